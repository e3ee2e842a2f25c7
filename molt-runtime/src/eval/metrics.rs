//! How far one next-token distribution is from another, position by position after a seam. All in nats.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use molt_models::Model;

/// Positions after a seam that are judged.
pub const AFTER: usize = 256;
/// Positions of the middle window: `kl_64`, `top1_64`.
pub const MIDDLE: usize = 64;
/// Positions of the short window: `kl_8`.
const SHORT: usize = 8;

/// A distribution over the vocabulary, as logarithms. In f64: divergences of a millionth are looked at.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbs(Vec<f64>);

impl LogProbs {
    /// The distribution that these logits stand for.
    pub fn of(logits: &[f32]) -> Self {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
        let log_sum = sum.ln() + f64::from(top);
        Self(logits.iter().map(|l| f64::from(*l) - log_sum).collect())
    }

    /// Of every hidden state `[tokens, width]` that left the last layer of a model.
    pub fn of_each(model: &Model, hidden: &[f32]) -> Vec<Self> {
        let mut logits: Vec<Vec<f32>> = Vec::new();
        model.with_each_logits(hidden, |_, one| logits.push(one.to_vec()));
        logits.par_iter().map(|logits| Self::of(logits)).collect()
    }

    /// KL(self || other).
    pub fn kl(&self, other: &Self) -> f64 {
        self.0.iter().zip(&other.0).map(|(p, q)| p.exp() * (p - q)).sum()
    }

    /// Jensen-Shannon divergence: the mean of both divergences from the mixture of the two.
    pub fn jsd(&self, other: &Self) -> f64 {
        let half = |(p, q): (&f64, &f64)| {
            let (own, of_other) = (p.exp(), q.exp());
            let mixture = ((own + of_other) / 2.0).ln();
            let part = |probability: f64, log: f64| if probability > 0.0 { probability * (log - mixture) } else { 0.0 };
            part(own, *p) + part(of_other, *q)
        };
        self.0.iter().zip(&other.0).map(half).sum::<f64>() / 2.0
    }

    /// The most likely token; the first of equal ones.
    pub fn favourite(&self) -> usize {
        let better = |best: (usize, f64), (at, p): (usize, &f64)| if *p > best.1 { (at, *p) } else { best };
        self.0.iter().enumerate().fold((0, f64::NEG_INFINITY), better).0
    }

    /// The loss of a token.
    pub fn loss(&self, token: u32) -> f64 {
        usize::try_from(token).ok().and_then(|at| self.0.get(at)).map_or(f64::INFINITY, |log| -log)
    }
}

/// What was measured at one seam.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeamFigures {
    /// KL(native || carried) of the first distribution after the seam.
    pub kl_seam: f64,
    /// Its mean over the first 8.
    pub kl_8: f64,
    /// Over the first 64.
    pub kl_64: f64,
    /// Over 256.
    pub kl_256: f64,
    /// The share of the first 64 with the same favourite.
    pub top1_64: f64,
    /// Loss of the true continuation, carried minus native, a token.
    pub nll_delta_256: f64,
    /// JSD(source, carried destination) at the first position after the seam.
    pub jsd_carried: f64,
    /// JSD(source, native destination) there: what changing models costs anyway.
    pub jsd_native: f64,
}

/// Collects the positions after one seam, in order.
#[derive(Debug, Default)]
pub struct Positions {
    kl: Vec<f64>,
    same: Vec<f64>,
    loss: Vec<f64>,
    jsd: Option<(f64, f64)>,
}

impl Positions {
    /// The next positions: distributions of both, and the tokens that truly came.
    pub fn push(&mut self, native: &[LogProbs], carried: &[LogProbs], truth: &[u32]) {
        let each: Vec<_> = (native, carried, truth)
            .into_par_iter()
            .map(|(native, carried, truth)| {
                let same = if native.favourite() == carried.favourite() { 1.0 } else { 0.0 };
                (native.kl(carried), same, carried.loss(*truth) - native.loss(*truth))
            })
            .collect();
        for (kl, same, loss) in each {
            self.kl.push(kl);
            self.same.push(same);
            self.loss.push(loss);
        }
    }

    /// The source's own distribution at the first position after the seam.
    pub fn seam(&mut self, source: &LogProbs, native: &LogProbs, carried: &LogProbs) {
        self.jsd = Some((source.jsd(carried), source.jsd(native)));
    }

    /// The largest divergence of all positions.
    pub fn kl_max(&self) -> f64 {
        self.kl.iter().copied().fold(0.0, |most, kl| if kl > most || kl.is_nan() { kl } else { most })
    }

