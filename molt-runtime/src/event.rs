//! Everything that happens, as one type. The stream of a client, `--json`, the log and the metrics are all made from it.

use molt_kv::carry::Route;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};
use molt_scheduler::{Census, Class, LeverKind};
use serde::Serialize;

use crate::budget::{Move, Step};

/// Something that happened, in order.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A run begins.
    Start(Start),
    /// A request was taken; it waits to be let in.
    Asked {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// Tokens of its prompt.
        prompt_tokens: Tokens,
    },
    /// A request was refused for good.
    Refused {
        /// Whose; empty where nobody knows the tenant.
        tenant: String,
        /// Why, as one of a few words.
        reason: &'static str,
    },
    /// A request was let in.
    Admitted {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// Where it starts.
        rung: RungIdx,
        /// How long it had waited.
        wait_ms: f64,
        /// Tokens of its prompt that an earlier conversation of the tenant had left in memory.
        cached_tokens: Tokens,
    },
    /// A token of an answer.
    Token {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// The tokens of the answer so far, this one included.
        nth: Tokens,
        /// How long its reader waited for it: since the token before, or since it asked. None where this is only text
        /// that was left over when the answer ended.
        wait_ms: Option<f64>,
        /// Text that is complete with this token; may be empty in the middle of a character.
        text: String,
        /// The rung that wrote it.
        rung: RungIdx,
        /// How likely it was, for who asked; it is too much for a log.
        #[serde(skip)]
        likelihood: Option<Likelihood>,
    },
    /// The budget moved.
    Budget {
        /// Bytes that may be used now.
        budget_bytes: Bytes,
        /// Bytes in use at that moment.
        usage_bytes: Bytes,
    },
    /// A source's limit on the budget moved, by a step that has a reason. The budget is the smallest of all limits.
    Limit {
        /// The source: `pressure`, `cgroup_pressure`, `systemd`.
        source: &'static str,
        /// What it did.
        direction: LimitDirection,
        /// What it allows now; none where it limits nothing any more.
        limit_bytes: Option<Bytes>,
        /// Why.
        reason: String,
    },
    /// A sequence changed its rung, cache and all.
    Switch(Switch),
    /// A lever was used.
    Lever {
        /// Which.
        kind: LeverKind,
        /// On whom.
        tenant: String,
        /// Its class.
        class: Class,
        /// What it frees.
        bytes: Bytes,
        /// Tokens that it drops: of shedding alone.
        tokens: Tokens,
    },
    /// A parked tenant runs again.
    Unpark {
        /// Who.
        tenant: String,
        /// Its class.
        class: Class,
        /// Where.
        rung: RungIdx,
    },
    /// What a bridge had mapped has been read natively in the background: the cache is what reading everything again would
    /// have made.
    Healed {
        /// Whose.
        tenant: String,
        /// Where.
        rung: RungIdx,
        /// Tokens read for it.
        tokens: Tokens,
        /// Time that it took in all.
        heal_ms: f64,
        /// The longest that the sequences' next tokens waited for a part of it.
        wait_ms_max: f64,
    },
    /// What a sequence had been read ahead on another rung was taken over, or is forgotten.
    ReadAhead {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// Where.
        rung: RungIdx,
        /// Tokens read for it; what a keepsake had is not among them.
        tokens: Tokens,
        /// Time that it took in all.
        read_ms: f64,
        /// Whether it was taken over.
        used: bool,
    },
    /// A rung's weights came into memory.
    Load {
        /// Which.
        rung: RungIdx,
        /// Weights and scratch.
        bytes: Bytes,
        /// How long it took.
        load_ms: f64,
    },
    /// A rung's weights left memory.
    Release {
        /// Which.
        rung: RungIdx,
        /// Weights and scratch.
        bytes: Bytes,
        /// How long it took.
        release_ms: f64,
    },
    /// Memory that was wanted is back with the system: the resident set has fallen below the budget (but for the clean
    /// pages of the program's own file, and 2 % of noise).
    Reaction {
        /// From the signal to here.
        reaction_ms: f64,
        /// Bytes in use when the signal came.
        before_bytes: Bytes,
        /// Bytes that may be used now.
        budget_bytes: Bytes,
        /// What the system says is resident, the program's own file included.
        rss_bytes: Bytes,
    },
    /// The first token that a reader gets after memory was wanted in the middle of its answer.
    Stall {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// From the token before.
        stall_ms: f64,
    },
    /// A step, or the loading of a bigger rung, was given up because memory is wanted; it is done again, and nothing of it
    /// was kept.
    GivenUp {
        /// Where.
        rung: RungIdx,
        /// Tokens that it was reading; none where it was loading.
        tokens: Tokens,
        /// How long it had been at it.
        given_up_ms: f64,
    },
    /// What the next rung takes from files is read into the system's page cache: the next smaller one's where the budget
    /// falls, the bigger one's where there is room to go up.
    Standby {
        /// The rung.
        rung: RungIdx,
        /// So much of it at most.
        bytes: Bytes,
    },
    /// Something failed and was dealt with; nothing was lost.
    Trouble {
        /// Where, as one of a few words.
        kind: TroubleKind,
        /// The route that failed, of a carry.
        #[serde(skip_serializing_if = "Option::is_none")]
        route: Option<Route>,
        /// What, and what was done about it.
        message: String,
    },
    /// Memory after the levers of a round.
    Sample {
        /// By the books.
        usage_bytes: Bytes,
        /// What may be used.
        budget_bytes: Bytes,
        /// What the system says.
        rss_bytes: Bytes,
        /// Of that, pages of files.
        rss_file_bytes: Bytes,
        /// Usage by the engine's books minus what the scheduler had reckoned with, when the round began.
        drift_bytes: i64,
        /// What the books say it is used for.
        by_kind: UsageByKind,
        /// Sequences by class and state.
        sequences: Census,
        /// From reading the budget until every lever of the round was executed.
        enforce_ms: f64,
    },
    /// An answer is complete.
    Finished {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// Its tokens.
        tokens: Tokens,
        /// Why it ended.
        reason: FinishReason,
        /// From asking to here.
        total_ms: f64,
    },
    /// A client left before its answer was complete.
    Cancelled {
        /// Whose.
        tenant: String,
        /// Its class.
        class: Class,
        /// Tokens that had been written.
        tokens: Tokens,
    },
    /// A run ends.
    Summary(Summary),
}

