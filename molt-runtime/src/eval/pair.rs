//! Two rungs with different weights, both loaded, and what can be measured between them.

use std::time::{Duration, Instant};

use molt_kv::bridge::Bridge;
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model};
use molt_scheduler::units::{RungIdx, Tokens};

use super::error::EvalError;
use super::metrics::{AFTER, LogProbs, Positions, SeamFigures};
use super::setting::Setting;
use super::windows::{Window, prefixes};
use crate::engine::pace;

/// Tokens whose distributions are made together: as many as the output head takes at once.
const GROUP: usize = 8;

/// Two rungs, source first.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) from: RungIdx,
    pub(super) to: RungIdx,
    pub(super) source: Model,
    pub(super) destination: Model,
    pub(super) bridge: Option<Bridge>,
    pub(super) ledger: Ledger,
    /// Of the destination, in operations a millisecond.
    pub(super) pace: f64,
}

/// What one way to the destination gave at one seam.
#[derive(Debug)]
pub(super) struct Seam {
    pub(super) prefix: usize,
    pub(super) setting: Setting,
    pub(super) figures: SeamFigures,
    pub(super) carry: Duration,
    /// Reading the whole context natively on the destination.
    pub(super) reread: Duration,
}

/// The name of a pair, as the command line takes it.
pub(super) fn name(from: RungIdx, to: RungIdx) -> String {
    format!("{from}:{to}")
}

/// Every ordered pair of rungs with different weights.
pub(super) fn all(ladder: &Ladder) -> Vec<(RungIdx, RungIdx)> {
    let rungs: Vec<_> = ladder.cost().rungs().map(|(rung, _)| rung).collect();
    let source = |rung: RungIdx| ladder.rung(rung).map(molt_models::Rung::source);
    let pairs = rungs.iter().flat_map(|from| rungs.iter().map(|to| (*from, *to)));
    pairs.filter(|(from, to)| source(*from) != source(*to)).collect()
}

impl Pair {
    pub(super) fn load(ladder: &Ladder, from: RungIdx, to: RungIdx) -> Result<Self, EvalError> {
        let ledger = Ledger::new();
        let load = |rung: RungIdx| {
            let no_rung = || EvalError::NoPair { pair: name(from, to), known: String::new() };
            Ok::<_, EvalError>(ladder.rung(rung).ok_or_else(no_rung)?.load(&ledger, &StopFlag::new())?)
        };
        let (source, destination) = (load(from)?, load(to)?);
        let bridge = ladder.bridge(from, to, &ledger)?;
        let pace = pace(&destination, &ledger)?;
        Ok(Self { from, to, source, destination, bridge, ledger, pace })
    }

    pub(super) fn name(&self) -> String {
        name(self.from, self.to)
    }

    /// Whether a cache can come over in that way.
    pub(super) fn allows(&self, setting: Setting) -> bool {
        !setting.is_bridged() || self.bridge.is_some()
    }

    /// A cache of a model with these tokens read natively, room for `limit`, and every hidden state.
    pub(super) fn read(&self, model: &Model, tokens: &[u32], limit: usize) -> Result<(KvCache, Vec<f32>), EvalError> {
        let mut cache = KvCache::new(model.cache_shape(), Tokens::from(limit), &self.ledger)?;
        let hidden = model.read_all(tokens, &mut cache, &StopFlag::new())?;
        Ok((cache, hidden))
    }

    /// Compares what follows a cache with the native hidden states of the same tokens; `truth` are the tokens after each.
    pub(super) fn compare(&self, native: &[f32], carried: &[f32], truth: &[u32]) -> Positions {
        let mut positions = Positions::default();
        self.compare_each(native, std::slice::from_ref(&carried), truth, |_, native, carried, truth| {
            positions.push(native, carried, truth);
        });
        positions
    }

    /// Group by group, so that distributions over a large vocabulary need not all be held.
    fn compare_each(
        &self,
        native: &[f32],
        carried: &[&[f32]],
        truth: &[u32],
        mut use_them: impl FnMut(usize, &[LogProbs], &[LogProbs], &[u32]),
    ) {
        let width = self.destination.width();
        for (group, truth) in truth.chunks(GROUP).enumerate() {
            let range = group * GROUP * width..(group * GROUP + truth.len()) * width;
            let reference = LogProbs::of_each(&self.destination, &native[range.clone()]);
            for (at, carried) in carried.iter().enumerate() {
                let found = LogProbs::of_each(&self.destination, &carried[range.clone()]);
                use_them(at, &reference, &found, truth);
            }
        }
    }

    /// Judges the seams of a window that are wanted; two native reads serve them all.
    pub(super) fn judge(
        &self,
        window: &Window,
        context: usize,
        wanted: impl Fn(usize) -> Vec<Setting>,
        mut found: impl FnMut(Seam) -> Result<(), EvalError>,
    ) -> Result<(), EvalError> {
        let prefixes = prefixes(context);
        if prefixes.iter().all(|prefix| wanted(*prefix).is_empty()) {
            return Ok(());
        }
        let (text, stop) = (&window.tokens, StopFlag::new());
        let start = Instant::now();
        let (mut own, mut native) = self.read(&self.destination, &text[..context], text.len())?;
        let reread = start.elapsed();
        native.extend(self.destination.read_all(&text[context..text.len() - 1], &mut own, &stop)?);
        // One token more than the context: what the source itself would have said after the seam.
        let (mut source, source_hidden) = self.read(&self.source, &text[..=context], text.len())?;
        let (width, source_width) = (self.destination.width(), self.source.width());
        for prefix in prefixes {
            source.truncate(prefix);
            let (after, truth) = (&text[prefix..prefix + AFTER], &text[prefix + 1..=prefix + AFTER]);
            let mut brought = Vec::new();
            for setting in wanted(prefix) {
                let (mut cache, carry) = setting.bring(self, &source, &mut own)?;
                let hidden = self.destination.read_all(after, &mut cache, &stop)?;
                brought.push((setting, carry, hidden));
            }
            let at_seam = &source_hidden[prefix * source_width..(prefix + 1) * source_width];
            let at_seam = LogProbs::of_each(&self.source, at_seam);
            let mut positions: Vec<(Positions, bool)> = brought.iter().map(|_| (Positions::default(), false)).collect();
            let hidden: Vec<&[f32]> = brought.iter().map(|(_, _, hidden)| &hidden[..]).collect();
            let native = &native[prefix * width..(prefix + AFTER) * width];
            self.compare_each(native, &hidden, truth, |at, native, carried, truth| {
                let (positions, seen) = &mut positions[at];
                if !std::mem::replace(seen, true) {
                    positions.seam(&at_seam[0], &native[0], &carried[0]);
                }
                positions.push(native, carried, truth);
            });
            for ((setting, carry, _), (positions, _)) in brought.into_iter().zip(positions) {
                if let Some(figures) = positions.figures() {
                    found(Seam { prefix, setting, figures, carry, reread })?;
                }
            }
        }
        Ok(())
    }
}
