//! Medians and their spread.

use serde::Serialize;

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

#[cfg(test)]
mod tests {
    use super::*;

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
