//! A fault of ours in the middle of a round reaches nobody: the engine puts itself in order and goes on. Sequences that were
//! untouched keep their caches; what was lent out when it happened is read again from the tokens, which are never lent.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use molt_scheduler::SequenceState;
use molt_scheduler::units::{Bytes, RungIdx, Time};

use crate::engine::{Engine, Told};
use crate::event::TroubleKind;

/// Rounds that may fail one after another: what fails for ever is not put in order by going on.
const IN_A_ROW: u32 = 8;

impl Engine {
    /// A round, after which the engine is in order whatever happened in it. False where rounds fail again and again.
    pub fn guarded_round(&mut self, now: Time, budget: Bytes, events: &mut Vec<Told>) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.round(now, budget, events))) {
            Ok(()) => {
                self.failed_rounds = 0;
                true
            }
            Err(payload) => {
                self.failed_rounds += 1;
                let message = format!("a round failed and the engine went on: {}", said(&*payload));
                self.trouble(TroubleKind::Panic, message);
                self.put_in_order(now);
                events.append(&mut self.events);
                self.failed_rounds < IN_A_ROW
            }
        }
    }

    /// Makes what the engine holds and what the scheduler knows agree again.
    fn put_in_order(&mut self, now: Time) {
        self.alarm.answer(None);
        self.forget_ahead();
        let planned: Vec<RungIdx> = self.scheduler.resident().collect();
        self.loaded.retain(|rung, _| planned.contains(rung));
        for rung in planned.into_iter().filter(|rung| !self.loaded.contains_key(rung)) {
            self.scheduler.load_failed(rung, now);
        }
        let scheduler = &self.scheduler;
        self.sequences.retain(|id, _| scheduler.state_of(*id).is_some());
        for (id, sequence) in &mut self.sequences {
            let stands = match scheduler.state_of(*id) {
                Some(SequenceState::Running { rung } | SequenceState::Parked { rung }) => rung,
                Some(SequenceState::Waiting { .. }) | None => sequence.rung,
            };
            // Its cache is that of a rung which it has not left, or has left for good.
            if sequence.rung != stands {
                (sequence.rung, sequence.cache) = (stands, None);
            }
            // Without a cache nothing of it has been read.
            if sequence.cache.is_none() {
                sequence.read = 0;
            }
        }
    }
}

/// What a panic says.
fn said(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no word of why")
}
