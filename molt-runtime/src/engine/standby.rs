//! Warm standby: when the budget begins to fall, what the next smaller rung takes from files is read into the page cache, so
//! that going down waits for no disk. Nothing becomes resident here, and the pages are the system's to drop.

use std::thread::{Builder, JoinHandle};

use molt_scheduler::Plan;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time};

use crate::engine::Engine;
use crate::event::Event;

/// A budget that was higher within this time is falling.
const RECENT: Span = Span::from_millis(30_000);

/// A fall by one part in so many is none.
const NOISE: u64 = 50;

/// Budgets that fall, and the rung that was fetched because one does.
#[derive(Debug, Default)]
pub(super) struct Standby {
    highest: Option<(Time, Bytes)>,
    fetched: Option<RungIdx>,
    fetching: Option<JoinHandle<()>>,
}

impl Standby {
    /// Whether this budget is one of those that fall. One that has been where it is for a while, or rises to where it was, is
    /// none; what was fetched may have been dropped by the next time.
    fn falls(&mut self, now: Time, budget: Bytes) -> bool {
        let highest = self.highest.filter(|(then, highest)| *highest > budget && now.since(*then) < RECENT);
        let (then, highest) = highest.unwrap_or((now, budget));
        self.highest = Some((then, highest));
        let falls = highest - budget > Bytes::new(highest.get() / NOISE);
        if !falls {
            self.fetched = None;
        }
        falls
    }
}

impl Engine {
    /// Fetches the rung that those on the biggest one in use would go down to, where the budget falls and still has room for it.
    pub(super) fn stand_by(&mut self, now: Time, plan: &Plan, budget: Bytes, spare: Bytes) {
        if !self.standby.falls(now, budget)
            || self.standby.fetching.as_ref().is_some_and(|under_way| !under_way.is_finished())
        {
            return;
        }
        let Some(from) = plan.steps().iter().map(|step| step.rung).min() else { return };
        let Some((to, cost)) = self.cost().rungs().find(|(to, _)| *to > from) else { return };
        let bytes = cost.held();
        if self.standby.fetched == Some(to) || self.loaded.contains_key(&to) || bytes > spare {
            return;
        }
        let ladder = self.ladder.clone();
        let fetch = move || ladder.rung(to).into_iter().for_each(molt_models::Rung::fetch);
        // Beside the engine: where files are not in memory it takes as long as the disk.
        if let Ok(under_way) = Builder::new().name("molt-standby".to_owned()).spawn(fetch) {
            self.standby.fetching = Some(under_way);
            self.standby.fetched = Some(to);
            self.tell(None, Event::Standby { rung: to, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Budgets `(second, MiB)`, and the seconds at which they fall.
    fn check(budgets: &[(u64, u64)], expected: &[u64]) {
        let mut standby = Standby::default();
        let falls = |(second, mib): &(u64, u64)| {
            standby.falls(Time::from_millis(second * 1_000), Bytes::mib(*mib)).then_some(*second)
        };
        assert_eq!(budgets.iter().filter_map(falls).collect::<Vec<_>>(), expected, "{budgets:?}");
    }

    #[test]
    fn a_budget_falls_for_a_while_and_noise_does_not() {
        check(&[(0, 1_000), (1, 1_000), (2, 985), (3, 1_000)], &[]);
        check(&[(0, 1_000), (1, 900), (2, 900), (10, 900), (31, 900), (40, 900)], &[1, 2, 10]);
        check(&[(0, 1_000), (1, 900), (2, 1_000), (3, 990), (4, 1_100), (5, 1_000)], &[1, 5]);
        check(&[(0, 1_000), (1, 900), (20, 800), (35, 700), (36, 600)], &[1, 20, 36]);
    }

    #[test]
    fn what_was_fetched_is_fetched_again_in_another_fall() {
        let mut standby = Standby::default();
        let mut feel = |second: u64, mib| standby.falls(Time::from_millis(second * 1_000), Bytes::mib(mib));
        assert!(!feel(0, 1_000) && feel(1, 900));
        standby.fetched = Some(RungIdx::new(1));
        assert!(standby.falls(Time::from_millis(2_000), Bytes::mib(880)));
        assert_eq!(standby.fetched, Some(RungIdx::new(1)));
        assert!(!standby.falls(Time::from_millis(60_000), Bytes::mib(880)));
        assert_eq!(standby.fetched, None);
    }
}
