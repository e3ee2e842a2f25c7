//! The engine: executes the scheduler's plans on real models. It runs on one thread and blocks; nothing here is
//! asynchronous.

mod ahead;
mod background;
mod carry;
mod effort;
mod left;
mod prefix;
mod reaction;
mod recover;
mod resume;
mod sequence;
mod standby;
mod step;
mod stop;
mod wording;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use molt_kv::bridge::Bridge;
use molt_kv::carry::buffer_bytes as carry_buffers;
use molt_kv::decoder::StopFlag;
use molt_kv::ledger::{Charge, Kind, Ledger};
use molt_kv::region::trim_heap;
use molt_kv::rope::Rope;
use molt_models::{CHUNK, Ladder, Model, ModelError};
use molt_scheduler::units::{Bytes, RungIdx, Time, Tokens};
use molt_scheduler::{
    Action, Class, Config, LadderCost, LadderCostError, LeverKind, Observation, Plan, Progress, Refusal, Request,
    RungCost, Scheduler, SequenceId, TenantId, TenantSpec,
};

use ahead::Ahead;
pub use ahead::{AheadSettings, Shadow};
pub use background::HealSettings;
pub use effort::{Effort, pace};
pub use left::LeftPrefix;
pub(crate) use left::MOST as MOST_LEFT;
use reaction::Reaction;
pub use resume::{Begun, Said};
pub use sequence::AnswerRequest;
use sequence::Sequence;
use standby::Standby;

use crate::alarm::Alarm;
use crate::engine::prefix::Prefixes;
use crate::event::{Event, TroubleKind};
use crate::memory::{resident_files, resident_set};
use crate::sampler::Books;

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct EngineSettings {
    /// What is read natively in a carry over a bridge.
    pub carry: Effort,
    /// Where keepsakes are written (unlinked); `None` keeps none.
    pub keepsakes: Option<PathBuf>,
    /// How much is read natively in the background after a carry.
    pub heal: HealSettings,
    /// How much is read natively in the background before a sequence goes to another rung.
    pub ahead: AheadSettings,
    /// How many ended conversations of each tenant keep their cache for the next turn.
    pub conversations: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        // On most systems /tmp is memory again; /var/tmp is on disk (Filesystem Hierarchy Standard).
        let disk = PathBuf::from("/var/tmp");
        let folder = if disk.is_dir() { disk } else { std::env::temp_dir() };
        let (heal, ahead) = (HealSettings::default(), AheadSettings::default());
        Self { carry: Effort::default(), keepsakes: Some(folder), heal, ahead, conversations: 4 }
    }
}

/// Why the engine could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A bridge of the ladder is unusable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// With its bridges the ladder's rungs do not fall in size.
    #[error("the ladder")]
    Cost(#[from] LadderCostError),
}

/// A rung whose weights are resident.
#[derive(Debug)]
struct Loaded {
    model: Model,
    /// Bridges that lead here, by the source hash of the model they lead from.
    bridges: BTreeMap<String, Bridge>,
}

/// Models, caches and the scheduler that decides about them.
#[derive(Debug)]
pub struct Engine {
    ladder: Arc<Ladder>,
    settings: EngineSettings,
    ledger: Ledger,
    overhead: Bytes,
    /// Of the overhead, pages of files.
    overhead_files: Bytes,
    scheduler: Scheduler,
    plan: Plan,
    progress: Vec<Progress>,
    ropes: Vec<Rope>,
    loaded: BTreeMap<RungIdx, Loaded>,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// What ended conversations have left.
    prefixes: Prefixes,
    /// What has been read where somebody may go next.
    ahead: Ahead,
    /// What the round's plan leaves of the budget for these.
    spare: Bytes,
    tenants: BTreeMap<TenantId, (String, Class)>,
    /// The budget that was told last.
    budget: Option<Bytes>,
    /// Tokens read in the last round.
    read_tokens: usize,
    /// Rounds since something was healed.
    unhealed_rounds: u32,
    /// Floating-point operations in a millisecond, when many tokens were last read at once.
    flops_per_ms: Option<f64>,
    alarm: Alarm,
    reaction: Reaction,
    standby: Standby,
    /// The tables of grammars in the books, once there are any.
    tables: Option<Charge>,
    /// Rounds that have failed one after another.
    failed_rounds: u32,
    /// Never raised: what is being done to give memory back is not given up because more is wanted.
    calm: StopFlag,
    events: Vec<Told>,
}

