//! Healing: after a carry, tokens are read natively again, left to right and in place, until the cache is what a native
//! read of everything would have made. Every token before the next one to heal is exact, and attention is causal, so what
//! is healed is exact as well; what follows is better than it was at every step.

use std::ops::Range;

use molt_scheduler::units::Tokens;

use crate::cache::{KvCache, Provenance};
use crate::decoder::{Decoder, StopFlag, Stopped};
use crate::ledger::{Kind, Ledger};
use crate::region::{Region, RegionError};

/// Why nothing was healed; the cache is as it was.
#[derive(Debug, thiserror::Error)]
pub enum HealError {
    /// Given up as asked.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// No memory for its buffers.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Reads the next tokens that are not exact again, at most `count` and at most one chunk of the decoder's; returns how
/// many. Where it is given up, the cache is as it was.
pub fn heal(
    cache: &mut KvCache,
    destination: &dyn Decoder,
    count: Tokens,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<Tokens, HealError> {
    let next = next(cache, usize::from(count).min(destination.chunk_limit()));
    if next.is_empty() {
        return Ok(Tokens::ZERO);
    }
    let tokens: Vec<u32> = cache.slots()[next.clone()].iter().map(|slot| slot.token).collect();
    let floats = tokens.len() * destination.width();
    let mut hidden = Region::new(ledger, Kind::Scratch, floats * size_of::<f32>())?;
    let hidden = &mut hidden.as_mut_slice::<f32>()[..floats];
    destination.embed(&tokens, hidden);
    let before = cache.copy_of(next.clone(), ledger)?;
    let layers = destination.cache_shape().layers;
    if let Err(stopped) = destination.run_layers(0..layers, hidden, cache, next.clone(), stop) {
        cache.put_back(next, &before);
        return Err(stopped.into());
    }
    cache.mark(next, Provenance::Exact);
    Ok(Tokens::from(tokens.len()))
}

/// Tokens that are not exact, from the first of them on: what [`heal`] has left to do.
pub fn left(cache: &KvCache) -> Tokens {
    Tokens::from(next(cache, usize::MAX).len())
}

fn next(cache: &KvCache, count: usize) -> Range<usize> {
    let len = cache.len();
    let first = cache.slots().iter().position(|slot| slot.provenance != Provenance::Exact).unwrap_or(len);
    first..first.saturating_add(count).min(len)
}
