//! The background reader's other use: conversations are read ahead on a rung where they may go next, so that nobody waits
//! when they do. *Catching up* reads on a bigger rung for those whom the scheduler has named; a *shadow* reads along on the
//! next smaller model while nothing is wanted.
//!
//! What is read ahead harms nobody by going: the scheduler plans as if it were not there, the engine keeps no more of it than
//! the plan leaves of the budget, and it goes before anything else does. At any time there is one rung of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use molt_kv::background::read_on;
use molt_kv::cache::{KvCache, Slot};
use molt_kv::decoder::Decoder as _;
use molt_kv::keepsake::Keepsake;
use molt_kv::ledger::Ledger;
use molt_models::{Model, ModelError};
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use molt_scheduler::{Action, Plan, SequenceId};
use serde::{Deserialize, Serialize};

use crate::engine::sequence::Sequence;
use crate::engine::{Engine, Loaded, chain, ms_since};
use crate::event::{Event, TroubleKind};
use crate::power;

/// When the next smaller model reads along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shadow {
    /// Never.
    #[default]
    Off,
    /// While there is memory for it.
    On,
    /// While there is memory for it and the machine does not run from a battery.
    Auto,
}

/// How much is read ahead, counted in tokens and rounds like healing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadSettings {
    /// How long a promotion waits at most until the bigger rung has caught up; zero catches up only when it comes.
    pub catch_up: Span,
    /// Whether going up waits for nothing and takes a bridge where there is one, which is no exact way; what it maps is healed.
    pub eager_up: bool,
    /// Whether the next smaller model reads along.
    pub shadow: Shadow,
    /// Most bytes that a shadow's caches may take.
    pub shadow_bytes: Bytes,
    /// Tokens that are read at a time: what a next token may have to wait for.
    pub tokens: Tokens,
    /// Catching up reads after every so many rounds.
    pub every: u32,
    /// A shadow reads after every so many.
    pub shadow_every: u32,
}

impl AheadSettings {
    /// How long a promotion waits for the bigger rung to catch up.
    pub(super) fn wait(&self) -> Span {
        if self.eager_up { Span::ZERO } else { self.catch_up }
    }
}

impl Default for AheadSettings {
    fn default() -> Self {
        Self {
            catch_up: Span::from_millis(20_000),
            eager_up: false,
            shadow: Shadow::Off,
            shadow_bytes: Bytes::mib(256),
            tokens: Tokens::new(8),
            every: 2,
            shadow_every: 4,
        }
    }
}

/// What has been read ahead.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    rung: Option<RungIdx>,
    /// The rung's weights where nobody runs there, and what they take.
    loaded: Option<(Loaded, Bytes)>,
    caches: BTreeMap<SequenceId, Read>,
    /// A rung that did not load; it is the scheduler's to try it again, and nobody waits for it to be read ahead there.
    broken: Option<RungIdx>,
    /// Rounds since something was read.
    rounds: u32,
    /// Whether the machine ran from a battery when that was last looked at, and how many times it is still believed.
    battery: (bool, u32),
}

#[derive(Debug)]
struct Read {
    cache: KvCache,
    tokens: Tokens,
    read_ms: f64,
}

impl Read {
    fn bytes(&self) -> Bytes {
        self.cache.shape().charge(self.cache.len())
    }
}

/// Who is read ahead and where.
struct Aim {
    to: RungIdx,
    who: Vec<SequenceId>,
    shadow: bool,
}

impl Ahead {
    /// Bytes in use, as the books have them.
    pub(super) fn bytes(&self) -> Bytes {
        let caches: Bytes = self.caches.values().map(Read::bytes).sum();
        self.loaded.as_ref().map_or(Bytes::ZERO, |(_, bytes)| *bytes) + caches
    }

    /// What of it a plan takes over, and so counts already.
    pub(super) fn claimed(&self, plan: &Plan) -> Bytes {
        let bytes = |action: &Action| match *action {
            Action::Load { rung, .. } if Some(rung) == self.rung => {
                self.loaded.as_ref().map_or(Bytes::ZERO, |(_, bytes)| *bytes)
            }
            Action::Demote { sequence, to, .. } | Action::Promote { sequence, to, .. } if Some(to) == self.rung => {
                self.caches.get(&sequence).map_or(Bytes::ZERO, Read::bytes)
            }
            _ => Bytes::ZERO,
        };
        plan.actions().iter().map(bytes).sum()
    }

    /// The scheduler has loaded a rung: it may be tried again.
    pub(super) fn has_loaded(&mut self, rung: RungIdx) {
        self.broken = self.broken.filter(|broken| *broken != rung);
    }

    /// The weights, where the scheduler has the rung loaded.
    pub(super) fn take_loaded(&mut self, rung: RungIdx) -> Option<Loaded> {
        if self.rung != Some(rung) {
            return None;
        }
        self.loaded.take().map(|(loaded, _)| loaded)
    }
}

