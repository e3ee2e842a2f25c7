//! Matrices of weights, borrowed from wherever they lie.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use crate::kernels::avx2;
use crate::kernels::product::FLOAT_LANES;
use crate::kernels::{Format, ISA, Isa, RUN, portable};

/// A borrowed matrix of weights `[rows, columns]`.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_bytes: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Weights<'a> {
    /// Borrows the bytes of a matrix; `None` where they are not exactly that many rows of whole blocks.
    pub fn new(format: Format, rows: usize, columns: usize, bytes: &'a [u8]) -> Option<Self> {
        let row_bytes = format.row_bytes(columns)?;
        let runs = !format.is_quantized() || columns.is_multiple_of(RUN);
        (columns > 0 && runs && row_bytes.checked_mul(rows)? == bytes.len()).then_some(Self {
            format,
            rows,
            columns,
            row_bytes,
            bytes,
        })
    }

    /// Bytes of the whole matrix.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn row(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.row_bytes..(index + 1) * self.row_bytes]
    }

    /// The weights of a row as floats.
    pub fn dequantize_row(&self, index: usize, out: &mut [f32]) {
        let row = self.row(index);
        match (*ISA, self.format) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
            (Isa::Avx2, format) => unsafe { avx2::dequantize(format, row, out) },
            (Isa::Portable, format) => portable::dequantize(format, row, out),
        }
    }

    /// Products of some rows of plain floats with a single token's inputs, where this machine has a version for them.
    pub(super) fn alone(&self, rows: Range<usize>, input: &[f32]) -> Option<[f32; FLOAT_LANES]> {
        debug_assert!(!self.format.is_quantized() && rows.len() <= FLOAT_LANES);
        #[cfg(target_arch = "x86_64")]
        if *ISA == Isa::Avx2 && self.format != Format::Bf16 && self.columns.is_multiple_of(8) {
            // Lanes without a row take the last one's again.
            let rows = std::array::from_fn(|lane| self.row((rows.start + lane).min(rows.end - 1)));
            // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
            return Some(unsafe { avx2::floats::alone(self.format, rows, input) });
        }
        None
    }

    /// Columns of some rows of plain floats, transposed: `[columns, 16]`. Lanes without a row hold anything.
    pub(super) fn pack(&self, rows: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
        debug_assert!(!self.format.is_quantized() && rows.len() <= FLOAT_LANES);
        let size = self.format.block_bytes();
        let part = |row: usize| &self.row(row)[columns.start * size..columns.end * size];
        #[cfg(target_arch = "x86_64")]
        if *ISA == Isa::Avx2 && self.format != Format::Bf16 && columns.len().is_multiple_of(8) {
            // Lanes without a row take the last one's again.
            for half in [0, FLOAT_LANES / 2] {
                let rows = std::array::from_fn(|lane| part((rows.start + half + lane).min(rows.end - 1)));
                // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
                unsafe { avx2::floats::pack8(self.format, rows, half, packed) };
            }
            return;
        }
        let mut wide = vec![0.0; columns.len()];
        for (lane, row) in rows.enumerate() {
            portable::dequantize(self.format, part(row), &mut wide);
            for (packed, value) in packed.chunks_exact_mut(FLOAT_LANES).zip(&wide) {
                packed[lane] = *value;
            }
        }
    }
}
