//! The features that a map reads and the targets it is fitted to. Fitting and carrying share this code, so that they
//! cannot disagree.

use std::ops::Range;

use rayon::prelude::*;

use crate::bridge::spec::BridgeSpec;
use crate::cache::KvCache;
use crate::rope::{Rope, Turn};

/// Features `[slots, spec.features()]`, written to `out`: keys before RoPE and values of every source layer, then the RMS-normalised
/// hidden state `hidden [slots, width]` that leaves the destination's native layers.
pub(crate) fn features(
    spec: &BridgeSpec,
    source: &KvCache,
    rope: &Rope,
    slots: Range<usize>,
    hidden: &[f32],
    out: &mut [f32],
) {
    let (width, group) = (spec.features(), spec.group_width());
    let hidden_width = spec.destination_width;
    out.par_chunks_mut(width).zip(hidden.par_chunks(hidden_width)).zip(slots.into_par_iter()).for_each(
        |((row, hidden), slot)| {
            let (groups, last) = row.split_at_mut(width - hidden_width);
            for (layer, part) in groups.chunks_exact_mut(group).enumerate() {
                keys_and_values(source, rope, layer, slot, part);
            }
            let square = hidden.iter().map(|v| v * v).sum::<f32>() / hidden_width as f32;
            let inverse = (square + 1e-6).sqrt().recip();
            for (to, from) in last.iter_mut().zip(hidden) {
                *to = from * inverse;
            }
        },
    );
}

/// Scales features `[rows, width]` in place to what maps expect.
pub(super) fn normalise(features: &mut [f32], mean: &[f32], inverse_scale: &[f32]) {
    for row in features.chunks_exact_mut(mean.len()) {
        for ((value, mean), inverse) in row.iter_mut().zip(mean).zip(inverse_scale) {
            *value = (*value - mean) * inverse;
        }
    }
}

/// Keys before RoPE and values of some slots in one layer, side by side: `[slots, 2 * kv_width]`.
pub fn plain_keys_and_values(cache: &KvCache, rope: &Rope, layer: usize, slots: Range<usize>) -> Vec<f32> {
    let width = 2 * cache.shape().kv_width();
    let mut all = vec![0.0; slots.len() * width];
    for (slot, out) in slots.zip(all.chunks_exact_mut(width)) {
        keys_and_values(cache, rope, layer, slot, out);
    }
    all
}

/// Keys before RoPE and values of one slot in one layer, side by side.
pub(super) fn keys_and_values(cache: &KvCache, rope: &Rope, layer: usize, slot: usize, out: &mut [f32]) {
    let width = cache.shape().kv_width();
    let (keys, values) = out.split_at_mut(width);
    cache.keys(layer).slice(slot * width..(slot + 1) * width).widen(keys);
    cache.values(layer).slice(slot * width..(slot + 1) * width).widen(values);
    rope.turn(keys, cache.slots()[slot].position, Turn::Back);
}
