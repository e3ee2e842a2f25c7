//! Kernels for x86-64 with AVX2, FMA and F16C. Only called where the processor was asked for them.

use std::arch::x86_64::*;

use half::f16;

use crate::kernels::activations::ActivationRow;
use crate::kernels::format::{Format, Frame, Quants, RUN, frame};

/// The quants of a run as 32 signed bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unpack(frame: &Frame<'_>) -> __m256i {
    let low_nibble = _mm256_set1_epi8(15);
    match frame.quants {
        Quants::Bytes(bytes) => load32(bytes),
        Quants::Split { nibbles, bias } => _mm256_sub_epi8(split(nibbles), _mm256_set1_epi8(bias)),
        Quants::SplitHigh { nibbles, high } => {
            // Each byte picks its bit of `high`: spread the four bytes over eight lanes each, then test one bit a lane.
            let spread = _mm256_shuffle_epi8(
                _mm256_set1_epi32(high.cast_signed()),
                _mm256_set_epi64x(
                    0x0303_0303_0303_0303,
                    0x0202_0202_0202_0202,
                    0x0101_0101_0101_0101,
                    0x0000_0000_0000_0000,
                ),
            );
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
            // A set fifth bit cancels the bias of 16.
            let bias = _mm256_andnot_si256(set, _mm256_set1_epi8(16));
            _mm256_sub_epi8(split(nibbles), bias)
        }
        Quants::Nibbles { bytes, high } => {
            let bytes = load32(bytes);
            let bytes = if high { _mm256_srli_epi16::<4>(bytes) } else { bytes };
            _mm256_and_si256(bytes, low_nibble)
        }
        Quants::Six { low, high_nibble, top, shift } => {
            let low = load32(low);
            let low = if high_nibble { _mm256_srli_epi16::<4>(low) } else { low };
            let top = load32(top);
            let top = match shift {
                0 => _mm256_slli_epi16::<4>(top),
                2 => _mm256_slli_epi16::<2>(top),
                4 => top,
                _ => _mm256_srli_epi16::<2>(top),
            };
            let joined =
                _mm256_or_si256(_mm256_and_si256(low, low_nibble), _mm256_and_si256(top, _mm256_set1_epi8(0x30)));
            _mm256_sub_epi8(joined, _mm256_set1_epi8(32))
        }
    }
}

