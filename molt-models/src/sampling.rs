//! Choosing the next token from its logits. The state is small and survives a change of rung; what a choice works in is
//! lent to it.

use bytemuck::{Pod, Zeroable};
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
    /// Taken off the logit of every token that the answer has already (OpenAI's `presence_penalty`).
    pub presence_penalty: f32,
    /// Taken off for every time that the answer has it.
    pub frequency_penalty: f32,
    /// Seed of the choice.
    pub seed: u64,
}

impl Default for SamplingSettings {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 1,
        }
    }
}

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Candidate {
    id: u32,
    /// Its logit, and later its part of the probability.
    weight: f32,
}

/// Where choices among a vocabulary are made: a megabyte and more of a large one, which models lend from what a pass
/// computes in.
#[derive(Debug)]
pub struct Room<'a> {
    /// `[vocab]`.
    pub candidates: &'a mut [Candidate],
    /// `[vocab]`, for whoever needs the logits as they were.
    pub logits: &'a mut [f32],
}

impl<'a> Room<'a> {
    /// Words of room for choices among so many tokens.
    pub const fn words(vocab: usize) -> usize {
        vocab * (size_of::<Candidate>() / size_of::<f32>() + 1)
    }

    /// Cut from at least [`Room::words`].
    pub fn of(words: &'a mut [f32], vocab: usize) -> Self {
        let (logits, candidates) = words[..Self::words(vocab)].split_at_mut(vocab);
        Self { candidates: bytemuck::cast_slice_mut(candidates), logits }
    }
}

/// What a model thinks of every next token, before anything is done to it.
#[derive(Debug, Clone, Copy)]
pub struct Distribution<'a> {
    logits: &'a [f32],
    log_total: f64,
}

impl<'a> Distribution<'a> {
    /// Of these logits.
    pub fn of(logits: &'a [f32]) -> Self {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // In double precision: a hundred thousand small ones are added to a few large ones.
        let total: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
        Self { logits, log_total: f64::from(top) + total.ln() }
    }

    /// The natural logarithm of a token's probability.
    pub fn logprob(&self, token: u32) -> f64 {
        let logit = usize::try_from(token).ok().and_then(|id| self.logits.get(id));
        logit.map_or(f64::NEG_INFINITY, |logit| f64::from(*logit) - self.log_total)
    }

    /// The most likely tokens, most likely first, each with its logarithm.
    pub fn top(&self, count: usize, candidates: &mut [Candidate]) -> Vec<(u32, f64)> {
        let all = list(self.logits, candidates);
        let most = most_likely(all, count);
        most.sort_unstable_by(descending);
        most.iter().map(|found| (found.id, f64::from(found.weight) - self.log_total)).collect()
    }
}

/// How far back a repetition is penalised.
const PENALTY_WINDOW: usize = 64;

/// Chooses tokens for one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    settings: SamplingSettings,
    rng: StdRng,
}

impl Sampler {
    /// A sampler with those settings.
    pub fn new(settings: SamplingSettings) -> Self {
        Self { settings, rng: StdRng::seed_from_u64(settings.seed) }
    }

    /// Goes on as if so many tokens had been chosen already.
    pub fn skip(&mut self, tokens: usize) {
        // Each choice but a greedy one takes one number.
        if self.settings.temperature > 0.0 {
            for _ in 0..tokens {
                let _drawn: f32 = self.rng.random();
            }
        }
    }

    /// Chooses among `logits [vocab]`; `recent` are the tokens so far. Adjusts the logits in place. `candidates [vocab]` is
    /// room to work in.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32], candidates: &mut [Candidate]) -> u32 {
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
        if s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            let mut seen = recent.to_vec();
            seen.sort_unstable();
            for same in seen.chunk_by(|a, b| a == b) {
                let logit = same.first().and_then(|id| usize::try_from(*id).ok()).and_then(|id| logits.get_mut(id));
                if let Some(logit) = logit {
                    *logit -= s.presence_penalty + s.frequency_penalty * same.len() as f32;
                }
            }
        }
        if s.temperature <= 0.0 {
            return argmax(logits);
        }
        let possible = list(logits, candidates);
        let most = if s.top_k > 0 { s.top_k } else { usize::MAX };
        let possible = most_likely(possible, most);
        let top = possible.iter().map(|c| c.weight).fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for candidate in &mut *possible {
            candidate.weight = ((candidate.weight - top) / s.temperature).exp();
            total += candidate.weight;
        }
        let kept = nucleus(possible, s.top_p * total);
        let total: f32 = kept.iter().map(|c| c.weight).sum();
        let mut at = self.rng.random::<f32>() * total;
        let chosen = kept.iter().find(|c| {
            at -= c.weight;
            at <= 0.0
        });
        chosen.or(kept.last()).map_or(0, |c| c.id)
    }
}

