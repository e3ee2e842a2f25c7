//! Products of quantised weights: eight rows of weights at a time, each in a lane of its own.
//!
//! The weights of a run (32 columns of eight rows) are unpacked once into eight registers, each with four consecutive
//! columns of every row, and stay there while the tokens pass: four inputs of a token are broadcast to all lanes, and
//! the sums need never be added across lanes. Whole numbers are as exact as in the portable version, and floats are
//! rounded in the same places, so results are equal to the last bit whatever the number of tokens.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::activations::Activations;
use crate::kernels::avx2::dots::{Dots, each, scaled};
use crate::kernels::avx2::k_quants::{q4_k, q6_k};
use crate::kernels::format::Format;

/// Rows of a tile.
pub(in crate::kernels) const LANES: usize = 8;

/// Rows of at most this many bytes are fetched two tiles ahead.
const SHORT_ROW: usize = 2_048;
/// Longer ones are fetched so many bytes ahead.
const AHEAD: usize = 1_024;

/// Sums of eight rows for each of at most `T` tokens. Kernels are compiled for one token, for a few and for many: of one
/// the sums stay in registers, of many in the first-level cache.
pub(in crate::kernels) type Sums<const T: usize> = [[f32; LANES]; T];

/// Some tokens' inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a, const T: usize> {
    pub(super) x: &'a Activations<'a>,
    first: usize,
    count: usize,
    dots: Dots,
}

impl<'a, const T: usize> Inputs<'a, T> {
    #[inline(always)]
    pub(super) fn of<V>(&self, all: &'a [V], index: usize) -> &'a [V] {
        // Where there is one token, nothing is left of the loops over tokens, nor of this arithmetic.
        match T {
            1 => &all[index..index + 1],
            _ => &all[index * self.x.tokens() + self.first..][..self.count],
        }
    }

    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        if T == 1 { 1 } else { self.count }
    }

    #[inline(always)]
    pub(super) fn quants(&self, run: usize) -> &'a [[i32; 8]] {
        self.of(self.x.quants(), run)
    }

    #[inline(always)]
    pub(super) fn sums(&self, run: usize) -> &'a [i32] {
        self.of(self.x.sums(), run)
    }

    #[inline(always)]
    pub(super) fn scales(&self, block: usize) -> &'a [f32] {
        self.of(self.x.scales(), block)
    }
}

/// Eight rows of the same matrix, one after another.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    /// Eight rows of `row_bytes` each; what comes after them is brought nearer while they are multiplied.
    ///
    /// # Panics
    /// Where there are fewer than eight.
    pub(in crate::kernels) fn new(bytes: &'a [u8], row_bytes: usize) -> Self {
        assert!(bytes.len() >= row_bytes * LANES, "fewer than eight rows");
        Self { bytes, row_bytes }
    }

    /// Has what will be read some time after `bytes` at `at` of every row fetched: of short rows the tile's after the next, of long
    /// ones (a tile of which would push everything else out of the first-level cache) what lies ahead in the same rows.
    #[inline(always)]
    pub(in crate::kernels) fn prefetch(&self, at: usize, bytes: usize) {
        let fetch = |offset: usize| {
            let address = self.bytes.as_ptr().wrapping_add(offset);
            // SAFETY: a prefetch is a hint and reads nothing that a program can see; any address will do.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
        };
        // Constant numbers of lines, for callers' blocks have constant sizes.
        if self.row_bytes <= SHORT_ROW {
            for line in 0..(bytes * LANES).div_ceil(64) {
                fetch((2 * self.row_bytes + at) * LANES + 64 * line);
            }
            return;
        }
        let ahead = at + AHEAD;
        // Past the end of these rows come those of the next tile.
        let ahead = if ahead < self.row_bytes { ahead } else { ahead + (LANES - 1) * self.row_bytes };
        for row in 0..LANES {
            for line in 0..bytes.div_ceil(64) {
                fetch(row * self.row_bytes + ahead + 64 * line);
            }
        }
    }

    /// 16 bytes at `at` of every row as four vectors: lane `r` of vector `j` is word `j` of row `r`.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(in crate::kernels) fn words(&self, at: usize) -> [__m256i; 4] {
        debug_assert!(at + 16 <= self.row_bytes);
        // SAFETY: callers walk over whole blocks of rows that hold them, and no block is shorter than what is read of
        // it; there are eight rows. The loads need no alignment.
        let [a, b, c, d] = unsafe {
            let low = self.bytes.as_ptr().add(at);
            let high = low.add(4 * self.row_bytes);
            [
                pair(low, high),
                pair(low.add(self.row_bytes), high.add(self.row_bytes)),
                pair(low.add(2 * self.row_bytes), high.add(2 * self.row_bytes)),
                pair(low.add(3 * self.row_bytes), high.add(3 * self.row_bytes)),
            ]
        };
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }

    /// 32 bytes at `at` of every row.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(in crate::kernels) fn run(&self, at: usize) -> [__m256i; 8] {
        let ([a, b, c, d], [e, f, g, h]) = (self.words(at), self.words(at + 16));
        [a, b, c, d, e, f, g, h]
    }
}