impl Engine {
    /// The rung where a sequence has been read, but for what is read at once when it comes, or needs no reading.
    pub(super) fn is_ahead(&self, id: SequenceId, sequence: &Sequence) -> Option<RungIdx> {
        let named = self.plan.prospects().iter().find(|prospect| prospect.sequence == id);
        if let Some(prospect) = named.filter(|prospect| !self.is_worth_reading(id, sequence, prospect.to)) {
            return Some(prospect.to);
        }
        let read = self.ahead.caches.get(&id)?;
        let left = sequence.cached() - Tokens::from(read.cache.len());
        self.ahead.rung.filter(|_| left <= self.settings.ahead.tokens)
    }

    /// Whether reading a sequence ahead would come to its end while a good part of the answer is still to come. What is not
    /// worth it goes at once: its reader waits once, and has the bigger model for longer.
    fn is_worth_reading(&self, id: SequenceId, sequence: &Sequence, to: RungIdx) -> bool {
        if self.same_weights(sequence.rung, to) || self.ahead.broken == Some(to) {
            return false;
        }
        let source = self.ladder.rung(to).map(molt_models::Rung::source);
        let kept =
            sequence.keepsakes.iter().filter(|kept| Some(kept.source()) == source).map(|kept| kept.slots().len());
        let read = self.ahead.caches.get(&id).map_or(0, |read| read.cache.len());
        let missing = (sequence.cached() - Tokens::from(kept.chain([read]).max().unwrap_or(0))).get();
        // Of every few rounds one reads a few tokens, and each writes one more.
        let AheadSettings { tokens, every, .. } = self.settings.ahead;
        let (every, gained) = (u64::from(every.max(1)), tokens.get().saturating_sub(u64::from(every.max(1))));
        let rounds = missing.saturating_mul(every).checked_div(gained).unwrap_or(u64::MAX);
        rounds <= sequence.answer_left().get() / 2
    }

    fn same_weights(&self, one: RungIdx, other: RungIdx) -> bool {
        let source = |rung| self.ladder.rung(rung).map(molt_models::Rung::source);
        source(one) == source(other)
    }

    /// What a sequence that goes to a rung has been read ahead there.
    pub(super) fn take_ahead(&mut self, sequence: SequenceId, to: RungIdx) -> Option<KvCache> {
        if self.ahead.rung != Some(to) {
            return None;
        }
        let read = self.ahead.caches.remove(&sequence)?;
        self.tell_read(sequence, to, &read, true);
        Some(read.cache)
    }

    fn tell_read(&mut self, sequence: SequenceId, rung: RungIdx, read: &Read, used: bool) {
        let (tenant, class) = self.tenant_of(sequence);
        let (tokens, read_ms) = (read.tokens, read.read_ms);
        self.tell(Some(sequence), Event::ReadAhead { tenant, class, rung, tokens, read_ms, used });
    }

    /// Forgets what has been read ahead.
    pub(super) fn forget_ahead(&mut self) {
        let caches = std::mem::take(&mut self.ahead.caches);
        if let Some(rung) = self.ahead.rung.take() {
            for (sequence, read) in &caches {
                self.tell_read(*sequence, rung, read, false);
            }
        }
        self.ahead.loaded = None;
    }

    /// Keeps what fits beside a plan, which is all or nothing; what is left of the budget then.
    pub(super) fn fit_ahead(&mut self, plan: &Plan, spare: Bytes) -> Bytes {
        let gone = |action: &Action| matches!(*action, Action::Release { rung, .. } if Some(rung) == self.ahead.rung);
        let extra = self.ahead.bytes() - self.ahead.claimed(plan);
        if extra > spare || plan.actions().iter().any(gone) {
            self.forget_ahead();
            return spare;
        }
        spare - extra
    }

    /// Reads a little ahead, where somebody may go somewhere and there is memory to spare.
    pub(super) fn read_ahead(&mut self, plan: &Plan, spare: Bytes) {
        self.ahead.rounds = self.ahead.rounds.saturating_add(1);
        let Some(aim) = self.aim(plan) else { return self.forget_ahead() };
        if self.ahead.rung.is_some_and(|rung| rung != aim.to) {
            self.forget_ahead();
        }
        let gone: Vec<SequenceId> = self.ahead.caches.keys().filter(|id| !aim.who.contains(id)).copied().collect();
        for id in gone {
            let Some(read) = self.ahead.caches.remove(&id) else { continue };
            self.tell_read(id, aim.to, &read, false);
        }
        let AheadSettings { every, shadow_every, .. } = self.settings.ahead;
        if self.ahead.rounds < if aim.shadow { shadow_every } else { every } {
            return;
        }
        self.ahead.rung = Some(aim.to);
        let Some(cost) = self.cost().get(aim.to) else { return };
        let takes = cost.held();
        // Together with what a reading takes in passing.
        let mut spare = spare - cost.scratch;
        if !self.loaded.contains_key(&aim.to) && self.ahead.loaded.is_none() {
            if takes > spare || !self.load_ahead(aim.to) {
                return;
            }
            spare -= takes;
        }
        for id in &aim.who {
            if self.read_one(*id, &aim, spare) {
                self.ahead.rounds = 0;
                return;
            }
        }
    }

