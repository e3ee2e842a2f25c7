//! Choosing the next token from its logits. The state is small and survives a change of rung.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSettings {
    /// 0 takes the most likely token always.
    pub temperature: f32,
    /// Only this many most likely tokens; 0 is no limit.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability.
    pub top_p: f32,
    /// Divides the logits of tokens seen lately (multiplies negative ones); 1 is none (CTRL, arXiv 1909.05858).
    pub repetition_penalty: f32,
    /// Seed of the choice.
    pub seed: u64,
}

impl Default for SamplingSettings {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 40, top_p: 0.95, repetition_penalty: 1.0, seed: 1 }
    }
}

/// How far back a repetition is penalised.
const PENALTY_WINDOW: usize = 64;

/// Chooses tokens for one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    settings: SamplingSettings,
    rng: StdRng,
    /// Kept between tokens, so that sampling allocates nothing.
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler with those settings.
    pub fn new(settings: SamplingSettings) -> Self {
        Self { settings, rng: StdRng::seed_from_u64(settings.seed), candidates: Vec::new() }
    }

    /// Chooses among `logits [vocab]`; `recent` are the tokens so far. Adjusts the logits in place.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> u32 {
        let s = self.settings;
        if s.repetition_penalty != 1.0 {
            let mut seen = recent[recent.len().saturating_sub(PENALTY_WINDOW)..].to_vec();
            seen.sort_unstable();
            seen.dedup();
            for logit in seen.iter().filter_map(|id| usize::try_from(*id).ok()) {
                if let Some(logit) = logits.get_mut(logit) {
                    *logit = if *logit > 0.0 { *logit / s.repetition_penalty } else { *logit * s.repetition_penalty };
                }
            }
        }
        if s.temperature <= 0.0 {
            return argmax(logits);
        }
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits.iter().copied()));
        let descending = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let keep = if s.top_k == 0 { self.candidates.len() } else { s.top_k.min(self.candidates.len()) };
        if keep < self.candidates.len() {
            self.candidates.select_nth_unstable_by(keep, descending);
            self.candidates.truncate(keep);
        }
        self.candidates.sort_unstable_by(descending);
        let top = self.candidates.first().map_or(0.0, |c| c.1);
        let mut total = 0.0;
        for candidate in &mut self.candidates {
            candidate.1 = ((candidate.1 - top) / s.temperature).exp();
            total += candidate.1;
        }
        let mut kept = 0.0;
        let nucleus = self.candidates.iter().position(|c| {
            kept += c.1;
            kept >= s.top_p * total
        });
        self.candidates.truncate(nucleus.map_or(self.candidates.len(), |n| n + 1));
        let total: f32 = self.candidates.iter().map(|c| c.1).sum();
        let mut at = self.rng.random::<f32>() * total;
        let chosen = self.candidates.iter().find(|c| {
            at -= c.1;
            at <= 0.0
        });
        chosen.or(self.candidates.last()).map_or(0, |c| c.0)
    }
}

/// The most likely token, the first of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0u32..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(settings: SamplingSettings, logits: &[f32], recent: &[u32]) -> Vec<usize> {
        let mut sampler = Sampler::new(settings);
        let mut counts = vec![0; logits.len()];
        for _ in 0..2_000 {
            counts[usize::try_from(sampler.sample(&mut logits.to_vec(), recent)).unwrap()] += 1;
        }
        counts
    }

    #[test]
    fn settings_bound_the_choice() {
        let logits = [2.0, 1.0, 0.0, -1.0];
        let base = SamplingSettings { temperature: 1.0, top_k: 0, top_p: 1.0, ..SamplingSettings::default() };
        assert!(counts(base, &logits, &[]).iter().all(|c| *c > 0));
        assert_eq!(counts(SamplingSettings { temperature: 0.0, ..base }, &logits, &[]), [2_000, 0, 0, 0]);
        assert_eq!(counts(SamplingSettings { top_k: 2, ..base }, &logits, &[])[2..], [0, 0]);
        // The first has 64 % of the probability, the first two 88 %.
        assert_eq!(counts(SamplingSettings { top_p: 0.6, ..base }, &logits, &[])[1..], [0, 0, 0]);
        assert_eq!(counts(SamplingSettings { top_p: 0.8, ..base }, &logits, &[])[2..], [0, 0]);
        let penalised = SamplingSettings { temperature: 0.0, repetition_penalty: 3.0, ..base };
        assert_eq!(counts(penalised, &logits, &[0]), [0, 2_000, 0, 0]);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let settings = SamplingSettings { temperature: 1.0, top_k: 0, top_p: 1.0, ..SamplingSettings::default() };
        let counts = counts(settings, &[1.0, 0.0], &[]);
        // e / (1 + e) = 0.731 of 2,000; four standard deviations are 79.
        assert!((counts[0] as f64 - 1_462.0).abs() < 80.0, "{counts:?}");
    }
}
