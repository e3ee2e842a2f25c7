//! `molt replay`: the scheduler under a pressure trace, over the simulator, without any model.
//!
//! A replay is a function of its inputs: the same trace, tenants, costs and policy give the same rounds.

mod costs;
mod peers;
mod plot;
mod round;
mod summary;
mod tenants;
mod text;

use std::collections::{BTreeMap, VecDeque};

use molt_scheduler::simulator::{BrokenLaw, Pace, World};
use molt_scheduler::units::{Bytes, RungIdx, Span, Time};
use molt_scheduler::{Action, Config, Policy, Request, SequenceId, TenantId};

use crate::trace::{Frame, Trace};

pub use costs::{Costs, CostsError};
pub use peers::{Peer, PeerSummary, run_peer};
pub use plot::{Plot, PlotError};
pub use round::{Asked, Census, Done, Round, Standing};
pub use summary::{LeverCounts, RungTime, Summary, TenantSummary};
pub use tenants::{Arrival, Profile, Tenants, TenantsError};
pub use text::Text;

/// What is replayed.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// The budget.
    pub trace: &'a Trace,
    /// Who asks.
    pub tenants: &'a Tenants,
    /// What everything costs.
    pub costs: &'a Costs,
    /// Who bears the levers.
    pub policy: Policy,
}

/// Why a replay broke off.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The scheduler broke a law: a bug in Molt.
    #[error("the scheduler broke a law; this is a bug in Molt")]
    Law(#[from] BrokenLaw),
    /// More rounds than anybody waits for.
    #[error("no end after {rounds} rounds, at {at_ms} ms of the trace")]
    Endless {
        /// Rounds so far.
        rounds: u64,
        /// Where the trace stands.
        at_ms: u64,
    },
}

/// Up to so many sequences are named one by one.
const NAMED: usize = 8;
/// Time after the last step and the last request in which nothing runs, before a replay ends as it is.
const STUCK: Span = Span::from_millis(120_000);
/// Rounds of a day at ten milliseconds each.
const ROUNDS_MAX: u64 = 8_640_000;

/// Requests in order of time, and the names of all who came.
struct Cast {
    coming: VecDeque<(Arrival, TenantId)>,
    tenants: BTreeMap<TenantId, String>,
    asked: BTreeMap<TenantId, u64>,
    names: BTreeMap<SequenceId, String>,
}

impl Cast {
    fn new(world: &mut World, tenants: &Tenants) -> Self {
        let mut coming = Vec::new();
        let mut names = BTreeMap::new();
        for tenant in &tenants.tenants {
            let id = world.register(tenant.spec.clone());
            names.insert(id, tenant.name.clone());
            coming.extend(tenant.requests.iter().map(|request| (*request, id)));
        }
        coming.sort_by_key(|(request, _)| request.at);
        Self { coming: coming.into(), tenants: names, asked: BTreeMap::new(), names: BTreeMap::new() }
    }

    /// Submits what has come by now.
    fn arrive(&mut self, world: &mut World, summary: &mut Summary) -> Vec<Asked> {
        let mut asked = Vec::new();
        while let Some((arrival, tenant)) = self.coming.front().copied().filter(|(next, _)| next.at <= world.now) {
            self.coming.pop_front();
            let nth = self.asked.entry(tenant).or_default();
            *nth += 1;
            let name = format!("{}/{nth}", self.tenants.get(&tenant).map_or("", String::as_str));
            let Arrival { prompt, pinned, answer, .. } = arrival;
            let refused = match world.submit(Request { tenant, prompt, pinned, answer }) {
                Ok(id) => {
                    self.names.insert(id, name.clone());
                    None
                }
                Err(refusal) => Some(refusal.to_string()),
            };
            summary.asked(tenant, refused.is_some());
            asked.push(Asked { sequence: name, prompt_tokens: prompt, answer_tokens: answer, refused });
        }
        asked
    }

    fn name(&self, id: SequenceId) -> String {
        self.names.get(&id).cloned().unwrap_or_default()
    }
}

