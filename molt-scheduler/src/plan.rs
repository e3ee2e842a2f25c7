//! What a round decided, as data. The engine executes it in the order in which it stands.

use serde::{Deserialize, Serialize};

use crate::ids::SequenceId;
use crate::units::{Bytes, RungIdx, Span, Tokens};

/// The four levers in order of harm, and the three ways back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeverKind {
    /// A request waits outside.
    Defer,
    /// Sequences move to a smaller rung.
    Demote,
    /// A sequence stops; its cache stays, its weights may go.
    Park,
    /// The oldest context of a sequence is dropped, in blocks, between its pinned prefix and its recent window.
    Shed,
}

/// One change of the resident set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// The request stays in its queue; `wait` is an estimate where one can be made. Planned once a deferral, not once
    /// a round.
    Defer {
        /// The sequence.
        sequence: SequenceId,
        /// Its place in the queue, from 0.
        place: u32,
        /// Estimated wait.
        wait: Option<Span>,
    },
    /// The sequence moves to a smaller rung and its cache is carried. The weights of `to` are there by then; those of
    /// `from` may be gone. Of a parked sequence it moves the cache, and its `Unpark` on `to` follows.
    Demote {
        /// The sequence.
        sequence: SequenceId,
        /// From here.
        from: RungIdx,
        /// To here.
        to: RungIdx,
        /// What is freed in the end, by the whole group that moves between these rungs, where this is its first; zero
        /// for those that move along with it.
        frees: Bytes,
    },
    /// The sequence stops; its cache stays bit for bit. Its rung is kept, for the cache is of that rung.
    Park {
        /// The sequence.
        sequence: SequenceId,
        /// The rung that its cache belongs to.
        rung: RungIdx,
        /// What parking it frees: the rung's weights where it was the last to use them.
        frees: Bytes,
    },
    /// Whole blocks of old context go: the tokens `from..from + tokens` of what is cached.
    Shed {
        /// The sequence.
        sequence: SequenceId,
        /// First cached token dropped (everything before it is pinned).
        from: Tokens,
        /// How many are dropped.
        tokens: Tokens,
        /// The bytes that frees.
        frees: Bytes,
    },
    /// A rung's weights leave memory. Always before any `Load`.
    Release {
        /// The rung.
        rung: RungIdx,
        /// Its weights and scratch.
        frees: Bytes,
    },
    /// A rung's weights come into memory.
    Load {
        /// The rung.
        rung: RungIdx,
        /// Its weights and scratch.
        takes: Bytes,
    },
    /// A waiting request starts on that rung.
    Admit {
        /// The sequence.
        sequence: SequenceId,
        /// Where it starts.
        rung: RungIdx,
    },
    /// A parked sequence runs again, on the rung of its cache.
    Unpark {
        /// The sequence.
        sequence: SequenceId,
        /// Where it runs.
        rung: RungIdx,
    },
    /// The sequence moves to a bigger rung.
    Promote {
        /// The sequence.
        sequence: SequenceId,
        /// From here.
        from: RungIdx,
        /// To here.
        to: RungIdx,
    },
}

/// What a running sequence does in this round's step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The sequence.
    pub sequence: SequenceId,
    /// The rung it runs on.
    pub rung: RungIdx,
    /// How many tokens it reads: a chunk of its prompt, or 1 to decode.
    pub tokens: Tokens,
    /// Whether this is prompt (a token is sampled only after its last chunk) or decoding.
    pub prefill: bool,
}

/// A promotion that will come if there is room for long enough, and for which the engine may read ahead on the bigger rung:
/// what that takes is no part of the plan, must fit beside it, and goes first where memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prospect {
    /// The sequence.
    pub sequence: SequenceId,
    /// Where it will go.
    pub to: RungIdx,
}

/// A round's decisions. Reused from round to round; a quiet round allocates nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a plan that is not executed leaves the scheduler's books wrong"]
pub struct Plan {
    pub(crate) actions: Vec<Action>,
    pub(crate) steps: Vec<Step>,
    pub(crate) prospects: Vec<Prospect>,
    pub(crate) usage: Bytes,
    pub(crate) peak: Bytes,
    pub(crate) crest: Bytes,
}

impl Plan {
    /// An empty plan, to be filled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes of the resident set, in the order in which the engine must make them: what gives memory back first.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Who steps afterwards, and how far.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Who is about to be promoted; foreground first. All to the same rung.
    pub fn prospects(&self) -> &[Prospect] {
        &self.prospects
    }

    /// Usage once the plan is executed, growth of the steps included.
    pub fn usage(&self) -> Bytes {
        self.usage
    }

    /// The highest usage from before its first action to after its steps, with both caches of every carry. Above the
    /// usage before only where the budget allows it.
    pub fn peak(&self) -> Bytes {
        self.peak
    }

    /// The highest usage from where everything is released to after its steps: what a budget that falls again while the
    /// plan is executed must hold.
    pub fn crest(&self) -> Bytes {
        self.crest
    }

    pub(crate) fn clear(&mut self) {
        let Self { actions, steps, prospects, usage, peak, crest } = self;
        actions.clear();
        steps.clear();
        prospects.clear();
        (*usage, *peak, *crest) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
    }
}
