//! Lever 4, shed: the oldest context goes, in whole blocks, between what is pinned and the recent window.
//!
//! In order of harm, each sequence gives all it can before the next gives anything, and no more blocks go than are
//! needed. Whoever is stopped sheds like whoever runs: its cache is what takes the room.

use crate::cost::LadderCost;
use crate::input::Config;
use crate::plan::Action;
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::Sequence;
use crate::units::{Bytes, Tokens};
use crate::usage::Books;

use super::Movable;

/// All that may be shed.
pub(crate) fn sheddable<'a>(
    sequences: impl Iterator<Item = &'a Sequence>,
    config: &Config,
    ladder: &LadderCost,
    who: Movable,
) -> Bytes {
    let of = |found: &Sequence| {
        let each = found.rung().map_or(Bytes::ZERO, |rung| ladder.cost(rung).cache_per_token);
        each.times(Tokens::new(found.sheddable(config).1.saturating_mul(config.shed_block.get())))
    };
    sequences.filter(|found| who.includes(found.class)).map(of).sum()
}

/// Sheds until `missing` is freed or nothing is left to shed; whether it is freed.
pub(crate) fn shed(
    scheduler: &mut Scheduler,
    books: &mut Books,
    scratch: &mut Scratch,
    missing: Bytes,
    who: Movable,
) -> bool {
    let Scratch { order, decided, .. } = scratch;
    let block = scheduler.config.shed_block;
    order.clear();
    order.extend(scheduler.sequences.iter().filter(|found| who.includes(found.class)).map(|found| found.id));
    order.sort_by_cached_key(|id| scheduler.sequences.get(id.parts()).map(Sequence::harm));
    let mut missing = missing;
    for id in order.iter() {
        if missing == Bytes::ZERO {
            break;
        }
        let Some(sequence) = scheduler.sequences.get_mut(id.parts()) else { continue };
        let Some(rung) = sequence.rung() else { continue };
        let (from, blocks) = sequence.sheddable(&scheduler.config);
        let each = scheduler.ladder.cost(rung).cache_per_token.times(block);
        let Some(needed) =
            missing.get().checked_add(each.get().saturating_sub(1)).and_then(|sum| sum.checked_div(each.get()))
        else {
            continue;
        };
        let tokens = Tokens::new(blocks.min(needed).saturating_mul(block.get()));
        if tokens == Tokens::ZERO {
            continue;
        }
        let frees = scheduler.ladder.cost(rung).cache_per_token.times(tokens);
        sequence.cached -= tokens;
        books.drop(rung, tokens);
        missing -= frees;
        decided.push(Action::Shed { sequence: *id, from, tokens, frees });
    }
    missing == Bytes::ZERO
}