/// How a limit moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitDirection {
    /// It fell.
    Down,
    /// It begins to grow.
    Up,
    /// It is gone.
    Lifted,
}

impl LimitDirection {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Down, Self::Up, Self::Lifted];
}

impl From<Step> for Event {
    fn from(Step { source, moved, reason }: Step) -> Self {
        let (direction, limit_bytes) = match moved {
            Move::Shrunk(bytes) => (LimitDirection::Down, Some(bytes)),
            Move::Grows(bytes) => (LimitDirection::Up, Some(bytes)),
            Move::Lifted => (LimitDirection::Lifted, None),
        };
        Self::Limit { source, direction, limit_bytes, reason }
    }
}

/// How likely a token was, by the model alone: before penalties, temperature and grammar.
#[derive(Debug, Clone, PartialEq)]
pub struct Likelihood {
    /// Its bytes; half a character, perhaps.
    pub token: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f64,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(Vec<u8>, f64)>,
}

/// What trouble there was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TroubleKind {
    /// A rung's weights could not be loaded.
    Load,
    /// There was no address space for a cache.
    Cache,
    /// A route of a carry failed and the next was taken.
    Carry,
    /// A keepsake could not be written.
    Keepsake,
    /// Nothing could be shed.
    Shed,
    /// A step was given up.
    Step,
    /// An answer could not go on within its grammar, and was ended.
    Grammar,
    /// The engine failed in the middle of a round, and went on with what it had.
    Panic,
    /// What should outlive the process could not be written, or is not what was written.
    State,
}

