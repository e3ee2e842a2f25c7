//! Pressure becomes a budget: it falls in steps while memory is short, holds while it is tight, and grows slowly in quiet.
//!
//! The system says how much everybody waits for memory, not how many bytes are too many. So bytes are found by trying, as
//! senpai does: less than is used now, until the waiting ends. Between the threshold that shrinks and the one that lets
//! grow lies a wide band in which nothing moves, as between the conditions of oomd's rules: a machine that is just at its
//! limit must not see models come and go.

use molt_scheduler::units::{Bytes, Span, Time};

/// How short memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// Programs stand still for it: much has to go, at once.
    Severe,
    /// Programs wait for it.
    Rising,
    /// Neither short nor plenty.
    Tight,
    /// Nobody waits.
    Quiet,
}

impl Shortage {
    /// By the share of time in which somebody waited for memory. A tenth is where systemd tells services by default
    /// (200 ms in 2 s, `MemoryPressureThresholdSec=`); a hundredth is noise.
    pub fn of_stall(ratio: f64) -> Self {
        match ratio {
            r if r >= 0.4 => Self::Severe,
            r if r >= 0.1 => Self::Rising,
            r if r >= 0.01 => Self::Tight,
            _ => Self::Quiet,
        }
    }
}

/// A change of the budget that is worth a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// It fell.
    Shrunk(Bytes),
    /// It begins to grow.
    Grows(Bytes),
    /// Pressure sets no limit any more.
    Lifted,
}

/// Steps follow each other no faster: what the last one gave back has to show first (a window of the kernel's).
const BETWEEN: Span = Span::from_millis(2_000);
/// Quiet must have lasted so long before anything grows.
const CALM: Span = Span::from_millis(10_000);
/// A step takes one part in so many of what is used, a severe one twice that.
const STEP: u64 = 8;
/// The limit does not fall below this part of what was used when it began to.
const LEAST: u64 = 16;
/// In quiet the limit grows by one part in so many a second.
const GROWTH: u64 = 64;

/// The limit that pressure sets, and how it moves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Squeeze {
    limit: Option<Limit>,
}

#[derive(Debug, Clone, Copy)]
struct Limit {
    bytes: Bytes,
    /// Usage at the first step: where the limit is twice that, it limits nothing.
    from: Bytes,
    stepped: Time,
    /// Since when nobody waits.
    quiet: Option<Time>,
    grown: Option<Time>,
}

impl Squeeze {
    /// What may be used; `None` where pressure sets no limit.
    pub fn limit(&self) -> Option<Bytes> {
        self.limit.map(|limit| limit.bytes)
    }

    /// Memory is that short now, and so much is used.
    pub fn feel(&mut self, now: Time, shortage: Shortage, used: Bytes) -> Option<Move> {
        match shortage {
            Shortage::Severe | Shortage::Rising => self.shrink(now, shortage, used),
            Shortage::Tight => {
                if let Some(limit) = &mut self.limit {
                    (limit.quiet, limit.grown) = (None, None);
                }
                None
            }
            Shortage::Quiet => self.grow(now),
        }
    }

    fn shrink(&mut self, now: Time, shortage: Shortage, used: Bytes) -> Option<Move> {
        let step = if shortage == Shortage::Severe { STEP / 2 } else { STEP };
        let from = match self.limit {
            Some(limit) if now.since(limit.stepped) < BETWEEN => {
                self.limit = Some(Limit { quiet: None, grown: None, ..limit });
                return None;
            }
            Some(limit) => limit.from,
            None => used,
        };
        // From what is used: a limit far above it would have to fall for minutes before anything came back.
        let base = self.limit().map_or(used, |limit| limit.min(used));
        // Never to nothing: what is left must be able to grow again, and below the process's own size nothing is gained.
        let bytes = (base - Bytes::new(base.get() / step)).max(Bytes::new(from.get() / LEAST));
        self.limit = Some(Limit { bytes, from, stepped: now, quiet: None, grown: None });
        Some(Move::Shrunk(bytes))
    }