/// 16 bytes from here and 16 from there.
///
/// # Safety
/// Both may be read for 16 bytes.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn pair(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: the caller promises that both can be read; the loads need no alignment.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(low.cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(high.cast()))
    }
}

/// Products of eight rows with at most `T` tokens of the inputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn multiply<const T: usize>(
    format: Format,
    rows: &Rows<'_>,
    (x, dots): (&Activations<'_>, Dots),
    tokens: Range<usize>,
    out: &mut Sums<T>,
) {
    // A lone token waits for memory, not for products: a function for it would be called in vain.
    let dots = if T == 1 { Dots::Pairs } else { dots };
    let x = Inputs { x, first: tokens.start, count: tokens.len(), dots };
    out[..x.count()].fill([0.0; LANES]);
    match format {
        Format::Q4_0 => runs::<Q4_0, T>(rows, x, out),
        Format::Q4_1 => runs::<Q4_1, T>(rows, x, out),
        Format::Q5_0 => runs::<Q5_0, T>(rows, x, out),
        Format::Q8_0 => q8_0::<T>(rows, x, out),
        Format::Q4K => q4_k::<T>(rows, x, out),
        Format::Q6K => q6_k::<T>(rows, x, out),
        Format::F32 | Format::F16 | Format::Bf16 => unreachable!("plain floats have no runs"),
    }
}

#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load(sums: &[f32; LANES]) -> __m256 {
    // SAFETY: reads the eight floats of the array; the load needs no alignment.
    unsafe { _mm256_loadu_ps(sums.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn store(sums: &mut [f32; LANES], value: __m256) {
    // SAFETY: writes the eight floats of the array; the store needs no alignment.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), value) }
}

/// The 2-byte floats in the low halves of all words, and those in the high halves.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(in crate::kernels) fn floats(words: __m256i) -> (__m256, __m256) {
    // Low halves of rows 0 to 3, then their high halves; the same for rows 4 to 7.
    let order = _mm256_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, //
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
    );
    let sorted = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(words, order));
    (_mm256_cvtph_ps(_mm256_castsi256_si128(sorted)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(sorted)))
}

/// Products of unsigned weights below 64 with one token's inputs. As many pairs are added in 16 bits as fit: `GROUP`
/// vectors of four columns each (8 for four bits, 4 for five, 2 for six), before `scales` (of the first and of the last
/// 16 columns) widen them to 32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn products<const GROUP: usize>(weights: &[__m256i; 8], scales: [__m256i; 2], x: &[i32; 8]) -> __m256i {
    let mut total = _mm256_setzero_si256();
    let mut first = 0;
    while first < 8 {
        let mut pairs = _mm256_maddubs_epi16(weights[first], _mm256_set1_epi32(x[first]));
        let mut at = first + 1;
        while at < first + GROUP {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[at], _mm256_set1_epi32(x[at])));
            at += 1;
        }
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, scales[first / 4]));
        first += GROUP;
    }
    total
}

/// [`products`] with the tokens' inputs of a run, added to their sums.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn accumulate<const GROUP: usize, const T: usize>(
    weights: &[__m256i; 8],
    scales: [__m256i; 2],
    x: &Inputs<'_, T>,
    run: usize,
    sums: &mut [__m256i; T],
) {
    let inputs = x.quants(run);
    // Formats with a scale for each 16 columns are those of more bits, with small groups.
    let done = match GROUP {
        8 => scaled::<true>(x.dots, weights, scales, inputs, sums),
        _ => scaled::<false>(x.dots, weights, scales, inputs, sums),
    };
    if !done {
        for (x, sum) in inputs.iter().zip(sums) {
            *sum = _mm256_add_epi32(*sum, products::<GROUP>(weights, scales, x));
        }
    }
}