/// A measured budget moves all the time; what is less than this part of the one last told is not told.
const TOLD_SHARE: u64 = 64;

/// What happened, and to which sequence if to one.
pub type Told = (Option<SequenceId>, Event);

/// What the scheduler should know of a ladder: its rungs' costs, the bridges that lead to a rung counted as its scratch,
/// and with them the buffers of a carry, which come and go: while one lasts nothing may be over the budget either.
pub fn ladder_cost(ladder: &Ladder) -> Result<LadderCost, EngineError> {
    let mut rungs = Vec::new();
    for (rung, cost) in ladder.cost().rungs() {
        // Opened only to be measured: a rung's bridges are mapped and charged while the rung is loaded.
        let ledger = Ledger::new();
        let bridges = bridges_to(ladder, rung, &ledger)?;
        let buffers = bridges.values().map(|bridge| carry_buffers(bridge, CHUNK)).max().unwrap_or(Bytes::ZERO);
        rungs.push(RungCost { scratch: cost.scratch + ledger.total() + buffers, ..cost });
    }
    Ok(LadderCost::new(rungs)?)
}

/// The bridges that lead to a rung, by the source hash of the model they lead from.
fn bridges_to(ladder: &Ladder, to: RungIdx, ledger: &Ledger) -> Result<BTreeMap<String, Bridge>, ModelError> {
    let mut bridges = BTreeMap::new();
    for (from, _) in ladder.cost().rungs() {
        let Some(source) = ladder.rung(from).map(|r| r.source().to_owned()) else { continue };
        if bridges.contains_key(&source) {
            continue;
        }
        if let Some(bridge) = ladder.bridge(from, to, ledger)? {
            bridges.insert(source, bridge);
        }
    }
    Ok(bridges)
}

impl Engine {
    /// An engine with nothing loaded. What the process takes at this moment is its overhead.
    pub fn new(ladder: Arc<Ladder>, config: Config, settings: EngineSettings) -> Result<Self, EngineError> {
        let cost = ladder_cost(&ladder)?;
        let overhead = resident_set();
        let conversations = settings.conversations;
        let ropes = ladder.rungs().iter().map(|r| r.config().rope()).collect();
        Ok(Self {
            scheduler: Scheduler::new(cost, Config { overhead, catch_up: settings.ahead.wait(), ..config }),
            ladder,
            settings,
            ledger: Ledger::new(),
            overhead,
            overhead_files: resident_files(),
            plan: Plan::new(),
            progress: Vec::new(),
            ropes,
            loaded: BTreeMap::new(),
            sequences: BTreeMap::new(),
            prefixes: Prefixes::new(conversations),
            ahead: Ahead::default(),
            spare: Bytes::ZERO,
            tenants: BTreeMap::new(),
            budget: None,
            read_tokens: 0,
            unhealed_rounds: 0,
            flops_per_ms: None,
            alarm: Alarm::default(),
            reaction: Reaction::default(),
            standby: Standby::default(),
            tables: None,
            failed_rounds: 0,
            calm: StopFlag::new(),
            events: Vec::new(),
        })
    }

    /// Rung by whoever wants memory back sooner than at the end of a round: what the engine reads or loads is given up and
    /// done again later.
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// What the process takes before any model.
    pub fn overhead(&self) -> Bytes {
        self.overhead
    }

    /// Bytes in use by the books, overhead included.
    pub fn usage(&self) -> Bytes {
        self.overhead + self.ledger.total()
    }

    /// The books, for whoever looks on from another thread.
    pub fn books(&self) -> Books {
        Books::new(self.ledger.clone(), self.overhead)
    }

    /// The scheduler's view of the ladder.
    pub fn cost(&self) -> &LadderCost {
        self.scheduler.ladder()
    }

    /// Registers a tenant.
    pub fn register(&mut self, name: &str, spec: TenantSpec) -> TenantId {
        let class = spec.class;
        let id = self.scheduler.register(spec);
        self.tenants.insert(id, (name.to_owned(), class));
        id
    }