/// Low nibbles in the first 16 bytes, high ones in the last.
#[target_feature(enable = "avx2")]
#[inline]
fn split(nibbles: &[u8; 16]) -> __m256i {
    // SAFETY: reads the 16 bytes of the array; the load needs no alignment.
    let bytes = unsafe { _mm_loadu_si128(nibbles.as_ptr().cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

#[target_feature(enable = "avx2")]
#[inline]
fn load32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: reads the 32 bytes of the array; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

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

/// A format as a type: the inner loop is compiled for each, without branches on it and without a frame that goes through
/// memory.
trait Kind {
    const FORMAT: Format;
}

macro_rules! kinds {
    ($($name:ident),*) => {
        $(
            struct $name;
            impl Kind for $name {
                const FORMAT: Format = Format::$name;
            }
        )*
    };
}

kinds!(Q4_0, Q4_1, Q5_0, Q8_0, Q4K, Q6K);

/// Dot products of one row of quantised weights with up to four rows of inputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_quantized(format: Format, row: &[u8], inputs: &[ActivationRow<'_>], out: &mut [f32]) {
    match format {
        Format::Q4_0 => dot_runs::<Q4_0>(row, inputs, out),
        Format::Q4_1 => dot_runs::<Q4_1>(row, inputs, out),
        Format::Q5_0 => dot_runs::<Q5_0>(row, inputs, out),
        Format::Q8_0 => dot_runs::<Q8_0>(row, inputs, out),
        Format::Q4K => dot_runs::<Q4K>(row, inputs, out),
        Format::Q6K => dot_runs::<Q6K>(row, inputs, out),
        Format::F32 | Format::F16 | Format::Bf16 => unreachable!("plain floats have no runs"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot_runs<K: Kind>(row: &[u8], inputs: &[ActivationRow<'_>], out: &mut [f32]) {
    match (inputs, out) {
        ([a], [o]) => [*o] = dot_runs_of::<K, 1>(row, [*a]),
        ([a, b], [o, p]) => [*o, *p] = dot_runs_of::<K, 2>(row, [*a, *b]),
        ([a, b, c], [o, p, q]) => [*o, *p, *q] = dot_runs_of::<K, 3>(row, [*a, *b, *c]),
        ([a, b, c, d], [o, p, q, r]) => [*o, *p, *q, *r] = dot_runs_of::<K, 4>(row, [*a, *b, *c, *d]),
        (inputs, out) => {
            for (input, out) in inputs.iter().zip(out) {
                [*out] = dot_runs_of::<K, 1>(row, [*input]);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot_runs_of<K: Kind, const N: usize>(row: &[u8], inputs: [ActivationRow<'_>; N]) -> [f32; N] {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_ps(); N];
    let mut offsets = [0.0f32; N];
    for run in 0..inputs[0].scales.len() {
        let frame = frame(K::FORMAT, row, run);
        let q = unpack(&frame);
        let magnitude = _mm256_abs_epi8(q);
        let scale = _mm256_set_m128(_mm_set1_ps(frame.scale[1]), _mm_set1_ps(frame.scale[0]));
        for ((input, sum), offset) in inputs.iter().zip(&mut sums).zip(&mut offsets) {
            let Some(bytes) = input.quants[run * RUN..].first_chunk::<32>() else { continue };
            let x = load32(bytemuck::cast_ref(bytes));
            // |q| * (x with the sign of q): one operand must be unsigned. At most 2 * 128 * 127 fits an i16.
            let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, q));
            let quads = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
            *sum = _mm256_fmadd_ps(quads, _mm256_mul_ps(scale, _mm256_set1_ps(input.scales[run])), *sum);
            *offset += frame.offset * input.sums[run];
        }
    }
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = sum8(sums[i]) - offsets[i];
    }
    out
}

/// The weights of a row of runs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dequantize_runs(format: Format, row: &[u8], out: &mut [f32]) {
    match format {
        Format::Q4_0 => write_runs::<Q4_0>(row, out),
        Format::Q4_1 => write_runs::<Q4_1>(row, out),
        Format::Q5_0 => write_runs::<Q5_0>(row, out),
        Format::Q8_0 => write_runs::<Q8_0>(row, out),
        Format::Q4K => write_runs::<Q4K>(row, out),
        Format::Q6K => write_runs::<Q6K>(row, out),
        Format::F32 | Format::F16 | Format::Bf16 => unreachable!("plain floats have no runs"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn write_runs<K: Kind>(row: &[u8], out: &mut [f32]) {
    let (runs, _) = out.as_chunks_mut::<RUN>();
    for (run, values) in runs.iter_mut().enumerate() {
        let frame = frame(K::FORMAT, row, run);
        let q = unpack(&frame);
        let halves = [_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q)];
        for ((half, scale), values) in halves.into_iter().zip(frame.scale).zip(values.as_chunks_mut::<16>().0) {
            for (eight, values) in [half, _mm_srli_si128::<8>(half)].into_iter().zip(values.as_chunks_mut::<8>().0) {
                let wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
                let weights = _mm256_fmsub_ps(wide, _mm256_set1_ps(scale), _mm256_set1_ps(frame.offset));
                // SAFETY: writes the eight floats of the array; the store needs no alignment.
                unsafe { _mm256_storeu_ps(values.as_mut_ptr(), weights) };
            }
        }
    }
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

/// Dot product of 2-byte floats with floats.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_f16(a: &[f16], b: &[f32]) -> f32 {
    let (a32, a_rest) = a.as_chunks::<32>();
    let (b32, b_rest) = b.as_chunks::<32>();
    let mut sums = [_mm256_setzero_ps(); 4];
    for (x, y) in a32.iter().zip(b32) {
        for ((sum, x), y) in sums.iter_mut().zip(x.as_chunks::<8>().0).zip(y.as_chunks::<8>().0) {
            // SAFETY: reads the eight 2-byte floats of the array; the load needs no alignment.
            let halves = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
            *sum = _mm256_fmadd_ps(_mm256_cvtph_ps(halves), load8(y), *sum);
        }
    }
    let both = [_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])];
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x.to_f32() * y).sum();
    sum8(_mm256_add_ps(both[0], both[1])) + rest
}

/// `out += scale * values`.
#[target_feature(enable = "avx2,fma")]
pub(super) fn add_scaled(out: &mut [f32], values: &[f32], scale: f32) {
    let factor = _mm256_set1_ps(scale);
    let (out8, out_rest) = out.as_chunks_mut::<8>();
    let (values8, values_rest) = values.as_chunks::<8>();
    for (o, v) in out8.iter_mut().zip(values8) {
        let sum = _mm256_fmadd_ps(load8(v), factor, load8(o));
        // SAFETY: writes the eight floats of the array; the store needs no alignment.
        unsafe { _mm256_storeu_ps(o.as_mut_ptr(), sum) };
    }
    for (o, v) in out_rest.iter_mut().zip(values_rest) {
        *o += scale * v;
    }
}