/// Runs a trace to its end, and until everybody is served or nothing moves any more; every round is told.
pub fn run(setup: &Setup<'_>, mut tell: impl FnMut(&Round)) -> Result<Summary, ReplayError> {
    let Setup { trace, tenants, costs, policy } = *setup;
    let frame = Frame { ladder: &costs.ladder, overhead: costs.overhead, context: tenants.context() };
    let config = trace.settings().over(Config {
        policy,
        overhead: costs.overhead,
        budget_limit: trace.budget_max(&frame),
        ..Config::default()
    });
    let pace = match trace.per_token() {
        Some(span) => Pace::Fixed(span),
        None => Pace::Measured(costs.speed.clone()),
    };
    let mut world = World::new(costs.ladder.clone(), config, pace);
    let mut cast = Cast::new(&mut world, tenants);
    let mut summary = Summary::new(setup, &cast.tenants);
    let mut last_run = Time::START;
    loop {
        let at = world.now;
        let asked = cast.arrive(&mut world, &mut summary);
        let (before, past) = (world.usage(), world.past.len());
        let budget = trace.budget_at(at, &frame);
        world.round(budget)?;
        let round = told(&world, &cast, (at, budget, before, past), asked);
        summary.count(&round, &world, past);
        tell(&round);
        if summary.rounds >= ROUNDS_MAX {
            return Err(ReplayError::Endless { rounds: summary.rounds, at_ms: world.now.micros() / 1_000 });
        }
        if !world.plan.steps().is_empty() || !cast.coming.is_empty() || world.now < trace.last_step() {
            last_run = world.now;
        }
        let over = cast.coming.is_empty() && world.now >= trace.last_step();
        if (over && world.live.is_empty()) || world.now.since(last_run) > STUCK {
            break;
        }
    }
    summary.close(&world);
    Ok(summary)
}

fn told(world: &World, cast: &Cast, before: (Time, Bytes, Bytes, usize), asked: Vec<Asked>) -> Round {
    let (at, budget, used, past) = before;
    let named = |action: &Action| match action {
        Action::Defer { sequence, .. }
        | Action::Demote { sequence, .. }
        | Action::Park { sequence, .. }
        | Action::Shed { sequence, .. }
        | Action::Admit { sequence, .. }
        | Action::Unpark { sequence, .. }
        | Action::Promote { sequence, .. } => Some(cast.name(*sequence)),
        Action::Release { .. } | Action::Load { .. } => None,
    };
    let done = |action: &Action| Done { sequence: named(action), action: *action };
    let mut round = Round {
        at_us: at,
        budget_bytes: budget,
        before_bytes: used,
        peak_bytes: world.plan.peak(),
        usage_bytes: world.plan.usage(),
        drift_bytes: world.scheduler.drift(),
        asked,
        done: world.plan.actions().iter().map(done).collect(),
        ended: world.past.iter().skip(past).map(|(id, _)| cast.name(*id)).collect(),
        census: census(world),
        standing: Vec::new(),
    };
    if !round.is_quiet() && world.live.len() <= NAMED {
        let standing = world.live.iter().filter_map(|(id, live)| {
            let state = world.scheduler.state_of(*id)?;
            let (cached_tokens, answered_tokens) = (live.cached, live.answered);
            Some(Standing { sequence: cast.name(*id), state, cached_tokens, answered_tokens })
        });
        round.standing = standing.collect();
    }
    round
}

fn census(world: &World) -> Census {
    let mut census = Census {
        rungs: world.scheduler.ladder().rungs().map(|_| (0, 0)).collect(),
        waiting: 0,
        resident: world.resident.iter().copied().collect::<Vec<RungIdx>>(),
    };
    for live in world.live.values() {
        match live.rung.and_then(|rung| census.rungs.get_mut(rung.get())) {
            Some((running, _)) if live.running => *running += 1,
            Some((_, parked)) => *parked += 1,
            None => census.waiting += 1,
        }
    }
    census
}
