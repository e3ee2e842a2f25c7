//! Rows of plain floats: turned into lanes for many tokens, multiplied at once for one.

use std::arch::x86_64::*;

use crate::kernels::Format;

/// How far ahead of what is read every row is fetched for a lone token, in bytes.
const AHEAD: usize = 512;

/// Products of 16 rows of 4- or 2-byte floats, of a multiple of eight columns, with a single token's inputs. Sums are made
/// in the order of columns, as [`super::math::panel`] makes them.
///
/// A lone token uses every weight once, so rows become lanes in registers and are used there. All sixteen are read side by
/// side: so many streams keep more of memory busy than one does.
///
/// # Panics
/// Where a row has not one number for each input.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn alone(format: Format, rows: [&[u8]; 16], input: &[f32]) -> [f32; 16] {
    match format {
        Format::F32 => alone_of::<4>(rows, input),
        _ => alone_of::<2>(rows, input),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn alone_of<const SIZE: usize>(rows: [&[u8]; 16], input: &[f32]) -> [f32; 16] {
    let width = input.len() * SIZE;
    assert!(rows.iter().all(|row| row.len() == width) && input.len().is_multiple_of(8), "rows of other widths");
    let mut sums = [_mm256_setzero_ps(); 2];
    for (eight, x) in input.as_chunks::<8>().0.iter().enumerate() {
        let at = eight * 8 * SIZE;
        // Past the end of these rows come those of the next tile.
        let ahead = if at + AHEAD < width { at + AHEAD } else { at + AHEAD + 15 * width };
        for (rows, sum) in rows.as_chunks::<8>().0.iter().zip(&mut sums) {
            let mut v = [_mm256_setzero_ps(); 8];
            for (row, v) in rows.iter().zip(&mut v) {
                // SAFETY: eight numbers of that row from `at` on, shown above to be there; loads need no alignment. The
                // prefetch is a hint and reads nothing that a program can see.
                unsafe {
                    if at.is_multiple_of(64) {
                        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(ahead).cast());
                    }
                    let from = row.as_ptr().add(at);
                    *v = match SIZE {
                        4 => _mm256_loadu_ps(from.cast()),
                        _ => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                    };
                }
            }
            for (x, column) in x.iter().zip(transpose8(v)) {
                *sum = _mm256_fmadd_ps(_mm256_set1_ps(*x), column, *sum);
            }
        }
    }
    let mut out = [0.0; 16];
    for (out, sum) in out.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
        // SAFETY: writes the eight floats of the array; the store needs no alignment.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
    }
    out
}

/// Rows of 4- or 2-byte floats, a multiple of eight of them, become lanes `lane..lane + 8` of `packed [columns, 16]`. What
/// lies as far behind is brought nearer.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::kernels) fn pack8(format: Format, rows: [&[u8]; 8], lane: usize, packed: &mut [f32]) {
    let size = format.block_bytes();
    let columns = rows[0].len() / size;
    assert!(rows.iter().all(|row| row.len() == rows[0].len()) && columns.is_multiple_of(8) && lane <= 8);
    assert!(packed.len() >= columns * 16);
    for column in (0..columns).step_by(8) {
        let mut v = [_mm256_setzero_ps(); 8];
        for (row, v) in rows.iter().zip(&mut v) {
            // SAFETY: eight floats of that row from `column` on, shown above to be there; loads need no alignment. The
            // prefetch is a hint and reads nothing that a program can see.
            unsafe {
                let at = row.as_ptr().add(column * size);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(rows[0].len()).cast());
                *v = match format {
                    Format::F32 => _mm256_loadu_ps(at.cast()),
                    _ => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                };
            }
        }
        for (row, v) in transpose8(v).iter().enumerate() {
            // SAFETY: eight of the 16 lanes of column `column + row`, shown above to be there.
            unsafe { _mm256_storeu_ps(packed.as_mut_ptr().add((column + row) * 16 + lane), *v) };
        }
    }
}

/// Rows become columns.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn transpose8(v: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = v;
    let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let (cd, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    let (ef, ef_high) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
    let (gh, gh_high) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
    let first = [
        _mm256_shuffle_ps::<0x44>(ab, cd),
        _mm256_shuffle_ps::<0xee>(ab, cd),
        _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
        _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
    ];
    let second = [
        _mm256_shuffle_ps::<0x44>(ef, gh),
        _mm256_shuffle_ps::<0xee>(ef, gh),
        _mm256_shuffle_ps::<0x44>(ef_high, gh_high),
        _mm256_shuffle_ps::<0xee>(ef_high, gh_high),
    ];
    [
        _mm256_permute2f128_ps::<0x20>(first[0], second[0]),
        _mm256_permute2f128_ps::<0x20>(first[1], second[1]),
        _mm256_permute2f128_ps::<0x20>(first[2], second[2]),
        _mm256_permute2f128_ps::<0x20>(first[3], second[3]),
        _mm256_permute2f128_ps::<0x31>(first[0], second[0]),
        _mm256_permute2f128_ps::<0x31>(first[1], second[1]),
        _mm256_permute2f128_ps::<0x31>(first[2], second[2]),
        _mm256_permute2f128_ps::<0x31>(first[3], second[3]),
    ]
}
