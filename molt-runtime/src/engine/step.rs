//! A step: everybody on a rung reads or writes in one pass.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::decoder::Decoder as _;
use molt_kv::faults::{self, Boundary};
use molt_models::{ModelError, Part};
use molt_scheduler::units::{RungIdx, Tokens};
use molt_scheduler::{SequenceId, Step};

use crate::engine::sequence::Chosen;
use crate::engine::{Engine, ms_since};
use crate::event::{Event, TroubleKind};

/// Tokens of a pass from which on its time says how fast this machine computes: with fewer, memory sets the pace.
pub(super) const PACE_TOKENS: usize = 32;

/// A sequence in the middle of a step.
struct Stepping {
    id: SequenceId,
    tokens: Vec<u32>,
    cache: KvCache,
}

impl Engine {
    /// Everybody on a rung steps in one pass: the weights are read once for all of them.
    pub(super) fn step_together(&mut self, rung: RungIdx, steps: &[Step]) {
        let Some(loaded) = self.loaded.get(&rung) else { return };
        let mut stepping = Vec::new();
        for step in steps.iter().filter(|step| step.rung == rung) {
            let Some(sequence) = self.sequences.get_mut(&step.sequence).filter(|s| s.rung == rung) else { continue };
            let tokens = sequence.next_tokens(step.tokens).to_vec();
            if tokens.is_empty() {
                continue;
            }
            let cache = match sequence.cache.take() {
                Some(cache) => Ok(cache),
                None => KvCache::new(loaded.model.cache_shape(), sequence.limit(), &self.ledger),
            };
            match cache {
                Ok(cache) => stepping.push(Stepping { id: step.sequence, tokens, cache }),
                // Address space, not memory, has run out; the next round tries again.
                Err(error) => {
                    let (kind, message) = (TroubleKind::Cache, format!("no cache for a sequence yet: {error}"));
                    self.events.push((None, Event::Trouble { kind, route: None, message }));
                }
            }
        }
        if stepping.is_empty() {
            return;
        }
        let mut parts: Vec<Part<'_>> =
            stepping.iter_mut().map(|s| Part { tokens: &s.tokens, cache: &mut s.cache }).collect();
        let started = Instant::now();
        let read = match faults::pass(Boundary::Compute) {
            Ok(()) => loaded.model.read_together(&mut parts, self.alarm.flag()),
            Err(_) => Err(molt_kv::decoder::Stopped.into()),
        };
        let pass: usize = stepping.iter().map(|stepping| stepping.tokens.len()).sum();
        if pass >= PACE_TOKENS && read.is_ok() {
            let context = stepping.iter().map(|stepping| stepping.cache.len()).sum::<usize>() / stepping.len();
            let flops = loaded.model.flops(loaded.model.config().layers, pass, context);
            self.flops_per_ms = Some(flops / ms_since(started).max(f64::MIN_POSITIVE));
        }
        // Of those who have read everything so far, the hidden states of their last tokens.
        let (mut hidden, mut choosing) = (Vec::new(), Vec::new());
        let width = loaded.model.config().width;
        for (index, Stepping { id, tokens, cache }) in stepping.into_iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            sequence.cache = Some(cache);
            let Ok(last) = &read else { continue };
            sequence.read += tokens.len();
            self.read_tokens += tokens.len();
            if sequence.may_sample() {
                hidden.extend_from_slice(&last[index * width..(index + 1) * width]);
                choosing.push(id);
            }
        }
        let mut lost = Vec::new();
        let (tokenizer, sequences, events) = (self.ladder.tokenizer(), &mut self.sequences, &mut self.events);
        let reaction = &mut self.reaction;
        loaded.model.choose_each(&hidden, |at, logits, room| {
            let Some((id, sequence)) = choosing.get(at).and_then(|id| Some((*id, sequences.get_mut(id)?))) else {
                return;
            };
            let Chosen { text, end, likelihood } = match sequence.sample(logits, room, tokenizer) {
                Ok(chosen) => chosen,
                Err(error) => {
                    lost.push((id, error));
                    return;
                }
            };
            let (tenant, class, nth) = (sequence.tenant.clone(), sequence.class, sequence.answered());
            let waited = std::mem::replace(&mut sequence.last_token, Instant::now()).elapsed();
            let wait_ms = (!end).then_some(waited.as_secs_f64() * 1e3);
            if reaction.ends_wait_of(id) {
                let stall_ms = waited.as_secs_f64() * 1e3;
                events.push((Some(id), Event::Stall { tenant: tenant.clone(), class, stall_ms }));
            }
            if !end || !text.is_empty() {
                let tenant = tenant.clone();
                events.push((Some(id), Event::Token { tenant, class, nth, wait_ms, text, rung, likelihood }));
            }
            if let Some(reason) = sequence.finished() {
                let total_ms = ms_since(sequence.asked);
                events.push((Some(id), Event::Finished { tenant, class, tokens: nth, reason, total_ms }));
            }
        });
        for (id, error) in lost {
            let (kind, message) = (TroubleKind::Grammar, error.to_string());
            self.tell(Some(id), Event::Trouble { kind, route: None, message });
            self.cancel(id);
        }
        match read {
            Ok(_) => {}
            Err(ModelError::Stopped(_)) => {
                self.tell(None, Event::GivenUp { rung, tokens: Tokens::from(pass), given_up_ms: ms_since(started) });
            }
            Err(error) => self.trouble(TroubleKind::Step, format!("a step failed and is repeated: {error}")),
        }
    }
}
