//! An engine of a few lines: it executes plans over a model of memory, keeps books of its own, and checks every plan
//! against the laws that hold for any engine.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;

use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{
    Action, Class, Config, LadderCost, Observation, Plan, Progress, Refusal, Request, RungCost, Scheduler, SequenceId,
    SequenceState, TenantId, TenantSpec,
};

/// How the engine sees a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Live {
    pub tenant: TenantId,
    pub class: Class,
    pub weight: u16,
    pub floor: RungIdx,
    pub pinned: u64,
    pub rung: Option<RungIdx>,
    pub running: bool,
    pub cached: u64,
    pub prompt_left: u64,
    pub answered: u64,
    pub answer: u64,
    pub switches: u64,
    pub promotions: u64,
    pub born: Time,
}

/// The engine and the scheduler it serves.
#[derive(Debug, Clone)]
pub struct World {
    pub scheduler: Scheduler,
    pub plan: Plan,
    pub live: BTreeMap<SequenceId, Live>,
    pub resident: BTreeSet<RungIdx>,
    pub progress: Vec<Progress>,
    pub now: Time,
    pub step: Span,
    pub finished: Vec<SequenceId>,
    pub served: BTreeMap<TenantId, u64>,
    /// Switches of those who are finished, with their promotions and the time they were there.
    pub past: Vec<Live>,
    pub specs: BTreeMap<TenantId, TenantSpec>,
    /// Bytes that the engine uses and the scheduler knows nothing of.
    pub leak: u64,
    /// Loads of these rungs fail.
    pub broken: BTreeSet<RungIdx>,
    /// Tokens cached, by sequence, when the last round was planned.
    pub planned: BTreeMap<SequenceId, u64>,
}

pub fn rung(weights: u64, cache_per_token: u64, scratch: u64) -> RungCost {
    RungCost {
        weights: Bytes::new(weights),
        cache_per_token: Bytes::new(cache_per_token),
        scratch: Bytes::new(scratch),
    }
}

pub fn tenant(class: Class, weight: u16, ceiling: u8, floor: u8) -> TenantSpec {
    TenantSpec {
        class,
        weight: NonZeroU16::new(weight).unwrap(),
        floor: RungIdx::new(floor),
        ceiling: RungIdx::new(ceiling),
        context_limit: Tokens::new(1 << 20),
        quota: None,
    }
}

impl World {
    pub fn new(rungs: Vec<RungCost>, config: Config) -> Self {
        let scheduler = Scheduler::new(LadderCost::new(rungs).unwrap(), config);
        Self {
            scheduler,
            plan: Plan::new(),
            live: BTreeMap::new(),
            resident: BTreeSet::new(),
            progress: Vec::new(),
            now: Time::START,
            step: Span::from_millis(100),
            finished: Vec::new(),
            served: BTreeMap::new(),
            past: Vec::new(),
            specs: BTreeMap::new(),
            leak: 0,
            broken: BTreeSet::new(),
            planned: BTreeMap::new(),
        }
    }

    pub fn register(&mut self, spec: TenantSpec) -> TenantId {
        let id = self.scheduler.register(spec.clone());
        self.specs.insert(id, spec);
        id
    }

    pub fn submit(&mut self, tenant: TenantId, prompt: u64, pinned: u64, answer: u64) -> Result<SequenceId, Refusal> {
        let request =
            Request { tenant, prompt: Tokens::new(prompt), pinned: Tokens::new(pinned), answer: Tokens::new(answer) };
        let id = self.scheduler.submit(request, self.now)?;
        let spec = &self.specs[&tenant];
        let bottom = self.scheduler.ladder().bottom();
        let live = Live {
            tenant,
            class: spec.class,
            weight: spec.weight.get(),
            floor: spec.floor.clamp(spec.ceiling.min(bottom), bottom),
            pinned: pinned.min(prompt),
            rung: None,
            running: false,
            cached: 0,
            prompt_left: prompt,
            answered: 0,
            answer,
            switches: 0,
            promotions: 0,
            born: self.now,
        };
        self.live.insert(id, live);
        Ok(id)
    }

    pub fn cost(&self, rung: RungIdx) -> RungCost {
        self.scheduler.ladder().get(rung).expect("a rung of the ladder")
    }

