//! What carrying needs of a decoder. molt-models implements it.

use std::ops::Range;

use crate::blocks::Q8Matrix;
use crate::cache::{CacheShape, KvCache};
use crate::rope::Rope;

pub use crate::stop::StopFlag;

/// The work was given up between two layers, as asked; nothing of it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("given up between two layers, as asked")]
pub struct Stopped;

/// A decoder whose layers can be run one by one.
pub trait Decoder {
    /// The shape of its caches.
    fn cache_shape(&self) -> CacheShape;

    /// Its rotation.
    fn rope(&self) -> &Rope;

    /// Width of the residual stream.
    fn width(&self) -> usize;

    /// SHA-256 of the file that its weights come from; the same at every precision.
    fn source(&self) -> &str;

    /// Most tokens that one call of [`Decoder::run_layers`] takes.
    fn chunk_limit(&self) -> usize;

    /// Hidden states `[tokens, width]` of token ids, before the first layer.
    fn embed(&self, tokens: &[u32], hidden: &mut [f32]);

    /// Runs `layers` over hidden states `[slots, width]` in place. Keys and values of the slots (made room for
    /// beforehand) are written to the cache; attention sees every slot up to its own.
    fn run_layers(
        &self,
        layers: Range<usize>,
        hidden: &mut [f32],
        cache: &mut KvCache,
        slots: Range<usize>,
        stop: &StopFlag,
    ) -> Result<(), Stopped> {
        self.run_slots(layers, hidden, cache, &[slots], None, stop)
    }

    /// As [`Decoder::run_layers`], over stretches of slots one after another that may lie apart; slots that were filled
    /// before are filled anew. To `received [cache.len()]` is added how much attention each slot got from those that run,
    /// the sum over layers and heads.
    fn run_slots(
        &self,
        layers: Range<usize>,
        hidden: &mut [f32],
        cache: &mut KvCache,
        stretches: &[Range<usize>],
        received: Option<&mut [f32]>,
        stop: &StopFlag,
    ) -> Result<(), Stopped>;

    /// `input [rows, columns] -> output [rows, matrix.rows]` through the engine's matrix kernels, in as many words of room
    /// as [`Q8Matrix::room`] says.
    fn multiply(&self, matrix: &Q8Matrix, input: &[f32], output: &mut [f32], room: &mut [i32]);

    /// Floating-point operations of reading `tokens` tokens through `layers` layers after `context` cached ones.
    fn flops(&self, layers: usize, tokens: usize, context: usize) -> f64;
}
