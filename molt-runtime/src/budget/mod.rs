//! Where the budget comes from: what an operator says, what the machine has, what the control group allows, how long
//! programs wait for memory, what the service manager says; the strictest holds. A budget falls at once and rises slowly, so that one moment of quiet does not bring everything back.
//!
//! A watcher looks between rounds as well: where less is there than is used, it interrupts what the engine is at.

mod cgroup;
mod host;
mod operator;
mod pressure;
#[cfg(test)]
mod recorded;
mod squeeze;
mod strictest;
mod systemd;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use molt_scheduler::units::{Bytes, Time};

pub use cgroup::CgroupBudget;
pub use host::HostBudget;
use nix::poll::PollFlags;
pub use operator::OperatorBudget;
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
