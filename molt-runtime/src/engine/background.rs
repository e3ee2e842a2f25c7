//! The background reader: between the rounds' steps it reads natively what a bridge has mapped, and where nothing is left to
//! heal it reads ahead.

use std::time::Instant;

use molt_kv::background::heal;
use molt_scheduler::units::{Bytes, Tokens};
use molt_scheduler::{Plan, Step};

use crate::engine::{Engine, ms_since};
use crate::event::Event;

/// How much of the time healing takes. It is counted in tokens and rounds, not in milliseconds, so that a run can be
/// repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealSettings {
    /// Tokens that are read at a time: what a next token may have to wait for. Eight take between two and three times as
    /// long as decoding one ("together" of `molt bench`), for the weights are read from memory once for all of them.
    pub tokens: Tokens,
    /// After every so many rounds; 0 heals nothing.
    pub every: u32,
}

impl Default for HealSettings {
    fn default() -> Self {
        Self { tokens: Tokens::new(8), every: 2 }
    }
}

/// How far the healing of a sequence has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Healing {
    tokens: Tokens,
    heal_ms: f64,
    wait_ms_max: f64,
}

impl Engine {
    /// What is read between the steps of a round and the next, where so much of the budget is to spare.
    pub(super) fn read_in_background(&mut self, plan: &Plan, spare: Bytes) {
        // Healing a cache that is about to be left behind would be for nothing.
        if !plan.prospects().is_empty() || !self.heal(plan.steps()) {
            self.read_ahead(plan, spare);
        }
    }

    /// Heals a little of the first sequence that stepped and is not exact: the foreground's before batch's, for so they
    /// stand among the steps. Whether there is anything to heal.
    fn heal(&mut self, steps: &[Step]) -> bool {
        self.unhealed_rounds = self.unhealed_rounds.saturating_add(1);
        let HealSettings { tokens, every } = self.settings.heal;
        if every == 0 {
            return false;
        }
        for step in steps {
            let Some((sequence, loaded)) = self.sequences.get_mut(&step.sequence).zip(self.loaded.get(&step.rung))
            else {
                continue;
            };
            let Some(cache) = sequence.cache.as_mut().filter(|_| sequence.rung == step.rung) else { continue };
            if cache.is_exact() || sequence.finished.is_some() {
                continue;
            }
            if self.unhealed_rounds < every {
                return true;
            }
            self.unhealed_rounds = 0;
            let started = Instant::now();
            // Given up, or without memory for its buffers: memory is wanted, and there will be another round.
            let Ok(healed) = heal(cache, &loaded.model, tokens, &self.ledger, self.alarm.flag()) else { return true };
            let took = ms_since(started);
            let healing = &mut sequence.healing;
            healing.tokens += healed;
            healing.heal_ms += took;
            healing.wait_ms_max = healing.wait_ms_max.max(took);
            if cache.is_exact() {
                let Healing { tokens, heal_ms, wait_ms_max } = std::mem::take(healing);
                let (tenant, rung) = (sequence.tenant.clone(), step.rung);
                self.tell(Some(step.sequence), Event::Healed { tenant, rung, tokens, heal_ms, wait_ms_max });
            }
            return true;
        }
        false
    }
}
