//! What interrupts the engine in the middle of a step: less may be used than is used.

use std::time::Instant;

use molt_kv::decoder::StopFlag;
use molt_scheduler::units::Bytes;

use crate::sync::{Arc, AtomicU64, Mutex, Ordering};

/// Shared by the engine, which notes what it uses, and by those who know how much it may use.
#[derive(Debug, Clone, Default)]
pub struct Alarm {
    flag: StopFlag,
    used: Arc<AtomicU64>,
    /// The budget that a round is answering now, plus one; 0 between rounds.
    answered: Arc<AtomicU64>,
    rings: Arc<Mutex<Rings>>,
}

/// When it rang, for whoever measures how long memory takes to come back.
#[derive(Debug, Default)]
struct Rings {
    /// First, since it was last forgotten.
    first: Option<Instant>,
    /// First, before it was last forgotten: what the round that follows answers.
    heard: Option<Instant>,
}

impl Alarm {
    /// The engine uses so much now.
    pub(crate) fn note(&self, used: Bytes) {
        self.used.store(used.get(), Ordering::Relaxed);
    }

    /// A round begins (or has ended, with none) to give back what this budget asks for.
    pub(crate) fn answer(&self, budget: Option<Bytes>) {
        self.answered.store(budget.map_or(0, |budget| budget.get().saturating_add(1)), Ordering::Relaxed);
    }

    /// What the engine uses, as it last noted.
    pub fn used(&self) -> Bytes {
        Bytes::new(self.used.load(Ordering::Relaxed))
    }

    /// Interrupts the engine where it uses more than that. A budget that holds what is used waits for the next round.
    pub fn ring_if_over(&self, budget: Bytes) {
        // The round at hand is giving back what its own budget asks for: only one that falls further is news.
        let answered = self.answered.load(Ordering::Relaxed);
        if budget < self.used() && (answered == 0 || budget.get().saturating_add(1) < answered) {
            self.rings.lock().first.get_or_insert_with(Instant::now);
            self.flag.raise();
        }
    }

    /// Forgotten before the budget of the next round is read, so that no interruption after that is lost.
    pub fn forget(&self) {
        let mut rings = self.rings.lock();
        let first = rings.first.take();
        rings.heard = rings.heard.or(first);
        drop(rings);
        self.flag.lower();
    }

    /// When the signal came that the round now beginning answers, if one came; told once.
    pub(crate) fn heard(&self) -> Option<Instant> {
        self.rings.lock().heard.take()
    }

    /// What work is given up by.
    pub fn flag(&self) -> &StopFlag {
        &self.flag
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ring_of_several_is_the_one_that_a_round_answers() {
        let alarm = Alarm::default();
        alarm.note(Bytes::new(10));
        let before = Instant::now();
        alarm.ring_if_over(Bytes::new(9));
        let after = Instant::now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        alarm.ring_if_over(Bytes::new(8));
        assert_eq!(alarm.heard(), None, "not before it was forgotten");
        alarm.forget();
        assert!(alarm.heard().is_some_and(|heard| before <= heard && heard <= after));
        assert_eq!(alarm.heard(), None, "told once");
        alarm.ring_if_over(Bytes::new(10));
        alarm.forget();
        assert_eq!(alarm.heard(), None, "a budget that holds what is used is no signal");
    }

    #[test]
    fn what_a_round_answers_is_no_news_and_less_is() {
        let check = |answered: Option<u64>, budget: u64, rings: bool| {
            let alarm = Alarm::default();
            alarm.note(Bytes::new(100));
            alarm.answer(answered.map(Bytes::new));
            alarm.ring_if_over(Bytes::new(budget));
            assert_eq!(alarm.flag().is_up(), rings, "{budget} while {answered:?} is answered");
        };
        check(None, 90, true);
        check(None, 100, false);
        check(Some(90), 90, false);
        check(Some(90), 95, false);
        check(Some(90), 80, true);
        check(Some(0), 0, false);
    }
}