/// Most likely first; of equals the lower id.
fn descending(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Writes down what may be chosen. What a grammar has ruled out is no candidate, not even for rounding.
fn list<'a>(logits: &[f32], candidates: &'a mut [Candidate]) -> &'a mut [Candidate] {
    let possible = (0u32..).zip(logits).filter(|(_, logit)| **logit > f32::NEG_INFINITY);
    let mut count = 0;
    for (place, (id, logit)) in candidates.iter_mut().zip(possible) {
        *place = Candidate { id, weight: *logit };
        count += 1;
    }
    &mut candidates[..count]
}

/// The most likely of them, at most so many, in any order.
fn most_likely(candidates: &mut [Candidate], count: usize) -> &mut [Candidate] {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, descending);
    }
    let count = count.min(candidates.len());
    &mut candidates[..count]
}

/// How many of the most likely candidates are sorted at first, in the hope that they suffice.
const SORTED: usize = 64;

/// Keeps the most likely candidates that together have that weight, most likely first. Sorts no more of them than it
/// takes: most distributions have their weight in few of 150,000 tokens.
fn nucleus(candidates: &mut [Candidate], weight: f32) -> &[Candidate] {
    let mut sorted = SORTED.min(candidates.len());
    loop {
        let most = most_likely(candidates, sorted);
        most.sort_unstable_by(descending);
        let mut kept = 0.0;
        let last = most.iter().position(|candidate| {
            kept += candidate.weight;
            kept >= weight
        });
        match last {
            Some(last) => return &candidates[..=last],
            None if sorted == candidates.len() => return candidates,
            None => sorted = (sorted * 8).min(candidates.len()),
        }
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
        let mut words = vec![0.0; Room::words(logits.len())];
        let room = Room::of(&mut words, logits.len());
        for _ in 0..2_000 {
            room.logits.copy_from_slice(logits);
            counts[usize::try_from(sampler.sample(room.logits, recent, room.candidates)).unwrap()] += 1;
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
        let greedy = SamplingSettings { temperature: 0.0, ..base };
        let (presence, frequency) = (
            SamplingSettings { presence_penalty: 1.5, ..greedy },
            SamplingSettings { frequency_penalty: 0.6, ..greedy },
        );
        assert_eq!(counts(presence, &logits, &[0, 0]), [0, 2_000, 0, 0]);
        assert_eq!(counts(frequency, &logits, &[0]), [2_000, 0, 0, 0]);
        assert_eq!(counts(frequency, &logits, &[0, 3, 0]), [0, 2_000, 0, 0]);
    }

    #[test]
    fn a_nucleus_is_what_a_full_sort_would_keep() {
        let check = |count: u32, weight: f32| {
            let mut state = 7u32;
            let mut random = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 20) as f32 / 4096.0
            };
            let all: Vec<Candidate> = (0..count).map(|id| Candidate { id, weight: random() }).collect();
            let mut expected = all.clone();
            expected.sort_unstable_by(descending);
            let mut kept = 0.0;
            let last = expected.iter().position(|c| {
                kept += c.weight;
                kept >= weight
            });
            expected.truncate(last.map_or(expected.len(), |last| last + 1));
            let mut found = all;
            assert_eq!(nucleus(&mut found, weight), expected, "{count} candidates, weight {weight}");
        };
        for count in [0, 1, 63, 64, 65, 3_000] {
            for weight in [0.0, 0.5, 40.0, 1_000.0, f32::INFINITY] {
                check(count, weight);
            }
        }
    }

    #[test]
    fn a_distribution_adds_up_to_one() {
        let logits: Vec<f32> = (0..5_000u16).map(|id| f32::from(id % 97) / 10.0).collect();
        let distribution = Distribution::of(&logits);
        let total: f64 = (0..5_000).map(|id| distribution.logprob(id).exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
        let mut words = vec![0.0; Room::words(5_000)];
        let candidates = Room::of(&mut words, 5_000).candidates;
        let top = distribution.top(3, candidates);
        assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [96, 193, 290], "of equals the lower id");
        assert!(top.iter().all(|(id, logprob)| *logprob == distribution.logprob(*id)));
        assert_eq!(distribution.top(0, candidates), []);
        assert_eq!(distribution.top(9_999, candidates).len(), 5_000);
    }

    #[test]
    fn what_is_ruled_out_is_never_chosen() {
        let settings = SamplingSettings { temperature: 2.0, top_k: 0, top_p: 1.0, ..SamplingSettings::default() };
        let counts = counts(settings, &[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY], &[]);
        assert_eq!((counts[0], counts[2], counts[4]), (0, 0, 0));
        assert!(counts[1] > 800 && counts[3] > 800, "{counts:?}");
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let settings = SamplingSettings { temperature: 1.0, top_k: 0, top_p: 1.0, ..SamplingSettings::default() };
        let counts = counts(settings, &[1.0, 0.0], &[]);
        // e / (1 + e) = 0.731 of 2,000; four standard deviations are 79.
        assert!((counts[0] as f64 - 1_462.0).abs() < 80.0, "{counts:?}");
    }
}
