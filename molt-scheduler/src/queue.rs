//! Who waits to be let in: one bounded queue a class, in the order of arrival.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::ids::SequenceId;
use crate::input::Class;
use crate::units::Span;

/// The queues. Deferred requests keep their place; one that was let in and could not start returns to the front.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Queues {
    foreground: VecDeque<SequenceId>,
    batch: VecDeque<SequenceId>,
}

impl Queues {
    pub(crate) fn of(&self, class: Class) -> &VecDeque<SequenceId> {
        match class {
            Class::Foreground => &self.foreground,
            Class::Batch => &self.batch,
        }
    }

    pub(crate) fn of_mut(&mut self, class: Class) -> &mut VecDeque<SequenceId> {
        match class {
            Class::Foreground => &mut self.foreground,
            Class::Batch => &mut self.batch,
        }
    }

    /// How many wait in a class.
    pub(crate) fn length(&self, class: Class) -> u32 {
        u32::try_from(self.of(class).len()).unwrap_or(u32::MAX)
    }

    /// The place of a request in its queue.
    pub(crate) fn place(&self, class: Class, sequence: SequenceId) -> Option<u32> {
        let place = self.of(class).iter().position(|waiting| *waiting == sequence)?;
        u32::try_from(place).ok()
    }

    /// Takes a request out, wherever it stands.
    pub(crate) fn leave(&mut self, class: Class, sequence: SequenceId) {
        self.of_mut(class).retain(|waiting| *waiting != sequence);
    }
}

/// A rough wait for a place in a queue: those who run end one after another, each after its share of the tokens that
/// are left to write, and every end lets one in. `None` while nobody runs or no round has been timed yet.
pub(crate) fn estimate(place: u32, running: u64, tokens_left: u64, pace: Span) -> Option<Span> {
    if running == 0 || pace == Span::ZERO {
        return None;
    }
    let rounds_an_end = (tokens_left / running / running).max(1);
    let rounds = rounds_an_end.saturating_mul(u64::from(place).saturating_add(1));
    Some(Span::from_micros(pace.micros().saturating_mul(rounds)))
}
