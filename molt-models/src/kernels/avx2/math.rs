//! Exponentials, and small float products whose right side stays in the first-level cache.

use std::arch::x86_64::*;

use half::f16;
use molt_kv::numbers::Numbers;

use crate::kernels::avx2::floats::transpose8;
use crate::kernels::{Left, portable};

/// `e^x` to about two units in the last place; zero below -87, where the result would be no ordinary number.
///
/// `e^x = 2^n e^r` with `|r| <= ln 2 / 2`, and for `e^r` the polynomial of Cephes' `expf`.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn exp8(x: __m256) -> __m256 {
    let gone = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(-87.0));
    let x = _mm256_min_ps(x, _mm256_set1_ps(88.0));
    let x = _mm256_max_ps(x, _mm256_set1_ps(-87.0));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, so that the remainder is exact.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm256_set1_ps(1.987_569_2e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    let e = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
    let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
    _mm256_andnot_ps(gone, _mm256_mul_ps(e, _mm256_castsi256_ps(power)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: reads the eight floats of the array; the load needs no alignment.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store(values: &mut [f32; 8], value: __m256) {
    // SAFETY: writes the eight floats of the array; the store needs no alignment.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), value) }
}

/// `gate = gate / (1 + e^-gate) * up`.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    let one = |g: __m256, u: __m256| {
        let e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), g));
        _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0), e)), u)
    };
    let (gates, gate_rest) = gate.as_chunks_mut::<8>();
    let (ups, up_rest) = up.as_chunks::<8>();
    for (g, u) in gates.iter_mut().zip(ups) {
        let value = one(load(g), load(u));
        store(g, value);
    }
    // The rest goes the same way, so that a value does not depend on where it stands.
    let (mut g, mut u) = ([0.0; 8], [0.0; 8]);
    g[..gate_rest.len()].copy_from_slice(gate_rest);
    u[..up_rest.len()].copy_from_slice(up_rest);
    let value = one(load(&g), load(&u));
    store(&mut g, value);
    gate_rest.copy_from_slice(&g[..gate_rest.len()]);
}

/// The largest of the values and `top`.
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn largest_of(values: &[f32], top: f32) -> f32 {
    let (eights, rest) = values.as_chunks::<8>();
    let mut most = _mm256_set1_ps(top);
    for eight in eights {
        most = _mm256_max_ps(most, load(eight));
    }
    let mut eight = [0.0; 8];
    store(&mut eight, most);
    eight.iter().chain(rest).fold(top, |m, v| m.max(*v))
}

/// Every value becomes `e^(value - top)`; their sum.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn exp_sum(values: &mut [f32], top: f32) -> f32 {
    let shift = _mm256_set1_ps(top);
    let mut sum = _mm256_setzero_ps();
    let (eights, rest) = values.as_chunks_mut::<8>();
    for eight in eights {
        let value = exp8(_mm256_sub_ps(load(eight), shift));
        store(eight, value);
        sum = _mm256_add_ps(sum, value);
    }
    if !rest.is_empty() {
        let mut eight = [f32::NEG_INFINITY; 8];
        eight[..rest.len()].copy_from_slice(rest);
        let value = exp8(_mm256_sub_ps(load(&eight), shift));
        store(&mut eight, value);
        rest.copy_from_slice(&eight[..rest.len()]);
        sum = _mm256_add_ps(sum, value);
    }
    super::sum8(sum)
}

/// Rows of a [`panel`] that are multiplied together: with 16 columns, eight sums are under way, as many as two
/// multipliers need to be kept busy.
const ROWS: usize = 6;