/// Products of unsigned weights of at most five bits with the tokens' inputs of a run.
#[target_feature(enable = "avx2")]
#[inline]
fn unscaled<const GROUP: usize, const T: usize>(
    weights: &[__m256i; 8],
    x: &Inputs<'_, T>,
    run: usize,
    out: &mut [__m256i; T],
) {
    let (inputs, ones) = (x.quants(run), _mm256_set1_epi16(1));
    if !each(x.dots, weights, inputs, out) {
        for (x, out) in inputs.iter().zip(out) {
            *out = products::<GROUP>(weights, [ones, ones], x);
        }
    }
}

/// A format whose blocks are runs.
pub(in crate::kernels) trait Runs {
    /// Bytes of a block.
    const BYTES: usize;
    /// What is subtracted from every quant.
    const BIAS: i16;
    /// Whether the second float of the block is added to every weight.
    const OFFSET: bool;
    /// Whether quants have five bits.
    const FIVE: bool;
    /// Where in the block the quants begin: nibbles, unless they are whole bytes.
    const QUANTS: usize;
    /// Whether quants are signed bytes.
    const BYTE: bool = false;
}

pub(in crate::kernels) struct Q4_0;
pub(in crate::kernels) struct Q4_1;
pub(in crate::kernels) struct Q5_0;
pub(in crate::kernels) struct Q8_0;

impl Runs for Q4_0 {
    const BYTES: usize = 18;
    const BIAS: i16 = 8;
    const OFFSET: bool = false;
    const FIVE: bool = false;
    const QUANTS: usize = 2;
}

impl Runs for Q4_1 {
    const BYTES: usize = 20;
    const BIAS: i16 = 0;
    const OFFSET: bool = true;
    const FIVE: bool = false;
    const QUANTS: usize = 4;
}

impl Runs for Q5_0 {
    const BYTES: usize = 22;
    const BIAS: i16 = 16;
    const OFFSET: bool = false;
    const FIVE: bool = true;
    const QUANTS: usize = 6;
}

/// Signed bytes become unsigned by 128 more each.
impl Runs for Q8_0 {
    const BYTES: usize = 34;
    const BIAS: i16 = 128;
    const OFFSET: bool = false;
    const FIVE: bool = false;
    const QUANTS: usize = 2;
    const BYTE: bool = true;
}

/// Of eight rows' blocks at `at` the scales, what is added to every weight, and the quants, made unsigned.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn unpack<F: Runs>(rows: &Rows<'_>, at: usize) -> (__m256, __m256, [__m256i; 8]) {
    let head = rows.words(at);
    let (scale, offset) = floats(head[0]);
    if F::BYTE {
        return (scale, offset, raised(rows.run(at + F::QUANTS)));
    }
    let nibbles = rows.words(at + F::QUANTS);
    let mut weights = [_mm256_setzero_si256(); 8];
    for i in 0..4 {
        // Low nibbles are columns 0 to 15, high ones 16 to 31.
        weights[i] = _mm256_and_si256(nibbles[i], _mm256_set1_epi8(15));
        weights[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles[i]), _mm256_set1_epi8(15));
    }
    if F::FIVE {
        // The fifth bits of all 32 columns lie across the first two words.
        let bits = _mm256_or_si256(_mm256_srli_epi32::<16>(head[0]), _mm256_slli_epi32::<16>(head[1]));
        fifth_bits(bits, &mut weights);
    }
    (scale, offset, weights)
}

