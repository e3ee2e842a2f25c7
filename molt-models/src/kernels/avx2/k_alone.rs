//! Blocks of 256 weights, of four bits (Q4_K) and six (Q6_K), with a single token's inputs: decoding.
//!
//! A lone token uses every weight once, so that turning eight rows into lanes, as tiles do, does not pay for itself. Here
//! rows stay rows: each is one stream from its first byte to its last, sums are kept in eight lanes of whole numbers, and
//! lanes are added across for two blocks at a time. Whole numbers are exact, and floats are rounded in the same places as
//! everywhere: results are equal to the last bit.

use std::arch::x86_64::*;

use crate::kernels::activations::Activations;

/// How far ahead of what is read memory is fetched, in bytes: the processor's own fetching ends at the end of a page.
const AHEAD: usize = 4_096;

/// What is made of one block.
#[derive(Debug, Clone, Copy)]
struct Lanes {
    /// Its products with the inputs, spread over lanes.
    products: __m256i,
    /// What is subtracted from its weights, with the inputs' sums; of formats that have no such thing, anything.
    offsets: __m256i,
}

/// A format of blocks of `N` bytes.
trait Block<const N: usize> {
    /// Whether something is subtracted from every weight.
    const OFFSET: bool;

    /// Products with eight runs of inputs.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn lanes(block: &[u8; N], x: &[[i32; 8]; 8], sums: &[i32; 8]) -> Lanes;

    /// The block's floats: its scale, and its scale of offsets.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C.
    unsafe fn scales(block: &[u8; N]) -> [f32; 2];
}

/// Products of as many rows of Q4_K as `out` is long with the only token of the inputs.
///
/// # Panics
/// Where there are fewer rows, or more tokens.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn q4_k(bytes: &[u8], x: &Activations<'_>, out: &mut [f32]) {
    rows::<FourBits, 144>(bytes, x, out);
}

/// As [`q4_k`], of Q6_K.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn q6_k(bytes: &[u8], x: &Activations<'_>, out: &mut [f32]) {
    rows::<SixBits, 210>(bytes, x, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn rows<B: Block<N>, const N: usize>(bytes: &[u8], x: &Activations<'_>, out: &mut [f32]) {
    let (quants, sums, dx) = (x.quants().as_chunks::<8>().0, x.sums().as_chunks::<8>().0, x.scales());
    let (blocks, count) = (bytes.as_chunks::<N>().0, dx.len());
    assert!(x.tokens() == 1 && quants.len() == count && sums.len() == count, "not one token's inputs");
    assert!(blocks.len() >= count * out.len(), "fewer rows than outputs");
    for (row, out) in blocks.chunks_exact(count).zip(out) {
        let mut total = 0.0;
        let mut at = 0;
        while at + 2 <= count {
            fetch_ahead(row[at].as_ptr(), 2 * N);
            // SAFETY: this function is compiled for, and only called on, processors with AVX2 and F16C.
            let (first, second) = unsafe {
                (B::lanes(&row[at], &quants[at], &sums[at]), B::lanes(&row[at + 1], &quants[at + 1], &sums[at + 1]))
            };
            let [p, q, o, r] = across([first.products, second.products, first.offsets, second.offsets]);
            total = add::<B, N>(total, &row[at], dx[at], [p, o]);
            total = add::<B, N>(total, &row[at + 1], dx[at + 1], [q, r]);
            at += 2;
        }
        if at < count {
            fetch_ahead(row[at].as_ptr(), N);
            // SAFETY: as above.
            let last = unsafe { B::lanes(&row[at], &quants[at], &sums[at]) };
            let [p, _, o, _] = across([last.products, last.products, last.offsets, last.offsets]);
            total = add::<B, N>(total, &row[at], dx[at], [p, o]);
        }
        *out = total;
    }
}

/// Adds a block's products, less its offsets, to a row's sum.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add<B: Block<N>, const N: usize>(total: f32, block: &[u8; N], dx: f32, [products, offsets]: [f32; 2]) -> f32 {
    // SAFETY: this function is compiled for, and only called on, processors with AVX2 and F16C.
    let [d, dmin] = unsafe { B::scales(block) };
    let total = (d * dx).mul_add(products, total);
    if B::OFFSET { (-(dmin * dx)).mul_add(offsets, total) } else { total }
}

/// Has what will be read after a while brought nearer.
#[inline(always)]
fn fetch_ahead(from: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: a prefetch is a hint and reads nothing that a program can see; any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD + 64 * line).cast()) };
    }
}

/// The sums of the lanes of each, as floats.
#[target_feature(enable = "avx2")]
#[inline]
fn across([a, b, c, d]: [__m256i; 4]) -> [f32; 4] {
    let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    let sums = _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums)));
    let high = _mm_movehl_ps(sums, sums);
    let first_two = |v: __m128| [_mm_cvtss_f32(v), _mm_cvtss_f32(_mm_movehdup_ps(v))];
    let ([a, b], [c, d]) = (first_two(sums), first_two(high));
    [a, b, c, d]
}

struct FourBits;

