//! Kernels in plain Rust: they serve every machine without a vector version, and judge those that have one.

use half::{bf16, f16};

use crate::kernels::activations::ActivationRow;
use crate::kernels::format::{Format, RUN, frame};

/// Dot products of one row of quantised weights with several rows of inputs.
pub(super) fn dot_quantized(format: Format, row: &[u8], inputs: &[ActivationRow<'_>], out: &mut [f32]) {
    out.fill(0.0);
    for run in 0..inputs[0].scales.len() {
        let unpacked = frame(format, row, run).unpack();
        for (input, out) in inputs.iter().zip(&mut *out) {
            let q = &input.quants[run * RUN..(run + 1) * RUN];
            let sum = |half: usize| -> i32 {
                let part = half * 16..half * 16 + 16;
                unpacked.q[part.clone()].iter().zip(&q[part]).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
            };
            let halves = unpacked.scale[0] * sum(0) as f32 + unpacked.scale[1] * sum(1) as f32;
            *out += halves * input.scales[run] - unpacked.offset * input.sums[run];
        }
    }
}

/// The weights of a row.
pub(super) fn dequantize(format: Format, row: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Format::F16 => {
            for (value, bytes) in out.iter_mut().zip(row.chunks_exact(2)) {
                *value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        Format::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(row.chunks_exact(2)) {
                *value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        _ => {
            for (run, values) in out.chunks_exact_mut(RUN).enumerate() {
                let unpacked = frame(format, row, run).unpack();
                for (i, value) in values.iter_mut().enumerate() {
                    *value = unpacked.scale[i / 16] * f32::from(unpacked.q[i]) - unpacked.offset;
                }
            }
        }
    }
}

/// Dot product of floats.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums, so that the compiler may use vectors.
    let mut sums = [0.0f32; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `out += scale * values`.
pub(super) fn add_scaled(out: &mut [f32], values: &[f32], scale: f32) {
    for (o, v) in out.iter_mut().zip(values) {
        *o += scale * v;
    }
}
