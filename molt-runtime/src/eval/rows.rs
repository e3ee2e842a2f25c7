//! Seams added up to rows: means with their spread over documents, medians of times.

use serde::{Deserialize, Serialize};

use super::journal::Record;
use super::setting::Setting;
use crate::bench::stats::{Spread, interval};

/// Which way a pair leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// To a smaller rung.
    Down,
    /// To a bigger one.
    Up,
}

/// One row: a pair, a setting, a context. Divergences are in nats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Rungs, source first: `tier0:tier1`.
    pub pair: String,
    /// Which way it leads.
    pub direction: Direction,
    /// The way to the destination.
    pub setting: Setting,
    /// The longest context; seams lie at it and up to three sixteenths before it.
    pub context_tokens: usize,
    /// Time of a native read of the context on the destination over that of the carry.
    pub cost_ratio: f64,
    /// Median time until the cache has come over, all included.
    pub carry_ms: f64,
    /// Median time of reading the context natively instead.
    pub reread_ms: f64,
    /// JSD(source, carried) over JSD(source, native), of the means at the seam; 1 is the floor.
    pub seam_jsd_ratio: Option<f64>,
    /// Mean of KL(native || carried) at the first position after the seam.
    pub kl_seam: f64,
    /// Over 8.
    pub kl_8: f64,
    /// Over 64.
    pub kl_64: f64,
    /// Over 256.
    pub kl_256: f64,
    /// A 95 % interval of `kl_64` over documents; none of a single document.
    pub kl_64_low: Option<f64>,
    /// Its upper end.
    pub kl_64_high: Option<f64>,
    /// Share of the first 64 positions with the same favourite.
    pub top1_64: f64,
    /// Loss of the true continuation, carried minus native.
    pub nll_delta_256: f64,
    /// The ratio of the perplexities.
    pub ppl_ratio: f64,
    /// Seams.
    pub seams: usize,
}

impl Row {
    /// The row of records of one pair, setting and context; none without any.
    pub(super) fn of(records: &[&Record], direction: Direction) -> Option<Self> {
        let place = &records.first()?.place;
        let mean = |of: &dyn Fn(&Record) -> f64| records.iter().map(|r| of(r)).sum::<f64>() / records.len() as f64;
        // Times of shorter prefixes are not those of the context.
        let median = |of: &dyn Fn(&Record) -> f64| {
            let whole = records.iter().filter(|r| r.place.prefix_tokens == place.context_tokens);
            Spread::of(&whole.map(|r| of(r)).collect::<Vec<_>>()).map_or(f64::NAN, |spread| spread.median)
        };
        let (carry_ms, reread_ms) = (median(&|r| r.carry_ms), median(&|r| r.reread_ms));
        let native = mean(&|r| r.figures.jsd_native);
        let nll_delta_256 = mean(&|r| r.figures.nll_delta_256);
        let by_document: Vec<(&str, f64)> =
            records.iter().map(|r| (r.place.document.as_str(), r.figures.kl_64)).collect();
        let interval = interval(&by_document);
        Some(Self {
            pair: place.pair.clone(),
            direction,
            setting: place.setting,
            context_tokens: place.context_tokens,
            cost_ratio: reread_ms / carry_ms,
            carry_ms,
            reread_ms,
            seam_jsd_ratio: (native > 0.0).then(|| mean(&|r| r.figures.jsd_carried) / native),
            kl_seam: mean(&|r| r.figures.kl_seam),
            kl_8: mean(&|r| r.figures.kl_8),
            kl_64: mean(&|r| r.figures.kl_64),
            kl_256: mean(&|r| r.figures.kl_256),
            kl_64_low: interval.map(|(low, _)| low),
            kl_64_high: interval.map(|(_, high)| high),
            top1_64: mean(&|r| r.figures.top1_64),
            nll_delta_256,
            ppl_ratio: nll_delta_256.exp(),
            seams: records.len(),
        })
    }
}