impl Block<144> for FourBits {
    const OFFSET: bool = true;

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn lanes(block: &[u8; 144], x: &[[i32; 8]; 8], sums: &[i32; 8]) -> Lanes {
        // Six bits each of eight scales and eight offsets in twelve bytes.
        let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        let (low, middle, high) = (word(4), word(8), word(12));
        let scales = eight(low & 0x3f3f_3f3f, high & 0x0f0f_0f0f | low >> 2 & 0x3030_3030);
        let offsets = eight(middle & 0x3f3f_3f3f, high >> 4 & 0x0f0f_0f0f | middle >> 2 & 0x3030_3030);
        let scales = _mm256_broadcastq_epi64(scales);
        let nibble = _mm256_set1_epi8(15);
        let mut products = _mm256_setzero_si256();
        for pair in 0..4 {
            let bytes = load(block, 16 + 32 * pair);
            let (first, second) = (2 * pair, 2 * pair + 1);
            let lows = _mm256_and_si256(bytes, nibble);
            let highs = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
            let lows = _mm256_madd_epi16(_mm256_maddubs_epi16(lows, words(&x[first])), spread_byte(scales, first));
            let highs = _mm256_madd_epi16(_mm256_maddubs_epi16(highs, words(&x[second])), spread_byte(scales, second));
            products = _mm256_add_epi32(products, _mm256_add_epi32(lows, highs));
        }
        let offsets = _mm256_cvtepu8_epi32(offsets);
        let offsets = _mm256_or_si256(offsets, _mm256_slli_epi32::<16>(offsets));
        Lanes { products, offsets: _mm256_madd_epi16(offsets, words(sums)) }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn scales(block: &[u8; 144]) -> [f32; 2] {
        let floats = halves(block, 0);
        [_mm_cvtss_f32(floats), _mm_cvtss_f32(_mm_movehdup_ps(floats))]
    }
}

struct SixBits;

impl Block<210> for SixBits {
    const OFFSET: bool = false;

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn lanes(block: &[u8; 210], x: &[[i32; 8]; 8], sums: &[i32; 8]) -> Lanes {
        let (nibble, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
        // SAFETY: bytes 192 to 207 of 210; the load needs no alignment.
        let scales = unsafe { _mm_loadu_si128(block.as_ptr().add(192).cast()) };
        // Scales of first halves of runs to the low 16 bytes, of second halves to the high ones: where those columns are.
        let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        let by_half = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order));
        let mut products = _mm256_setzero_si256();
        for side in 0..2 {
            let (low, high) = (load(block, 64 * side), load(block, 64 * side + 32));
            let top = load(block, 128 + 32 * side);
            let parts = [
                (low, _mm256_slli_epi16::<4>(top)),
                (high, _mm256_slli_epi16::<2>(top)),
                (_mm256_srli_epi16::<4>(low), top),
                (_mm256_srli_epi16::<4>(high), _mm256_srli_epi16::<2>(top)),
            ];
            for (part, (low, top)) in parts.into_iter().enumerate() {
                let run = 4 * side + part;
                let weights = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(top, two));
                let pairs = _mm256_maddubs_epi16(weights, words(&x[run]));
                products = _mm256_add_epi32(products, _mm256_madd_epi16(pairs, spread_word(by_half, run)));
            }
        }
        // 32 is subtracted from every quant.
        let bias = _mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), words(sums));
        Lanes { products: _mm256_sub_epi32(products, _mm256_slli_epi32::<5>(bias)), offsets: bias }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn scales(block: &[u8; 210]) -> [f32; 2] {
        // The block's float is its last two bytes.
        let floats = halves(block, 202);
        [_mm_cvtss_f32(_mm_shuffle_ps::<0b11_11_11_11>(floats, floats)), 0.0]
    }
}

/// Eight bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn eight(first: u32, last: u32) -> __m128i {
    _mm_cvtsi64_si128((u64::from(first) | u64::from(last) << 32).cast_signed())
}

/// Byte `at` of each half, unsigned, as 16 bits, to all places of its half.
#[target_feature(enable = "avx2")]
#[inline]
fn spread_byte(halves: __m256i, at: usize) -> __m256i {
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "0 to 7")]
    let at = at as i16;
    // 0x80 makes a zero.
    _mm256_shuffle_epi8(halves, _mm256_set1_epi16(at | 0x8000_u16.cast_signed()))
}

/// The 16-bit number `at` of each half, to all places of its half.
#[target_feature(enable = "avx2")]
#[inline]
fn spread_word(halves: __m256i, at: usize) -> __m256i {
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "0 to 7")]
    let at = at as i16;
    _mm256_shuffle_epi8(halves, _mm256_set1_epi16(at * 0x0202 + 0x0100))
}

/// Four 2-byte floats.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn halves<const N: usize>(block: &[u8; N], at: usize) -> __m128 {
    assert!(at + 8 <= N, "past the block");
    // SAFETY: eight bytes from there lie in the block; the load needs no alignment.
    _mm_cvtph_ps(unsafe { _mm_loadl_epi64(block.as_ptr().add(at).cast()) })
}

#[target_feature(enable = "avx2")]
#[inline]
fn load<const N: usize>(block: &[u8; N], at: usize) -> __m256i {
    assert!(at + 32 <= N, "past the block");
    // SAFETY: 32 bytes from there lie in the block; the load needs no alignment.
    unsafe { _mm256_loadu_si256(block.as_ptr().add(at).cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn words(words: &[i32; 8]) -> __m256i {
    // SAFETY: reads the eight words of the array; the load needs no alignment.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}
