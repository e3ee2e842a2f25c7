//! Executing a plan, and the laws it is held against on the way.

use std::collections::BTreeSet;

use crate::ids::SequenceId;
use crate::input::Progress;
use crate::plan::{Action, Plan, Prospect, Step};
use crate::units::{Bytes, RungIdx, Span, Tokens};

use super::pace::Work;
use super::{Law, Live, World};

/// Rounds in which a sequence is read ahead.
const READ_AHEAD: u32 = 3;

/// Memory while a plan is executed.
struct Way {
    budget: Bytes,
    /// What usage may be at this point.
    cap: Bytes,
    /// What it is.
    level: Bytes,
    peak: Bytes,
    /// The highest since something was last given back at once.
    crest: Bytes,
    loads: bool,
    failed: BTreeSet<RungIdx>,
    work: Work,
}

impl Way {
    /// Usage is `level` now, and was `over` on the way there.
    fn reach(&mut self, level: Bytes, over: Bytes, action: Action) -> Result<(), Law> {
        let usage = level.max(over);
        self.peak = self.peak.max(usage);
        self.crest = self.crest.max(usage);
        self.level = level;
        if usage > self.cap {
            return Err(Law::OverOnTheWay { usage, cap: self.cap, action });
        }
        if level <= self.budget {
            self.cap = self.budget;
        }
        Ok(())
    }

    /// So much goes, and nothing comes for it.
    fn give_back(&mut self, bytes: Bytes, action: Action) -> Result<(), Law> {
        self.crest = self.level - bytes;
        self.reach(self.crest, Bytes::ZERO, action)
    }
}

impl World {
    /// Executes a plan; how long the round took.
    pub(super) fn execute(&mut self, plan: &Plan, budget: Bytes, before: Bytes, bottom: Bytes) -> Result<Span, Law> {
        let mut way = Way {
            budget,
            cap: before.max(budget),
            level: before,
            peak: before,
            crest: before,
            loads: false,
            failed: BTreeSet::new(),
            work: Work::default(),
        };
        for action in plan.actions() {
            self.act(*action, &mut way)?;
        }
        for rung in &way.failed {
            self.scheduler.load_failed(*rung, self.now);
            let (now, resident) = (self.now, &self.resident);
            let stranded = |live: &&mut Live| live.running && live.rung.is_some_and(|on| !resident.contains(&on));
            self.live.values_mut().filter(stranded).for_each(|live| live.stop(now));
        }
        if way.failed.is_empty() {
            self.read_ahead(plan.prospects())?;
        }
        for step in plan.steps() {
            self.step(*step, &mut way)?;
        }
        let usage = self.usage();
        let (peak, crest) = (way.peak.max(usage), way.crest.max(usage));
        if way.failed.is_empty() {
            if usage > budget && bottom <= budget {
                return Err(Law::OverBudget { usage, budget, bottom });
            }
            if usage > before.max(budget) {
                return Err(Law::Rose { before, usage, budget });
            }
            let (said, said_peak, said_crest) = (plan.usage(), plan.peak(), plan.crest());
            if self.scheduler.drift() >= 0 && (said, said_peak, said_crest) != (usage, peak, crest) {
                return Err(Law::Reckoned { said, said_peak, said_crest, usage, peak, crest });
            }
        }
        for progress in self.progress.iter().filter(|progress| progress.finished) {
            let live = self.live.remove(&progress.sequence);
            self.past.extend(live.map(|live| (progress.sequence, live)));
        }
        self.agree()?;
        Ok(self.pace.round(&way.work))
    }

    fn get(&mut self, sequence: SequenceId) -> Result<&mut Live, Law> {
        self.live.get_mut(&sequence).ok_or(Law::Unknown { sequence })
    }

    fn act(&mut self, action: Action, way: &mut Way) -> Result<(), Law> {
        let wrong = |what| Err(Law::Misplaced { what, action });
        let now = self.now;
        match action {
            Action::Demote { to, .. }
            | Action::Promote { to, .. }
            | Action::Admit { rung: to, .. }
            | Action::Unpark { rung: to, .. }
                if way.failed.contains(&to) =>
            {
                Ok(())
            }
            Action::Defer { sequence, .. } if self.get(sequence)?.rung.is_some() => wrong("deferred though inside"),
            Action::Defer { .. } => Ok(()),
            Action::Park { sequence, rung, .. } => {
                let live = self.get(sequence)?;
                if !live.running || live.rung != Some(rung) {
                    return wrong("parked though not running there");
                }
                live.stop(now);
                Ok(())
            }
            Action::Shed { sequence, from, tokens, frees } => {
                let (window, sinks) = (self.scheduler.config.window, self.scheduler.config.sinks);
                let whole = tokens.get().checked_rem(self.scheduler.config.shed_block.get()) == Some(0);
                let live = self.get(sequence)?;
                let front = live.pinned.max(sinks);
                if from != front || !whole || front + tokens + window > live.cached {
                    return wrong("shed what must be kept");
                }
                live.cached -= tokens;
                let Some(rung) = live.rung else { return wrong("shed of somebody outside") };
                if frees != self.cache(rung, tokens) {
                    return wrong("shed frees another sum");
                }
                way.give_back(frees, action)
            }
            Action::Release { rung, .. } => {
                if way.loads || !self.resident.remove(&rung) {
                    return wrong("released late or not there");
                }
                way.give_back(self.cost(rung).held(), action)
            }
            Action::Load { rung, .. } => {
                way.loads = true;
                if self.broken.contains(&rung) {
                    way.failed.insert(rung);
                    return Ok(());
                }
                if !self.resident.insert(rung) {
                    return wrong("loaded twice");
                }
                way.work.loaded += self.cost(rung).weights;
                way.reach(way.level + self.cost(rung).held(), Bytes::ZERO, action)
            }
            Action::Demote { sequence, from, to, .. } | Action::Promote { sequence, from, to } => {
                self.carry(action, sequence, (from, to), way)
            }
            Action::Admit { sequence, rung } => {
                let there = self.resident.contains(&rung);
                let live = self.get(sequence)?;
                if live.rung.is_some() || !there {
                    return wrong("admitted where it cannot be");
                }
                live.rung = Some(rung);
                live.start(now);
                Ok(())
            }
            Action::Unpark { sequence, rung } => {
                let there = self.resident.contains(&rung);
                let live = self.get(sequence)?;
                if live.running || live.rung != Some(rung) || !there {
                    return wrong("unparked where it cannot be");
                }
                live.start(now);
                Ok(())
            }
        }
    }

