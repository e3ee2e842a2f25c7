//! Taking a sequence's cache to another rung: which route, and what happens when a route fails.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::carry::{self, CarryError, CarryReport, CarrySettings, Route};
use molt_kv::decoder::Decoder as _;
use molt_kv::keepsake::Keepsake;
use molt_scheduler::SequenceId;
use molt_scheduler::units::{RungIdx, Tokens};

use crate::engine::step::PACE_TOKENS;
use crate::engine::{Effort, Engine, Loaded, chain, ms_since};
use crate::event::{Event, Switch, TroubleKind};

impl Engine {
    /// Moves a sequence to another rung whose weights are loaded. The old cache goes only when the new one has been
    /// checked; where every route fails, the conversation stays and is read again in ordinary steps.
    pub(super) fn carry(&mut self, id: SequenceId, (from, to): (RungIdx, RungIdx), signal: Instant, pressure: f64) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        let Some(loaded) = self.loaded.get(&to) else {
            // The load failed and the scheduler knows; the sequence stays where it is.
            self.sequences.insert(id, sequence);
            return;
        };
        let mut failures = Vec::new();
        if let Some(old) = sequence.cache.take() {
            let limit = old.limit();
            match self.routes(old, &mut sequence.keepsakes, (from, to), loaded, &mut failures) {
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
                        sequence.healing = super::heal::Healing::default();
                    }
                    sequence.mixed = matches!(report.route, Route::Identity | Route::Keepsake);
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
                    sequence.cache = KvCache::new(loaded.model.cache_shape(), limit, &self.ledger).ok();
                    sequence.read = 0;
                }
            }
        }
        sequence.rung = to;
        self.sequences.insert(id, sequence);
        for (route, failure) in failures {
            let (kind, what) = match route {
                Some(Route::Identity) => (TroubleKind::Carry, "taking the cache as it is"),
                Some(Route::Bridge) => (TroubleKind::Carry, "the bridge"),
                Some(Route::Keepsake) => (TroubleKind::Carry, "the keepsake"),
                Some(Route::Reread) => (TroubleKind::Carry, "reading again"),
                None => (TroubleKind::Keepsake, "keeping what was left behind"),
            };
            let then = if route.is_some() { ", and the next route was taken" } else { "" };
            let message = format!("in a carry from {from} to {to} {what} failed{then}: {failure}");
            self.tell(None, Event::Trouble { kind, route, message });
        }
    }

    /// The routes in order of cost: identity, keepsake, bridge, reading again. Returns the new cache, what was done,
    /// and the milliseconds of the carry alone. Failures name their route; that of a keepsake's writing is none.
    fn routes(
        &self,
        old: KvCache,
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
        if let Some(at) = keepsakes.iter().position(|k| k.source() == model.source()) {
            let mut keepsake = keepsakes.remove(at);
            if keepsake.is_prefix_of(old.slots()) {
                match carry::restore(&mut keepsake, old.slots(), old.limit(), model, &self.ledger, &self.calm) {
                    Ok((cache, report)) => return Ok((cache, report, ms_since(started))),
                    Err(error) => failures.push((Some(Route::Keepsake), chain(&error))),
                }
            }
        }
        let rung = self.ladder.rung(from);
        let bridge = rung.and_then(|rung| loaded.bridges.get(rung.source())).zip(self.ropes.get(from.get()));
        let carried = bridge.and_then(|(bridge, rope)| {
            let settings = match (self.settings.carry, self.flops_per_ms) {
                (Effort::Fixed(settings), _) => settings,
                (Effort::Stall { .. }, None) => CarrySettings::default(),
                (Effort::Stall { target_ms }, Some(pace)) => {
                    CarrySettings::within(target_ms * pace, bridge, model, Tokens::from(old.len()))
                }
            };
            let done = carry::carry(bridge, (&old, rope), model, settings, &self.ledger, &self.calm);
            done.map_err(|error| failures.push((Some(Route::Bridge), chain(&error)))).ok()
        });
        let (cache, report) = match carried {
            Some(done) => done,
            None => carry::reread(old.slots(), old.limit(), model, &self.ledger, &self.calm)?,
        };
        let carry_ms = ms_since(started);
        // Only now, so that the reader waits for the carry alone; and only on the way down.
        if let (true, Some(folder), Some(rung)) = (to > from, &self.settings.keepsakes, rung) {
            match Keepsake::save(&old, rung.source(), folder) {
                Ok(keepsake) => keepsakes.push(keepsake),
                Err(error) => failures.push((None, chain(&error))),
            }
        }
        Ok((cache, report, carry_ms))
    }
}
