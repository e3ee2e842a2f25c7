//! How much a tenant may ask for in a minute: a bucket that fills evenly and may be overdrawn once.

use std::time::{Duration, Instant};

/// What is left of an allowance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bucket {
    /// Below zero where more was used than there was.
    left: f64,
    filled: Instant,
}

impl Bucket {
    /// Full, for so much a minute.
    pub(super) fn full(a_minute: u64, now: Instant) -> Self {
        Self { left: a_minute as f64, filled: now }
    }

    fn fill(&mut self, a_minute: u64, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        // A limit that was lowered meanwhile holds from now on.
        self.left = (self.left + passed / 60.0 * a_minute as f64).min(a_minute as f64);
        self.filled = now;
    }

    /// Whether that much is left; if not, how long until it is.
    pub(super) fn holds(&mut self, wanted: f64, a_minute: u64, now: Instant) -> Result<(), Duration> {
        self.fill(a_minute, now);
        match wanted - self.left {
            missing if missing <= 0.0 => Ok(()),
            _ if a_minute == 0 => Err(Duration::from_secs(3_600)),
            missing => Err(Duration::from_secs_f64(missing * 60.0 / a_minute as f64)),
        }
    }

    /// Takes something out, whether or not it is there: what was used was used.
    pub(super) fn take(&mut self, used: f64, a_minute: u64, now: Instant) {
        self.fill(a_minute, now);
        self.left -= used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_fills_evenly_and_no_further_than_full() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut bucket = Bucket::full(60, start);
        bucket.take(90.0, 60, start);
        assert_eq!(bucket.holds(1.0, 60, start), Err(Duration::from_secs(31)));
        assert_eq!(bucket.holds(1.0, 60, at(30)), Err(Duration::from_secs(1)));
        assert_eq!(bucket.holds(1.0, 60, at(31)), Ok(()));
        assert_eq!(bucket.holds(60.0, 60, at(10_000)), Ok(()));
        assert_eq!(bucket.holds(61.0, 60, at(20_000)), Err(Duration::from_secs(1)));
        // Lowered while it runs.
        assert!(bucket.holds(11.0, 10, at(20_000)).is_err());
        assert!(bucket.holds(1.0, 0, at(20_001)).is_err());
    }
}