impl TroubleKind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Load,
        Self::Cache,
        Self::Carry,
        Self::Keepsake,
        Self::Shed,
        Self::Step,
        Self::Grammar,
        Self::Panic,
        Self::State,
    ];
}

/// Bytes in use, by what for. They add up to the usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct UsageByKind {
    /// Weights of rungs.
    pub weights_bytes: Bytes,
    /// Caches of sequences.
    pub cache_bytes: Bytes,
    /// Buffers of steps.
    pub scratch_bytes: Bytes,
    /// Bridges of the rungs that are loaded.
    pub bridge_bytes: Bytes,
    /// What grammars are made from.
    pub tables_bytes: Bytes,
    /// What the process takes before any model.
    pub overhead_bytes: Bytes,
}

impl UsageByKind {
    /// All of it.
    pub fn total(&self) -> Bytes {
        let Self { weights_bytes, cache_bytes, scratch_bytes, bridge_bytes, tables_bytes, overhead_bytes } = *self;
        weights_bytes + cache_bytes + scratch_bytes + bridge_bytes + tables_bytes + overhead_bytes
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it.
    Stop,
    /// It reached the length that was asked for.
    Length,
}

/// How a run begins.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Start {
    /// The ladder.
    pub ladder: String,
    /// Its rungs.
    pub rungs: Vec<RungInfo>,
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// What the process takes before any model.
    pub overhead_bytes: Bytes,
    /// Of that, pages of files.
    pub overhead_file_bytes: Bytes,
    /// The kernels' instruction set.
    pub isa: &'static str,
}

/// A rung, for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RungInfo {
    /// Which.
    pub rung: RungIdx,
    /// Its model file.
    pub file: String,
    /// Its precision.
    pub precision: String,
    /// Resident weights.
    pub weights_bytes: Bytes,
}

/// A change of rung.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Switch {
    /// Whose.
    pub tenant: String,
    /// Its class.
    pub class: Class,
    /// From.
    pub from: RungIdx,
    /// To.
    pub to: RungIdx,
    /// How the cache came along.
    pub route: Route,
    /// From the signal to a usable cache: release, load and carry.
    pub switch_ms: f64,
    /// The carry alone, both rungs warm.
    pub carry_ms: f64,
    /// Tokens in the cache.
    pub tokens: Tokens,
    /// Of them, read natively over an exact prefix.
    pub exact_tokens: Tokens,
    /// Of them, mapped by the bridge.
    pub mapped_tokens: Tokens,
    /// Share of the operations of a re-read that the carry saved.
    pub flops_saved_ratio: f64,
    /// Usage / budget when the signal came.
    pub pressure_ratio: f64,
}

/// How a run ends.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Tokens of the answer.
    pub tokens: u64,
    /// Rungs that wrote it, in order of first use.
    pub rungs: Vec<RungIdx>,
    /// Changes of rung.
    pub switches: u64,
    /// The longest of them.
    pub switch_ms_max: f64,
    /// The longest time between two tokens.
    pub stall_ms_max: f64,
    /// Time to the first token.
    pub first_token_ms: f64,
    /// Largest usage minus budget after the levers of a round; zero or less: the budget was always kept.
    pub overshoot_bytes_max: i64,
    /// The most that was in use at any moment of a round, minus the more of the budget and what was in use when the round
    /// began; zero or less: no transition took more than there was.
    pub transition_overshoot_bytes_max: i64,
    /// Largest resident set that the system reported.
    pub rss_bytes_max: u64,
    /// Largest difference between the resident set and the books, at a sample.
    pub rss_minus_usage_bytes_max: i64,
    /// Tokens a second over the whole answer, switches included.
    pub tok_s: f64,
    /// Whether the answer was cut off before its own end. The scheduler has no such lever.
    pub killed: bool,
}
