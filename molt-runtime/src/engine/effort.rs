//! How much a carry over a bridge does before the next token.

use std::time::Instant;

use molt_kv::bridge::Bridge;
use molt_kv::cache::KvCache;
use molt_kv::carry::CarrySettings;
use molt_kv::decoder::{Decoder, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Model, ModelError};
use molt_scheduler::units::Tokens;

use super::ms_since;

/// How much of a carry over a bridge is done before the next token, and so how much is left to healing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effort {
    /// As much as a reader waits for, by what this machine has been seen to compute: everything is read again where that is
    /// done in time. [`CarrySettings::BALANCED`] until something was seen.
    Stall {
        /// How long a reader may wait for the carry.
        target_ms: f64,
    },
    /// Always the same.
    Fixed(CarrySettings),
}

impl Effort {
    /// What is read natively in a carry of so many tokens, on a machine of that pace ([`pace`]).
    pub fn settings(
        self,
        flops_per_ms: Option<f64>,
        bridge: &Bridge,
        destination: &dyn Decoder,
        tokens: Tokens,
    ) -> CarrySettings {
        match (self, flops_per_ms) {
            (Self::Fixed(settings), _) => settings,
            (Self::Stall { .. }, None) => CarrySettings::BALANCED,
            (Self::Stall { target_ms }, Some(pace)) => {
                CarrySettings::within(target_ms * pace, bridge, destination, tokens)
            }
        }
    }
}

impl Default for Effort {
    fn default() -> Self {
        Self::Stall { target_ms: 1_000.0 }
    }
}

/// Floating-point operations that a model does in a millisecond when it reads many tokens at once; the engine learns it from
/// what it reads, this measures it for whoever has no engine.
///
/// # Errors
/// Where the model cannot read.
pub fn pace(model: &Model, ledger: &Ledger) -> Result<f64, ModelError> {
    const TOKENS: usize = 256;
    let tokens = TOKENS.min(model.config().trained_context / 2);
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let ids: Vec<u32> = (1u32..).map(|i| i.wrapping_mul(7919) % vocab).take(tokens).collect();
    let mut took = f64::INFINITY;
    // The first warms up.
    for _ in 0..2 {
        let mut cache = KvCache::new(model.cache_shape(), Tokens::from(tokens), ledger)?;
        let started = Instant::now();
        model.read(&ids, &mut cache, &StopFlag::new())?;
        took = took.min(ms_since(started));
    }
    Ok(model.flops(model.config().layers, tokens, 0) / took.max(f64::MIN_POSITIVE))
}