    /// Mean divergence over the first positions.
    pub fn kl_mean(&self, positions: usize) -> f64 {
        mean(&self.kl, positions)
    }

    /// The figures; none before the seam and all positions have been seen.
    pub fn figures(&self) -> Option<SeamFigures> {
        let (jsd_carried, jsd_native) = self.jsd?;
        (self.kl.len() >= AFTER).then(|| SeamFigures {
            kl_seam: self.kl_mean(1),
            kl_8: self.kl_mean(SHORT),
            kl_64: self.kl_mean(MIDDLE),
            kl_256: self.kl_mean(AFTER),
            top1_64: mean(&self.same, MIDDLE),
            nll_delta_256: mean(&self.loss, AFTER),
            jsd_carried,
            jsd_native,
        })
    }
}

fn mean(values: &[f64], first: usize) -> f64 {
    let values = &values[..first.min(values.len())];
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(probabilities: &[f32]) -> LogProbs {
        LogProbs::of(&probabilities.iter().map(|p| p.ln()).collect::<Vec<_>>())
    }

    #[test]
    fn divergences_of_hand_made_distributions() {
        let check = |p: &[f32], q: &[f32], kl: f64, jsd: f64, same_favourite: bool| {
            let (p, q) = (distribution(p), distribution(q));
            assert!((p.kl(&q) - kl).abs() < 1e-6, "kl {} is not {kl}", p.kl(&q));
            assert!((p.jsd(&q) - jsd).abs() < 1e-6, "jsd {} is not {jsd}", p.jsd(&q));
            assert!((p.jsd(&q) - q.jsd(&p)).abs() < 1e-12, "jsd is symmetric");
            assert_eq!(p.favourite() == q.favourite(), same_favourite);
        };
        check(&[0.5, 0.25, 0.25], &[0.5, 0.25, 0.25], 0.0, 0.0, true);
        // .5 ln 2 + .5 ln(2/3); the mixture is (.375, .625).
        check(&[0.5, 0.5], &[0.25, 0.75], 0.143_841, 0.033_822, false);
        check(&[0.25, 0.75], &[0.5, 0.5], 0.130_812, 0.033_822, false);
        check(&[0.6, 0.4], &[0.9, 0.1], 0.311_239, 0.063_288, true);
        // Logits need not be normalised, and a constant added to all changes nothing.
        let shifted = LogProbs::of(&[1_000.0, 1_000.0 + 3f32.ln()]);
        assert!(shifted.kl(&distribution(&[0.25, 0.75])).abs() < 1e-4);
        // Impossible under both is no difference; the bound of the JSD is ln 2.
        assert!((distribution(&[1.0, 0.0]).jsd(&distribution(&[0.0, 1.0])) - 2f64.ln()).abs() < 1e-9);
    }

    #[test]
    fn a_distribution_is_zero_from_itself_to_the_last_bit() {
        let logits: Vec<f32> = (0..5_000u16).map(|i| (f32::from(i) * 0.37).sin() * 9.0).collect();
        assert_eq!(LogProbs::of(&logits).kl(&LogProbs::of(&logits)), 0.0);
    }

    #[test]
    fn windows_after_a_seam() {
        // One position apart at the seam, then nine, then none: the means tell them apart.
        let (even, leaning) = (distribution(&[0.5, 0.5]), distribution(&[0.25, 0.75]));
        let check = |apart: usize, expected: [f64; 4], top1: f64, loss: f64| {
            let mut positions = Positions::default();
            positions.seam(&even, &even, &leaning);
            for at in 0..AFTER {
                assert!(positions.figures().is_none(), "figures before all positions were seen");
                let carried = if at < apart { leaning.clone() } else { even.clone() };
                positions.push(std::slice::from_ref(&even), &[carried], &[1]);
            }
            let found = positions.figures().unwrap();
            let kls = [found.kl_seam, found.kl_8, found.kl_64, found.kl_256];
            for (found, expected) in kls.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{kls:?}, {expected}");
            }
            assert!((found.top1_64 - top1).abs() < 1e-9 && (found.nll_delta_256 - loss).abs() < 1e-6, "{found:?}");
            assert!(found.jsd_native == 0.0 && (found.jsd_carried - 0.033_822).abs() < 1e-6);
        };
        let kl = 0.143_841;
        let gain = -1.5f64.ln();
        check(0, [0.0; 4], 1.0, 0.0);
        check(1, [kl, kl / 8.0, kl / 64.0, kl / 256.0], 63.0 / 64.0, gain / 256.0);
        check(16, [kl, kl, kl / 4.0, kl / 16.0], 0.75, gain / 16.0);
        check(256, [kl; 4], 0.0, gain);
    }
}
