//! How many sequences stand where, by class: for those who look on. Nothing is decided from it.

use serde::{Deserialize, Serialize};

use crate::input::Class;
use crate::scheduler::Scheduler;
use crate::state::Phase;

/// Sequences of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Standing {
    /// They wait to be let in.
    pub waiting: u32,
    /// They run.
    pub running: u32,
    /// They stopped and keep their caches.
    pub parked: u32,
}

/// All sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Census {
    /// Of the foreground.
    pub foreground: Standing,
    /// Of batch.
    pub batch: Standing,
}

impl Scheduler {
    /// Counts all sequences, one look at each.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for sequence in self.sequences.iter() {
            let standing = match sequence.class {
                Class::Foreground => &mut census.foreground,
                Class::Batch => &mut census.batch,
            };
            match sequence.phase {
                Phase::Waiting { .. } => standing.waiting += 1,
                Phase::Running { .. } => standing.running += 1,
                Phase::Parked { .. } => standing.parked += 1,
            }
        }
        census
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;
    use crate::units::{Bytes, RungIdx, Time, Tokens};
    use crate::{Config, LadderCost, Observation, Plan, Request, RungCost, TenantSpec};

    /// Two requests of the foreground and one of batch, after a round with each of these budgets.
    fn check(budgets: &[Bytes], foreground: Standing, batch: Standing) {
        let rung = RungCost { weights: Bytes::mib(100), scratch: Bytes::ZERO, cache_per_token: Bytes::new(1_024) };
        let mut scheduler = Scheduler::new(LadderCost::new(vec![rung]).unwrap(), Config::default());
        let mut plan = Plan::new();
        for class in [Class::Foreground, Class::Foreground, Class::Batch] {
            let (weight, floor, ceiling) = (NonZeroU16::MIN, RungIdx::TOP, RungIdx::TOP);
            let context_limit = Tokens::new(1_000);
            let tenant = scheduler.register(TenantSpec { class, weight, floor, ceiling, context_limit, quota: None });
            let (prompt, pinned, answer) = (Tokens::new(100), Tokens::ZERO, Tokens::new(100));
            scheduler.submit(Request { tenant, prompt, pinned, answer }, Time::from_micros(0)).unwrap();
        }
        for budget in budgets {
            let usage = scheduler.expected_usage();
            let observation = Observation { now: Time::from_micros(1), budget: *budget, usage, progress: &[] };
            scheduler.round(&observation, &mut plan);
        }
        assert_eq!(scheduler.census(), Census { foreground, batch });
    }

    #[test]
    fn everybody_is_counted_where_they_stand() {
        let none = Standing::default();
        check(&[], Standing { waiting: 2, ..none }, Standing { waiting: 1, ..none });
        check(&[Bytes::mib(1_000)], Standing { running: 2, ..none }, Standing { running: 1, ..none });
        let parked = [Bytes::mib(1_000), Bytes::mib(50)];
        check(&parked, Standing { parked: 2, ..none }, Standing { parked: 1, ..none });
    }
}
