//! The scheduler's state and what may be asked of it. A round itself is in [`crate::round`].

use serde::{Deserialize, Serialize};

use crate::cost::LadderCost;
use crate::ids::{SequenceId, TenantId};
use crate::input::{Class, Config, Observation, Refusal, Request, TenantSpec};
use crate::plan::Plan;
use crate::queue::{self, Account, End, Queues};
use crate::round::Scratch;
use crate::slab::Slab;
use crate::state::{Phase, Sequence, SequenceState, Tenant};
use crate::units::{Bytes, RungIdx, Span, Time, Tokens};
use crate::usage::{Books, Entry, RungSet};

/// The longest pause between two attempts at a rung that does not load, in multiples of [`Config::patience`].
const BACK_OFF_LIMIT: u64 = 32;

/// The core: state, and a plan for every observation.
///
/// It assumes that every plan is executed exactly and in order; what went otherwise it is told by
/// [`Scheduler::load_failed`] and by the next observation's progress and usage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scheduler {
    pub(crate) ladder: LadderCost,
    pub(crate) config: Config,
    pub(crate) tenants: Slab<Tenant>,
    pub(crate) sequences: Slab<Sequence>,
    pub(crate) queues: Queues,
    pub(crate) resident: RungSet,
    pub(crate) rungs: Vec<RungState>,
    /// Measured minus expected usage in the last round.
    pub(crate) drift_bytes: i64,
    /// Requests ever accepted.
    pub(crate) arrivals: u64,
    /// Sequences ever parked.
    pub(crate) parkings: u64,
    /// When somebody last bore a lever worse than deferral.
    pub(crate) pressed: Option<Time>,
    /// The last round, and whether anybody stepped in it.
    pub(crate) last_round: Option<(Time, bool)>,
    /// Smoothed time from one round with steps to the next.
    pub(crate) pace: Span,
    /// Where those stood who came to a rung that the last plan loads, should the load fail.
    pub(crate) came: Vec<(SequenceId, Phase)>,
    #[serde(skip)]
    pub(crate) scratch: Scratch,
}

/// What is known of a rung beyond its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct RungState {
    /// The last plan loads it; no word of failure yet.
    pub(crate) loading: bool,
    /// Since when every round found room to promote somebody to it.
    pub(crate) room_since: Option<Time>,
    /// It failed to load: not before then, and how long the pause was.
    pub(crate) retry: Option<(Time, Span)>,
}

