//! Seams added up to rows: means with their spread over documents, medians of times.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};

use super::journal::Record;
use super::setting::Setting;
use crate::bench::stats::Spread;

/// How often documents are drawn for the interval, and from which seed: the same records give the same row.
const DRAWS: usize = 2_000;
const SEED: u64 = 7;

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

/// The middle 95 % of the mean over documents drawn with replacement: seams of one document are not independent.
fn interval(values: &[(&str, f64)]) -> Option<(f64, f64)> {
    let mut documents: Vec<(&str, f64, f64)> = Vec::new();
    for (document, value) in values {
        match documents.iter_mut().find(|(known, _, _)| known == document) {
            Some((_, sum, count)) => (*sum, *count) = (*sum + value, *count + 1.0),
            None => documents.push((document, *value, 1.0)),
        }
    }
    if documents.len() < 2 {
        return None;
    }
    let mut random = StdRng::seed_from_u64(SEED);
    let mut means: Vec<f64> = (0..DRAWS)
        .map(|_| {
            let (mut sum, mut count) = (0.0, 0.0);
            for _ in 0..documents.len() {
                let (_, of_one, seams) = documents[random.random_range(0..documents.len())];
                (sum, count) = (sum + of_one, count + seams);
            }
            sum / count
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    Some((means[DRAWS / 40], means[DRAWS - 1 - DRAWS / 40]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_knows_documents_from_seams() {
        let check = |values: &[(&str, f64)], expected: Option<(f64, f64)>| {
            let found = interval(values);
            let close = |(a, b): ((f64, f64), (f64, f64))| (a.0 - b.0).abs() < 1e-9 && (a.1 - b.1).abs() < 1e-9;
            assert!(found.zip(expected).map_or(found == expected, close), "{found:?} is not {expected:?}");
        };
        check(&[], None);
        check(&[("a", 1.0), ("a", 3.0)], None);
        check(&[("a", 2.0), ("b", 2.0)], Some((2.0, 2.0)));
        // Two documents: half of the draws take the same one twice, however many seams it has.
        check(&[("a", 0.0), ("b", 1.0)], Some((0.0, 1.0)));
        check(&[("a", 0.0), ("a", 0.0), ("a", 0.0), ("b", 1.0)], Some((0.0, 1.0)));
        // Many documents narrow it.
        let names: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let many: Vec<(&str, f64)> =
            names.iter().enumerate().map(|(at, name)| (name.as_str(), if at < 50 { 0.0 } else { 1.0 })).collect();
        let (low, high) = interval(&many).unwrap();
        assert!(low > 0.35 && low < 0.47 && high > 0.53 && high < 0.65, "{low} {high}");
    }
}