    /// Forgets a tenant, as it wished; its sequences end and their memory is free at once.
    pub fn deregister(&mut self, tenant: TenantId) {
        self.scheduler.deregister(tenant);
        self.tenants.remove(&tenant);
        let scheduler = &self.scheduler;
        let gone: Vec<SequenceId> =
            self.sequences.keys().copied().filter(|id| scheduler.state_of(*id).is_none()).collect();
        gone.into_iter().for_each(|id| self.cancel(id));
        // Last: what has just ended leaves something, too.
        self.prefixes.forget(tenant);
    }

    /// Takes a request; it starts when a round admits it.
    pub fn submit(&mut self, tenant: TenantId, request: AnswerRequest, now: Time) -> Result<SequenceId, Refusal> {
        self.take_in(tenant, request, None, now)
    }

    /// Takes up an answer that was begun before; one that had not ended.
    pub fn resume(
        &mut self,
        tenant: TenantId,
        request: AnswerRequest,
        begun: Begun,
        now: Time,
    ) -> Result<SequenceId, Refusal> {
        self.take_in(tenant, request, Some(begun), now)
    }

    fn take_in(
        &mut self,
        tenant: TenantId,
        request: AnswerRequest,
        begun: Option<Begun>,
        now: Time,
    ) -> Result<SequenceId, Refusal> {
        // What is written already has to be read like the prompt, and needs no room that it does not have.
        let written = Tokens::from(begun.as_ref().map_or(0, |begun| begun.answered.len()));
        let prompt = Tokens::from(request.prompt.len()) + written;
        let claim = Request { tenant, prompt, pinned: request.pinned, answer: request.answer - written };
        let (name, class) = match self.tenants.get(&tenant) {
            Some((name, class)) => (name.clone(), *class),
            // The scheduler refuses it.
            None => (String::new(), Class::Batch),
        };
        match self.scheduler.submit(claim, now) {
            Ok(id) => {
                self.tell(Some(id), Event::Asked { tenant: name.clone(), class, prompt_tokens: prompt });
                self.sequences.insert(id, Sequence::new(tenant, name, class, request, begun));
                Ok(id)
            }
            Err(refusal) => {
                self.tell(None, Event::Refused { tenant: name, reason: reason(&refusal) });
                Err(refusal)
            }
        }
    }

    /// Ends a sequence because its client left; its memory is free at once.
    pub fn cancel(&mut self, sequence: SequenceId) {
        self.scheduler.cancel(sequence);
        self.reaction.ends_wait_of(sequence);
        let Some(left) = self.sequences.remove(&sequence) else { return };
        if left.finished().is_some() {
            // Its reader has all of it and went before the next round.
            self.keep_prefix(left);
            return;
        }
        let (tenant, class, tokens) = (left.tenant.clone(), left.class, left.answered());
        self.tell(Some(sequence), Event::Cancelled { tenant, class, tokens });
    }

    /// Whether the last round read anything, so that one without a token of an answer was no idle one.
    pub fn has_read(&self) -> bool {
        self.read_tokens > 0
    }

    /// Tokens that the last round read, of prompts and of answers.
    pub fn read_tokens(&self) -> usize {
        self.read_tokens
    }

    /// Whether a sequence is still to be served.
    pub fn has(&self, sequence: SequenceId) -> bool {
        self.sequences.contains_key(&sequence)
    }

