//! A round: apply what happened, decide, then write the decisions down in the order in which they must be executed.
//!
//! Deciding changes phases and pushes actions into `decided` in any order; [`commit`] sorts them into the plan: parks
//! and sheds, releases, loads, carries, returns. It also picks the idle weights that go, and reckons the peak.

use crate::climb;
use crate::ids::{SequenceId, TenantId};
use crate::input::{Observation, Progress};
use crate::levers::{self, Candidate, Fit, Group};
use crate::plan::{Action, Plan};
use crate::queue;
use crate::scheduler::Scheduler;
use crate::state::Phase;
use crate::steps;
use crate::transition::{Carry, Frame};
use crate::units::{Bytes, RungIdx, Span, Time, Tokens};
use crate::usage::{Books, Horizon, RungSet};

/// Buffers that keep their room from round to round. They hold nothing between rounds, so they are neither stored nor
/// compared.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch {
    pub(crate) decided: Vec<Action>,
    pub(crate) carries: Vec<Carry>,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) fits: Vec<Fit>,
    pub(crate) groups: Vec<Group>,
    pub(crate) order: Vec<SequenceId>,
    pub(crate) counts: Vec<u64>,
    /// Tenants whose first requests were looked at and did not go in, and how many of them.
    pub(crate) behind: Vec<(TenantId, usize)>,
    pub(crate) line: Vec<(u64, u64, SequenceId)>,
}

