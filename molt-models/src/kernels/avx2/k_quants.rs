//! Blocks of 256 weights with scales of their own for each run: four bits (Q4_K) and six (Q6_K). A lone token goes another
//! way, see `k_alone.rs`.

use std::arch::x86_64::*;

use crate::kernels::avx2::tile::{Inputs, Rows, Sums, accumulate, floats, load, store};

/// Byte `byte` of every word, twice as 16 bits.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::kernels) fn pair_of(words: __m256i, byte: i32) -> __m256i {
    // 0x80 clears a byte. Lanes of 16 bytes are shuffled apart, so words begin at 0, 4, 8 and 12 in both.
    let both = byte | 0x80 << 8 | byte << 16 | 0x80 << 24;
    let order = _mm256_add_epi32(_mm256_set1_epi32(both), starts(0x0004_0004));
    _mm256_shuffle_epi8(words, order)
}

/// Bytes `first` and `first + 1` of every word as signed 16 bits each.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::kernels) fn signed_bytes(words: __m256i, first: i32, second: i32) -> __m256i {
    let both = 0x80 | first << 8 | 0x80 << 16 | second << 24;
    let order = _mm256_add_epi32(_mm256_set1_epi32(both), starts(0x0400_0400));
    _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(words, order))
}

/// What is added to a shuffle's order in each word of 16 bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn starts(step: i32) -> __m256i {
    _mm256_setr_epi32(0, step, 2 * step, 3 * step, 0, step, 2 * step, 3 * step)
}

/// What stands at the front of eight rows' blocks of four bits: six bits each of eight scales and eight offsets in twelve
/// bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct FourBitHead {
    /// Of the whole block.
    pub(in crate::kernels) scale: __m256,
    /// Of the whole block's offsets.
    pub(in crate::kernels) offset_scale: __m256,
    /// Of each run: byte `r % 4` of word `r / 4`.
    pub(in crate::kernels) scales: [__m256i; 2],
    /// As the scales.
    pub(in crate::kernels) offsets: [__m256i; 2],
}

/// The head of the blocks at `at`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn four_bit_head(rows: &Rows<'_>, at: usize) -> FourBitHead {
    let [head, low, middle, high] = rows.words(at);
    let (scale, offset_scale) = floats(head);
    let (nibble, six, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x3f), _mm256_set1_epi8(0x30));
    let scales = [
        _mm256_and_si256(low, six),
        _mm256_or_si256(_mm256_and_si256(high, nibble), _mm256_and_si256(_mm256_srli_epi32::<2>(low), two)),
    ];
    let offsets = [
        _mm256_and_si256(middle, six),
        _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi32::<4>(high), nibble),
            _mm256_and_si256(_mm256_srli_epi32::<2>(middle), two),
        ),
    ];
    FourBitHead { scale, offset_scale, scales, offsets }
}

/// Runs `2 pair` and `2 pair + 1` of the blocks at `at`, whose nibbles lie in the same bytes.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::kernels) fn nibbles(rows: &Rows<'_>, at: usize, pair: usize) -> [[__m256i; 8]; 2] {
    let nibble = _mm256_set1_epi8(15);
    let bytes = rows.run(at + 16 + 32 * pair);
    let (mut lows, mut highs) = (bytes, bytes);
    for i in 0..8 {
        lows[i] = _mm256_and_si256(bytes[i], nibble);
        highs[i] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[i]), nibble);
    }
    [lows, highs]
}

/// Blocks of 256 weights of four bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_k<const T: usize>(rows: &Rows<'_>, x: Inputs<'_, T>, out: &mut Sums<T>) {
    let mut sums = [_mm256_setzero_si256(); T];
    for block in 0..x.x.blocks() {
        let at = block * 144;
        rows.prefetch(at, 144);
        let FourBitHead { scale, offset_scale, scales, offsets } = four_bit_head(rows, at);
        sums[..x.count()].fill(_mm256_setzero_si256());
        // Spelled out, so that positions are constants.
        four_bits::<T, 0>(rows, at, scales[0], x, block, &mut sums);
        four_bits::<T, 1>(rows, at, scales[0], x, block, &mut sums);
        four_bits::<T, 2>(rows, at, scales[1], x, block, &mut sums);
        four_bits::<T, 3>(rows, at, scales[1], x, block, &mut sums);
        let offsets: [__m256i; 8] = [
            pair_of(offsets[0], 0),
            pair_of(offsets[0], 1),
            pair_of(offsets[0], 2),
            pair_of(offsets[0], 3),
            pair_of(offsets[1], 0),
            pair_of(offsets[1], 1),
            pair_of(offsets[1], 2),
            pair_of(offsets[1], 3),
        ];
        for at in 0..x.count() {
            let offset = of_sums(&offsets, &x, block, at);
            let dx = _mm256_set1_ps(x.scales(block)[at]);
            let total = _mm256_fmadd_ps(_mm256_mul_ps(scale, dx), _mm256_cvtepi32_ps(sums[at]), load(&out[at]));
            let offset_scale = _mm256_mul_ps(offset_scale, dx);
            store(&mut out[at], _mm256_fnmadd_ps(offset_scale, _mm256_cvtepi32_ps(offset), total));
        }
    }
}