    pub fn cache(&self, rung: RungIdx, cached: u64) -> u64 {
        self.cost(rung).cache_per_token.get() * cached
    }

    /// Usage by the engine's own books.
    pub fn usage(&self) -> u64 {
        let held: u64 =
            self.resident.iter().map(|rung| self.cost(*rung).weights.get() + self.cost(*rung).scratch.get()).sum();
        let caches: u64 =
            self.live.values().map(|live| live.rung.map_or(0, |rung| self.cache(rung, live.cached))).sum();
        self.scheduler.config().overhead.get() + held + caches + self.leak
    }

    /// What is left when all weights are gone and every cache is shed as far as it goes.
    pub fn rock_bottom(&self) -> u64 {
        let config = self.scheduler.config();
        let kept = |live: &Live| {
            let front = live.pinned.max(config.sinks.get());
            let block = config.shed_block.get();
            live.cached - live.cached.saturating_sub(front + config.window.get()) / block * block
        };
        let caches: u64 = self.live.values().map(|live| live.rung.map_or(0, |rung| self.cache(rung, kept(live)))).sum();
        config.overhead.get() + caches + self.leak
    }

    /// One round: plan, execute, step. Checks every law that an engine can see; returns the first one broken.
    pub fn round(&mut self, budget: u64) -> Result<(), String> {
        let before = self.usage();
        let bottom = self.rock_bottom();
        self.planned = self.live.iter().map(|(id, live)| (*id, live.cached)).collect();
        let progress = std::mem::take(&mut self.progress);
        let usage = Bytes::new(before);
        let observation = Observation { now: self.now, budget: Bytes::new(budget), usage, progress: &progress };
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.round(&observation, &mut plan);
        let result = self.execute(&plan, budget, before, bottom);
        self.plan = plan;
        self.now = self.now + self.step;
        result
    }

