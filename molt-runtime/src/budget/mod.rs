//! Where the budget comes from: what an operator says, what the machine has, what the control group allows, how long
//! programs wait for memory, what the service manager says; the strictest holds. A budget falls at once and rises slowly, so that one moment of quiet does not bring everything back.
//!
//! A watcher looks between rounds as well: where less is there than is used, it interrupts what the engine is at.

mod cgroup;
mod host;
mod pressure;
#[cfg(test)]
mod recorded;
mod squeeze;
mod strictest;
mod systemd;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use molt_scheduler::units::{Bytes, Time};

use crate::alarm::Alarm;

pub use cgroup::CgroupBudget;
pub use host::HostBudget;
use nix::poll::PollFlags;
pub use pressure::PressureBudget;
pub use squeeze::{Move, Shortage, Squeeze};
pub use strictest::{Holds, Strictest, Watched};
pub use systemd::{SystemdBudget, Watch, WatchError};

/// Says how many bytes this process may use now. Asked once a round and by the watcher.
pub trait BudgetSource: Send {
    /// The budget at that time; `None` where this source sets no limit.
    fn budget(&mut self, now: Time) -> Option<Bytes>;

    /// Its name, one word.
    fn name(&self) -> &'static str;

    /// Why the budget that it said last is what it is, for whoever asks what holds.
    fn reason(&self) -> String;

    /// The last step that its limit took and that nobody was told of.
    fn step(&mut self) -> Option<Step> {
        None
    }

    /// What becomes ready when it has news before anybody asks.
    fn wake(&self) -> Option<Wake> {
        None
    }

    /// It has become ready. Says whether it can again.
    fn woken(&mut self) -> bool {
        false
    }
}

/// A step of a source's limit, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Whose.
    pub source: &'static str,
    /// What it did.
    pub moved: Move,
    /// Why.
    pub reason: String,
}

/// A descriptor to wait for.
#[derive(Debug, Clone)]
pub struct Wake {
    file: Arc<OwnedFd>,
    flags: PollFlags,
}

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