    fn grow(&mut self, now: Time) -> Option<Move> {
        let limit = self.limit.as_mut()?;
        let quiet = *limit.quiet.get_or_insert(now);
        if now.since(quiet) < CALM {
            return None;
        }
        let Some(grown) = limit.grown.replace(now) else { return Some(Move::Grows(limit.bytes)) };
        let rise = u128::from(limit.bytes.get() / GROWTH) * u128::from(now.since(grown).micros()) / 1_000_000;
        limit.bytes += Bytes::new(u64::try_from(rise).unwrap_or(u64::MAX));
        if limit.bytes.get() / 2 < limit.from.get() {
            return None;
        }
        self.limit = None;
        Some(Move::Lifted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USED: Bytes = Bytes::new(800);

    /// What was felt, `(second, shortage)`, with 800 bytes in use; the moves that it made, `(second, move)`.
    fn check(felt: impl IntoIterator<Item = (u64, Shortage)>, expected: &[(u64, Move)]) {
        let mut squeeze = Squeeze::default();
        let moves = felt.into_iter().filter_map(|(second, shortage)| {
            let at = Time::from_millis(second * 1_000);
            squeeze.feel(at, shortage, USED).map(|moved| (second, moved))
        });
        assert_eq!(moves.collect::<Vec<_>>(), expected);
    }

    fn all(shortage: Shortage, seconds: std::ops::Range<u64>) -> impl Iterator<Item = (u64, Shortage)> {
        seconds.map(move |second| (second, shortage))
    }

    #[test]
    fn it_falls_in_steps_and_no_faster_than_they_can_show() {
        let shrunk = |bytes| Move::Shrunk(Bytes::new(bytes));
        check(all(Shortage::Rising, 0..5), &[(0, shrunk(700)), (2, shrunk(613)), (4, shrunk(537))]);
        check(all(Shortage::Severe, 0..3), &[(0, shrunk(600)), (2, shrunk(450))]);
        check(all(Shortage::Tight, 0..60), &[]);
        check(all(Shortage::Quiet, 0..60), &[]);
    }

    #[test]
    fn it_grows_only_after_quiet_that_lasted_and_is_lifted_far_above_what_was_used() {
        let once = [(0, Shortage::Rising)].into_iter();
        let shrunk = (0, Move::Shrunk(Bytes::new(700)));
        // A little pressure every nine seconds: never quiet for long enough.
        let disturbed = (1..100).map(|s| (s, if s % 9 == 0 { Shortage::Tight } else { Shortage::Quiet }));
        check(once.clone().chain(disturbed), &[shrunk]);
        let mut squeeze = Squeeze::default();
        let moves: Vec<_> = once
            .chain(all(Shortage::Quiet, 1..200))
            .filter_map(|(second, shortage)| {
                squeeze.feel(Time::from_millis(second * 1_000), shortage, USED).map(|moved| (second, moved))
            })
            .collect();
        let [(0, _), (11, Move::Grows(grows)), (lifted, Move::Lifted)] = moves[..] else { panic!("{moves:?}") };
        assert_eq!(grows, Bytes::new(700));
        assert!((40..150).contains(&lifted), "lifted after {lifted} s");
        assert_eq!(squeeze.limit(), None);
    }

    #[test]
    fn pressure_that_lasts_leaves_something_that_grows_again() {
        let check = |used: Bytes| {
            let mut squeeze = Squeeze::default();
            let mut least = used;
            for (second, shortage) in all(Shortage::Severe, 0..900).chain(all(Shortage::Quiet, 900..2_000)) {
                squeeze.feel(Time::from_millis(second * 1_000), shortage, used);
                least = squeeze.limit().map_or(least, |limit| limit.min(least));
            }
            assert_eq!(least, Bytes::new(used.get() / LEAST), "{used}");
            assert_eq!(squeeze.limit(), None, "{used}: it is lifted in the end");
        };
        check(Bytes::mib(14));
        check(Bytes::mib(900));
    }

    #[test]
    fn shares_of_time() {
        let check = |ratio, expected| assert_eq!(Shortage::of_stall(ratio), expected, "{ratio}");
        check(0.0, Shortage::Quiet);
        check(0.009, Shortage::Quiet);
        check(0.05, Shortage::Tight);
        check(0.1, Shortage::Rising);
        check(0.9, Shortage::Severe);
        check(f64::NAN, Shortage::Quiet);
    }
}
