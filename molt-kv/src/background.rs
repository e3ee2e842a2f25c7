//! The background reader: reads tokens natively into a cache, left to right, a little at a time.
//!
//! It *heals* in place after a carry, until the cache is what a native read of everything would have made. Every token
//! before the next one to heal is exact, and attention is causal, so what is healed is exact as well; what follows is better
//! than it was at every step.
//!
//! It *reads on* into a cache of another model, so that a conversation that goes there has been read before it comes.

use std::ops::Range;

use molt_scheduler::units::Tokens;

use crate::cache::{CacheError, KvCache, Provenance, Slot};
use crate::decoder::{Decoder, StopFlag, Stopped};
use crate::ledger::{Kind, Ledger};
use crate::region::{Region, RegionError};

/// Why nothing was read; the cache is as it was.
#[derive(Debug, thiserror::Error)]
pub enum BackgroundError {
    /// Given up as asked.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// No memory for its buffers.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// No room for more tokens.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Reads the next tokens that are not exact again, at most `count` and at most one chunk of the decoder's; returns how
/// many. Where it is given up, the cache is as it was.
pub fn heal(
    cache: &mut KvCache,
    destination: &dyn Decoder,
    count: Tokens,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<Tokens, BackgroundError> {
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

/// Reads on into the cache of another model, which holds the first of `slots` (see [`KvCache::is_prefix_of`]): the next ones,
/// at most `count` and at most one chunk of the decoder's; returns how many. Where it is given up, the cache is as it was.
pub fn read_on(
    cache: &mut KvCache,
    slots: &[Slot],
    destination: &dyn Decoder,
    count: Tokens,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<Tokens, BackgroundError> {
    let held = cache.len();
    let count = usize::from(count).min(destination.chunk_limit());
    let next: Vec<Slot> = slots.iter().skip(held).take(count).copied().collect();
    if next.is_empty() {
        return Ok(Tokens::ZERO);
    }
    let tokens: Vec<u32> = next.iter().map(|slot| slot.token).collect();
    let floats = tokens.len() * destination.width();
    let mut hidden = Region::new(ledger, Kind::Scratch, floats * size_of::<f32>())?;
    let hidden = &mut hidden.as_mut_slice::<f32>()[..floats];
    destination.embed(&tokens, hidden);
    let layers = destination.cache_shape().layers;
    let into = cache.append_at(&next, cache.native_provenance())?;
    if let Err(stopped) = destination.run_layers(0..layers, hidden, cache, into, stop) {
        cache.truncate(held);
        return Err(stopped.into());
    }
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