    /// One round: observe, plan, enforce, sample, step. What happened is appended to `events`.
    pub fn round(&mut self, now: Time, budget: Bytes, events: &mut Vec<Told>) {
        let signal = Instant::now();
        if self.tables.is_none() {
            // Whoever asked first for a grammar had them made, in a thread of its own.
            self.tables = self.ladder.grammar_bytes().map(|bytes| self.ledger.hold(Kind::Tables, bytes));
        }
        let usage = self.usage();
        self.alarm.note(usage);
        self.hear(signal, budget);
        if self.budget.is_none_or(|told| told.get().abs_diff(budget.get()) > told.get() / TOLD_SHARE) {
            self.budget = Some(budget);
            self.tell(None, Event::Budget { budget_bytes: budget, usage_bytes: usage });
        }
        let mut progress = std::mem::take(&mut self.progress);
        progress.clear();
        progress.extend(self.sequences.iter().map(|(id, found)| found.progress(*id, self.is_ahead(*id, found))));
        self.progress = progress;
        let ended: Vec<Sequence> =
            self.sequences.extract_if(.., |_, s| s.finished().is_some()).map(|(_, ended)| ended).collect();
        ended.into_iter().for_each(|ended| self.keep_prefix(ended));
        let mut plan = std::mem::take(&mut self.plan);
        // What ended conversations have left and what has been read ahead go before anybody bears a lever: the plan is made
        // as if they were gone.
        let usage_needed = self.usage() - self.prefixes.bytes() - self.ahead.bytes();
        let observation = Observation { now, budget, usage: usage_needed, progress: &self.progress };
        self.scheduler.round(&observation, &mut plan);
        let spare = self.fit_ahead(&plan, budget - plan.peak());
        self.fit_prefixes(spare);
        // What the plan is about to take counts as used: a budget that does not hold it interrupts a load.
        self.alarm.answer(Some(budget));
        self.alarm.note(usage.max(plan.peak() + self.beside(&plan)));
        let pressure = usage.get() as f64 / budget.get().max(1) as f64;
        for action in plan.actions() {
            self.tell_lever(*action);
        }
        for action in plan.actions() {
            self.execute(*action, plan.actions(), now, signal, pressure);
            if matches!(action, Action::Release { .. } | Action::Shed { .. }) {
                // A budget that falls again while the rest is done is news only where it does not hold that.
                self.alarm.note(self.usage().max(plan.crest() + self.beside(&plan)));
            }
            self.look_if_back(budget);
        }
        let usage_bytes = self.usage();
        // What the levers have freed interrupts nobody any more.
        self.alarm.note(usage_bytes);
        self.alarm.answer(None);
        if usage_bytes > budget {
            // No lever is left that could answer: how long the budget stays so low is no reaction of ours.
            self.reaction.give_up();
        }
        if !plan.actions().is_empty() {
            trim_heap();
        }
        self.look_if_back(budget);
        let (rss_bytes, rss_file_bytes) = (resident_set(), resident_files());
        let drift_bytes = self.scheduler.drift();
        let (by_kind, sequences, enforce_ms) = (self.books().by_kind(), self.scheduler.census(), ms_since(signal));
        let budget_bytes = budget;
        self.tell(
            None,
            Event::Sample {
                usage_bytes,
                budget_bytes,
                rss_bytes,
                rss_file_bytes,
                drift_bytes,
                by_kind,
                sequences,
                enforce_ms,
            },
        );
        self.read_tokens = 0;
        for rung in self.loaded.keys().copied().collect::<Vec<_>>() {
            self.step_together(rung, plan.steps());
        }
        self.stand_by(now, &plan, budget, self.spare);
        self.read_in_background(&plan, self.spare);
        self.plan = plan;
        events.append(&mut self.events);
    }

    /// What is used beside a plan, which knows nothing of it.
    fn beside(&self, plan: &Plan) -> Bytes {
        self.prefixes.bytes() + (self.ahead.bytes() - self.ahead.claimed(plan))
    }

