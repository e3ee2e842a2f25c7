//! Matrix products and their parts, on slices. Vector versions are chosen at run time; everything here is safe to call.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod format;
mod portable;

#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use half::f16;
use molt_kv::gemm::{self, MatrixRef, Threads};
use rayon::prelude::*;

use activations::{ActivationRow, Activations};
pub use format::{Format, RUN};

/// Up to this many rows of inputs, weights are read once and multiplied as 8-bit integers (decoding is bound by memory);
/// above it they are widened tile by tile for the float product, which does more multiplications in a cycle on AVX2
/// and rounds nothing.
const INTEGER_ROWS: usize = 4;

/// Widened weights of a tile. The float product packs all inputs anew for each tile, so tiles are as large as the
/// third-level cache allows rather than the second.
const TILE_BYTES: usize = 2 << 20;
/// Fewer rows than this, and packing the inputs costs a tenth of the product.
const TILE_ROWS: usize = 192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

static ISA: LazyLock<Isa> = LazyLock::new(|| {
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
        Isa::Avx2 => "avx2",
    }
}

/// A borrowed matrix of weights `[rows, columns]`.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    format: Format,
    rows: usize,
    columns: usize,
    row_bytes: usize,
    bytes: &'a [u8],
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

    fn row(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.row_bytes..(index + 1) * self.row_bytes]
    }

    fn floats(&self) -> Option<&'a [f32]> {
        match self.format {
            Format::F32 => bytemuck::try_cast_slice(self.bytes).ok(),
            _ => None,
        }
    }

    /// The weights of a row as floats.
    pub fn dequantize_row(&self, index: usize, out: &mut [f32]) {
        let row = self.row(index);
        match (*ISA, self.format) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
            (Isa::Avx2, format) if format.is_quantized() => unsafe { avx2::dequantize_runs(format, row, out) },
            (_, format) => portable::dequantize(format, row, out),
        }
    }

    /// `input [m, columns] -> output [m, rows]`, on all threads of the current pool.
    ///
    /// # Panics
    /// Where `input` and `output` do not hold the same number of rows.
    pub fn multiply(&self, input: &[f32], output: &mut [f32]) {
        let m = input.len() / self.columns;
        assert!(input.len() == m * self.columns && output.len() == m * self.rows, "shapes do not fit");
        match m {
            0 => {}
            1..=INTEGER_ROWS => self.multiply_few(input, m, output),
            _ => self.multiply_many(input, m, output),
        }
    }

    /// Every weight is read once for all rows of inputs.
    fn multiply_few(&self, input: &[f32], m: usize, output: &mut [f32]) {
        let activations = self.format.is_quantized().then(|| Activations::new(input, self.columns));
        let quantized: Vec<ActivationRow<'_>> = activations.iter().flat_map(Activations::rows).collect();
        self.by_tiles(m, output, self.tile_rows(16), |rows, tile| {
            for (row, out) in rows.zip(tile.chunks_exact_mut(m)) {
                match self.format.is_quantized() {
                    true => dot_quantized(self.format, self.row(row), &quantized, out),
                    false => self.dot_floats(row, input, out),
                }
            }
        });
    }

    fn dot_floats(&self, row: usize, input: &[f32], out: &mut [f32]) {
        let bytes = self.row(row);
        let inputs = input.chunks_exact(self.columns);
        let halves = (self.format == Format::F16).then(|| bytemuck::try_cast_slice::<u8, f16>(bytes).ok()).flatten();
        let floats = (self.format == Format::F32).then(|| bytemuck::try_cast_slice::<u8, f32>(bytes).ok()).flatten();
        match (halves, floats) {
            (Some(halves), _) => inputs.zip(out).for_each(|(x, out)| *out = dot_f16(halves, x)),
            (_, Some(floats)) => inputs.zip(out).for_each(|(x, out)| *out = dot(floats, x)),
            // Brain floats, and files that hold floats at an address that is no multiple of their size.
            _ => {
                let mut wide = vec![0.0; self.columns];
                portable::dequantize(self.format, bytes, &mut wide);
                inputs.zip(out).for_each(|(x, out)| *out = dot(&wide, x));
            }
        }
    }

    /// Weights are widened tile by tile and multiplied as floats.
    fn multiply_many(&self, input: &[f32], m: usize, output: &mut [f32]) {
        let x = MatrixRef::row_major(input, m, self.columns);
        if let Some(floats) = self.floats() {
            let w = MatrixRef::row_major(floats, self.rows, self.columns).t();
            return gemm::multiply(x, w, output, self.rows, Threads::All);
        }
        self.by_tiles(m, output, self.tile_rows((TILE_BYTES / (4 * self.columns)).max(TILE_ROWS)), |rows, tile| {
            let mut wide = vec![0.0; rows.len() * self.columns];
            for (row, out) in rows.clone().zip(wide.chunks_exact_mut(self.columns)) {
                self.dequantize_row(row, out);
            }
            let w = MatrixRef::row_major(&wide, rows.len(), self.columns);
            gemm::multiply(w, x.t(), tile, m, Threads::One);
        });
    }

    /// Rows of a tile: about `wished`, and enough tiles for every thread.
    fn tile_rows(&self, wished: usize) -> usize {
        wished.clamp(8, self.rows.div_ceil(2 * rayon::current_num_threads()).max(8))
    }

    /// Fills `[m, rows]` from tiles `[rows of the tile, m]`.
    fn by_tiles(
        &self,
        m: usize,
        output: &mut [f32],
        tile_rows: usize,
        fill: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync,
    ) {
        let range = |tile: usize| tile * tile_rows..((tile + 1) * tile_rows).min(self.rows);
        if m == 1 {
            return output.par_chunks_mut(tile_rows).enumerate().for_each(|(tile, out)| fill(range(tile), out));
        }
        let mut transposed = vec![0.0; self.rows * m];
        transposed.par_chunks_mut(tile_rows * m).enumerate().for_each(|(tile, out)| fill(range(tile), out));
        output.par_chunks_mut(self.rows).enumerate().for_each(|(column, out)| {
            for (row, value) in out.iter_mut().enumerate() {
                *value = transposed[row * m + column];
            }
        });
    }
}

fn dot_quantized(format: Format, row: &[u8], inputs: &[ActivationRow<'_>], out: &mut [f32]) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::dot_quantized(format, row, inputs, out) },
        Isa::Portable => portable::dot_quantized(format, row, inputs, out),
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

/// Dot product of 2-byte floats with floats of the same length.
#[inline]
pub fn dot_f16(a: &[f16], b: &[f32]) -> f32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::dot_f16(a, b) },
        Isa::Portable => a.iter().zip(b).map(|(x, y)| x.to_f32() * y).sum(),
    }
}

/// `out += scale * values`, for slices of the same length.
#[inline]
pub fn add_scaled(out: &mut [f32], values: &[f32], scale: f32) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2::add_scaled(out, values, scale) },
        Isa::Portable => portable::add_scaled(out, values, scale),
    }
}
