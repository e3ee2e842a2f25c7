//! What a replay adds up to.

use std::collections::BTreeMap;

use molt_scheduler::simulator::{Live, World};
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Action, Class, Policy, TenantId};
use serde::Serialize;

use super::{Round, Setup};

/// What a replay adds up to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The trace.
    pub trace: String,
    /// The tenants' file, by its own name.
    pub tenants_name: String,
    /// The ladder.
    pub ladder: String,
    /// Who bore the levers.
    pub policy: Policy,
    /// Rounds in all.
    pub rounds: u64,
    /// Time of the trace.
    pub lasted_us: Time,
    /// How often each lever was used on somebody.
    pub levers: LeverCounts,
    /// How often somebody went up.
    pub promotions: u64,
    /// How often somebody came back.
    pub returns: u64,
    /// Weights that came into memory.
    pub loads: u64,
    /// Largest usage minus budget after a round; zero or less: the budget was always kept.
    pub overshoot_bytes_max: i64,
    /// Largest difference between measured and expected usage, either way.
    pub drift_bytes_max: u64,
    /// Time that sequences spent on each rung, added up.
    pub rungs: Vec<RungTime>,
    /// Tenant by tenant.
    pub tenants: Vec<TenantSummary>,
    #[serde(skip)]
    index: BTreeMap<TenantId, usize>,
}

/// Uses of the levers, counted by sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LeverCounts {
    /// Requests that had to wait.
    pub defer: u64,
    /// Downward changes of rung.
    pub demote: u64,
    /// Stops.
    pub park: u64,
    /// Times that old context went.
    pub shed: u64,
}

/// Time on a rung.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RungTime {
    /// Running.
    pub running_us: Span,
    /// Parked.
    pub parked_us: Span,
}

/// A tenant's lot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TenantSummary {
    /// Its name.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// Its weight.
    pub weight: u16,
    /// Requests in all.
    pub requests: u64,
    /// Of them, refused.
    pub refused: u64,
    /// Of them, served to the end.
    pub finished: u64,
    /// Tokens read and written.
    pub served_tokens: Tokens,
    /// The waits of those who were let in, added up.
    pub wait_us_sum: Span,
    /// The longest of them.
    pub wait_us_max: Span,
    /// How many were let in.
    pub admitted: u64,
    /// The longest time that one of its sequences was parked.
    pub parked_us_max: Span,
}

impl TenantSummary {
    /// How long a request waited to be let in, on average.
    pub fn wait_mean(&self) -> Span {
        Span::from_micros(self.wait_us_sum.micros().checked_div(self.admitted).unwrap_or(0))
    }

    fn add(&mut self, live: &Live, now: Time) {
        if let Some(admitted) = live.admitted {
            let wait = admitted.since(live.born);
            self.admitted += 1;
            self.wait_us_sum = self.wait_us_sum + wait;
            self.wait_us_max = self.wait_us_max.max(wait);
        }
        let parked = live.stopped.map_or(Span::ZERO, |since| now.since(since));
        self.parked_us_max = self.parked_us_max.max(live.parked_max).max(parked);
    }
}

impl Summary {
    pub(super) fn new(setup: &Setup<'_>, names: &BTreeMap<TenantId, String>) -> Self {
        let tenants = names.values().zip(&setup.tenants.tenants).map(|(name, profile)| TenantSummary {
            name: name.clone(),
            class: profile.spec.class,
            weight: profile.spec.weight.get(),
            requests: 0,
            refused: 0,
            finished: 0,
            served_tokens: Tokens::ZERO,
            wait_us_sum: Span::ZERO,
            wait_us_max: Span::ZERO,
            admitted: 0,
            parked_us_max: Span::ZERO,
        });
        Self {
            trace: setup.trace.name().to_owned(),
            tenants_name: setup.tenants.name.clone(),
            ladder: setup.costs.name.clone(),
            policy: setup.policy,
            rounds: 0,
            lasted_us: Time::START,
            levers: LeverCounts::default(),
            promotions: 0,
            returns: 0,
            loads: 0,
            overshoot_bytes_max: i64::MIN,
            drift_bytes_max: 0,
            rungs: setup.costs.ladder.rungs().map(|_| RungTime::default()).collect(),
            tenants: tenants.collect(),
            index: names.keys().copied().zip(0..).collect(),
        }
    }

    fn tenant(&mut self, id: TenantId) -> Option<&mut TenantSummary> {
        self.index.get(&id).and_then(|index| self.tenants.get_mut(*index))
    }

    pub(super) fn asked(&mut self, tenant: TenantId, refused: bool) {
        if let Some(own) = self.tenant(tenant) {
            own.requests += 1;
            own.refused += u64::from(refused);
        }
    }

    /// Counts a round, after which the world stands where it does; those who ended before it are `past`.
    pub(super) fn count(&mut self, round: &Round, world: &World, past: usize) {
        self.rounds += 1;
        let took = world.now.since(round.at_us);
        for (time, (running, parked)) in self.rungs.iter_mut().zip(&round.census.rungs) {
            time.running_us = time.running_us + took.times(*running);
            time.parked_us = time.parked_us + took.times(*parked);
        }
        for done in &round.done {
            let count = match done.action {
                Action::Defer { .. } => &mut self.levers.defer,
                Action::Demote { .. } => &mut self.levers.demote,
                Action::Park { .. } => &mut self.levers.park,
                Action::Shed { .. } => &mut self.levers.shed,
                Action::Promote { .. } => &mut self.promotions,
                Action::Unpark { .. } => &mut self.returns,
                Action::Load { .. } => &mut self.loads,
                Action::Release { .. } | Action::Admit { .. } => continue,
            };
            *count += 1;
        }
        self.overshoot_bytes_max = self.overshoot_bytes_max.max(difference(round.usage_bytes, round.budget_bytes));
        self.drift_bytes_max = self.drift_bytes_max.max(round.drift_bytes.unsigned_abs());
        for (_, live) in world.past.iter().skip(past) {
            if let Some(own) = self.tenant(live.tenant) {
                own.finished += 1;
                own.add(live, world.now);
            }
        }
    }

    /// Adds what is still there, and what everybody was served.
    pub(super) fn close(&mut self, world: &World) {
        self.lasted_us = world.now;
        for live in world.live.values() {
            if let Some(own) = self.tenant(live.tenant) {
                own.add(live, world.now);
            }
        }
        for (id, served) in &world.served {
            if let Some(own) = self.tenant(*id) {
                own.served_tokens = *served;
            }
        }
    }
}

fn difference(a: Bytes, b: Bytes) -> i64 {
    let wide = |bytes: Bytes| i64::try_from(bytes.get()).unwrap_or(i64::MAX);
    wide(a).saturating_sub(wide(b))
}

/// A rung by its place in a list.
pub(super) fn rung(index: usize) -> RungIdx {
    RungIdx::new(u8::try_from(index).unwrap_or(u8::MAX))
}
