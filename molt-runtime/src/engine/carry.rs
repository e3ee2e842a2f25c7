//! Taking a sequence's cache to another rung: which route, and what happens when a route fails.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::carry::{self, CarryError, CarryReport, Route};
use molt_kv::decoder::Decoder as _;
use molt_kv::keepsake::Keepsake;
use molt_models::Model;
use molt_scheduler::SequenceId;
use molt_scheduler::units::{RungIdx, Tokens};

use crate::engine::background::Healing;
use crate::engine::step::PACE_TOKENS;
use crate::engine::{Effort, Engine, Loaded, chain, ms_since};
use crate::event::{Event, Switch, TroubleKind};

impl Engine {
    /// Moves a sequence to another rung whose weights are loaded. The old cache goes only when the new one has been
    /// checked; where every route fails, the conversation stays and is read again in ordinary steps.
    pub(super) fn carry(&mut self, id: SequenceId, (from, to): (RungIdx, RungIdx), signal: Instant, pressure: f64) {
        // The load may have failed; then the scheduler knows, and the sequence stays where it is.
        if !self.loaded.contains_key(&to) {
            return;
        }
        let ahead = self.take_ahead(id, to);
        let was_ahead = ahead.is_some();
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        // What it is made of is lent out; should the carry panic, it is still there, and is read again.
        let (old, mut keepsakes) = (sequence.cache.take(), std::mem::take(&mut sequence.keepsakes));
        let mut failures = Vec::new();
        let limit = old.as_ref().map(KvCache::limit);
        let carried = old
            .zip(self.loaded.get(&to))
            .map(|(old, loaded)| self.routes(old, ahead, &mut keepsakes, (from, to), loaded, &mut failures));
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.keepsakes = keepsakes;
        sequence.rung = to;
        if let Some(carried) = carried {
            match carried {
                Ok((cache, report, carry_ms)) => {
                    let switch = Switch {
                        tenant: sequence.tenant.clone(),
                        class: sequence.class,
                        from,
                        to,
                        route: report.route,
                        switch_ms: ms_since(signal),
                        carry_ms,
                        tokens: report.tokens(),
                        exact_tokens: report.exact,
                        mapped_tokens: report.mapped,
                        flops_saved_ratio: 1.0 - report.flops / report.reread_flops.max(1.0),
                        pressure_ratio: pressure,
                    };
                    sequence.cache = Some(cache);
                    if report.route != Route::Identity {
                        sequence.healing = Healing::default();
                    }
                    // What was read ahead may have begun with a keepsake.
                    sequence.mixed = matches!(report.route, Route::Identity | Route::Keepsake) || was_ahead;
                    // Restoring is no arithmetic, and says nothing of how fast that is.
                    let computed = matches!(report.route, Route::Bridge | Route::Reread);
                    if computed && usize::from(report.tokens()) >= PACE_TOKENS && report.flops > 0.0 {
                        self.flops_per_ms = Some(report.flops / carry_ms.max(f64::MIN_POSITIVE));
                    }
                    self.tell(Some(id), Event::Switch(switch));
                }
                Err(error) => {
                    failures.push((Some(Route::Reread), chain(&error)));
                    // Nothing is lost: the tokens are there, and the scheduler sees an unread prompt.
                    let shape = self.loaded.get(&to).map(|loaded| loaded.model.cache_shape());
                    let empty = shape.zip(limit).map(|(shape, limit)| KvCache::new(shape, limit, &self.ledger));
                    sequence.cache = empty.and_then(Result::ok);
                    sequence.read = 0;
                }
            }
        }
        for (route, failure) in failures {
            let (kind, what) = match route {
                Some(Route::Identity) => (TroubleKind::Carry, "taking the cache as it is"),
                Some(Route::Bridge) => (TroubleKind::Carry, "the bridge"),
                Some(Route::Keepsake) => (TroubleKind::Carry, "the keepsake"),
                Some(Route::ReadAhead) => (TroubleKind::Carry, "what was read ahead"),
                Some(Route::Reread) => (TroubleKind::Carry, "reading again"),
                None => (TroubleKind::Keepsake, "keeping what was left behind"),
            };
            let then = if route.is_some() { ", and the next route was taken" } else { "" };
            let message = format!("in a carry from {from} to {to} {what} failed{then}: {failure}");
            self.tell(None, Event::Trouble { kind, route, message });
        }
    }

