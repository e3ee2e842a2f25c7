//! Where the budget comes from: what an operator says, what the machine has, what the control group allows; the strictest
//! holds. A budget falls at once and rises slowly, so that one moment of quiet does not bring everything back.
//!
//! A watcher looks between rounds as well: where less is there than is used, it interrupts what the engine is at.

mod cgroup;
mod host;
mod strictest;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use molt_kv::decoder::StopFlag;
use molt_scheduler::units::{Bytes, Time};

pub use cgroup::CgroupBudget;
pub use host::HostBudget;
pub use strictest::{Strictest, Watched};

/// Says how many bytes this process may use now. Asked once a round and by the watcher.
pub trait BudgetSource: Send {
    /// The budget at that time; `None` where this source sets no limit.
    fn budget(&mut self, now: Time) -> Option<Bytes>;
}

/// A budget that an operator sets, from any thread. A smaller one interrupts what the engine is at.
#[derive(Debug, Clone)]
pub struct OperatorBudget {
    budget: Arc<AtomicU64>,
    interrupt: StopFlag,
}

impl OperatorBudget {
    /// Starts at that budget; `interrupt` is the engine's.
    pub fn new(budget: Bytes, interrupt: StopFlag) -> Self {
        Self { budget: Arc::new(AtomicU64::new(budget.get())), interrupt }
    }

    /// Sets it. The engine sees it at once where it is smaller, and with its next round where it is not.
    pub fn set(&self, budget: Bytes) {
        let before = self.budget.swap(budget.get(), Ordering::Relaxed);
        if budget.get() < before {
            // After the swap: whoever is interrupted finds the new budget.
            self.interrupt.raise();
        }
    }

    /// As it is set.
    pub fn get(&self) -> Bytes {
        Bytes::new(self.budget.load(Ordering::Relaxed))
    }
}

impl BudgetSource for OperatorBudget {
    fn budget(&mut self, _now: Time) -> Option<Bytes> {
        Some(self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_budget_interrupts() {
        let check = |from: u64, to: u64, interrupts: bool| {
            let stop = StopFlag::new();
            let budget = OperatorBudget::new(Bytes::new(from), stop.clone());
            budget.clone().set(Bytes::new(to));
            assert_eq!((budget.get(), stop.is_up()), (Bytes::new(to), interrupts));
        };
        check(5, 9, false);
        check(5, 5, false);
        check(5, 4, true);
    }
}