    /// Whom the scheduler has named; else those who write on the biggest rung in use, for the next smaller model.
    fn aim(&mut self, plan: &Plan) -> Option<Aim> {
        if let Some(first) = plan.prospects().first() {
            let elsewhere =
                |id: &SequenceId| self.sequences.get(id).is_some_and(|found| !self.same_weights(found.rung, first.to));
            let who: Vec<_> = plan.prospects().iter().map(|found| found.sequence).filter(elsewhere).collect();
            return Some(Aim { to: first.to, who, shadow: false }).filter(|aim| !aim.who.is_empty());
        }
        let wanted = match self.settings.ahead.shadow {
            Shadow::Off => false,
            Shadow::On => true,
            Shadow::Auto => !self.on_battery(),
        };
        let from = plan.steps().iter().map(|step| step.rung).min().filter(|_| wanted && plan.actions().is_empty())?;
        let to = self.cost().rungs().map(|(rung, _)| rung).find(|to| *to > from && !self.same_weights(from, *to))?;
        let writes = |id: &SequenceId| self.sequences.get(id).is_some_and(|found| found.answered() > Tokens::ZERO);
        let who = plan.steps().iter().filter(|step| step.rung == from).map(|step| step.sequence).filter(writes);
        Some(Aim { to, who: who.collect(), shadow: true }).filter(|aim| !aim.who.is_empty())
    }

    fn on_battery(&mut self) -> bool {
        /// Rounds for which a look at the power supply is believed.
        const BELIEVED: u32 = 256;
        let (mut battery, mut left) = self.ahead.battery;
        if left == 0 {
            (battery, left) = (power::on_battery(Path::new("/sys")), BELIEVED);
        }
        self.ahead.battery = (battery, left - 1);
        battery
    }

    /// Loads a rung that the scheduler knows nothing of; whether that was done.
    fn load_ahead(&mut self, rung: RungIdx) -> bool {
        if self.ahead.broken == Some(rung) {
            return false;
        }
        let before = self.ledger.total();
        let stop = self.alarm.flag().clone();
        match self.load(rung, &stop) {
            Ok(loaded) => {
                self.ahead.loaded = Some((loaded, self.ledger.total() - before));
                true
            }
            Err(ModelError::Stopped(_)) => false,
            Err(error) => {
                self.ahead.broken = Some(rung);
                let message = format!("{rung} could not be loaded to read ahead: {}", chain(&error));
                self.trouble(TroubleKind::Load, message);
                false
            }
        }
    }

    /// Reads a little of one sequence; whether there was something to read.
    fn read_one(&mut self, id: SequenceId, aim: &Aim, spare: Bytes) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let ahead = &mut self.ahead;
        let loaded = self.loaded.get(&aim.to).or(ahead.loaded.as_ref().map(|(loaded, _)| loaded));
        let (Some(loaded), Some(old)) = (loaded, &sequence.cache) else { return false };
        if sequence.finished.is_some() || sequence.rung == aim.to {
            return false;
        }
        let model = &loaded.model;
        let AheadSettings { tokens, shadow_bytes, .. } = self.settings.ahead;
        // A shadow waits until there is enough for one go.
        let least = if aim.shadow { usize::from(tokens) } else { 1 };
        let held = ahead.caches.get(&id).map_or(Bytes::ZERO, Read::bytes);
        let caches: Bytes = ahead.caches.values().map(Read::bytes).sum();
        let whole = model.cache_shape().charge(old.len());
        if whole - held > spare || (aim.shadow && caches - held + whole > shadow_bytes) {
            return false;
        }
        let slots = old.slots();
        let missing = |read: &Read| slots.len().saturating_sub(read.cache.len());
        let fitting = ahead.caches.get(&id).is_some_and(|read| read.cache.is_prefix_of(slots));
        let started = Instant::now();
        if !fitting {
            let limit = old.limit();
            let Some(cache) = begin(&mut sequence.keepsakes, slots, limit, model, &self.ledger) else { return false };
            ahead.caches.insert(id, Read { cache, tokens: Tokens::ZERO, read_ms: 0.0 });
        }
        let Some(read) = ahead.caches.get_mut(&id).filter(|read| missing(read) >= least) else { return false };
        // Given up, or without memory for its buffers: memory is wanted, and there may be another round.
        if let Ok(more) = read_on(&mut read.cache, slots, model, tokens, &self.ledger, self.alarm.flag()) {
            read.tokens += more;
        }
        read.read_ms += ms_since(started);
        true
    }
}

/// The cache that reading ahead goes on with: the keepsake where there is one, or an empty one.
fn begin(keepsakes: &mut [Keepsake], slots: &[Slot], limit: Tokens, model: &Model, ledger: &Ledger) -> Option<KvCache> {
    let keepsake = keepsakes.iter_mut().find(|found| found.source() == model.source() && found.is_prefix_of(slots));
    let kept = keepsake.and_then(|keepsake| keepsake.restore(limit, ledger).ok());
    kept.filter(|cache| cache.shape() == model.cache_shape())
        .or_else(|| KvCache::new(model.cache_shape(), limit, ledger).ok())
}