    /// Both caches of a carry are there until it is done.
    fn carry(
        &mut self,
        action: Action,
        sequence: SequenceId,
        (from, to): (RungIdx, RungIdx),
        way: &mut Way,
    ) -> Result<(), Law> {
        let wrong = |what| Err(Law::Misplaced { what, action });
        let up = to < from;
        if up != matches!(action, Action::Promote { .. }) || from == to {
            return wrong("the wrong way");
        }
        let there = self.resident.contains(&to);
        let live = self.get(sequence)?;
        if live.rung != Some(from) || !there {
            return wrong("carried from or to where it cannot");
        }
        // Somebody parked has been so for long enough to go below its floor.
        if !up && to > live.floor && live.running {
            return wrong("demoted below its floor");
        }
        live.rung = Some(to);
        live.switches += 1;
        live.promotions += u64::from(up);
        let cached = live.cached;
        way.work.carried += cached;
        let over = way.level + self.cache(to, cached);
        way.reach(over - self.cache(from, cached), over, action)
    }

    /// What is read ahead takes no memory here, for it goes before anything else does.
    fn read_ahead(&mut self, prospects: &[Prospect]) -> Result<(), Law> {
        for live in self.live.values_mut() {
            live.ahead = live.ahead.filter(|(rung, _)| live.rung.is_some_and(|own| own > *rung));
        }
        for prospect in prospects {
            let Prospect { sequence, to } = *prospect;
            let live = self.get(sequence)?;
            if !live.running || live.rung.is_none_or(|own| own <= to) {
                return Err(Law::Prospect { prospect: *prospect });
            }
            let rounds = live.ahead.filter(|(rung, _)| *rung == to).map_or(0, |(_, rounds)| rounds);
            live.ahead = Some((to, rounds + 1));
        }
        Ok(())
    }

    fn step(&mut self, step: Step, way: &mut Way) -> Result<(), Law> {
        let Step { sequence, rung, tokens, prefill } = step;
        if way.failed.contains(&rung) {
            return Ok(());
        }
        let there = self.resident.contains(&rung);
        let live = self.get(sequence)?;
        let fine = live.running && live.rung == Some(rung) && there && tokens > Tokens::ZERO;
        let reads = live.prompt_left > Tokens::ZERO;
        let long = if reads { live.prompt_left } else { Tokens::new(1) };
        if !fine || prefill != reads || tokens > long {
            return Err(Law::Step { step });
        }
        live.cached += tokens;
        if prefill {
            live.prompt_left -= tokens;
        }
        if live.prompt_left == Tokens::ZERO {
            live.answered += Tokens::new(1);
        }
        let (tenant, finished) = (live.tenant, live.prompt_left == Tokens::ZERO && live.answered >= live.answer);
        let progress = Progress {
            sequence,
            cached: live.cached,
            prompt_left: live.prompt_left,
            answered: live.answered,
            finished,
            ahead: live.ahead.and_then(|(rung, rounds)| (rounds >= READ_AHEAD).then_some(rung)),
        };
        *self.served.entry(tenant).or_default() += tokens;
        way.work.steps = way.work.steps + self.pace.step(rung, tokens, prefill);
        self.progress.push(progress);
        Ok(())
    }

    /// Scheduler and engine say the same of everybody.
    fn agree(&self) -> Result<(), Law> {
        for (id, live) in &self.live {
            if self.scheduler.standing(*id) != Some((live.rung, live.running)) {
                let said = self.scheduler.state_of(*id);
                return Err(Law::Disagree { sequence: *id, said, rung: live.rung, running: live.running });
            }
        }
        let (said, is) = (self.scheduler.resident(), self.resident.iter().copied());
        if said.eq(is) {
            return Ok(());
        }
        Err(Law::Resident { said: self.scheduler.resident().collect(), is: self.resident.iter().copied().collect() })
    }
}
