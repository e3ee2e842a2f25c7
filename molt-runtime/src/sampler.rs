//! A thread that looks at memory while the engine works: what the books say and what the system says, every few
//! milliseconds, also in the middle of a round.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use molt_kv::ledger::{Kind, Ledger};
use molt_scheduler::units::Bytes;

use crate::event::UsageByKind;
use crate::memory::resident_set;

/// An engine's books, to be read by anybody.
#[derive(Debug, Clone)]
pub struct Books {
    ledger: Ledger,
    overhead: Bytes,
}

impl Books {
    pub(crate) fn new(ledger: Ledger, overhead: Bytes) -> Self {
        Self { ledger, overhead }
    }

    /// Bytes in use, overhead included.
    pub fn usage(&self) -> Bytes {
        self.overhead + self.ledger.total()
    }

    /// What it is used for. Kind by kind: while a round is at work they need not add up to what [`Self::usage`] says.
    pub fn by_kind(&self) -> UsageByKind {
        let used = |kind| self.ledger.used(kind);
        UsageByKind {
            weights_bytes: used(Kind::Weights),
            cache_bytes: used(Kind::Cache),
            scratch_bytes: used(Kind::Scratch),
            bridge_bytes: used(Kind::Bridge),
            tables_bytes: used(Kind::Tables),
            overhead_bytes: self.overhead,
        }
    }

    /// The most that was in use at any moment since this was last asked, to the byte: no sampler can miss it.
    pub fn take_peak(&self) -> Bytes {
        self.overhead + self.ledger.take_peak()
    }

    /// Of them, buffers of steps: room for the longest pass, of which only what a pass has used is resident.
    pub fn scratch(&self) -> Bytes {
        self.ledger.used(Kind::Scratch)
    }

    /// Of them, parts of mapped files.
    pub fn files(&self) -> Bytes {
        self.ledger.files()
    }
}

/// What one look saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// When.
    pub at: Instant,
    /// By the books.
    pub usage: Bytes,
    /// What the system says is resident.
    pub rss: Bytes,
}

/// How often one should look.
pub const EVERY: Duration = Duration::from_millis(5);

/// Looks every so often, until it is told to stop.
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<AtomicBool>,
    looked: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Look>>,
}

impl Sampler {
    /// Starts to look.
    pub fn start(books: Books, every: Duration) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, looked) = (stop.clone(), Arc::new(AtomicBool::new(false)));
        let first = looked.clone();
        let look = move || Look { at: Instant::now(), usage: books.usage(), rss: resident_set() };
        let thread = std::thread::Builder::new().name("molt-sampler".to_owned()).spawn(move || {
            let mut looks = vec![look()];
            first.store(true, Ordering::Release);
            while !stopped.load(Ordering::Acquire) {
                std::thread::sleep(every);
                looks.push(look());
            }
            // How it ended, also where nobody looked meanwhile.
            looks.push(look());
            looks
        })?;
        Ok(Self { stop, looked, thread })
    }

    /// Whether it has looked once: what happens from now on has a look before it.
    pub fn has_looked(&self) -> bool {
        self.looked.load(Ordering::Acquire)
    }

    /// Everything that was seen, oldest first.
    pub fn stop(self) -> Vec<Look> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap_or_default()
    }
}

/// How memory moved after a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// By the books when the signal came.
    pub before: Bytes,
    /// The most that the books held from the signal on.
    pub peak: Bytes,
    /// The most that the books held after they had first been within the new budget; none where they never were.
    pub peak_within: Option<Bytes>,
}

impl Path {
    /// From the last look before `signal` on, to a budget. `None` where nobody looked before the signal.
    pub fn of(looks: &[Look], signal: Instant, budget: Bytes) -> Option<Self> {
        let start = looks.partition_point(|look| look.at <= signal).checked_sub(1)?;
        let (before, after) = (looks[start].usage, &looks[start + 1..]);
        let most = |looks: &[Look]| looks.iter().map(|look| look.usage).max();
        let within = after.iter().position(|look| look.usage <= budget);
        let peak_within = within.and_then(|at| most(&after[at..]));
        Some(Self { before, peak: most(after).unwrap_or(before), peak_within })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_after_a_signal() {
        let start = Instant::now();
        let check = |usage: &[u64], signal_ms: u64, budget: u64, expected: Option<(u64, u64, Option<u64>)>| {
            let looks: Vec<Look> = (0..)
                .zip(usage)
                .map(|(at, usage)| Look {
                    at: start + Duration::from_millis(10 * at),
                    usage: Bytes::new(*usage),
                    rss: Bytes::ZERO,
                })
                .collect();
            let found = Path::of(&looks, start + Duration::from_millis(signal_ms), Bytes::new(budget));
            let found = found.map(|p| (p.before.get(), p.peak.get(), p.peak_within.map(Bytes::get)));
            assert_eq!(found, expected, "{usage:?}");
        };
        check(&[9, 9, 9, 3, 5, 4], 15, 6, Some((9, 9, Some(5))));
        check(&[9, 9, 11, 3, 7, 4], 15, 6, Some((9, 11, Some(7))));
        check(&[9, 8, 8], 5, 6, Some((9, 8, None)));
        check(&[9], 5, 6, Some((9, 9, None)));
        check(&[], 5, 6, None);
    }
}
