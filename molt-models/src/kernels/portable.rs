//! Kernels in plain Rust: they serve every machine without a vector version, and judge those that have one.

use half::{bf16, f16};
use molt_kv::numbers::Numbers;

use crate::kernels::Left;
use crate::kernels::activations::{Activations, halves};
use crate::kernels::format::{Format, RUN, frame};

/// The dot product of one row of quantised weights with one token's inputs.
///
/// For each block of inputs that share a scale, everything is whole numbers:
/// `sum += (d dx) integers - (dmin dx) offsets`, in the order of the blocks, each step rounded once. Every vector kernel
/// does exactly the same operations, so results do not depend on the machine or on how many tokens are multiplied at a
/// time.
pub(super) fn dot_quantized(format: Format, row: &[u8], x: &Activations<'_>, token: usize) -> f32 {
    let per_block = x.runs() / x.blocks();
    let mut total = 0.0f32;
    for block in 0..x.blocks() {
        let (mut integers, mut offsets, mut factors) = (0i32, 0i32, (0.0, 0.0));
        for run in block * per_block..(block + 1) * per_block {
            let frame = frame(format, row, run);
            let q = frame.unpack();
            let bytes: &[i8; RUN] = bytemuck::cast_ref(&x.quants()[run * x.tokens() + token]);
            let sum = |half: usize| -> i32 {
                let part = half * 16..half * 16 + 16;
                q[part.clone()].iter().zip(&bytes[part]).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
            };
            integers += frame.scales[0] * sum(0) + frame.scales[1] * sum(1);
            let [first, last] = halves(x.sums()[run * x.tokens() + token]);
            offsets += frame.offset * (first + last);
            factors = (frame.d, frame.dmin);
        }
        let dx = x.scales()[block * x.tokens() + token];
        total = (factors.0 * dx).mul_add(integers as f32, total);
        if format.has_offset() {
            total = (-(factors.1 * dx)).mul_add(offsets as f32, total);
        }
    }
    total
}

/// The weights of a row. Vector versions are this code, compiled for their instructions.
#[inline(always)]
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
                let frame = frame(format, row, run);
                let (q, scales, offset) = (frame.unpack(), frame.float_scales(), frame.float_offset());
                for (i, value) in values.iter_mut().enumerate() {
                    *value = scales[i / 16] * f32::from(q[i]) - offset;
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

/// `gate = gate / (1 + e^-gate) * up`.
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + (-*g).exp()) * u;
    }
}

/// Every value becomes `e^(value - top)`; their sum.
pub(super) fn exp_sum(values: &mut [f32], top: f32) -> f32 {
    values.iter_mut().fold(0.0, |sum, value| {
        *value = (*value - top).exp();
        sum + *value
    })
}

/// `out[r][j] += sum over k of left[r][k] right[k][j]`.
pub(super) fn panel(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) {
    for (row, out) in (0..left.rows).zip(out.chunks_exact_mut(width)) {
        let left = &left.values[row * left.stride..][..left.width];
        for (factor, right) in left.iter().zip(right.chunks_exact(width)) {
            for (sum, value) in out.iter_mut().zip(right) {
                *sum += factor * value;
            }
        }
    }
}

/// Token `t` of `numbers` becomes column `t` of `out`.
pub(super) fn transpose(
    numbers: Numbers<'_>,
    stride: usize,
    width: usize,
    tokens: usize,
    columns: usize,
    out: &mut [f32],
) {
    for token in 0..tokens {
        let at = token * stride;
        match numbers.slice(at..at + width) {
            Numbers::F16(row) => put(row.iter().map(|half| half.to_f32()), columns, &mut out[token..]),
            Numbers::F32(row) => put(row.iter().copied(), columns, &mut out[token..]),
        }
    }
}

/// A column of a matrix whose rows are so long.
fn put(values: impl Iterator<Item = f32>, columns: usize, out: &mut [f32]) {
    out.iter_mut().step_by(columns.max(1)).zip(values).for_each(|(out, value)| *out = value);
}
