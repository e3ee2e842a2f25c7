//! Small float products whose right side stays in the first-level cache.

use std::arch::x86_64::*;

use crate::kernels::Left;
use crate::kernels::avx2::math;

/// `out[r][j] += sum over k of left[r][k] right[k][j]`, with `right [left.width, width]`; as in [`math::panel`], to the last
/// bit.
#[target_feature(enable = "avx512f")]
pub(in crate::kernels) fn panel(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) {
    if !width.is_multiple_of(16) {
        return math::panel(left, right, width, out);
    }
    let mut first = 0;
    while first < left.rows {
        let rest = Left { values: &left.values[first * left.stride..], rows: left.rows - first, ..left };
        let out = &mut out[first * width..];
        // Twelve sums are under way where there is enough to do, more than two multipliers need to be kept busy.
        first += match (rest.rows, width.is_multiple_of(32)) {
            (12.., false) => block::<12, 1>(rest, right, width, out),
            (6.., true) => block::<6, 2>(rest, right, width, out),
            (4.., _) => block::<4, 1>(rest, right, width, out),
            (3, _) => block::<3, 1>(rest, right, width, out),
            (2, _) => block::<2, 1>(rest, right, width, out),
            _ => block::<1, 1>(rest, right, width, out),
        };
    }
}

/// The first `R` rows, `C` times 16 columns at a time; returns `R`.
#[target_feature(enable = "avx512f")]
#[inline]
fn block<const R: usize, const C: usize>(left: Left<'_>, right: &[f32], width: usize, out: &mut [f32]) -> usize {
    let Left { values: left, rows, width: left_width, stride } = left;
    assert!(rows >= R && left.len() >= (R - 1) * stride + left_width && width.is_multiple_of(C * 16));
    assert!(right.len() >= left_width * width && out.len() >= R * width);
    for column in (0..width).step_by(C * 16) {
        let mut sums = [[_mm512_setzero_ps(); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                // SAFETY: rows and columns of `out` were shown above to be there; loads need no alignment.
                *sum = unsafe { _mm512_loadu_ps(out.as_ptr().add(r * width + column + c * 16)) };
            }
        }
        let mut k = 0;
        while k + TOGETHER <= left_width {
            // SAFETY: rows `k` to `k + TOGETHER` of `right` have `width` columns, of which `C` times 16 lie at `column`, and
            // `left` has R rows of `left_width` columns, `stride` apart.
            unsafe { add::<R, C, TOGETHER>(&mut sums, (left, stride, k), (right, width, column)) };
            k += TOGETHER;
        }
        while k < left_width {
            // SAFETY: as above, of row `k`.
            unsafe { add::<R, C, 1>(&mut sums, (left, stride, k), (right, width, column)) };
            k += 1;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                // SAFETY: as for the loads; `out` is borrowed mutably.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(r * width + column + c * 16), *sum) };
            }
        }
    }
    R
}

/// Rows of the right side that are in registers at a time: the address of a row on the left is made once for so many.
const TOGETHER: usize = 4;

/// Adds the products of columns `k` to `k + K` of the left side.
///
/// # Safety
/// `left` has `R` rows of `k + K` columns, `stride` apart, and `right` has `k + K` rows of `width` columns, of which `C` times
/// 16 lie at `column`.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn add<const R: usize, const C: usize, const K: usize>(
    sums: &mut [[__m512; C]; R],
    (left, stride, k): (&[f32], usize, usize),
    (right, width, column): (&[f32], usize, usize),
) {
    let mut columns = [[_mm512_setzero_ps(); C]; K];
    for (row, columns) in columns.iter_mut().enumerate() {
        for (c, columns) in columns.iter_mut().enumerate() {
            // SAFETY: the caller promises that they are there; loads need no alignment.
            *columns = unsafe { _mm512_loadu_ps(right.as_ptr().add((k + row) * width + column + c * 16)) };
        }
    }
    for (r, sums) in sums.iter_mut().enumerate() {
        for (at, columns) in columns.iter().enumerate() {
            // SAFETY: as above.
            let factor = unsafe { _mm512_set1_ps(*left.get_unchecked(r * stride + k + at)) };
            for (sum, columns) in sums.iter_mut().zip(columns) {
                *sum = _mm512_fmadd_ps(factor, *columns, *sum);
            }
        }
    }
}
