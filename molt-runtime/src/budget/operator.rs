//! The budget that an operator sets.

use molt_scheduler::units::{Bytes, Time};

use crate::alarm::Alarm;
use crate::budget::BudgetSource;
use crate::sync::{Arc, AtomicU64, Ordering};

/// A budget that an operator sets, from any thread. One that does not hold what is used interrupts the engine.
#[derive(Debug, Clone)]
pub struct OperatorBudget {
    budget: Arc<AtomicU64>,
    alarm: Alarm,
}

impl OperatorBudget {
    /// Starts at that budget; `alarm` is the engine's.
    pub fn new(budget: Bytes, alarm: Alarm) -> Self {
        Self { budget: Arc::new(AtomicU64::new(budget.get())), alarm }
    }

    /// Sets it. The engine sees it at once where it uses more, and with its next round where it does not.
    pub fn set(&self, budget: Bytes) {
        self.budget.store(budget.get(), Ordering::Relaxed);
        // After the budget: whoever is interrupted finds the new one.
        self.alarm.ring_if_over(budget);
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

    fn name(&self) -> &'static str {
        "operator"
    }

    fn reason(&self) -> String {
        "set when the daemon started, in its configuration, or by an operator".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_that_does_not_hold_what_is_used_interrupts() {
        let check = |used: u64, from: u64, to: u64, interrupts: bool| {
            let alarm = Alarm::default();
            alarm.note(Bytes::new(used));
            let budget = OperatorBudget::new(Bytes::new(from), alarm.clone());
            budget.clone().set(Bytes::new(to));
            assert_eq!((budget.get(), alarm.flag().is_up()), (Bytes::new(to), interrupts));
            alarm.forget();
            assert!(!alarm.flag().is_up());
        };
        check(5, 5, 9, false);
        check(5, 9, 5, false);
        check(5, 9, 4, true);
        check(5, 2, 4, true);
    }
}