impl Scheduler {
    /// A scheduler without tenants and with nothing resident.
    pub fn new(ladder: LadderCost, config: Config) -> Self {
        let rungs = ladder.rungs().map(|_| RungState::default()).collect();
        Self {
            ladder,
            config,
            tenants: Slab::default(),
            sequences: Slab::default(),
            queues: Queues::default(),
            resident: RungSet::EMPTY,
            rungs,
            drift_bytes: 0,
            arrivals: 0,
            parkings: 0,
            pressed: None,
            last_round: None,
            pace: Span::ZERO,
            came: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    /// The ladder's costs.
    pub fn ladder(&self) -> &LadderCost {
        &self.ladder
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Registers a tenant. A ceiling below the ladder becomes its smallest rung, and a floor that is above the ceiling
    /// or below the ladder becomes the nearest rung between the two: nobody is refused for naming rungs of another
    /// ladder.
    pub fn register(&mut self, mut spec: TenantSpec) -> TenantId {
        let bottom = self.ladder.bottom();
        spec.ceiling = spec.ceiling.min(bottom);
        spec.floor = spec.floor.clamp(spec.ceiling, bottom);
        self.tenants.insert(TenantId::new, |id| Tenant { id, spec, account: Account::default() })
    }

    /// Forgets a tenant. Its sequences end as if its client had cancelled each of them, which is its wish and not the
    /// scheduler's.
    pub fn deregister(&mut self, tenant: TenantId) {
        if self.tenants.get(tenant.parts()).is_none() {
            return;
        }
        let of = |sequence: &&Sequence| sequence.tenant == tenant;
        let ids: Vec<SequenceId> = self.sequences.iter().filter(of).map(|found| found.id).collect();
        ids.into_iter().for_each(|id| self.cancel(id));
        self.tenants.remove(tenant.parts());
    }

    /// Takes a request into the queue of its class, or refuses it at once and for good.
    pub fn submit(&mut self, request: Request, now: Time) -> Result<SequenceId, Refusal> {
        let Request { tenant: owner, prompt, pinned, answer } = request;
        let Some(tenant) = self.tenants.get(owner.parts()) else {
            return Err(Refusal::UnknownTenant { tenant: owner });
        };
        let spec = &tenant.spec;
        let longest = prompt + answer;
        if prompt == Tokens::ZERO {
            return Err(Refusal::EmptyPrompt);
        }
        if longest > spec.context_limit {
            return Err(Refusal::OverContext { prompt, answer, limit: spec.context_limit });
        }
        if let Some(quota) = spec.quota.filter(|quota| longest > *quota) {
            return Err(Refusal::OverQuota { asked: longest, quota });
        }
        let needs = self.config.overhead + self.ladder.alone(self.ladder.bottom(), longest).unwrap_or(Bytes::MAX);
        if needs > self.config.budget_limit {
            return Err(Refusal::NeverFits { needs, limit: self.config.budget_limit });
        }
        let class = spec.class;
        self.has_room(owner, class)?;
        let order = self.arrivals;
        self.arrivals += 1;
        let (weight, floor, ceiling) = (u64::from(spec.weight.get()), spec.floor, spec.ceiling);
        let id = self.sequences.insert(SequenceId::new, |id| Sequence {
            id,
            tenant: owner,
            class,
            weight,
            floor,
            ceiling,
            pinned: pinned.min(prompt),
            longest,
            answer,
            cached: Tokens::ZERO,
            prompt_left: prompt,
            answered: Tokens::ZERO,
            submitted: now,
            order,
            ahead: None,
            switched: None,
            credit: crate::steps::ONE_TOKEN,
            phase: Phase::Waiting { told: false, overtaken: 0 },
        });
        self.enqueue(id, End::Back);
        Ok(id)
    }

    /// The client left: the sequence and its cache are gone from the books at once. A name that is gone is ignored.
    pub fn cancel(&mut self, sequence: SequenceId) {
        let Some(found) = self.sequences.get(sequence.parts()) else { return };
        match found.phase {
            phase @ Phase::Waiting { .. } => self.dequeue(sequence, phase),
            Phase::Running { .. } | Phase::Parked { .. } => {
                let gone = found.clone();
                self.refund(&gone);
            }
        }
        self.sequences.remove(sequence.parts());
    }

    /// Observes and plans. The plan is cleared first and then holds what the engine must do, in order.
    pub fn round(&mut self, observation: &Observation<'_>, plan: &mut Plan) {
        crate::round::round(self, observation, plan);
    }

    /// The engine could not load a rung that the last plan loads, and executed nothing that needed it.
    ///
    /// Whoever came to that rung is put back: a new request to the front of its queue, a sequence from another rung to
    /// that rung if its weights are still there, and otherwise it is parked there with its cache. The rung is tried
    /// again after [`Config::patience`], then after twice that, and so on up to 32 times that.
    pub fn load_failed(&mut self, rung: RungIdx, now: Time) {
        let patience = self.config.patience;
        let Some(state) = self.rungs.get_mut(rung.get()) else { return };
        let pause = match state.retry {
            Some((_, last)) => last.micros().saturating_mul(2).min(patience.micros().saturating_mul(BACK_OFF_LIMIT)),
            None => patience.micros(),
        };
        let pause = Span::from_micros(pause.max(1));
        state.retry = Some((now + pause, pause));
        state.loading = false;
        self.resident = self.resident.without(rung);
        let mut came = std::mem::take(&mut self.came);
        for (id, origin) in came.iter().rev() {
            let Some(sequence) = self.sequences.get_mut(id.parts()) else { continue };
            if sequence.phase != (Phase::Running { rung }) {
                continue;
            }
            sequence.phase = match *origin {
                Phase::Running { rung: from } if !self.resident.contains(from) => {
                    self.parkings += 1;
                    Phase::Parked { rung: from, since: now, ticket: self.parkings }
                }
                other => other,
            };
            if matches!(origin, Phase::Waiting { .. }) {
                let back = sequence.clone();
                self.refund(&back);
                self.enqueue(*id, End::Front);
            }
        }
        came.retain(|(id, _)| {
            let phase = self.sequences.get(id.parts()).map(|sequence| sequence.phase);
            matches!(phase, Some(Phase::Running { .. }))
        });
        self.came = came;
        for sequence in self.sequences.iter_mut().filter(|sequence| sequence.phase == (Phase::Running { rung })) {
            self.parkings += 1;
            sequence.phase = Phase::Parked { rung, since: now, ticket: self.parkings };
        }
    }

    /// Where a sequence stands, or `None` once it is gone.
    pub fn state_of(&self, sequence: SequenceId) -> Option<SequenceState> {
        let found = self.sequences.get(sequence.parts())?;
        Some(match found.phase {
            Phase::Waiting { .. } => {
                SequenceState::Waiting { place: self.place(found.class, sequence).unwrap_or(u32::MAX) }
            }
            Phase::Running { rung } => SequenceState::Running { rung },
            Phase::Parked { rung, .. } => SequenceState::Parked { rung },
        })
    }

    /// The rung of a sequence's cache and whether it runs: its state without its place in a queue, which takes a walk.
    pub(crate) fn standing(&self, sequence: SequenceId) -> Option<(Option<RungIdx>, bool)> {
        let found = self.sequences.get(sequence.parts())?;
        Some((found.rung(), matches!(found.phase, Phase::Running { .. })))
    }

    /// What should be in use now, by the scheduler's own books.
    pub fn expected_usage(&self) -> Bytes {
        self.config.overhead + self.books().level(&self.ladder, self.resident)
    }

    /// Measured minus expected usage in the last round, in bytes. While it is above zero, that much of the budget is
    /// set aside, since whatever it is, it is there. Below zero nothing is made of it.
    pub fn drift(&self) -> i64 {
        self.drift_bytes
    }

    /// The biggest rung to which somebody goes up if there is room for as long as that takes.
    pub fn rising_to(&self) -> Option<RungIdx> {
        let mut rungs = self.ladder.rungs().zip(&self.rungs);
        rungs.find_map(|((rung, _), state)| state.room_since.map(|_| rung))
    }

    /// Rungs whose weights are in memory once the last plan is executed, biggest first.
    pub fn resident(&self) -> impl Iterator<Item = RungIdx> {
        self.resident.iter()
    }

    /// The wait for a place in a queue, as far as it can be told.
    pub(crate) fn wait(&self, place: u32) -> Option<Span> {
        let (running, left) = self.work();
        queue::estimate(place, running, left, self.pace)
    }

    /// How many run, and how many tokens they may still read and write.
    pub(crate) fn work(&self) -> (u64, u64) {
        self.sequences.iter().fold((0, 0), |(running, left), sequence| match sequence.phase {
            Phase::Running { .. } => (running + 1, sequence.growth(Tokens::MAX).get().saturating_add(left)),
            Phase::Waiting { .. } | Phase::Parked { .. } => (running, left),
        })
    }

    /// What a sequence brings to the books.
    pub(crate) fn entry(&self, sequence: &Sequence) -> Entry {
        Entry {
            cached: sequence.cached,
            near: sequence.growth(self.config.shed_block),
            far: sequence.growth(self.config.admit_for_tokens),
        }
    }

    /// The books of everybody who is in.
    pub(crate) fn books(&self) -> Books {
        let mut books = Books::default();
        for sequence in self.sequences.iter() {
            if let Some(rung) = sequence.rung() {
                books.keep(rung, sequence.cached);
            }
            if let Phase::Running { rung } = sequence.phase {
                books.start(rung, self.entry(sequence));
            }
        }
        books
    }

    /// Rungs that are resident or may be loaded now.
    pub(crate) fn usable(&self, now: Time) -> RungSet {
        let mut set = RungSet::EMPTY;
        for ((rung, _), state) in self.ladder.rungs().zip(&self.rungs) {
            if self.resident.contains(rung) || state.retry.is_none_or(|(at, _)| at <= now) {
                set = set.with(rung);
            }
        }
        set
    }

    /// The classes in the order in which they are let in.
    pub(crate) const CLASSES: [Class; 2] = [Class::Foreground, Class::Batch];
}
