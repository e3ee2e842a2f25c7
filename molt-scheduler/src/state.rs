//! What is known of each tenant and each sequence.

use serde::{Deserialize, Serialize};

use crate::ids::{SequenceId, TenantId};
use crate::input::{Class, Config, TenantSpec};
use crate::queue::Account;
use crate::units::{RungIdx, Time, Tokens};

/// A registered tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    /// As registered, with floor and ceiling clamped to the ladder.
    pub(crate) spec: TenantSpec,
    pub(crate) account: Account,
}

/// Where a sequence stands. Public view: [`SequenceState`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub(crate) enum Phase {
    /// In the queue of its class.
    Waiting {
        /// Whether its deferral was planned already.
        told: bool,
        /// Requests behind it that were let in before it.
        overtaken: u32,
    },
    /// On a rung.
    Running {
        /// That rung.
        rung: RungIdx,
    },
    /// Stopped, with its cache kept.
    Parked {
        /// The rung of the cache.
        rung: RungIdx,
        /// Since when.
        since: Time,
        /// Its place among all that were ever parked.
        ticket: u64,
    },
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum SequenceState {
    /// It waits to be let in.
    Waiting {
        /// How many of its class are let in before it, if all fit and nobody else comes.
        place: u32,
    },
    /// It runs.
    Running {
        /// On this rung.
        rung: RungIdx,
    },
    /// It stopped and keeps its cache.
    Parked {
        /// The rung of its cache.
        rung: RungIdx,
    },
}

/// One conversation. Class, weight, floor and ceiling are its tenant's, copied because every round reads them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) tenant: TenantId,
    pub(crate) class: Class,
    pub(crate) weight: u64,
    pub(crate) floor: RungIdx,
    pub(crate) ceiling: RungIdx,
    pub(crate) pinned: Tokens,
    /// Prompt and answer at most: what its tenant's quota is charged.
    pub(crate) longest: Tokens,
    pub(crate) answer: Tokens,
    pub(crate) cached: Tokens,
    pub(crate) prompt_left: Tokens,
    pub(crate) answered: Tokens,
    /// When it came.
    pub(crate) submitted: Time,
    /// Its place among all that ever came.
    pub(crate) order: u64,
    /// The rung on which the engine has read it ahead.
    pub(crate) ahead: Option<RungIdx>,
    /// When it last changed rungs; never, for most.
    pub(crate) switched: Option<Time>,
    /// Credit for decode steps, in 65,536ths of a token.
    pub(crate) credit: u32,
    pub(crate) phase: Phase,
}

impl Sequence {
    /// The rung of its cache, or `None` while it waits outside.
    pub(crate) fn rung(&self) -> Option<RungIdx> {
        match self.phase {
            Phase::Waiting { .. } => None,
            Phase::Running { rung } | Phase::Parked { rung, .. } => Some(rung),
        }
    }

    /// Tokens of the answer that may still come.
    pub(crate) fn answer_left(&self) -> Tokens {
        self.answer - self.answered
    }

    /// Tokens that steps have still to read: the prompt, and of the answer each token but the last, for the last chunk of
    /// the prompt writes the first.
    pub(crate) fn work_left(&self) -> Tokens {
        if self.prompt_left == Tokens::ZERO {
            return self.answer_left();
        }
        self.prompt_left + (self.answer_left() - Tokens::new(1))
    }

    /// By how much its cache may grow soon: the prompt that is not read yet, and at most `most` of the answer.
    pub(crate) fn growth(&self, most: Tokens) -> Tokens {
        self.prompt_left + self.answer_left().min(most)
    }

    /// Old context that may be shed in whole blocks: where it starts and how many blocks there are.
    pub(crate) fn sheddable(&self, config: &Config) -> (Tokens, u64) {
        let front = self.pinned.max(config.sinks);
        let blocks = (self.cached - front - config.window).get().checked_div(config.shed_block.get()).unwrap_or(0);
        (front, blocks)
    }

    /// Who bears a lever first: batch before foreground, lower weight first, and of equals the one that came last, for
    /// it loses the least work.
    pub(crate) fn harm(&self) -> (Class, u64, std::cmp::Reverse<u64>) {
        (self.class, self.weight, std::cmp::Reverse(self.order))
    }
}