/// `out[r][j] += sum over k of left[r][k] right[k][j]`, with `right [left.width, width]`.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn panel(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) {
    for (first, out) in (0..left.rows).step_by(ROWS).zip(out.chunks_mut(ROWS * width)) {
        let left = Left { values: &left.values[first * left.stride..], rows: (left.rows - first).min(ROWS), ..left };
        match left.rows {
            6 => rows::<6>(left, right, width, out),
            5 => rows::<5>(left, right, width, out),
            4 => rows::<4>(left, right, width, out),
            3 => rows::<3>(left, right, width, out),
            2 => rows::<2>(left, right, width, out),
            _ => rows::<1>(left, right, width, out),
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn rows<const R: usize>(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) {
    let Left { values: left, width: left_width, stride, .. } = left;
    assert!(left.len() >= (R - 1) * stride + left_width && right.len() >= left_width * width && out.len() >= R * width);
    let mut column = 0;
    while column + 16 <= width {
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: rows and columns of `out` were shown above to be there; loads need no alignment.
            let at = unsafe { out.as_ptr().add(r * width + column) };
            // SAFETY: as above, 16 floats from there.
            *sums = unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] };
        }
        for k in 0..left_width {
            // SAFETY: row `k` of `right` has `width` columns, of which 16 lie at `column`.
            let at = unsafe { right.as_ptr().add(k * width + column) };
            // SAFETY: as above.
            let (first, second) = unsafe { (_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))) };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `left` has R rows of `left_width` columns, `stride` apart.
                let factor = unsafe { _mm256_set1_ps(*left.get_unchecked(r * stride + k)) };
                *sums = [_mm256_fmadd_ps(factor, first, sums[0]), _mm256_fmadd_ps(factor, second, sums[1])];
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: as for the loads; `out` is borrowed mutably.
            let at = unsafe { out.as_mut_ptr().add(r * width + column) };
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_ps(at, sums[0]);
                _mm256_storeu_ps(at.add(8), sums[1]);
            }
        }
        column += 16;
    }
    for r in 0..R {
        for j in column..width {
            let left = &left[r * stride..r * stride + left_width];
            let sum = &mut out[r * width + j];
            *sum = left.iter().zip(right[j..].iter().step_by(width)).fold(*sum, |sum, (a, b)| a.mul_add(*b, sum));
        }
    }
}

/// Numbers of a cache `[tokens, stride]` (of each token the first `width`) become floats `[width, columns]`: token `t` is
/// column `t`.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::kernels) fn transpose(
    numbers: Numbers<'_>,
    stride: usize,
    width: usize,
    tokens: usize,
    columns: usize,
    out: &mut [f32],
) {
    assert!(tokens == 0 || numbers.len() >= (tokens - 1) * stride + width);
    assert!(tokens <= columns && out.len() >= width * columns);
    let (whole_tokens, whole_width) = (tokens / 8 * 8, width / 8 * 8);
    for token in (0..whole_tokens).step_by(8) {
        for from in (0..whole_width).step_by(8) {
            let mut v = [_mm256_setzero_ps(); 8];
            for (lane, v) in v.iter_mut().enumerate() {
                let at = (token + lane) * stride + from;
                // SAFETY: eight numbers of token `token + lane` from `from` on, shown above to be there.
                *v = unsafe {
                    match numbers {
                        Numbers::F16(halves) => _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().add(at).cast())),
                        Numbers::F32(floats) => _mm256_loadu_ps(floats.as_ptr().add(at)),
                    }
                };
            }
            let t = transpose8(v);
            for (row, v) in t.iter().enumerate() {
                // SAFETY: eight columns from `token` on of row `from + row`, shown above to be there.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add((from + row) * columns + token), *v) };
            }
        }
    }
    // What is left at both edges.
    if whole_width < width && whole_tokens > 0 {
        let right = numbers.slice(whole_width..numbers.len());
        portable::transpose(
            right,
            stride,
            width - whole_width,
            whole_tokens,
            columns,
            &mut out[whole_width * columns..],
        );
    }
    if whole_tokens < tokens {
        let below = numbers.slice(whole_tokens * stride..numbers.len());
        portable::transpose(below, stride, width, tokens - whole_tokens, columns, &mut out[whole_tokens..]);
    }
}

/// Halves of a cache `[tokens, stride]`, of each token the first `width`, become floats `[tokens, width]`.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::kernels) fn widen(halves: &[f16], stride: usize, width: usize, tokens: usize, out: &mut [f32]) {
    for (token, out) in out.chunks_exact_mut(width).take(tokens).enumerate() {
        let (eights, rest) = halves[token * stride..token * stride + width].as_chunks::<8>();
        let (out_eights, out_rest) = out.as_chunks_mut::<8>();
        for (eight, out) in eights.iter().zip(out_eights) {
            // SAFETY: reads the eight halves of the array; the load needs no alignment.
            let value = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(eight.as_ptr().cast()) });
            store(out, value);
        }
        for (half, out) in rest.iter().zip(out_rest) {
            *out = half.to_f32();
        }
    }
}