/// Signed bytes, each 128 more.
#[target_feature(enable = "avx2")]
#[inline]
fn raised(bytes: [__m256i; 8]) -> [__m256i; 8] {
    bytes.map(|bytes| _mm256_xor_si256(bytes, _mm256_set1_epi8(i8::MIN)))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn runs<F: Runs, const T: usize>(rows: &Rows<'_>, x: Inputs<'_, T>, out: &mut Sums<T>) {
    let ones = _mm256_set1_epi16(1);
    let mut integers = [_mm256_setzero_si256(); T];
    for run in 0..x.x.runs() {
        let at = run * F::BYTES;
        rows.prefetch(at, F::BYTES);
        let (scale, offset, weights) = unpack::<F>(rows, at);
        match F::FIVE {
            true => unscaled::<4, T>(&weights, &x, run, &mut integers),
            false => unscaled::<8, T>(&weights, &x, run, &mut integers),
        }
        for (((integers, sum), dx), out) in integers.iter().zip(x.sums(run)).zip(x.scales(run)).zip(&mut *out) {
            let bias = _mm256_madd_epi16(_mm256_set1_epi16(F::BIAS), _mm256_set1_epi32(*sum));
            let (integers, dx) = (_mm256_sub_epi32(*integers, bias), _mm256_set1_ps(*dx));
            let mut total = _mm256_fmadd_ps(_mm256_mul_ps(scale, dx), _mm256_cvtepi32_ps(integers), load(out));
            if F::OFFSET {
                let inputs = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, _mm256_set1_epi32(*sum)));
                total = _mm256_fmadd_ps(_mm256_mul_ps(offset, dx), inputs, total);
            }
            store(out, total);
        }
    }
}

/// Adds 16 to every quant whose bit is set: bit `c` of a row's word belongs to column `c`.
#[target_feature(enable = "avx2")]
#[inline]
fn fifth_bits(bits: __m256i, weights: &mut [__m256i; 8]) {
    for (byte, pair) in weights.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // Eight columns have their bits in one byte of the word: it goes to all four bytes of the lane.
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "0 to 3")]
        let byte = byte as i32 * 0x0101_0101;
        let order = _mm256_add_epi32(
            _mm256_set1_epi32(byte),
            _mm256_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c, 0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c),
        );
        let spread = _mm256_shuffle_epi8(bits, order);
        for (weights, mask) in pair.iter_mut().zip([0x0804_0201, 0x8040_2010_u32]) {
            let mask = _mm256_set1_epi32(mask.cast_signed());
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask);
            *weights = _mm256_or_si256(*weights, _mm256_and_si256(set, _mm256_set1_epi8(16)));
        }
    }
}

/// Blocks of 32 signed bytes with one scale.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q8_0<const T: usize>(rows: &Rows<'_>, x: Inputs<'_, T>, out: &mut Sums<T>) {
    let mut integers = [_mm256_setzero_si256(); T];
    for run in 0..x.x.runs() {
        let at = run * 34;
        rows.prefetch(at, 34);
        let (scale, _) = floats(rows.words(at)[0]);
        let weights = rows.run(at + 2);
        signed_bytes(&weights, &x, run, &mut integers);
        for ((integers, dx), out) in integers.iter().zip(x.scales(run)).zip(&mut *out) {
            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(*dx));
            let total = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(*integers), load(out));
            store(out, total);
        }
    }
}

/// Products of signed bytes with the tokens' inputs of a run.
#[target_feature(enable = "avx2")]
#[inline]
fn signed_bytes<const T: usize>(weights: &[__m256i; 8], x: &Inputs<'_, T>, run: usize, out: &mut [__m256i; T]) {
    let inputs = x.quants(run);
    // Fours take unsigned weights: 128 more each, which is taken off again with the inputs' sums.
    if each(x.dots, &raised(*weights), inputs, out) {
        for (out, sum) in out.iter_mut().zip(x.sums(run)) {
            let extra = _mm256_madd_epi16(_mm256_set1_epi16(128), _mm256_set1_epi32(*sum));
            *out = _mm256_sub_epi32(*out, extra);
        }
        return;
    }
    let ones = _mm256_set1_epi16(1);
    for (x, out) in inputs.iter().zip(out) {
        *out = _mm256_setzero_si256();
        for (weights, x) in weights.iter().zip(x) {
            // |w| * (x with the sign of w): one operand must be unsigned. At most 2 * 128 * 127 fits 16 bits.
            let x = _mm256_sign_epi8(_mm256_set1_epi32(*x), *weights);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(*weights), x);
            *out = _mm256_add_epi32(*out, _mm256_madd_epi16(pairs, ones));
        }
    }
}
