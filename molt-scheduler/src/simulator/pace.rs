//! How long things take, as data.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, RungIdx, Span, Tokens};

/// How time passes from round to round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// Every round takes as long, whatever happens in it.
    Fixed(Span),
    /// A round takes what its loads, carries and steps take.
    Measured(Speed),
}

/// How fast an engine is. Steps of a round run one after another, as the engine runs them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Weights that come into memory in a millisecond.
    pub load_bytes_per_ms: Bytes,
    /// A token of a cache on its way to another rung.
    pub carry_token: Span,
    /// By rung, biggest first; a rung that is missing is as fast as the last one that is not.
    pub rungs: Vec<RungSpeed>,
    /// A round in which nothing happens: the engine looks again after that long.
    pub idle: Span,
}

/// How fast a rung is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungSpeed {
    /// A token written.
    pub decode_token: Span,
    /// A token of a prompt read.
    pub prompt_token: Span,
}

/// What a round did.
#[derive(Debug, Clone, Default)]
pub(super) struct Work {
    pub(super) loaded: Bytes,
    pub(super) carried: Tokens,
    /// Of the steps so far.
    pub(super) steps: Span,
}

impl Pace {
    /// What a step of that many tokens takes.
    pub(super) fn step(&self, rung: RungIdx, tokens: Tokens, prefill: bool) -> Span {
        let Self::Measured(speed) = self else { return Span::ZERO };
        let Some(own) = speed.rungs.get(rung.get()).or(speed.rungs.last()) else { return Span::ZERO };
        if prefill { own.prompt_token.times(tokens.get()) } else { own.decode_token.times(tokens.get()) }
    }

    /// What a round takes.
    pub(super) fn round(&self, work: &Work) -> Span {
        let speed = match self {
            Self::Fixed(span) => return *span,
            Self::Measured(speed) => speed,
        };
        let ms = work.loaded.get().checked_div(speed.load_bytes_per_ms.get()).unwrap_or(0);
        let all = Span::from_millis(ms) + speed.carry_token.times(work.carried.get()) + work.steps;
        if all == Span::ZERO { speed.idle } else { all }
    }
}
