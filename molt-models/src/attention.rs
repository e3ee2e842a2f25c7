//! Grouped-query attention over a cache: no repeated heads and no score matrix are ever made. Keys come in tiles, and the
//! softmax is kept up to date as they pass (FlashAttention, arXiv 2205.14135).
//!
//! Tiles begin at the same slots for every query, and a query's sums are made in the same order whoever is read beside it:
//! what a token gets does not depend on the tokens of its pass, to the last bit.

use std::ops::Range;

use molt_kv::cache::KvCache;
use rayon::prelude::*;

use crate::config::ModelConfig;
use crate::kernels::{Left, exp_sum, largest_of, panel, transpose, widen};

/// Cached tokens widened to f32 at a time.
const TILE: usize = 64;
/// Query tokens that share a widened tile.
const QUERIES: usize = 16;

/// `queries [slots, heads, head_dim]` (after RoPE) over the cached tokens up to each one's own slot, into `out` of the
/// same shape. Slots rise, and may lie apart. Cost grows with what is cached, not with its limit.
pub(crate) fn attend(
    config: &ModelConfig,
    cache: &KvCache,
    layer: usize,
    slots: &[usize],
    queries: &[f32],
    out: &mut [f32],
) {
    let width = config.q_width();
    let group_width = width / config.kv_heads;
    if slots.len() <= 1 {
        // A lone token: the heads are shared out.
        return out.par_chunks_mut(group_width).enumerate().for_each(|(head, out)| {
            let own = head * group_width..(head + 1) * group_width;
            Pass::new(config, cache, layer, head).run(slots, &[&queries[own]], &mut [out]);
        });
    }
    out.par_chunks_mut(QUERIES * width).enumerate().for_each(|(block, out)| {
        let first = block * QUERIES;
        for head in 0..config.kv_heads {
            let own = head * group_width..(head + 1) * group_width;
            let mut rows: Vec<&mut [f32]> = out.chunks_exact_mut(width).map(|row| &mut row[own.clone()]).collect();
            let queries = queries[first * width..].chunks_exact(width).map(|row| &row[own.clone()]);
            let queries: Vec<&[f32]> = queries.take(rows.len()).collect();
            let slots = &slots[first..first + rows.len()];
            Pass::new(config, cache, layer, head).run(slots, &queries, &mut rows);
        }
    });
}

/// Adds to `received`, one value a cached token, the attention that `queries` (as [`attend`] takes them) pay to it: the sum
/// over heads and queries. Scores are made anew, for the weights of a softmax are only known at its end.
pub(crate) fn add_received(
    config: &ModelConfig,
    cache: &KvCache,
    layer: usize,
    slots: &[usize],
    queries: &[f32],
    received: &mut [f32],
) {
    let (width, group_width) = (config.q_width(), config.q_width() / config.kv_heads);
    let blocks: Vec<_> =
        (0..config.kv_heads).flat_map(|head| (0..slots.len()).step_by(QUERIES).map(move |b| (head, b))).collect();
    // As many at a time as there are threads: each makes a value for every cached token, on the heap.
    for blocks in blocks.chunks(rayon::current_num_threads().max(1)) {
        let parts: Vec<Vec<f32>> = blocks
            .par_iter()
            .map(|(head, first)| {
                let own = head * group_width..(head + 1) * group_width;
                let queries = queries[first * width..].chunks_exact(width).map(|row| &row[own.clone()]);
                let queries: Vec<&[f32]> = queries.take(QUERIES).collect();
                Pass::new(config, cache, layer, *head).weights(&slots[*first..first + queries.len()], &queries)
            })
            .collect();
        // In the order of the blocks, so that the sums do not depend on who was first.
        for part in parts {
            received.iter_mut().zip(part).for_each(|(sum, weight)| *sum += weight);
        }
    }
}

/// Some queries over one key/value head.
struct Pass<'a> {
    config: &'a ModelConfig,
    cache: &'a KvCache,
    layer: usize,
    head: usize,
    /// `[head_dim, TILE]`.
    keys: Vec<f32>,
    /// `[TILE, head_dim]`.
    values: Vec<f32>,
}

/// Of each row: the largest score so far, and the sum of the weights relative to it.
#[derive(Debug, Clone, Copy)]
struct Running {
    top: f32,
    sum: f32,
}

impl<'a> Pass<'a> {
    fn new(config: &'a ModelConfig, cache: &'a KvCache, layer: usize, head: usize) -> Self {
        let tile = vec![0.0; TILE * config.head_dim];
        Self { config, cache, layer, head, keys: tile.clone(), values: tile }
    }