/// Adds the products of runs `2 PAIR` and `2 PAIR + 1` of a block.
#[target_feature(enable = "avx2")]
#[inline]
fn four_bits<const T: usize, const PAIR: usize>(
    rows: &Rows<'_>,
    at: usize,
    scales: __m256i,
    x: Inputs<'_, T>,
    block: usize,
    sums: &mut [__m256i; T],
) {
    let [lows, highs] = nibbles(rows, at, PAIR);
    let run = 8 * block + 2 * PAIR;
    let byte = if PAIR.is_multiple_of(2) { 0 } else { 2 };
    let (first, second) = (pair_of(scales, byte), pair_of(scales, byte + 1));
    accumulate::<8, T>(&lows, [first, first], &x, run, sums);
    accumulate::<8, T>(&highs, [second, second], &x, run + 1, sums);
}

/// `sum over the block's runs of factors[run] . sums of the run's halves`.
#[target_feature(enable = "avx2")]
#[inline]
fn of_sums<const T: usize>(factors: &[__m256i; 8], x: &Inputs<'_, T>, block: usize, at: usize) -> __m256i {
    let mut total = _mm256_setzero_si256();
    for (run, factors) in factors.iter().enumerate() {
        let sum = _mm256_set1_epi32(x.sums(8 * block + run)[at]);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(*factors, sum));
    }
    total
}

/// Blocks of 256 weights of six bits; eight bits of scale for each 16.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q6_k<const T: usize>(rows: &Rows<'_>, x: Inputs<'_, T>, out: &mut Sums<T>) {
    let mut sums = [_mm256_setzero_si256(); T];
    for block in 0..x.x.blocks() {
        let at = block * 210;
        rows.prefetch(at, 210);
        let scales = rows.words(at + 192);
        // The block's float is its last two bytes.
        let (_, scale) = floats(rows.words(at + 194)[3]);
        sums[..x.count()].fill(_mm256_setzero_si256());
        for side in 0..2 {
            let (low, high) = (rows.run(at + 64 * side), rows.run(at + 64 * side + 32));
            let top = rows.run(at + 128 + 32 * side);
            let run = 8 * block + 4 * side;
            let (near, far) = if side == 0 { (scales[0], scales[1]) } else { (scales[2], scales[3]) };
            six_bits::<T, 0>(&low, &top, near, (&x, run), &mut sums);
            six_bits::<T, 1>(&high, &top, near, (&x, run + 1), &mut sums);
            six_bits::<T, 2>(&low, &top, far, (&x, run + 2), &mut sums);
            six_bits::<T, 3>(&high, &top, far, (&x, run + 3), &mut sums);
        }
        let factors: [__m256i; 8] = [
            signed_bytes(scales[0], 0, 1),
            signed_bytes(scales[0], 2, 3),
            signed_bytes(scales[1], 0, 1),
            signed_bytes(scales[1], 2, 3),
            signed_bytes(scales[2], 0, 1),
            signed_bytes(scales[2], 2, 3),
            signed_bytes(scales[3], 0, 1),
            signed_bytes(scales[3], 2, 3),
        ];
        for at in 0..x.count() {
            // 32 is subtracted from every quant.
            let bias = _mm256_slli_epi32::<5>(of_sums(&factors, &x, block, at));
            let integers = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[at], bias));
            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales(block)[at]));
            let total = _mm256_fmadd_ps(scale, integers, load(&out[at]));
            store(&mut out[at], total);
        }
    }
}

/// Run `PART` of half a block: a nibble of `low`, two bits of `top`.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::kernels) fn six_bit_quants<const PART: usize>(low: &[__m256i; 8], top: &[__m256i; 8]) -> [__m256i; 8] {
    let mut weights = [_mm256_setzero_si256(); 8];
    for i in 0..8 {
        let low = if PART < 2 { low[i] } else { _mm256_srli_epi16::<4>(low[i]) };
        let top = match PART {
            0 => _mm256_slli_epi16::<4>(top[i]),
            1 => _mm256_slli_epi16::<2>(top[i]),
            2 => top[i],
            _ => _mm256_srli_epi16::<2>(top[i]),
        };
        let (low, top) = (_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(top, _mm256_set1_epi8(0x30)));
        weights[i] = _mm256_or_si256(low, top);
    }
    weights
}

/// Adds the products of run `PART` of half a block.
#[target_feature(enable = "avx2")]
#[inline]
fn six_bits<const T: usize, const PART: usize>(
    low: &[__m256i; 8],
    top: &[__m256i; 8],
    scales: __m256i,
    (x, run): (&Inputs<'_, T>, usize),
    sums: &mut [__m256i; T],
) {
    let weights = six_bit_quants::<PART>(low, top);
    let byte = if PART.is_multiple_of(2) { 0 } else { 2 };
    let scales = [signed_bytes(scales, byte, byte), signed_bytes(scales, byte + 1, byte + 1)];
    accumulate::<2, T>(&weights, scales, x, run, sums);
}