    fn execute(&mut self, plan: &Plan, budget: u64, before: u64, bottom: u64) -> Result<(), String> {
        let mut cap = before.max(budget);
        let mut peak = before;
        let mut loads = false;
        let mut failed = BTreeSet::new();
        for action in plan.actions() {
            let wrong = |what: &str| Err(format!("{what}: {action:?} at {:?}", self.now));
            let mut way = 0;
            match *action {
                Action::Defer { sequence, .. } => {
                    if self.live[&sequence].rung.is_some() {
                        return wrong("deferred though inside");
                    }
                }
                Action::Park { sequence, rung, .. } => {
                    let live = self.live.get_mut(&sequence).unwrap();
                    if !live.running || live.rung != Some(rung) {
                        return wrong("parked though not running there");
                    }
                    live.running = false;
                }
                Action::Shed { sequence, from, tokens, frees } => {
                    let config = self.scheduler.config();
                    let (window, block) = (config.window.get(), config.shed_block.get());
                    let live = &self.live[&sequence];
                    let front = live.pinned.max(config.sinks.get());
                    let fine = from.get() == front && tokens.get() % block == 0;
                    if !fine || front + tokens.get() + window > live.cached {
                        return wrong("shed what must be kept");
                    }
                    if frees.get() != self.cache(live.rung.unwrap(), tokens.get()) {
                        return wrong("shed frees another sum");
                    }
                    self.live.get_mut(&sequence).unwrap().cached -= tokens.get();
                }
                Action::Release { rung, .. } => {
                    if loads || !self.resident.remove(&rung) {
                        return wrong("released late or not there");
                    }
                }
                Action::Load { rung, .. } if self.broken.contains(&rung) => {
                    loads = true;
                    failed.insert(rung);
                }
                Action::Load { rung, .. } => {
                    loads = true;
                    if !self.resident.insert(rung) {
                        return wrong("loaded twice");
                    }
                }
                Action::Demote { to, .. }
                | Action::Promote { to, .. }
                | Action::Admit { rung: to, .. }
                | Action::Unpark { rung: to, .. }
                    if failed.contains(&to) => {}
                Action::Demote { sequence, from, to, .. } | Action::Promote { sequence, from, to } => {
                    let live = &self.live[&sequence];
                    let up = to < from;
                    if up != matches!(action, Action::Promote { .. }) || from == to {
                        return wrong("the wrong way");
                    }
                    if live.rung != Some(from) || !self.resident.contains(&to) {
                        return wrong("carried from or to where it cannot");
                    }
                    let patient = !live.running;
                    if !up && to > live.floor && !patient {
                        return wrong("demoted below its floor");
                    }
                    way = self.cache(to, live.cached);
                    let over = self.usage() + way;
                    peak = peak.max(over);
                    if over > cap {
                        return wrong(&format!("peak {over} over {cap}"));
                    }
                    let live = self.live.get_mut(&sequence).unwrap();
                    live.rung = Some(to);
                    live.switches += 1;
                    live.promotions += u64::from(up);
                    way = 0;
                }
                Action::Admit { sequence, rung } => {
                    let live = self.live.get_mut(&sequence).unwrap();
                    if live.rung.is_some() || !self.resident.contains(&rung) {
                        return wrong("admitted where it cannot be");
                    }
                    (live.rung, live.running) = (Some(rung), true);
                }
                Action::Unpark { sequence, rung } => {
                    let live = self.live.get_mut(&sequence).unwrap();
                    if live.running || live.rung != Some(rung) || !self.resident.contains(&rung) {
                        return wrong("unparked where it cannot be");
                    }
                    live.running = true;
                }
            }
            let usage = self.usage() + way;
            peak = peak.max(usage);
            if usage > cap {
                return wrong(&format!("usage {usage} over {cap}"));
            }
            if usage <= budget {
                cap = budget;
            }
        }
        for rung in &failed {
            self.scheduler.load_failed(*rung, self.now);
            for live in self.live.values_mut().filter(|live| live.rung.is_some_and(|on| !self.resident.contains(&on))) {
                live.running = false;
            }
        }
        for step in plan.steps() {
            let live = self.live.get_mut(&step.sequence).unwrap();
            if failed.contains(&step.rung) {
                continue;
            }
            let tokens = step.tokens.get();
            let fine = live.running && live.rung == Some(step.rung) && self.resident.contains(&step.rung) && tokens > 0;
            if !fine || step.prefill != (live.prompt_left > 0) || (!step.prefill && tokens != 1) {
                return Err(format!("a step that cannot be: {step:?} of {live:?} at {:?}", self.now));
            }
            live.cached += tokens;
            if step.prefill {
                live.prompt_left -= tokens;
            }
            if live.prompt_left == 0 {
                live.answered += 1;
            }
            *self.served.entry(live.tenant).or_default() += tokens;
            let finished = live.prompt_left == 0 && live.answered >= live.answer;
            self.progress.push(Progress {
                sequence: step.sequence,
                cached: Tokens::new(live.cached),
                prompt_left: Tokens::new(live.prompt_left),
                answered: Tokens::new(live.answered),
                finished,
            });
        }
        let usage = self.usage();
        peak = peak.max(usage);
        if failed.is_empty() {
            if usage > budget && bottom <= budget {
                return Err(format!("usage {usage} over budget {budget} at {:?}, though {bottom} would fit", self.now));
            }
            if usage > before.max(budget) {
                return Err(format!("usage rose from {before} to {usage} over budget {budget}"));
            }
            if self.scheduler.drift() >= 0 && (plan.usage().get() != usage || plan.peak().get() != peak) {
                let (said, top) = (plan.usage(), plan.peak());
                return Err(format!("plan says usage {} peak {}, it was {usage} and {peak}", said.get(), top.get()));
            }
        }
        for progress in self.progress.iter().filter(|progress| progress.finished) {
            let live = self.live.remove(&progress.sequence).unwrap();
            self.past.push(live);
            self.finished.push(progress.sequence);
        }
        self.agree()
    }

    /// Scheduler and engine say the same of everybody.
    fn agree(&self) -> Result<(), String> {
        for (id, live) in &self.live {
            let said = self.scheduler.state_of(*id);
            let fine = match said {
                Some(SequenceState::Waiting { .. }) => live.rung.is_none(),
                Some(SequenceState::Running { rung }) => live.running && live.rung == Some(rung),
                Some(SequenceState::Parked { rung }) => !live.running && live.rung == Some(rung),
                None => false,
            };
            if !fine {
                return Err(format!("{id} is {said:?}, and {live:?} at {:?}", self.now));
            }
        }
        let resident: BTreeSet<RungIdx> = self.scheduler.resident().collect();
        if resident == self.resident { Ok(()) } else { Err(format!("resident {resident:?}, and {:?}", self.resident)) }
    }
}
