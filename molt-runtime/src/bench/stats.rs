//! Medians and their spread, and how sure one can be of a share or a mean.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;

/// How often documents are drawn for an interval, and from which seed: the same samples give the same interval.
const DRAWS: usize = 2_000;
const SEED: u64 = 7;
/// The normal distribution holds 95 % within so many standard deviations.
const Z: f64 = 1.959_964;

/// The middle of some samples, and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the samples are below.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of at least one sample; `None` of none.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = *sorted.get(middle)?;
        let median = if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + upper) / 2.0 } else { upper };
        Some(Self { median, min: sorted[0], max: sorted[sorted.len() - 1] })
    }
}

/// The median with the range in brackets, to one digit or as many as asked for.
impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(1);
        write!(f, "{:.digits$} ({:.digits$} to {:.digits$})", self.median, self.min, self.max)
    }
}

/// The smallest sample that is not below `share` of all of them; `None` of none.
pub fn percentile(samples: &[f64], share: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let below = |at: &usize| ((*at + 1) as f64) < share * samples.len() as f64;
    let at = (0..sorted.len()).find(|at| !below(at))?;
    sorted.get(at).copied()
}

/// Wilson's 95 % interval of a share, of which so many of so many were seen; it says something of none and of all too.
/// `None` where nobody was asked.
pub fn wilson(seen: usize, asked: usize) -> Option<(f64, f64)> {
    if asked == 0 {
        return None;
    }
    let (n, share) = (asked as f64, seen as f64 / asked as f64);
    let middle = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    Some((((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0)))
}

/// How likely pairs that differ would be split as unevenly or more by chance alone: the two-sided sign test, which for
/// right and wrong answers to the same questions is McNemar's, exactly.
pub fn sign_test(one: usize, other: usize) -> f64 {
    let (all, fewer) = (one + other, one.min(other));
    let ln_factorial = |n: usize| (1..=n).map(|i| (i as f64).ln()).sum::<f64>();
    let term = |k: usize| ln_factorial(all) - ln_factorial(k) - ln_factorial(all - k) - all as f64 * 2f64.ln();
    (2.0 * (0..=fewer).map(|k| term(k).exp()).sum::<f64>()).min(1.0)
}

/// The middle 95 % of the mean over documents drawn with replacement: seams of one document are not independent.
pub(crate) fn interval(values: &[(&str, f64)]) -> Option<(f64, f64)> {
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
    fn how_sure_a_share_is() {
        let check = |seen: usize, asked: usize, expected: Option<(f64, f64)>| {
            let found = wilson(seen, asked);
            let close = |(a, b): ((f64, f64), (f64, f64))| (a.0 - b.0).abs() < 1e-4 && (a.1 - b.1).abs() < 1e-4;
            assert!(found.zip(expected).map_or(found == expected, close), "{found:?} is not {expected:?}");
        };
        check(0, 0, None);
        // All right of ten still leaves room for one wrong in four.
        check(0, 10, Some((0.0, 0.277_5)));
        check(10, 10, Some((0.722_5, 1.0)));
        check(5, 10, Some((0.236_6, 0.763_4)));
        check(81, 263, Some((0.255_3, 0.366_2)));
    }

    #[test]
    fn how_likely_a_split_is_by_chance() {
        let check = |one: usize, other: usize, expected: f64| {
            assert!((sign_test(one, other) - expected).abs() < 1e-6, "{} is not {expected}", sign_test(one, other));
            assert_eq!(sign_test(one, other), sign_test(other, one));
        };
        check(0, 0, 1.0);
        check(3, 3, 1.0);
        check(0, 5, 2.0 / 32.0);
        check(1, 9, 2.0 * 11.0 / 1_024.0);
    }

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

    #[test]
    fn shares_of_samples() {
        let check = |samples: &[f64], share, expected| assert_eq!(percentile(samples, share), expected);
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        check(&hundred, 0.99, Some(99.0));
        check(&hundred, 0.5, Some(50.0));
        check(&hundred, 1.0, Some(100.0));
        check(&[3.0, 1.0, 2.0], 0.99, Some(3.0));
        check(&[], 0.5, None);
    }

    #[test]
    fn the_middle_of_samples() {
        let check = |samples: &[f64], expected: Option<(f64, f64, f64)>| {
            let found = Spread::of(samples).map(|s| (s.median, s.min, s.max));
            assert_eq!(found, expected);
        };
        check(&[], None);
        check(&[3.0], Some((3.0, 3.0, 3.0)));
        check(&[3.0, 1.0], Some((2.0, 1.0, 3.0)));
        check(&[9.0, 1.0, 2.0], Some((2.0, 1.0, 9.0)));
    }
}
