//! A safe edge around the `gemm` crate: strided f32 matrices as borrowed slices.

use gemm::Parallelism;

/// A borrowed matrix `[rows, columns]` whose element `(r, c)` is `data[r * row_stride + c * column_stride]`.
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> MatrixRef<'a> {
    /// Rows of `columns` values, one after another.
    pub fn row_major(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns, 1)
    }

    /// Any strides.
    ///
    /// # Panics
    /// Where the last element lies outside `data`.
    pub fn strided(data: &'a [f32], rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> Self {
        let last = rows.saturating_sub(1) * row_stride + columns.saturating_sub(1) * column_stride;
        assert!(rows == 0 || columns == 0 || last < data.len(), "a matrix outside its data");
        Self { data, rows, columns, row_stride, column_stride }
    }

    /// The same numbers with rows and columns exchanged.
    pub fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// How many threads a product may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling one.
    One,
    /// All of the current pool.
    All,
}

/// `out = a b`, where `out` holds rows of `b.columns` values, `out_stride` apart.
///
/// # Panics
/// Where the shapes do not fit each other or `out`.
pub fn multiply(a: MatrixRef<'_>, b: MatrixRef<'_>, out: &mut [f32], out_stride: usize, threads: Threads) {
    assert_eq!(a.columns, b.rows, "inner dimensions differ");
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m == 0 || n == 0 {
        return;
    }
    assert!(out_stride >= n && (m - 1) * out_stride + n <= out.len(), "the output does not hold the product");
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: every element that gemm reads or writes was shown above (and in `MatrixRef::strided`) to lie inside its
    // slice; `out` is borrowed mutably and so overlaps neither input. Strides of slices fit an `isize`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride.cast_signed(),
            false,
            a.data.as_ptr(),
            a.column_stride.cast_signed(),
            a.row_stride.cast_signed(),
            b.data.as_ptr(),
            b.column_stride.cast_signed(),
            b.row_stride.cast_signed(),
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_and_transposed_products() {
        // [2, 3] inside rows of 4.
        let a = [1.0, 2.0, 3.0, -9.0, 4.0, 5.0, 6.0, -9.0];
        let b = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
        let mut out = [0.0; 4];
        let (a, b) = (MatrixRef::strided(&a, 2, 3, 4, 1), MatrixRef::row_major(&b, 3, 2));
        multiply(a, b, &mut out, 2, Threads::One);
        assert_eq!(out, [4.0, 5.0, 10.0, 11.0]);
        let mut square = [0.0; 9];
        multiply(a.t(), a, &mut square, 3, Threads::All);
        assert_eq!(square[1], 1.0 * 2.0 + 4.0 * 5.0);
    }
}
