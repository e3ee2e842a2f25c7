//! The scheduler of Molt: one moving budget, four levers in order of harm. Pure, synchronous, deterministic.
//!
//! State and observation go in, a plan comes out. There is no clock, no randomness, no input or output and no tensor in
//! here; time is a value. The engine executes a [`Plan`] exactly and in order, and tells in the next [`Observation`]
//! what came of it.
//!
//! ```
//! use molt_scheduler::units::{Bytes, RungIdx, Time, Tokens};
//! use molt_scheduler::*;
//!
//! let rung = |mib, per_token| RungCost {
//!     weights: Bytes::mib(mib),
//!     cache_per_token: Bytes::new(per_token),
//!     scratch: Bytes::mib(8),
//! };
//! let ladder = LadderCost::new(vec![rung(900, 28_672), rung(400, 12_288)])?;
//! let mut scheduler = Scheduler::new(ladder, Config::default());
//! let reader = scheduler.register(TenantSpec {
//!     class: Class::Foreground,
//!     weight: std::num::NonZeroU16::MIN,
//!     floor: RungIdx::new(1),
//!     ceiling: RungIdx::TOP,
//!     context_limit: Tokens::new(4096),
//!     quota: None,
//! });
//! let request = Request { tenant: reader, prompt: Tokens::new(100), pinned: Tokens::ZERO, answer: Tokens::new(200) };
//! let sequence = scheduler.submit(request, Time::START)?;
//!
//! let mut plan = Plan::new();
//! let usage = Bytes::ZERO;
//! scheduler.round(&Observation { now: Time::START, budget: Bytes::mib(600), usage, progress: &[] }, &mut plan);
//! let rung = RungIdx::new(1);
//! assert_eq!(plan.actions(), [Action::Load { rung, takes: Bytes::mib(408) }, Action::Admit { sequence, rung }]);
//! assert_eq!(plan.steps().len(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules of evaluation
//!
//! A round goes through these in order; the first that has nothing to do costs nothing.
//!
//! 1. **Apply** progress. Who has finished is gone, and so is its cache, before usage was measured. What is said of a
//!    sequence that is gone is ignored: names carry a generation.
//! 2. **Drift** is measured usage minus the books. Above zero it is set aside from the budget while it lasts; below zero
//!    nothing is made of it. The budget less overhead and drift is the *limit*.
//! 3. **Need** is the weights and scratch of every rung on which somebody runs, all caches (running and parked), and one
//!    token of growth for everybody who runs. Weights that nobody runs on are idle: they stay while there is room, are
//!    the first thing to go, and are no part of the need.
//! 4. Where the need is over the limit, **levers** are used, in the order of [`LEVERS`]; the module of each says how it
//!    chooses. Nobody is let in, comes back or goes up in such a round. Otherwise, the **ways back**: unpark, admit,
//!    promote, each with its conditions in its module.
//!    Among those who wait the foreground goes first, and within a class the tenant that was served least for its weight;
//!    a tenant's own requests go in their order.
//! 5. **Steps** are shared out over those who run, prompt chunks cut to the room that is left.
//! 6. The decisions are **written down** in the order of execution: `Park` and `Shed`, `Release`, `Load`, `Demote` or
//!    `Promote` one after another in the order of least peak, `Unpark` and `Admit`, and last the news for those who have
//!    to wait (`Defer`). A `Demote` of a parked sequence carries its cache to a rung that is loaded by then, and is
//!    followed by its `Unpark` there; no carry needs the weights of its source.
//!
//! # What holds
//!
//! - After enforcement, usage with the growth of the coming step is within the budget whenever all weights gone and
//!   every cache shed to what must be kept would be. On the way usage never rises above what it was, and once within
//!   the budget it stays there: [`Plan::peak`] is reckoned with both caches of every carry.
//! - No lever is used where a less harmful one would do, over all tenants ([`Policy::LeverFirst`]); on ladders of up to
//!   eight rungs the search is exhaustive in the sets of rungs in use, and two orders of carrying are tried. Batch bears a lever before the foreground does;
//!   one exception is made in its favour: a foreground sequence that has been parked for the patience takes the place
//!   of batch.
//! - Nobody is ended. Whoever cannot run waits, with its cache.
//! - Floors hold for every lever. One gives way only for a sequence that has been parked, or has waited outside, for
//!   eight times [`Config::patience`], and only where nothing within its floor fits.
//! - With [`Policy::ProtectForeground`] the foreground bears a lever only where stopping all of batch, and shedding all
//!   its old context, does not suffice.
//! - Shares follow weights also where not all fit: of two tenants of a class that always have a request waiting, the
//!   tokens that their steps have read, each over its weight, are never further apart than the longest request of the one
//!   and of the other and what one of them has inside, each over its weight. The error does not grow, so shares converge
//!   as one over the time. A tenant that was idle begins where the others are, give or take their longest request.
//! - A request that does not fit is passed by eight at most whose turn is later, and by another tenant only until that
//!   one is ahead by what it costs. A tenant beside which others are registered may have as many requests waiting as
//!   there are places left ([`Refusal::TenantQueueFull`]), so that no flood gets another one refused.
//! - Every queue and every walk is bounded, and slots, not hashes, order every walk: the same state and observation give
//!   the same plan, also after the state was written down and read again.
//!
//! # The law of hysteresis
//!
//! Going down is at once; going up is slow. A sequence is promoted only if
//!
//! - room for it, with [`Config::headroom_percent`] of the limit to spare, was found in every round for
//!   [`Config::patience`], with no lever used meanwhile, and
//! - it has not changed rungs for [`Config::residence`], and
//! - at least [`Config::promote_for_tokens`] of its answer are left.
//!
//! So on *any* budget a sequence that is there for a time `T` is promoted at most `1 + T / residence` times; on a
//! saw-tooth whose troughs have no room for that and come more often than the patience, never. On a ladder of `L` rungs it can go down only by rungs that
//! it has or that a promotion gave it, so with `P` promotions it is demoted at most `(L - 1) (1 + P)` times. Weights for
//! somebody parked are loaded no sooner than the patience after it was parked, and weights beside others for a new
//! request no sooner than the patience after the last lever.
//!
//! Coming back is bounded too: once memory is there for all, whoever is parked runs again after at most the patience
//! and a round for each that stands before it, foreground first, then in the order of parking.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod census;
mod climb;
mod cost;
mod ids;
mod input;
mod levers;
mod plan;
mod queue;
mod round;
mod scheduler;
pub mod simulator;
mod slab;
mod snapshot;
mod state;
mod steps;
mod transition;
pub mod units;
mod usage;

pub use census::{Census, Standing};
pub use cost::{LadderCost, LadderCostError, RungCost};
pub use ids::{SequenceId, TenantId};
pub use input::{Class, Config, Observation, Policy, Progress, Refusal, Request, TenantSpec};
pub use levers::ORDER as LEVERS;
pub use plan::{Action, LeverKind, Plan, Prospect, Step};
pub use scheduler::Scheduler;
pub use snapshot::{plan_snapshot, snapshot};
pub use state::SequenceState;