    /// One of the plan's actions.
    fn execute(&mut self, action: Action, actions: &[Action], now: Time, signal: Instant, pressure: f64) {
        match action {
            Action::Release { rung, frees } => {
                let started = Instant::now();
                self.loaded.remove(&rung);
                self.tell(None, Event::Release { rung, bytes: frees, release_ms: ms_since(started) });
            }
            Action::Load { rung, takes } => {
                let started = Instant::now();
                // A rung that somebody goes down to gives memory back; it is loaded to the end.
                let down = |action: &Action| matches!(action, Action::Demote { to, .. } if *to == rung);
                let stop = if actions.iter().any(down) { self.calm.clone() } else { self.alarm.flag().clone() };
                match self.load(rung, &stop) {
                    Ok(loaded) => {
                        self.loaded.insert(rung, loaded);
                        self.ahead.has_loaded(rung);
                        self.tell(None, Event::Load { rung, bytes: takes, load_ms: ms_since(started) });
                    }
                    Err(ModelError::Stopped(_)) => {
                        self.scheduler.load_failed(rung, now);
                        let given_up_ms = ms_since(started);
                        self.tell(None, Event::GivenUp { rung, tokens: Tokens::ZERO, given_up_ms });
                    }
                    Err(error) => {
                        self.scheduler.load_failed(rung, now);
                        self.trouble(
                            TroubleKind::Load,
                            format!("{rung} could not be loaded: {}; it is tried again", chain(&error)),
                        );
                    }
                }
            }
            // A parked sequence keeps its cache and gets no steps; there is nothing to do.
            Action::Defer { .. } | Action::Park { .. } => {}
            Action::Demote { sequence, from, to, .. } | Action::Promote { sequence, from, to } => {
                self.carry(sequence, (from, to), signal, pressure);
            }
            Action::Shed { sequence, from, tokens, .. } => {
                let cache = self.sequences.get_mut(&sequence).and_then(|s| s.cache.as_mut());
                let shed = cache.map(|c| c.shed(usize::from(from)..usize::from(from + tokens)));
                if let Some(Err(error)) = shed {
                    self.trouble(TroubleKind::Shed, format!("nothing was shed: {error}"));
                }
            }
            // Where the load failed the scheduler has it wait again, or has parked it again.
            Action::Admit { rung, .. } if !self.loaded.contains_key(&rung) => {}
            Action::Admit { sequence, rung } => self.admit(sequence, rung),
            Action::Unpark { rung, .. } if !self.loaded.contains_key(&rung) => {}
            Action::Unpark { sequence, rung } => {
                let (tenant, class) = self.tenant_of(sequence);
                self.tell(Some(sequence), Event::Unpark { tenant, class, rung });
            }
        }
    }

    fn load(&mut self, rung: RungIdx, stop: &StopFlag) -> Result<Loaded, ModelError> {
        if let Some(loaded) = self.ahead.take_loaded(rung) {
            return Ok(loaded);
        }
        let Some(entry) = self.ladder.rung(rung) else { unreachable!("the scheduler plans only rungs of the ladder") };
        let model = entry.load(&self.ledger, stop)?;
        Ok(Loaded { model, bridges: bridges_to(&self.ladder, rung, &self.ledger)? })
    }

    fn admit(&mut self, id: SequenceId, rung: RungIdx) {
        let cached_tokens = self.adopt(id, rung).max(self.reuse_prefix(id, rung));
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.rung = rung;
        let (tenant, class, wait_ms) = (sequence.tenant.clone(), sequence.class, ms_since(sequence.asked));
        self.tell(Some(id), Event::Admitted { tenant, class, rung, wait_ms, cached_tokens });
    }

    /// Levers are told before the plan is executed: a reader sees why before what.
    fn tell_lever(&mut self, action: Action) {
        let (kind, sequence, bytes, tokens) = match action {
            Action::Defer { sequence, .. } => (LeverKind::Defer, sequence, Bytes::ZERO, Tokens::ZERO),
            Action::Demote { sequence, frees, .. } => (LeverKind::Demote, sequence, frees, Tokens::ZERO),
            Action::Park { sequence, frees, .. } => (LeverKind::Park, sequence, frees, Tokens::ZERO),
            Action::Shed { sequence, frees, tokens, .. } => (LeverKind::Shed, sequence, frees, tokens),
            _ => return,
        };
        let (tenant, class) = self.tenant_of(sequence);
        self.tell(Some(sequence), Event::Lever { kind, tenant, class, bytes, tokens });
    }

    fn tenant_of(&self, sequence: SequenceId) -> (String, Class) {
        self.sequences.get(&sequence).map_or((String::new(), Class::Batch), |s| (s.tenant.clone(), s.class))
    }

    fn trouble(&mut self, kind: TroubleKind, message: String) {
        self.tell(None, Event::Trouble { kind, route: None, message });
    }

    fn tell(&mut self, sequence: Option<SequenceId>, event: Event) {
        self.events.push((sequence, event));
    }
}

/// A refusal in one word.
fn reason(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::UnknownTenant { .. } => "unknown_tenant",
        Refusal::EmptyPrompt => "empty_prompt",
        Refusal::OverContext { .. } => "over_context",
        Refusal::OverQuota { .. } => "over_quota",
        Refusal::NeverFits { .. } => "never_fits",
        Refusal::QueueFull { .. } => "queue_full",
        Refusal::TenantQueueFull { .. } => "tenant_queue_full",
    }
}

fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// An error with its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
