//! What is told of a round of a replay: one type, from which the table, the JSON lines and the plot are made.

use molt_scheduler::units::{Bytes, RungIdx, Time, Tokens};
use molt_scheduler::{Action, SequenceState};
use serde::Serialize;

/// A round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Round {
    /// When it began.
    pub at_us: Time,
    /// What could be used.
    pub budget_bytes: Bytes,
    /// What was used before.
    pub before_bytes: Bytes,
    /// And at most on the way.
    pub peak_bytes: Bytes,
    /// And after its steps.
    pub usage_bytes: Bytes,
    /// Measured minus expected usage, as the scheduler found it.
    pub drift_bytes: i64,
    /// Requests that came.
    pub asked: Vec<Asked>,
    /// What the plan did, in order.
    pub done: Vec<Done>,
    /// Sequences that have written all they were asked for.
    pub ended: Vec<String>,
    /// Where all stand afterwards, by rung.
    pub census: Census,
    /// Where each stands afterwards; empty where there are too many to name or nothing has changed.
    pub standing: Vec<Standing>,
}

impl Round {
    /// Whether nothing has happened but steps (and perhaps a budget that moved without consequences).
    pub fn is_quiet(&self) -> bool {
        self.asked.is_empty() && self.done.is_empty() && self.ended.is_empty()
    }
}

/// A request that came.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Asked {
    /// Its name: the tenant's, and a number.
    pub sequence: String,
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Tokens of the answer.
    pub answer_tokens: Tokens,
    /// Why it was refused, if it was.
    pub refused: Option<String>,
}

/// An action, with a name for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Done {
    /// Whom it concerns, where it concerns somebody.
    pub sequence: Option<String>,
    /// The action.
    #[serde(flatten)]
    pub action: Action,
}

/// How many stand where.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Census {
    /// By rung: running and parked.
    pub rungs: Vec<(u64, u64)>,
    /// Waiting outside.
    pub waiting: u64,
    /// Rungs whose weights are in memory.
    pub resident: Vec<RungIdx>,
}

/// Where a sequence stands.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Standing {
    /// Who.
    pub sequence: String,
    /// Where.
    #[serde(flatten)]
    pub state: SequenceState,
    /// Tokens in its cache.
    pub cached_tokens: Tokens,
    /// Tokens written.
    pub answered_tokens: Tokens,
}