    /// The routes in order of cost: identity, read ahead, keepsake, bridge, reading again. Returns the new cache, what was done,
    /// and the milliseconds of the carry alone. Failures name their route; that of a keepsake's writing is none.
    fn routes(
        &self,
        old: KvCache,
        ahead: Option<KvCache>,
        keepsakes: &mut Vec<Keepsake>,
        (from, to): (RungIdx, RungIdx),
        loaded: &Loaded,
        failures: &mut Vec<(Option<Route>, String)>,
    ) -> Result<(KvCache, CarryReport, f64), CarryError> {
        let started = Instant::now();
        let model = &loaded.model;
        let same_weights = self.ladder.rung(from).is_some_and(|rung| rung.source() == model.source());
        if same_weights && old.shape() == model.cache_shape() {
            let report = CarryReport::identity(&old, model);
            return Ok((old, report, ms_since(started)));
        }
        let ahead = ahead.filter(|ahead| ahead.shape() == model.cache_shape() && ahead.is_prefix_of(old.slots()));
        // A bridge up is no exact way, and there is time for one: it is for those who asked for it.
        let rung = self.ladder.rung(from).filter(|_| to > from || self.settings.ahead.eager_up);
        let bridge = rung.and_then(|rung| loaded.bridges.get(rung.source())).zip(self.ropes.get(from.get()));
        let (ahead, begun) = match bridge {
            Some(_) => self.worth_all(ahead, old.len(), model),
            None => (ahead, None),
        };
        if let Some(ahead) = ahead {
            match carry::take_over(ahead, old.slots(), model, &self.ledger, &self.calm) {
                Ok((cache, report)) => {
                    let carry_ms = ms_since(started);
                    keepsakes.retain(|keepsake| keepsake.source() != model.source());
                    self.keep(&old, keepsakes, (from, to), failures);
                    return Ok((cache, report, carry_ms));
                }
                Err(error) => failures.push((Some(Route::ReadAhead), chain(&error))),
            }
        }
        if let Some(at) = keepsakes.iter().position(|k| k.source() == model.source()) {
            let mut keepsake = keepsakes.remove(at);
            if keepsake.is_prefix_of(old.slots()) {
                match carry::restore(&mut keepsake, old.slots(), old.limit(), model, &self.ledger, &self.calm) {
                    Ok((cache, report)) => return Ok((cache, report, ms_since(started))),
                    Err(error) => failures.push((Some(Route::Keepsake), chain(&error))),
                }
            }
        }
        let carried = bridge.and_then(|(bridge, rope)| {
            let settings = self.settings.carry.settings(self.flops_per_ms, bridge, model, Tokens::from(old.len()));
            let done = carry::carry(bridge, (&old, rope), begun, model, settings, &self.ledger, &self.calm);
            done.map_err(|error| failures.push((Some(Route::Bridge), chain(&error)))).ok()
        });
        let (cache, report) = match carried {
            Some(done) => done,
            None => carry::reread(old.slots(), old.limit(), model, &self.ledger, &self.calm)?,
        };
        let carry_ms = ms_since(started);
        self.keep(&old, keepsakes, (from, to), failures);
        Ok((cache, report, carry_ms))
    }

    /// Whether the rest of what was read ahead is to be read natively, or is begun with by a carry over a bridge: as much is
    /// read at once as a reader waits for.
    fn worth_all(&self, ahead: Option<KvCache>, tokens: usize, model: &Model) -> (Option<KvCache>, Option<KvCache>) {
        let Some(ahead) = ahead else { return (None, None) };
        let left = tokens - ahead.len();
        let flops = model.flops(model.config().layers, left, ahead.len());
        let waits = match (self.settings.carry, self.flops_per_ms) {
            (Effort::Stall { target_ms }, Some(pace)) => flops <= target_ms * pace,
            _ => false,
        };
        if waits || left <= usize::from(self.settings.ahead.tokens) + 1 {
            (Some(ahead), None)
        } else {
            (None, Some(ahead))
        }
    }

    /// Keeps what a sequence leaves behind on its way down, after the carry, so that the reader waits for that alone.
    fn keep(
        &self,
        old: &KvCache,
        keepsakes: &mut Vec<Keepsake>,
        (from, to): (RungIdx, RungIdx),
        failures: &mut Vec<(Option<Route>, String)>,
    ) {
        if let (true, Some(folder), Some(rung)) = (to > from, &self.settings.keepsakes, self.ladder.rung(from)) {
            match Keepsake::save(old, rung.source(), folder) {
                Ok(keepsake) => keepsakes.push(keepsake),
                Err(error) => failures.push((None, chain(&error))),
            }
        }
    }
}
