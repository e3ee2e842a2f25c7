//! What the scheduler is told: tenants, requests, and an observation a round.

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use crate::ids::{SequenceId, TenantId};
use crate::units::{Bytes, RungIdx, Span, Time, Tokens};

/// How urgent a tenant is. Batch tenants bear every lever before the foreground does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Work that nobody waits for.
    Batch,
    /// A person is reading.
    Foreground,
}

/// What a tenant registers with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSpec {
    /// Its class.
    pub class: Class,
    /// Its share among tenants of its class, and how late a lever of its class touches it.
    pub weight: NonZeroU16,
    /// The smallest rung it accepts while anything else is left.
    pub floor: RungIdx,
    /// The biggest rung it may use.
    pub ceiling: RungIdx,
    /// Most tokens of one sequence, prompt and answer together.
    pub context_limit: Tokens,
    /// Most tokens of cache over all its sequences, where it has such a limit.
    pub quota: Option<Tokens>,
}

/// A request for one answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Whose.
    pub tenant: TenantId,
    /// Tokens of the prompt.
    pub prompt: Tokens,
    /// Tokens at the front that shedding never touches (system prompt); at least the attention sinks are kept anyway.
    pub pinned: Tokens,
    /// Most tokens of the answer.
    pub answer: Tokens,
}

/// What the engine did with a sequence since the last round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens in its cache now.
    pub cached: Tokens,
    /// Tokens of the prompt not read yet.
    pub prompt_left: Tokens,
    /// Tokens of the answer so far.
    pub answered: Tokens,
    /// Whether it has ended (stop token, limit, or the client left).
    pub finished: bool,
    /// The rung on which its cache has been read ahead, so that it may go there without a wait.
    pub ahead: Option<RungIdx>,
}

/// What a round sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation<'a> {
    /// Now.
    pub now: Time,
    /// Bytes that may be used.
    pub budget: Bytes,
    /// Bytes that are used, by the engine's own books, before this round's plan and without the caches of those that
    /// have ended; where it says more than the scheduler had counted on, it wins.
    pub usage: Bytes,
    /// Every sequence that stepped or ended since the last round.
    pub progress: &'a [Progress],
}

/// Why a request was refused for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "refused", rename_all = "snake_case")]
pub enum Refusal {
    /// The tenant is not (or no longer) registered.
    #[error("tenant {tenant} is not registered")]
    UnknownTenant {
        /// Who.
        tenant: TenantId,
    },
    /// An empty prompt.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt and answer are longer than the tenant may have.
    #[error("prompt ({prompt}) and answer (up to {answer}) are over the tenant's limit of {limit}")]
    OverContext {
        /// Tokens of the prompt.
        prompt: Tokens,
        /// Most tokens of the answer.
        answer: Tokens,
        /// The limit.
        limit: Tokens,
    },
    /// More cache than the tenant's quota allows, even alone.
    #[error("the request may cache {asked}, over the tenant's quota of {quota}")]
    OverQuota {
        /// What it may need.
        asked: Tokens,
        /// The quota.
        quota: Tokens,
    },
    /// It cannot fit on the smallest rung, even alone under the largest budget there can be.
    #[error("the request needs {needs} on the smallest rung, and there can never be more than {limit}")]
    NeverFits {
        /// What it needs, with weights, scratch and overhead.
        needs: Bytes,
        /// The most there can be.
        limit: Bytes,
    },
    /// The queue of its class is full.
    #[error("the queue is full with {length} requests")]
    QueueFull {
        /// Requests that wait.
        length: u32,
        /// Estimated time until there is room, where one can be made.
        retry_after: Option<Span>,
    },
    /// The tenant has as many requests waiting as there are places left for all the others.
    #[error("the tenant has {waiting} requests waiting, and {left} places are left for others beside it")]
    TenantQueueFull {
        /// Requests of the tenant that wait.
        waiting: u32,
        /// Places left in the queue of its class.
        left: u32,
        /// Estimated time until there is room, where one can be made.
        retry_after: Option<Span>,
    },
}

/// Settings of the scheduler, all with stated defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Who bears the levers.
    pub policy: Policy,
    /// Bytes in use that no lever can free (the process itself).
    pub overhead: Bytes,
    /// The largest budget there can ever be (the machine's memory), for refusing what can never fit.
    pub budget_limit: Bytes,
    /// Headroom must have lasted this long before anything goes up.
    pub patience: Span,
    /// A sequence stays at least this long on a rung before it is promoted.
    pub residence: Span,
    /// A promotion must leave at least this share of the budget free, in percent.
    pub headroom_percent: u8,
    /// A promotion that fits beside the rung it leaves waits for up to so long after the patience until the sequence has
    /// been read ahead there (see [`Plan::prospects`](crate::Plan::prospects)); zero promotes at once.
    pub catch_up: Span,
    /// A promotion must serve at least this many tokens of the answer.
    pub promote_for_tokens: Tokens,
    /// An admission leaves room for every prompt that is being read and for this many tokens of every answer (or what
    /// is left of it), so that letting somebody in does not demote those who are in.
    pub admit_for_tokens: Tokens,
    /// Sequences that may be in at once, running and parked together.
    pub admit_limit: u32,
    /// Requests that may wait in each class. A tenant beside which others are registered may fill no more places than it
    /// leaves free.
    pub queue_limit: u32,
    /// Most prompt tokens read in one step while another sequence decodes on any rung.
    pub chunk: Tokens,
    /// Most prompt tokens read in one step when nobody decodes.
    pub chunk_alone: Tokens,
    /// Tokens of old context are shed in blocks of this size.
    pub shed_block: Tokens,
    /// Attention sinks: first tokens that shedding never touches.
    pub sinks: Tokens,
    /// Most recent tokens that shedding never touches.
    pub window: Tokens,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::LeverFirst,
            overhead: Bytes::ZERO,
            budget_limit: Bytes::MAX,
            patience: Span::from_millis(2_000),
            residence: Span::from_millis(3_000),
            headroom_percent: 5,
            catch_up: Span::ZERO,
            promote_for_tokens: Tokens::new(16),
            admit_for_tokens: Tokens::new(256),
            admit_limit: 4_096,
            queue_limit: 256,
            chunk: Tokens::new(64),
            chunk_alone: Tokens::new(512),
            shed_block: Tokens::new(64),
            sinks: Tokens::new(4),
            window: Tokens::new(64),
        }
    }
}

/// Who bears the levers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// A lever is used only where every less harmful one is exhausted over all tenants.
    #[default]
    LeverFirst,
    /// Batch tenants exhaust all their levers before the foreground bears any.
    ProtectForeground,
}
