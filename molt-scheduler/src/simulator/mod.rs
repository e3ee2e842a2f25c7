//! An engine without models: it executes plans over a reckoning of memory and time, keeps books of its own, and holds
//! every plan against the laws that hold for any engine.
//!
//! It is the one harness of the scheduler. The properties of this crate run on it, and so does whoever wants to see what
//! a budget does to a ladder and its tenants without loading either. Like the core it never asks a clock: time moves by
//! what a round's loads, carries and steps cost ([`Pace`]).
//!
//! ```
//! use molt_scheduler::simulator::{Pace, World};
//! use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
//! use molt_scheduler::*;
//!
//! let rung = |mib| RungCost {
//!     weights: Bytes::mib(mib),
//!     cache_per_token: Bytes::new(4096),
//!     scratch: Bytes::mib(8),
//! };
//! let ladder = LadderCost::new(vec![rung(900), rung(400)])?;
//! let mut world = World::new(ladder, Config::default(), Pace::Fixed(Span::from_millis(50)));
//! let reader = world.register(TenantSpec {
//!     class: Class::Foreground,
//!     weight: std::num::NonZeroU16::MIN,
//!     floor: RungIdx::new(1),
//!     ceiling: RungIdx::TOP,
//!     context_limit: Tokens::new(4096),
//!     quota: None,
//! });
//! let request = Request { tenant: reader, prompt: Tokens::new(100), pinned: Tokens::ZERO, answer: Tokens::new(20) };
//! world.submit(request)?;
//! while !world.live.is_empty() {
//!     world.round(Bytes::mib(if world.now.micros() < 500_000 { 1000 } else { 500 }))?;
//! }
//! assert_eq!(world.past[0].1.switches, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It must never decide anything: what it does not find in the plan does not happen.

mod execute;
mod law;
mod live;
mod pace;

use std::collections::{BTreeMap, BTreeSet};

use crate::cost::{LadderCost, RungCost};
use crate::ids::{SequenceId, TenantId};
use crate::input::{Config, Observation, Progress, Refusal, Request, TenantSpec};
use crate::plan::Plan;
use crate::scheduler::Scheduler;
use crate::units::{Bytes, RungIdx, Time, Tokens};

pub use law::{BrokenLaw, Law};
pub use live::Live;
pub use pace::{Pace, RungSpeed, Speed};

/// The engine's side of everything, and the scheduler it serves.
///
/// The fields are open: a test sets what no plan could bring about (a leak, a rung that does not load) and reads what it
/// compares.
#[derive(Debug, Clone)]
pub struct World {
    /// The scheduler.
    pub scheduler: Scheduler,
    /// Its last plan.
    pub plan: Plan,
    /// Sequences that are there, waiting ones among them.
    pub live: BTreeMap<SequenceId, Live>,
    /// Those that have ended, in order of their end.
    pub past: Vec<(SequenceId, Live)>,
    /// Rungs whose weights are in memory.
    pub resident: BTreeSet<RungIdx>,
    /// What the next observation tells.
    pub progress: Vec<Progress>,
    /// Now.
    pub now: Time,
    /// How long a round takes.
    pub pace: Pace,
    /// Tokens that steps read, by tenant: of prompts, and of answers each but the last.
    pub served: BTreeMap<TenantId, Tokens>,
    /// As registered.
    pub specs: BTreeMap<TenantId, TenantSpec>,
    /// Bytes that the engine uses and the scheduler knows nothing of.
    pub leak: Bytes,
    /// Loads of these rungs fail.
    pub broken: BTreeSet<RungIdx>,
}

impl World {
    /// A world with nothing in it.
    pub fn new(ladder: LadderCost, config: Config, pace: Pace) -> Self {
        Self {
            scheduler: Scheduler::new(ladder, config),
            plan: Plan::new(),
            live: BTreeMap::new(),
            past: Vec::new(),
            resident: BTreeSet::new(),
            progress: Vec::new(),
            now: Time::START,
            pace,
            served: BTreeMap::new(),
            specs: BTreeMap::new(),
            leak: Bytes::ZERO,
            broken: BTreeSet::new(),
        }
    }

    /// Registers a tenant.
    pub fn register(&mut self, spec: TenantSpec) -> TenantId {
        let id = self.scheduler.register(spec.clone());
        self.specs.insert(id, spec);
        id
    }

    /// Takes a request, or refuses it as the scheduler does.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Refusal> {
        let id = self.scheduler.submit(request.clone(), self.now)?;
        let bottom = self.scheduler.ladder().bottom();
        if let Some(spec) = self.specs.get(&request.tenant) {
            self.live.insert(id, Live::new(&request, spec, bottom, self.now));
        }
        Ok(id)
    }

    /// The client of a sequence leaves; whether it was there.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        self.scheduler.cancel(sequence);
        self.progress.retain(|progress| progress.sequence != sequence);
        self.live.remove(&sequence).is_some()
    }

    /// What a rung costs; below the ladder, more than there can be.
    pub fn cost(&self, rung: RungIdx) -> RungCost {
        self.scheduler.ladder.cost(rung)
    }

    /// What a cache of that length takes on a rung.
    pub fn cache(&self, rung: RungIdx, cached: Tokens) -> Bytes {
        self.cost(rung).cache_per_token.times(cached)
    }

    /// Usage by the engine's own books.
    pub fn usage(&self) -> Bytes {
        let held: Bytes = self.resident.iter().map(|rung| self.cost(*rung).held()).sum();
        let cache = |live: &Live| live.rung.map_or(Bytes::ZERO, |rung| self.cache(rung, live.cached));
        let caches: Bytes = self.live.values().map(cache).sum();
        self.scheduler.config.overhead + held + caches + self.leak
    }

    /// What is left when all weights are gone and every cache is shed as far as it goes.
    pub fn rock_bottom(&self) -> Bytes {
        let config = &self.scheduler.config;
        let kept = |live: &Live| {
            let old = live.cached - live.pinned.max(config.sinks) - config.window;
            let blocks = old.get().checked_div(config.shed_block.get()).unwrap_or(0);
            live.cached - Tokens::new(blocks.saturating_mul(config.shed_block.get()))
        };
        let cache = |live: &Live| live.rung.map_or(Bytes::ZERO, |rung| self.cache(rung, kept(live)));
        let caches: Bytes = self.live.values().map(cache).sum();
        config.overhead + caches + self.leak
    }

    /// One round: plan, execute, step. Time then stands at its end. The first law that does not hold is returned; the
    /// world is then no longer of use.
    pub fn round(&mut self, budget: Bytes) -> Result<(), BrokenLaw> {
        let usage = self.usage();
        let bottom = self.rock_bottom();
        let progress = std::mem::take(&mut self.progress);
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.round(&Observation { now: self.now, budget, usage, progress: &progress }, &mut plan);
        let executed = self.execute(&plan, budget, usage, bottom);
        self.plan = plan;
        match executed {
            Ok(took) => {
                self.now = self.now + took;
                Ok(())
            }
            Err(law) => Err(BrokenLaw { at: self.now, law }),
        }
    }
}
