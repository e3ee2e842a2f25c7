//! Kernels for x86-64 with AVX2, FMA and F16C. Only called where the processor was asked for them.

use std::arch::x86_64::*;

use crate::kernels::format::{Format, RUN};
use crate::kernels::portable;

pub(super) mod dots;
pub(super) mod floats;
pub(super) mod k_alone;
pub(super) mod k_quants;
pub(super) mod math;
pub(super) mod tile;

#[target_feature(enable = "avx2")]
#[inline]
fn load8(values: &[f32; 8]) -> __m256 {
    // SAFETY: reads the eight floats of the array; the load needs no alignment.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum8(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// The weights of a row: the portable code, compiled for wider vectors.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dequantize(format: Format, row: &[u8], out: &mut [f32]) {
    portable::dequantize(format, row, out);
}

/// The largest magnitude.
#[target_feature(enable = "avx2")]
pub(super) fn largest(values: &[f32]) -> f32 {
    let (eights, rest) = values.as_chunks::<8>();
    let sign = _mm256_set1_ps(-0.0);
    let mut most = _mm256_setzero_ps();
    for eight in eights {
        // In this order a NaN is passed over, as `f32::max` does.
        most = _mm256_max_ps(_mm256_andnot_ps(sign, load8(eight)), most);
    }
    let four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)));
    rest.iter().fold(one, |m, v| m.max(v.abs()))
}

/// Rounds a run to bytes; the sums of both halves in one word.
#[target_feature(enable = "avx2")]
pub(super) fn round(values: &[f32; RUN], inverse: f32, out: &mut [i8; RUN]) -> i32 {
    let factor = _mm256_set1_ps(inverse);
    let mut words = [_mm256_setzero_si256(); 4];
    for (word, eight) in words.iter_mut().zip(values.as_chunks::<8>().0) {
        *word = _mm256_cvtps_epi32(_mm256_mul_ps(load8(eight), factor));
    }
    let halves = [_mm256_packs_epi32(words[0], words[1]), _mm256_packs_epi32(words[2], words[3])];
    // Packing works on 16 bytes apart; the words are put back in order at the end.
    let bytes = _mm256_packs_epi16(halves[0], halves[1]);
    let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: writes the 32 bytes of the array; the store needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
    // Pairs, fours, and then the two halves: 16 bytes of at most 127 fit 16 bits.
    let fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    let sums = _mm256_hadd_epi32(fours, fours);
    let sums = _mm256_hadd_epi32(sums, sums);
    let (first, last) = (_mm256_extract_epi32::<0>(sums), _mm256_extract_epi32::<4>(sums));
    first & 0xffff | last << 16
}

/// Dot product of floats.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a32, a_rest) = a.as_chunks::<32>();
    let (b32, b_rest) = b.as_chunks::<32>();
    let mut sums = [_mm256_setzero_ps(); 4];
    for (x, y) in a32.iter().zip(b32) {
        for ((sum, x), y) in sums.iter_mut().zip(x.as_chunks::<8>().0).zip(y.as_chunks::<8>().0) {
            *sum = _mm256_fmadd_ps(load8(x), load8(y), *sum);
        }
    }
    let both = [_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])];
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sum8(_mm256_add_ps(both[0], both[1])) + rest
}
