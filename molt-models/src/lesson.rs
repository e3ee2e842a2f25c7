//! What maps learn from: a window of text that both models have read, and the places where it is cut into what came over and
//! what is judged.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use half::f16;
use molt_kv::bridge::{BridgeSpec, Fitted, plain_keys_and_values};
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_scheduler::units::Tokens;

use crate::autograd::BlockKv;
use crate::error::ModelError;
use crate::model::Model;

/// Tokens after a cut whose distributions are compared, at most; and at most a quarter of the window.
const JUDGED: usize = 128;

/// First tokens that are exact and last ones that are fed, in turn: maps must serve every effort of a carry. At most a
/// quarter of the context each.
const ENDS: [(usize, usize); 4] = [(64, 64), (4, 16), (32, 64), (16, 32)];

/// The shortest window that can be cut.
const SHORTEST: usize = 32;

/// A place at which a window is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Tokens that come over.
    pub context: usize,
    /// The first of them, which are exact, as in a carry.
    pub exact_first: usize,
    /// The last of them, which are read over the mapped ones.
    pub fed: usize,
    /// Tokens after the context whose distributions are compared.
    pub judged: usize,
}

/// One window of text with everything that does not change while maps learn.
#[derive(Debug)]
pub struct Lesson {
    ids: Vec<u32>,
    /// `[tokens, features]` at half precision: there are many.
    features: Tensor,
    /// Of every block, all tokens as a native read makes them.
    exact: Vec<BlockKv>,
    /// Hidden states `[tokens, width]` after a native read.
    native: Vec<f32>,
    width: usize,
}

impl Lesson {
    /// Reads a window natively with both models.
    ///
    /// # Errors
    /// Where a model cannot read it, or it is too short to be cut.
    pub fn new(fitted: &Fitted, source: &Model, destination: &Model, window: &[u32]) -> Result<Self, ModelError> {
        let spec = fitted.spec();
        if window.len() < SHORTEST {
            let reason = format!("a window of {} tokens is too short to learn from: give {SHORTEST}", window.len());
            return Err(candle_core::Error::Msg(reason).into());
        }
        let (ledger, stop, tokens) = (Ledger::new(), StopFlag::new(), window.len());
        // What is judged after the last cut never comes over.
        let context = tokens - judged(tokens);
        let mut from = KvCache::new(source.cache_shape(), Tokens::from(context), &ledger)?;
        source.read(&window[..context], &mut from, &stop)?;
        let mut to = KvCache::new(destination.cache_shape(), Tokens::from(tokens), &ledger)?;
        let (after_native, native) = destination.read_halves(spec.native_layers, window, &mut to, &stop)?;
        let width = spec.destination_width;
        let features = fitted.inputs((&from, source.rope()), 0..context, &after_native[..context * width]);
        let features: Vec<f16> = features.into_iter().map(f16::from_f32).collect();
        let exact = (0..to.shape().layers).map(|layer| {
            let plain = plain_keys_and_values(&to, destination.rope(), layer, 0..context);
            heads(spec, &Tensor::from_vec(plain, (context, spec.outputs()), &Device::Cpu)?)
        });
        Ok(Self {
            ids: window.to_vec(),
            features: Tensor::from_vec(features, (context, spec.features()), &Device::Cpu)?,
            exact: exact.collect::<candle_core::Result<_>>()?,
            native,
            width,
        })
    }

    /// The cut of that number, of so many: the last one leaves just what is judged, the others lie evenly before it.
    ///
    /// # Panics
    /// Where there are not so many cuts.
    pub fn cut(&self, number: usize, cuts: usize) -> Cut {
        assert!(number < cuts, "cut {number} of {cuts}");
        let judged = judged(self.ids.len());
        let longest = self.ids.len() - judged;
        let context = (longest * (number + 1) / cuts).max(SHORTEST / 2);
        let (exact_first, fed) = ENDS[number % ENDS.len()];
        Cut { context, exact_first: exact_first.min(context / 4), fed: fed.min(context / 4), judged }
    }

    pub(crate) fn ids(&self, range: Range<usize>) -> &[u32] {
        &self.ids[range]
    }

    pub(crate) fn native_hidden(&self, range: Range<usize>) -> &[f32] {
        &self.native[range.start * self.width..range.end * self.width]
    }

    pub(crate) fn features(&self, range: Range<usize>) -> candle_core::Result<Tensor> {
        self.features.narrow(0, range.start, range.len())?.to_dtype(DType::F32)
    }

    /// The first tokens of a block, exact.
    pub(crate) fn exact(&self, layer: usize, tokens: usize) -> candle_core::Result<BlockKv> {
        let BlockKv { keys, values } = &self.exact[layer];
        Ok(BlockKv { keys: keys.narrow(2, 0, tokens)?, values: values.narrow(2, 0, tokens)? })
    }
}

fn judged(tokens: usize) -> usize {
    JUDGED.min(tokens / 4)
}

/// `[tokens, outputs]` as a map makes them, cut into heads.
pub(crate) fn heads(spec: &BridgeSpec, plain: &Tensor) -> candle_core::Result<BlockKv> {
    let (tokens, half) = (plain.dim(0)?, spec.outputs() / 2);
    let shape = spec.destination_shape;
    let cut = |start: usize| {
        let part = plain.narrow(1, start, half)?.reshape((1, tokens, shape.kv_heads, shape.head_dim))?;
        part.transpose(1, 2)?.contiguous()
    };
    Ok(BlockKv { keys: cut(0)?, values: cut(half)? })
}
