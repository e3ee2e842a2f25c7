//! Warm standby: what the next rung takes from files is read into the page cache before it is loaded, so that nobody's way
//! there waits for the disk: the next smaller one when the budget begins to fall, the bigger one when there is room to go up
//! and all that is missing is patience. Nothing stays resident, and the pages are the system's to drop; they are no more
//! than the budget has room for.

use std::thread::{Builder, JoinHandle};

use molt_kv::decoder::StopFlag;
use molt_scheduler::Plan;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time};

use crate::engine::Engine;
use crate::event::Event;

/// A budget that was higher within this time is falling.
const RECENT: Span = Span::from_millis(30_000);

/// A fall by one part in so many is none.
const NOISE: u64 = 50;

/// Budgets that fall, and the rung that was fetched because it may be next.
#[derive(Debug, Default)]
pub(super) struct Standby {
    highest: Option<(Time, Bytes)>,
    fetched: Option<RungIdx>,
    fetching: Option<Fetching>,
}

#[derive(Debug)]
struct Fetching {
    under_way: JoinHandle<()>,
    stop: StopFlag,
}

impl Standby {
    /// Whether this budget is one of those that fall. One that has been where it is for a while, or rises to where it was, is
    /// none.
    fn falls(&mut self, now: Time, budget: Bytes) -> bool {
        let highest = self.highest.filter(|(then, highest)| *highest > budget && now.since(*then) < RECENT);
        let (then, highest) = highest.unwrap_or((now, budget));
        self.highest = Some((then, highest));
        highest - budget > Bytes::new(highest.get() / NOISE)
    }

    /// Whether another rung may be fetched now. One that is no longer next is not read to its end.
    fn is_free(&self, next: RungIdx) -> bool {
        let under_way = self.fetching.as_ref().filter(|fetching| !fetching.under_way.is_finished());
        under_way.filter(|_| self.fetched != Some(next)).into_iter().for_each(|fetching| fetching.stop.raise());
        under_way.is_none()
    }

    /// No rung is next: none is read to its end, and what was fetched may have been dropped by the next time.
    fn forget(&mut self) {
        self.fetching.iter().for_each(|fetching| fetching.stop.raise());
        self.fetched = None;
    }
}

impl Engine {
    /// Fetches the rung to which somebody is about to go up, as far as there is room for it, or the one that those on the
    /// biggest in use would go down to, where the budget falls and there is room for all of it.
    pub(super) fn stand_by(&mut self, now: Time, plan: &Plan, budget: Bytes, spare: Bytes) {
        let falls = self.standby.falls(now, budget);
        let next = match self.scheduler.rising_to() {
            Some(to) => self.cost().get(to).map(|cost| (to, cost.weights.min(spare))),
            None if falls => {
                let from = plan.steps().iter().map(|step| step.rung).min();
                let below = from.and_then(|from| self.cost().rungs().find(|(to, _)| *to > from));
                below.filter(|(_, cost)| cost.held() <= spare).map(|(to, cost)| (to, cost.weights))
            }
            None => {
                self.standby.forget();
                return;
            }
        };
        let Some((to, bytes)) = next.filter(|(_, bytes)| *bytes > Bytes::ZERO) else { return };
        if self.loaded.contains_key(&to) {
            // What is still missing of it comes as it is used.
            self.standby.forget();
            return;
        }
        if !self.standby.is_free(to) || self.standby.fetched == Some(to) {
            return;
        }
        let (ladder, stop) = (self.ladder.clone(), StopFlag::new());
        let told = stop.clone();
        let fetch = move || ladder.rung(to).into_iter().for_each(|rung| rung.fetch(bytes, &told));
        // Beside the engine: where files are not in memory it takes as long as the disk.
        if let Ok(under_way) = Builder::new().name("molt-standby".to_owned()).spawn(fetch) {
            self.standby.fetching = Some(Fetching { under_way, stop });
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
    fn what_is_no_longer_next_is_not_read_to_its_end() {
        let check = |then: &dyn Fn(&mut Standby), stopped: bool| {
            let (stop, (go, wait)) = (StopFlag::new(), std::sync::mpsc::channel::<()>());
            let under_way = std::thread::spawn(move || wait.recv().unwrap_or_default());
            let fetching = Some(Fetching { under_way, stop: stop.clone() });
            let mut standby = Standby { fetched: Some(RungIdx::new(1)), fetching, ..Standby::default() };
            then(&mut standby);
            assert_eq!(stop.is_up(), stopped);
            drop(go);
        };
        check(&|standby| assert!(!standby.is_free(RungIdx::new(1))), false);
        check(&|standby| assert!(!standby.is_free(RungIdx::TOP)), true);
        check(&|standby| standby.forget(), true);
    }
}
