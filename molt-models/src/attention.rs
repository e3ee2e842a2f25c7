//! Grouped-query attention over a cache: no repeated heads, no mask and no score matrix are ever made. Keys come in
//! tiles, and the softmax is kept up to date as they pass (FlashAttention, arXiv 2205.14135).

use std::ops::Range;

use half::slice::HalfFloatSliceExt as _;
use molt_kv::cache::KvCache;
use rayon::prelude::*;

use crate::config::ModelConfig;
use crate::kernels::{add_scaled, dot};

/// Cached tokens widened to f32 at a time.
const TILE: usize = 64;
/// Query tokens that share a widened tile.
const QUERIES: usize = 16;

/// `queries [slots, heads, head_dim]` (after RoPE) over the cached tokens up to each one's own slot, into `out` of the
/// same shape. Cost grows with what is cached, not with its limit.
pub(crate) fn attend(
    config: &ModelConfig,
    cache: &KvCache,
    layer: usize,
    slots: Range<usize>,
    queries: &[f32],
    out: &mut [f32],
) {
    let width = config.q_width();
    let group_width = width / config.kv_heads;
    if slots.len() == 1 {
        // A lone token: the heads are shared out.
        return out.par_chunks_mut(group_width).enumerate().for_each(|(head, out)| {
            let q = &queries[head * group_width..(head + 1) * group_width];
            attend_head(config, cache, layer, head, slots.start, &[q], &mut [out]);
        });
    }
    out.par_chunks_mut(QUERIES * width).enumerate().for_each(|(block, out)| {
        let first = block * QUERIES;
        for head in 0..config.kv_heads {
            let own = head * group_width..(head + 1) * group_width;
            let q: Vec<&[f32]> = queries[first * width..].chunks_exact(width).map(|row| &row[own.clone()]).collect();
            let mut rows: Vec<&mut [f32]> = out.chunks_exact_mut(width).map(|row| &mut row[own.clone()]).collect();
            let q = &q[..rows.len()];
            attend_head(config, cache, layer, head, slots.start + first, q, &mut rows);
        }
    });
}

/// Queries of consecutive slots from `first` (each `[group, head_dim]`) over one key/value head.
fn attend_head(
    config: &ModelConfig,
    cache: &KvCache,
    layer: usize,
    head: usize,
    first: usize,
    queries: &[&[f32]],
    out: &mut [&mut [f32]],
) {
    let dim = config.head_dim;
    let (kv_width, group) = (config.kv_width(), config.heads / config.kv_heads);
    let scale = (dim as f32).powf(-0.5);
    let (keys, values) = (cache.keys(layer), cache.values(layer));
    let (mut key_tile, mut value_tile) = (vec![0.0f32; TILE * dim], vec![0.0f32; TILE * dim]);
    // Of each query: the largest score so far and the sum of the weights relative to it.
    let mut state = vec![(f32::NEG_INFINITY, 0.0f32); queries.len() * group];
    for row in out.iter_mut() {
        row.fill(0.0);
    }
    let end = first + queries.len();
    for start in (0..end).step_by(TILE) {
        let tile = start..(start + TILE).min(end);
        for (at, slot) in tile.clone().enumerate() {
            let from = slot * kv_width + head * dim;
            keys[from..from + dim].convert_to_f32_slice(&mut key_tile[at * dim..(at + 1) * dim]);
            values[from..from + dim].convert_to_f32_slice(&mut value_tile[at * dim..(at + 1) * dim]);
        }
        for (index, (query, out)) in queries.iter().zip(out.iter_mut()).enumerate() {
            // Causal: nothing after the query's own slot.
            let seen = (first + index + 1).saturating_sub(start).min(tile.len());
            if seen == 0 {
                continue;
            }
            let heads = query.chunks_exact(dim).zip(out.chunks_exact_mut(dim));
            for ((q, o), (largest, sum)) in heads.zip(&mut state[index * group..(index + 1) * group]) {
                let mut scores = [0.0f32; TILE];
                let mut top = *largest;
                for (score, key) in scores[..seen].iter_mut().zip(key_tile.chunks_exact(dim)) {
                    *score = dot(q, key) * scale;
                    top = top.max(*score);
                }
                if top > *largest {
                    let shrink = (*largest - top).exp();
                    *sum *= shrink;
                    o.iter_mut().for_each(|v| *v *= shrink);
                    *largest = top;
                }
                for (score, value) in scores[..seen].iter().zip(value_tile.chunks_exact(dim)) {
                    let weight = (score - top).exp();
                    *sum += weight;
                    add_scaled(o, value, weight);
                }
            }
        }
    }
    for (row, state) in out.iter_mut().zip(state.chunks_exact(group)) {
        for (o, (_, sum)) in row.chunks_exact_mut(dim).zip(state) {
            let inverse = sum.recip();
            o.iter_mut().for_each(|v| *v *= inverse);
        }
    }
}
