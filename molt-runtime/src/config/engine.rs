//! What the configuration says about carries, what is read in the background, and when levers are used.

use std::path::PathBuf;

use molt_scheduler::Policy;
use serde::Deserialize;

use crate::engine::{AheadSettings, EngineSettings, HealSettings, Shadow};

/// How much of a carry is done before the next token.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Carry {
    /// How long a reader may wait for it, in milliseconds.
    pub stall_ms_target: f64,
    /// `fast`, `balanced`, `faithful` or `exact` instead, whatever that takes.
    pub always: Option<Always>,
}

impl Default for Carry {
    fn default() -> Self {
        Self { stall_ms_target: 1_000.0, always: None }
    }
}

/// A carry that is always the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Always {
    /// Hardly more than the maps.
    Fast,
    /// Some tokens at both ends natively.
    Balanced,
    /// Many.
    Faithful,
    /// Everything: bridges are not used.
    Exact,
}

/// What is read natively in the background after a carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Heal {
    /// Tokens at a time.
    pub tokens: u64,
    /// After every so many rounds; 0 is never.
    pub every_rounds: u32,
}

impl Default for Heal {
    fn default() -> Self {
        let HealSettings { tokens, every } = HealSettings::default();
        Self { tokens: tokens.get(), every_rounds: every }
    }
}

/// What is read natively in the background before a sequence changes its rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReadAhead {
    /// How long going up waits at most until the bigger rung has caught up, in milliseconds; 0 catches up when it comes.
    pub catch_up_ms: u64,
    /// Whether going up waits for nothing and takes a bridge where the ladder has one.
    pub eager_up: bool,
    /// Whether the next smaller model reads along.
    pub shadow: Shadow,
    /// Most MiB that it may take for caches.
    pub shadow_mib: u64,
    /// Tokens at a time.
    pub tokens: u64,
    /// Catching up reads after every so many rounds.
    pub every_rounds: u32,
    /// A shadow reads after every so many.
    pub shadow_every_rounds: u32,
}

impl Default for ReadAhead {
    fn default() -> Self {
        let AheadSettings { catch_up, eager_up, shadow, shadow_bytes, tokens, every, shadow_every } =
            AheadSettings::default();
        Self {
            catch_up_ms: catch_up.micros() / 1_000,
            eager_up,
            shadow,
            shadow_mib: shadow_bytes.get() >> 20,
            tokens: tokens.get(),
            every_rounds: every,
            shadow_every_rounds: shadow_every,
        }
    }
}

/// What sequences leave behind on bigger models, so that going back up is exact.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Keepsakes {
    /// Whether any are kept.
    pub keep: bool,
    /// The folder of their unlinked files; one on disk, if not given.
    pub folder: Option<PathBuf>,
}

impl Default for Keepsakes {
    fn default() -> Self {
        Self { keep: true, folder: None }
    }
}

/// What ended conversations leave for their next turn. It goes before anybody bears a lever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reuse {
    /// How many of each tenant and user keep their cache; 0 keeps none.
    pub conversations: usize,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { conversations: EngineSettings::default().conversations }
    }
}

/// When levers are used, and when things go up again.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scheduling {
    /// `lever_first`, or `protect_foreground`.
    pub policy: Policy,
    /// Headroom must have lasted so many milliseconds before anything goes up.
    pub patience_ms: u64,
    /// A sequence stays on a rung for at least so many milliseconds before it goes up.
    pub residence_ms: u64,
    /// Requests of each class that may wait.
    pub queue_limit: u32,
    /// Most tokens of a prompt that are read at a time while anybody writes.
    pub chunk: u64,
}

impl Default for Scheduling {
    fn default() -> Self {
        let config = molt_scheduler::Config::default();
        Self {
            policy: config.policy,
            patience_ms: config.patience.micros() / 1_000,
            residence_ms: config.residence.micros() / 1_000,
            queue_limit: config.queue_limit,
            chunk: config.chunk.get(),
        }
    }
}