impl PartialEq for Scratch {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

pub(crate) fn round(scheduler: &mut Scheduler, observation: &Observation<'_>, plan: &mut Plan) {
    plan.clear();
    let now = observation.now;
    apply(scheduler, observation.progress);
    tell_time(scheduler, now);
    let mut books = scheduler.books();
    let before = books.level(&scheduler.ladder, scheduler.resident);
    scheduler.drift_bytes = signed_difference(observation.usage, scheduler.config.overhead + before);
    let reserve = Bytes::new(u64::try_from(scheduler.drift_bytes).unwrap_or(0));
    let set_aside = scheduler.config.overhead + reserve;
    let frame = Frame { now, limit: observation.budget - set_aside, before, usable: scheduler.usable(now) };

    let mut scratch = std::mem::take(&mut scheduler.scratch);
    scratch.decided.clear();
    if books.needs(&scheduler.ladder, Horizon::Step) > frame.limit {
        levers::enforce(scheduler, &frame, &mut books, &mut scratch);
    } else {
        climb::climb(scheduler, &frame, &mut books, &mut scratch, &mut plan.prospects);
    }
    steps::plan(scheduler, &frame, &books, &mut scratch, plan);
    commit(scheduler, &frame, &books, &mut scratch, plan);
    plan.usage += set_aside;
    plan.peak += set_aside;
    plan.crest += set_aside;
    scheduler.last_round = Some((now, !plan.steps.is_empty()));
    scheduler.scratch = scratch;
    tell_deferred(scheduler, plan);
}

/// Enters what the engine did. What is said of a sequence that is gone, or that was never let in, is ignored.
fn apply(scheduler: &mut Scheduler, progress: &[Progress]) {
    for Progress { sequence: id, cached, prompt_left, answered, finished, ahead } in progress {
        if let Some(sequence) = scheduler.sequences.get_mut(id.parts())
            && !matches!(sequence.phase, Phase::Waiting { .. })
        {
            (sequence.cached, sequence.prompt_left, sequence.answered) = (*cached, *prompt_left, *answered);
            sequence.ahead = *ahead;
        }
        if *finished {
            scheduler.cancel(*id);
        }
    }
}

/// Keeps the pace, and takes rungs that were loaded without a word of failure as loaded.
fn tell_time(scheduler: &mut Scheduler, now: Time) {
    for rung in &mut scheduler.rungs {
        if std::mem::take(&mut rung.loading) {
            rung.retry = None;
        }
    }
    scheduler.came.clear();
    if let Some((last, true)) = scheduler.last_round {
        let (pace, took) = (scheduler.pace.micros(), now.since(last).micros());
        let smooth = if pace == 0 { took } else { (pace.saturating_mul(7).saturating_add(took)) / 8 };
        scheduler.pace = Span::from_micros(smooth);
    }
}

fn signed_difference(measured: Bytes, expected: Bytes) -> i64 {
    let magnitude = |bytes: Bytes| i64::try_from(bytes.get()).unwrap_or(i64::MAX);
    magnitude(measured - expected) - magnitude(expected - measured)
}

/// Writes the decisions into the plan in the order of execution, and reckons usage and peak.
fn commit(scheduler: &mut Scheduler, frame: &Frame, books: &Books, scratch: &mut Scratch, plan: &mut Plan) {
    let Scratch { decided, carries, .. } = scratch;
    let ladder = &scheduler.ladder;
    let used = books.used();
    let loaded = used.minus(scheduler.resident);
    let growth: Bytes = plan.steps.iter().map(|step| ladder.cost(step.rung).cache_per_token.times(step.tokens)).sum();

    let first = |action: &Action| matches!(action, Action::Park { .. } | Action::Shed { .. });
    plan.actions.extend(decided.iter().filter(|action| first(action)));

    carries.clear();
    for (decision, action) in decided.iter().enumerate() {
        if let Action::Demote { sequence, from, to, .. } | Action::Promote { sequence, from, to } = action {
            let cached = scheduler.sequences.get(sequence.parts()).map_or(Tokens::ZERO, |found| found.cached);
            let cache = |rung: RungIdx| ladder.cost(rung).cache_per_token.times(cached);
            carries.push(Carry { decision, source: cache(*from), destination: cache(*to) });
        }
    }
    let caches_after = books.caches(ladder);
    // The books say what is cached in the end; carried back, what is cached before the first carry.
    let caches_before = carries.iter().fold(caches_after, |sum, carry| sum + carry.source - carry.destination);
    frame.arrange(ladder, caches_before, used.minus(loaded), loaded, carries);

    let peak = |kept: RungSet| {
        let mut level = caches_before + kept.held(ladder) + loaded.held(ladder);
        let mut peak = level;
        for carry in carries.iter() {
            peak = peak.max(level + carry.destination);
            level = level + carry.destination - carry.source;
        }
        peak.max(level + growth)
    };
    // Idle weights harm nobody by going: biggest first, and only as many as the peak asks for.
    let mut kept = scheduler.resident;
    for rung in scheduler.resident.minus(used).iter() {
        if peak(kept) <= frame.limit {
            break;
        }
        kept = kept.without(rung);
        plan.actions.push(Action::Release { rung, frees: ladder.cost(rung).held() });
    }
    plan.crest = peak(kept);
    plan.peak = plan.crest.max(frame.before);
    plan.usage = caches_after + kept.held(ladder) + loaded.held(ladder) + growth;
    plan.actions.extend(loaded.iter().map(|rung| Action::Load { rung, takes: ladder.cost(rung).held() }));

    plan.actions.extend(carries.iter().filter_map(|carry| decided.get(carry.decision)));
    let last = |action: &Action| matches!(action, Action::Unpark { .. } | Action::Admit { .. });
    plan.actions.extend(decided.iter().filter(|action| last(action)));

    for rung in loaded.iter() {
        if let Some(state) = scheduler.rungs.get_mut(rung.get()) {
            state.loading = true;
        }
    }
    scheduler.resident = RungSet::numbered(kept.bits() | loaded.bits());
    let comes = |(id, _): &(SequenceId, Phase)| {
        let phase = scheduler.sequences.get(id.parts()).map(|sequence| sequence.phase);
        matches!(phase, Some(Phase::Running { rung }) if loaded.contains(rung))
    };
    let mut came = std::mem::take(&mut scheduler.came);
    came.retain(comes);
    scheduler.came = came;
}

/// Tells of every request that has to wait, once, in the order of their places.
fn tell_deferred(scheduler: &mut Scheduler, plan: &mut Plan) {
    for class in Scheduler::CLASSES {
        if scheduler.queues.of(class).untold == 0 {
            continue;
        }
        let (running, left) = scheduler.work();
        let mut line = std::mem::take(&mut scheduler.scratch.line);
        line.clear();
        line.extend(scheduler.starts(class));
        line.sort_unstable();
        for (place, (_, _, id)) in (0u32..).zip(&line) {
            if let Some(sequence) = scheduler.sequences.get_mut(id.parts())
                && let Phase::Waiting { told: told @ false, .. } = &mut sequence.phase
            {
                *told = true;
                let wait = queue::estimate(place, running, left, scheduler.pace);
                plan.actions.push(Action::Defer { sequence: *id, place, wait });
            }
        }
        scheduler.scratch.line = line;
        scheduler.queues.of_mut(class).untold = 0;
    }
}
