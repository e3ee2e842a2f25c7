//! Matrix products and their parts, on slices. Vector versions are chosen at run time; everything here is safe to call.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod columns;
mod format;
mod portable;
mod product;
mod weights;

#[cfg(test)]
mod tests;

use std::sync::LazyLock;

#[cfg(test)]
use half::f16;
use molt_kv::numbers::Numbers;

pub use format::{Format, RUN};
pub use product::{Product, multiply_all, room};
pub use weights::Weights;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

/// Names kernels that are less than what the processor can do, to compare them: `portable`, `avx2` or `vnni` (products of
/// bytes, but in vectors of 256 bits).
const OVERRIDE: &str = "MOLT_KERNELS";

/// Whether kernels are held to those of that name.
fn held_to(name: &str) -> bool {
    std::env::var_os(OVERRIDE).is_some_and(|held| held == name)
}

static ISA: LazyLock<Isa> = LazyLock::new(|| {
    if held_to("portable") {
        return Isa::Portable;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        return Isa::Avx2;
    }
    Isa::Portable
});

/// The instruction set that the kernels use on this machine.
pub fn isa_name() -> &'static str {
    match *ISA {
        Isa::Portable => "portable",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if avx512::used() => "avx512 with vnni",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::dots::Dots::best().name(),
    }
}

/// Dot product of floats of the same length.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::dot(a, b) },
        Isa::Portable => portable::dot(a, b),
    }
}

/// `gate = gate / (1 + e^-gate) * up`, for slices of the same length (SwiGLU, arXiv 2002.05202).
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "one value of up for each of gate");
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::math::silu_mul(gate, up) },
        Isa::Portable => portable::silu_mul(gate, up),
    }
}

/// The largest of the values and `top`.
pub fn largest_of(values: &[f32], top: f32) -> f32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::math::largest_of(values, top) },
        Isa::Portable => values.iter().fold(top, |m, v| m.max(*v)),
    }
}

/// Every value becomes `e^(value - top)`, with `top` at least the largest; the sum of them.
pub fn exp_sum(values: &mut [f32], top: f32) -> f32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::math::exp_sum(values, top) },
        Isa::Portable => portable::exp_sum(values, top),
    }
}

/// A strided matrix on the left of a [`panel`]: row `r` begins at `r * stride`, and has `width` columns.
#[derive(Debug, Clone, Copy)]
pub struct Left<'a> {
    /// Its values.
    pub values: &'a [f32],
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub width: usize,
    /// From one row to the next.
    pub stride: usize,
}

/// `out[r][j] += sum over k of left[r][k] right[k][j]`, with `right [left.width, width]` and `out [left.rows, width]`, on
/// the calling thread. Meant for a right side that fits the cache. Sums are made in the order of `k`.
///
/// # Panics
/// Where the shapes do not fit.
pub fn panel(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) {
    let Left { values, rows, width: inner, stride } = left;
    assert!(rows == 0 || (inner <= stride && values.len() >= (rows - 1) * stride + inner), "shapes do not fit");
    assert!(right.len() == inner * width && out.len() == rows * width, "shapes do not fit");
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: they are only used where the processor has what they take.
        Isa::Avx2 if avx512::used() => unsafe { avx512::panel::panel(left, right, width, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::math::panel(left, right, width, out) },
        Isa::Portable => portable::panel(left, right, width, out),
    }
}

/// Numbers of a cache `[tokens, stride]`, of each token the first `width`, become floats `[width, columns]`: token `t` is
/// column `t`, and columns without a token stay as they are.
///
/// # Panics
/// Where the slices are too short, or there are more tokens than columns.
pub fn transpose(numbers: Numbers<'_>, stride: usize, width: usize, tokens: usize, columns: usize, out: &mut [f32]) {
    assert!(tokens == 0 || numbers.len() >= (tokens - 1) * stride + width, "too few values");
    assert!(tokens <= columns && out.len() >= width * columns, "shapes do not fit");
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::math::transpose(numbers, stride, width, tokens, columns, out) },
        Isa::Portable => portable::transpose(numbers, stride, width, tokens, columns, out),
    }
}

/// Numbers of a cache `[tokens, stride]`, of each token the first `width`, become floats `[tokens, width]`.
///
/// # Panics
/// Where the slices are too short.
pub fn widen(numbers: Numbers<'_>, stride: usize, width: usize, tokens: usize, out: &mut [f32]) {
    assert!(tokens == 0 || numbers.len() >= (tokens - 1) * stride + width, "too few values");
    assert!(out.len() >= width * tokens, "shapes do not fit");
    match (*ISA, numbers) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        (Isa::Avx2, Numbers::F16(halves)) => unsafe { avx2::math::widen(halves, stride, width, tokens, out) },
        _ => {
            for (token, out) in out.chunks_exact_mut(width).take(tokens).enumerate() {
                numbers.slice(token * stride..token * stride + width).widen(out);
            }
        }
    }
}
