//! Matrices of 8-bit blocks (`Q8_0` of the GGUF specification): 32 weights share one f16 scale.

use half::f16;

use crate::region::FilePart;

/// Weights in a block.
pub const BLOCK: usize = 32;
/// Bytes of a block: the scale and 32 signed bytes.
pub const BLOCK_BYTES: usize = 34;

/// A matrix `[rows, columns]` of `Q8_0` blocks along its rows; `columns` is a multiple of 32.
#[derive(Debug)]
pub struct Q8Matrix {
    rows: usize,
    columns: usize,
    part: FilePart,
}

impl Q8Matrix {
    /// Blocks in a mapped file; `None` where the part has not the size of such a matrix.
    pub fn mapped(rows: usize, columns: usize, part: FilePart) -> Option<Self> {
        let fits = columns.is_multiple_of(BLOCK) && part.bytes().len() == rows * columns / BLOCK * BLOCK_BYTES;
        fits.then_some(Self { rows, columns, part })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Words of room that a product with so many rows of inputs takes: for every 32 inputs their 8-bit form, two sums in
    /// a word, and a scale.
    pub fn room(&self, inputs: usize) -> usize {
        self.columns / BLOCK * 10 * inputs
    }

    /// The blocks, row after row.
    pub fn bytes(&self) -> &[u8] {
        self.part.bytes()
    }
}

/// Rounds a row (a multiple of 32 values) to blocks, as llama.cpp does: scale = largest magnitude / 127.
pub fn quantize_row(row: &[f32], blocks: &mut [u8]) {
    for (values, block) in row.chunks_exact(BLOCK).zip(blocks.chunks_exact_mut(BLOCK_BYTES)) {
        let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let scale = f16::from_f32(largest / 127.0);
        let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
        block[..2].copy_from_slice(&scale.to_le_bytes());
        for (value, byte) in values.iter().zip(&mut block[2..]) {
            #[expect(clippy::cast_possible_truncation, reason = "clamped to the range of an i8")]
            let rounded = (value * inverse).round().clamp(-127.0, 127.0) as i8;
            *byte = rounded.to_le_bytes()[0];
        }
    }
}

/// The values of a row of blocks.
pub(crate) fn dequantize_row(blocks: &[u8], row: &mut [f32]) {
    for (block, values) in blocks.chunks_exact(BLOCK_BYTES).zip(row.chunks_exact_mut(BLOCK)) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        for (byte, value) in block[2..].iter().zip(values) {
            *value = f32::from(i8::from_le_bytes([*byte])) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounding_is_off_by_half_a_step_at_most(row in prop::collection::vec(-30.0f32..30.0, 64)) {
            let mut blocks = [0; 2 * BLOCK_BYTES];
            quantize_row(&row, &mut blocks);
            let mut back = [0.0; 64];
            dequantize_row(&blocks, &mut back);
            for (values, back) in row.chunks(BLOCK).zip(back.chunks(BLOCK)) {
                let step = values.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
                for (a, b) in values.iter().zip(back) {
                    // Half a step, and what rounding the scale to f16 adds.
                    prop_assert!((a - b).abs() <= 0.5 * step + a.abs() * 1e-3 + 1e-6, "{a} became {b}");
                }
            }
        }
    }
}
