//! How long it takes until memory that is wanted is back with the system, and how long readers wait for it.

use std::collections::BTreeSet;
use std::time::Instant;

use molt_scheduler::SequenceId;
use molt_scheduler::units::Bytes;

use crate::engine::{Engine, ms_since};
use crate::event::Event;
use crate::memory::{resident_files, resident_set};

/// What the heap may hold beside the books: one part in so many of the budget.
const NOISE: u64 = 50;

/// Memory that is wanted and not yet back.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    since: Instant,
    usage: Bytes,
}

/// What is under way because less may be used than is used.
#[derive(Debug, Default)]
pub(super) struct Reaction {
    wanted: Option<Wanted>,
    /// Who was answering when the signal came and has got no token since.
    waiting: BTreeSet<SequenceId>,
}

impl Reaction {
    /// What is wanted back cannot be had.
    pub(super) fn give_up(&mut self) {
        self.wanted = None;
    }

    /// Whether this is the first token of a sequence since a signal.
    pub(super) fn ends_wait_of(&mut self, sequence: SequenceId) -> bool {
        self.waiting.remove(&sequence)
    }
}

impl Engine {
    /// A round begins, with the budget that it will keep.
    pub(super) fn hear(&mut self, round: Instant, budget: Bytes) {
        let rung = self.alarm.heard();
        let usage = self.usage();
        if usage <= budget {
            return;
        }
        // A budget that falls further while memory is on its way back is the same wish.
        self.reaction.wanted.get_or_insert(Wanted { since: rung.unwrap_or(round), usage });
        let answering = self.sequences.iter().filter(|(_, own)| own.finished().is_none() && own.answered().get() > 0);
        self.reaction.waiting.extend(answering.map(|(id, _)| *id));
    }

    /// Says so where what was wanted is back: the resident set, not only our books, is within the budget. Pages of the
    /// program's own file come in as code is used; they are clean, the system's to drop, and no part of it.
    pub(super) fn look_if_back(&mut self, budget: Bytes) {
        let Some(Wanted { since, usage: before_bytes }) = self.reaction.wanted else { return };
        if self.usage() > budget {
            return;
        }
        let (rss_bytes, files) = (resident_set(), resident_files());
        let own_files = files - self.overhead_files - self.ledger.files();
        if rss_bytes - own_files <= budget + Bytes::new(budget.get() / NOISE) {
            self.reaction.wanted = None;
            let reaction_ms = ms_since(since);
            self.tell(None, Event::Reaction { reaction_ms, before_bytes, budget_bytes: budget, rss_bytes });
        }
    }
}
