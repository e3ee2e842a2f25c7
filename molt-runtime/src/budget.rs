//! Where the budget comes from. More sources (cgroup, host, systemd) join behind the same trait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use molt_scheduler::units::{Bytes, Time};

/// Says how many bytes may be used now. Asked once a round.
pub trait BudgetSource: Send {
    /// The budget at that time.
    fn budget(&mut self, now: Time) -> Bytes;
}

/// A budget that an operator sets, from any thread.
#[derive(Debug, Clone)]
pub struct OperatorBudget(Arc<AtomicU64>);

impl OperatorBudget {
    /// Starts at that budget.
    pub fn new(budget: Bytes) -> Self {
        Self(Arc::new(AtomicU64::new(budget.get())))
    }

    /// Sets it; the next round sees it.
    pub fn set(&self, budget: Bytes) {
        self.0.store(budget.get(), Ordering::Relaxed);
    }

    /// As it is set.
    pub fn get(&self) -> Bytes {
        Bytes::new(self.0.load(Ordering::Relaxed))
    }
}

impl BudgetSource for OperatorBudget {
    fn budget(&mut self, _now: Time) -> Bytes {
        self.get()
    }
}