    /// Queries of slots that rise, each `[group, head_dim]`.
    fn run(mut self, slots: &[usize], queries: &[&[f32]], out: &mut [&mut [f32]]) {
        let dim = self.config.head_dim;
        let group = self.config.heads / self.config.kv_heads;
        let scale = (dim as f32).powf(-0.5);
        let rows = queries.len() * group;
        // `[queries, group, head_dim]`, one after another.
        let scaled: Vec<f32> = queries.iter().copied().flatten().map(|q| q * scale).collect();
        let mut mixed = vec![0.0f32; rows * dim];
        let mut scores = vec![0.0f32; rows * TILE];
        let mut running = vec![Running { top: f32::NEG_INFINITY, sum: 0.0 }; rows];
        let end = slots.last().map_or(0, |last| last + 1);
        for start in (0..end).step_by(TILE) {
            self.widen(start..(start + TILE).min(end));
            scores.fill(0.0);
            panel(Left { values: &scaled, rows, width: dim, stride: dim }, &self.keys, TILE, &mut scores);
            for (row, scores) in scores.chunks_exact_mut(TILE).enumerate() {
                // Causal: nothing after the query's own slot.
                let seen = (slots[row / group] + 1).saturating_sub(start).min(TILE);
                scores[seen..].fill(f32::NEG_INFINITY);
                if seen == 0 {
                    scores.fill(0.0);
                    continue;
                }
                let (running, mixed) = (&mut running[row], &mut mixed[row * dim..(row + 1) * dim]);
                let top = largest_of(scores, running.top);
                if top > running.top {
                    let shrink = (running.top - top).exp();
                    running.sum *= shrink;
                    mixed.iter_mut().for_each(|value| *value *= shrink);
                    running.top = top;
                }
                running.sum += exp_sum(scores, top);
            }
            panel(Left { values: &scores, rows, width: TILE, stride: TILE }, &self.values, dim, &mut mixed);
        }
        for (out, (mixed, running)) in
            out.iter_mut().flat_map(|out| out.chunks_exact_mut(dim)).zip(mixed.chunks_exact(dim).zip(&running))
        {
            let inverse = running.sum.recip();
            out.iter_mut().zip(mixed).for_each(|(out, value)| *out = value * inverse);
        }
    }

    /// What each cached token gets of the softmaxes of queries of slots that rise, added up.
    fn weights(mut self, slots: &[usize], queries: &[&[f32]]) -> Vec<f32> {
        let dim = self.config.head_dim;
        let group = self.config.heads / self.config.kv_heads;
        let scale = (dim as f32).powf(-0.5);
        let (rows, end) = (queries.len() * group, slots.last().map_or(0, |last| last + 1));
        let scaled: Vec<f32> = queries.iter().copied().flatten().map(|q| q * scale).collect();
        let mut scores = vec![0.0f32; rows * TILE];
        let mut running = vec![Running { top: f32::NEG_INFINITY, sum: 0.0 }; rows];
        let mut weights = vec![0.0f32; end];
        // Keys pass by twice: what a softmax divides by is only known when all have.
        for dividing in [false, true] {
            for start in (0..end).step_by(TILE) {
                self.widen(start..(start + TILE).min(end));
                scores.fill(0.0);
                panel(Left { values: &scaled, rows, width: dim, stride: dim }, &self.keys, TILE, &mut scores);
                for (row, (scores, running)) in scores.chunks_exact_mut(TILE).zip(&mut running).enumerate() {
                    let seen = (slots[row / group] + 1).saturating_sub(start).min(TILE);
                    let scores = &mut scores[..seen];
                    if dividing {
                        exp_sum(scores, running.top);
                        let weights = weights[start..].iter_mut().zip(scores);
                        weights.for_each(|(weight, score)| *weight += *score / running.sum);
                    } else {
                        let top = largest_of(scores, running.top);
                        let shrink = if top > running.top { (running.top - top).exp() } else { 1.0 };
                        *running = Running { top, sum: running.sum * shrink + exp_sum(scores, top) };
                    }
                }
            }
        }
        weights
    }

    /// Widens keys and values of some slots; where there are fewer than a tile, what remains of an earlier tile is
    /// masked by its scores.
    fn widen(&mut self, slots: Range<usize>) {
        let (dim, width) = (self.config.head_dim, self.config.kv_width());
        let from = slots.start * width + self.head * dim;
        let [keys, values] = [self.cache.keys(self.layer), self.cache.values(self.layer)];
        transpose(keys.slice(from..keys.len()), width, dim, slots.len(), TILE, &mut self.keys);
        widen(values.slice(from..values.len()), width, dim, slots.len(), &mut self.values);
    }
}
