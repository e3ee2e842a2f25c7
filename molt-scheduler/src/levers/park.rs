//! Lever 3, park: sequences stop. Their caches stay bit for bit, and their weights go where nobody else uses them.
//!
//! The smallest number of sequences is stopped, counted in the order of harm, with which the others can go on at all
//! (be it on smaller rungs). Then those among the stopped who would cost nothing that is not there anyway, say because
//! the foreground keeps their rung, are let run after all, the most precious first.

use crate::units::{Bytes, RungIdx};
use crate::usage::RungSet;

use super::demote::{self, option};
use super::{Field, Movable};

/// How many numbers of the stopped are tried where stopping all does not suffice.
const ONE_BY_ONE: usize = 64;

/// Stops as few as suffice beyond the first `from`; whether any number of them does.
pub(crate) fn choose(field: &mut Field<'_>, from: usize, movable: Movable) -> bool {
    let all = field.candidates.len();
    choose_among(field, from, all, movable)
}

/// The same with the stopped taken from `from..until` only.
pub(crate) fn choose_among(field: &mut Field<'_>, from: usize, until: usize, movable: Movable) -> bool {
    if until <= from {
        return false;
    }
    if !demote::choose(field, until, movable) {
        // Kept caches alone are too much. Somebody who goes on at a smaller rung may have a smaller cache there.
        let few = (from + 1..until).take(ONE_BY_ONE).find(|enough| demote::choose(field, *enough, movable));
        if let Some(enough) = few {
            relent(field, enough, movable);
        }
        return few.is_some();
    }
    // With the first `enough` stopped it works, with the first `few` it does not.
    let (mut few, mut enough) = (from, until);
    while few + 1 < enough {
        let middle = few + (enough - few) / 2;
        if demote::choose(field, middle, movable) {
            enough = middle;
        } else {
            few = middle;
        }
    }
    let settled = demote::choose(field, enough, movable);
    relent(field, enough, movable);
    settled
}

/// Stops the first `most`, or as many fewer as let the others go on; whether that suffices. Fewer may suffice where more
/// do not: the cache of somebody who goes on at a smaller rung may be smaller there.
pub(crate) fn at_most(field: &mut Field<'_>, most: usize, movable: Movable) -> bool {
    let found = (0..=most).rev().take(ONE_BY_ONE).find(|parked| demote::choose(field, *parked, movable));
    if let Some(parked) = found {
        relent(field, parked, movable);
    }
    found.is_some()
}

/// Stops everybody.
pub(crate) fn everybody(field: &mut Field<'_>) {
    for found in field.candidates.iter_mut() {
        found.to = None;
    }
}

/// Lets run, of the first `parked`, those who fit beside the others without further weights.
pub(crate) fn relent(field: &mut Field<'_>, parked: usize, movable: Movable) {
    let used = field.candidates.iter().filter_map(|found| found.to).fold(RungSet::EMPTY, RungSet::with);
    let mut usage = demote::usage(field);
    for index in (0..parked.min(field.candidates.len())).rev() {
        let Some(found) = field.candidates.get(index).copied() else { break };
        for near in [true, false] {
            let Some(to) = option(field, &found, movable, used, near) else { continue };
            let cache = |rung: RungIdx| field.ladder.cost(rung).cache_per_token.times(found.cached);
            let with: Bytes = usage - cache(found.rung) + cache(to) + field.ladder.cost(to).cache_per_token;
            if with > field.frame.limit {
                continue;
            }
            if let Some(slot) = field.candidates.get_mut(index) {
                slot.to = Some(to);
            }
            if to == found.rung || demote::lawful(field) {
                usage = with;
                break;
            }
            if let Some(slot) = field.candidates.get_mut(index) {
                slot.to = None;
            }
        }
    }
}
