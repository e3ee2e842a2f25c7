//! What interrupts the engine in the middle of a step: less may be used than is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use molt_kv::decoder::StopFlag;
use molt_scheduler::units::Bytes;

/// Shared by the engine, which notes what it uses, and by those who know how much it may use.
#[derive(Debug, Clone, Default)]
pub struct Alarm {
    flag: StopFlag,
    used: Arc<AtomicU64>,
}

impl Alarm {
    /// The engine uses so much now.
    pub(crate) fn note(&self, used: Bytes) {
        self.used.store(used.get(), Ordering::Relaxed);
    }

    /// Interrupts the engine where it uses more than that. A budget that holds what is used waits for the next round.
    pub fn ring_if_over(&self, budget: Bytes) {
        if budget.get() < self.used.load(Ordering::Relaxed) {
            self.flag.raise();
        }
    }

    /// Forgotten before the budget of the next round is read, so that no interruption after that is lost.
    pub fn forget(&self) {
        self.flag.lower();
    }

    /// What work is given up by.
    pub fn flag(&self) -> &StopFlag {
        &self.flag
    }
}
