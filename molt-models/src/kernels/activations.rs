//! Inputs of products with quantised weights, rounded to 8 bits.
//!
//! Formats whose scales belong to 256 weights get one scale for 256 inputs, the others one for 32, as in llama.cpp
//! (`Q8_K` and `Q8_0`), so that within such a block everything is whole numbers.
//!
//! Everything is laid out run by run (32 inputs) and, within a run, token by token: a kernel keeps the weights of one
//! run in registers and walks along the tokens.

use rayon::prelude::*;

use crate::kernels::format::{Format, RUN};
use crate::kernels::{ISA, Isa};

/// Rows of inputs as whole numbers with their scales, in room that somebody lends.
#[derive(Debug)]
pub(super) struct Activations<'a> {
    tokens: usize,
    runs: usize,
    /// Runs that share a scale: 1 or 8.
    runs_per_block: usize,
    /// `[runs, tokens]`: 32 signed bytes, as eight words of four.
    quants: &'a [[i32; 8]],
    /// `[runs, tokens]`: sums of the first and of the last 16 of a run, each in 16 bits of the word, low half first.
    sums: &'a [i32],
    /// `[blocks, tokens]`.
    scales: &'a [f32],
}

/// So many tokens are rounded on one thread.
const FEW: usize = 16;

/// Inputs that share a scale, for weights of a format.
pub(super) fn block_len(format: Format) -> usize {
    format.block_len().max(RUN)
}

/// Words of room that rounding `tokens` rows of `columns` inputs takes, in blocks of `block`.
pub(super) fn words(tokens: usize, columns: usize, block: usize) -> usize {
    (columns / RUN * 9 + columns / block) * tokens
}

impl<'a> Activations<'a> {
    /// Rounds `input [tokens, columns]`, where `columns` are whole blocks of `block` (32 or 256) inputs, into the front
    /// of `room`; returns what is left of it.
    ///
    /// # Panics
    /// Where the room is smaller than [`words`].
    pub(super) fn new(input: &[f32], columns: usize, block: usize, room: &'a mut [i32]) -> (Self, &'a mut [i32]) {
        let (tokens, runs, runs_per_block) = (input.len() / columns, columns / RUN, block / RUN);
        let (quants, room) = room.split_at_mut(runs * tokens * 8);
        let (sums, room) = room.split_at_mut(runs * tokens);
        let (scales, rest) = room.split_at_mut(columns / block * tokens);
        let (quants, scales) = (quants.as_chunks_mut::<8>().0, bytemuck::cast_slice_mut::<i32, f32>(scales));
        // Of every block of columns all tokens lie together.
        let together = (tokens * runs_per_block).max(1);
        let blocks = quants.par_chunks_mut(together).zip(sums.par_chunks_mut(together));
        let blocks = blocks.zip(scales.par_chunks_mut(tokens.max(1))).enumerate();
        // Of a few tokens it takes no longer than the threads take to meet.
        let least = if tokens < FEW { columns } else { 1 };
        blocks.with_min_len(least).for_each(|(index, ((quants, sums), scales))| {
            for (token, (row, scale)) in input.chunks_exact(columns).zip(scales).enumerate() {
                let values = &row[index * block..(index + 1) * block];
                let largest = largest(values);
                let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
                *scale = largest / 127.0;
                for (run, values) in values.as_chunks::<RUN>().0.iter().enumerate() {
                    let at = run * tokens + token;
                    let bytes: &mut [i8; RUN] = bytemuck::cast_mut(&mut quants[at]);
                    sums[at] = round(values, inverse, bytes);
                }
            }
        });
        (Self { tokens, runs, runs_per_block, quants, sums, scales }, rest)
    }

    #[inline]
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    #[inline]
    pub(super) fn runs(&self) -> usize {
        self.runs
    }

    #[inline]
    pub(super) fn blocks(&self) -> usize {
        self.runs / self.runs_per_block
    }

    /// `[runs, tokens]` of 32 bytes.
    pub(super) fn quants(&self) -> &[[i32; 8]] {
        self.quants
    }

    /// `[runs, tokens]` of the two sums of a run.
    pub(super) fn sums(&self) -> &[i32] {
        self.sums
    }

    /// `[blocks, tokens]`.
    pub(super) fn scales(&self) -> &[f32] {
        self.scales
    }
}

/// The two sums in a word of [`Activations::sums`].
pub(super) fn halves(word: i32) -> [i32; 2] {
    let [a, b, c, d] = word.to_le_bytes();
    [i32::from(i16::from_le_bytes([a, b])), i32::from(i16::from_le_bytes([c, d]))]
}

fn largest(values: &[f32]) -> f32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { super::avx2::largest(values) },
        Isa::Portable => values.iter().fold(0.0f32, |m, v| m.max(v.abs())),
    }
}

/// Rounds to the nearest whole number, to the even one of two, and returns the sums of both halves in one word.
fn round(values: &[f32; RUN], inverse: f32, out: &mut [i8; RUN]) -> i32 {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { super::avx2::round(values, inverse, out) },
        Isa::Portable => round_portable(values, inverse, out),
    }
}

pub(super) fn round_portable(values: &[f32; RUN], inverse: f32, out: &mut [i8; RUN]) -> i32 {
    for (out, value) in out.iter_mut().zip(values) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 127 by construction")]
        let rounded = (value * inverse).round_ties_even() as i8;
        *out = rounded;
    }
    let sum = |half: &[i8]| half.iter().map(|q| i16::from(*q)).sum::<i16>();
    let ([a, b], [c, d]) = (sum(&out[..16]).to_le_bytes(), sum(&out[16..]).to_le_bytes());
    i32::from_le_bytes([a, b, c, d])
}
