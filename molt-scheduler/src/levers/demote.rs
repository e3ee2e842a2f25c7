//! Lever 2, demote: sequences go on at smaller rungs.
//!
//! What counts is the set of rungs that are in use afterwards, for that is what the weights cost. So every set is
//! tried (all of them on ladders of up to eight rungs, those of at most three on longer ones), and each sequence takes
//! the biggest rung of the set between where it is and its floor, or, where memory asks for it, the one on which its
//! cache is smallest. Of the assignments that fit, the one with the least harm is taken: fewest rungs lost by the
//! foreground, then by batch, each rung counted by weight. That the transition keeps to the law is part of fitting:
//! where it does not, the next assignment is tried, which as a rule goes a rung further down.
//!
//! Where none of these can be carried out and the sequences are few, every assignment is tried one by one before anybody is
//! stopped.
//!
//! A tenant that shares its rung with another gains nothing by moving alone, since its old weights stay and new ones
//! come; such an assignment never fits better than staying, so they move together.

use crate::cost::LadderCost;
use crate::input::Class;
use crate::transition::Carry;
use crate::units::{Bytes, RungIdx, Tokens};
use crate::usage::RungSet;

use super::{Candidate, Field, Movable};

/// How a sequence picks its rung of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pick {
    /// All lose as few rungs as they can.
    Near,
    /// Batch takes the smallest cache.
    NearForeground,
    /// All take the smallest cache.
    Small,
}

impl Pick {
    /// Whether a class takes the biggest rung that it can.
    fn near(self, class: Class) -> bool {
        match self {
            Self::Near => true,
            Self::NearForeground => class == Class::Foreground,
            Self::Small => false,
        }
    }
}

/// An assignment that fits: foreground harm, batch harm, then what tells equal ones apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fit {
    harm: (u64, u64),
    set: RungSet,
    pick: Pick,
}

/// How many sequences are looked at one by one where giving back to all at once is too much on the way.
const REFINED_ONE_BY_ONE: u32 = 32;

/// Chooses the least harmful assignment of everybody but the first `parked`; whether there is one.
pub(crate) fn choose(field: &mut Field<'_>, parked: usize, movable: Movable) -> bool {
    for (index, found) in field.candidates.iter_mut().enumerate() {
        found.to = if index < parked { None } else { Some(found.rung) };
    }
    if parked >= field.candidates.len() {
        return field.missing(parked) == Bytes::ZERO;
    }
    let whole = RungSet::whole(field.ladder);
    let usable = whole.and(field.frame.usable);
    let short = whole.len() <= 8;
    field.fits.clear();
    let kept = group(field, parked);
    for bits in 1..=whole.bits() {
        let set = RungSet::numbered(bits);
        if !set.minus(usable).is_empty() || !(short || set.len() <= 3) {
            continue;
        }
        for pick in [Pick::Near, Pick::NearForeground, Pick::Small] {
            if let Some((usage, harm)) = weigh(field, kept, movable, set, pick)
                && usage <= field.frame.limit
            {
                field.fits.push(Fit { harm, set, pick });
            }
        }
    }
    field.fits.sort_unstable();
    for index in 0..field.fits.len() {
        let Some(Fit { set, pick, .. }) = field.fits.get(index).copied() else { break };
        if let Some(usage) = assign(field, parked, movable, set, pick) {
            refine(field, parked, movable, set, usage, None);
            if lawful(field) {
                return true;
            }
        }
        // What fits in the end may be too much on the way: then give back one by one, as long as the way stays lawful.
        if let Some(usage) = assign(field, parked, movable, set, pick)
            && lawful(field)
        {
            refine(field, parked, movable, set, usage, Some(REFINED_ONE_BY_ONE));
            return true;
        }
    }
    try_all(field, parked, movable)
}

/// Assignments that are tried one by one where none of those by sets can be carried out.
const TRIED_AT_MOST: usize = 4_096;

/// Where there are few sequences: every assignment of everybody but the first `parked`, for the way there may be lawful
/// only if some that choose alike choose differently. Takes the least harmful; whether there is one.
fn try_all(field: &mut Field<'_>, parked: usize, movable: Movable) -> bool {
    let usable = RungSet::whole(field.ladder).and(field.frame.usable);
    let allowed = |found: &Candidate| {
        let moves = movable.includes(found.class);
        let may = move |rung: &RungIdx| *rung == found.rung || (moves && *rung > found.rung && *rung <= found.floor);
        usable.iter().filter(may).fold(RungSet::EMPTY, RungSet::with)
    };
    let mut ways = field.candidates.iter().skip(parked).map(|found| allowed(found).len() as usize);
    let Some(ways) = ways.try_fold(1usize, usize::checked_mul).filter(|ways| *ways <= TRIED_AT_MOST) else {
        return false;
    };
    let mut best: Option<((u64, u64), usize)> = None;
    for way in 0..ways {
        let harm = take(field, parked, allowed, way);
        if best.is_none_or(|(least, _)| harm < least) && usage(field) <= field.frame.limit && lawful(field) {
            best = Some((harm, way));
        }
    }
    match best {
        Some((_, way)) => {
            take(field, parked, allowed, way);
            true
        }
        None => false,
    }
}

/// Makes the assignment with that number, in which everybody but the first `parked` takes one of the rungs allowed; its
/// harm.
fn take(field: &mut Field<'_>, parked: usize, allowed: impl Fn(&Candidate) -> RungSet, mut way: usize) -> (u64, u64) {
    let mut harm = (0u64, 0u64);
    for found in field.candidates.iter_mut().skip(parked) {
        let rungs = allowed(found);
        let count = (rungs.len() as usize).max(1);
        found.to = rungs.iter().nth(way % count);
        way /= count;
        let lost = found.to.map_or(0, |to| u64::from(to.index() - found.rung.index())).saturating_mul(found.weight);
        match found.class {
            Class::Foreground => harm.0 = harm.0.saturating_add(lost),
            Class::Batch => harm.1 = harm.1.saturating_add(lost),
        }
    }
    harm
}

/// Usage after the assignment as it stands, with the next step's growth.
pub(super) fn usage(field: &Field<'_>) -> Bytes {
    let mut used = RungSet::EMPTY;
    let mut caches = field.parked;
    for found in field.candidates.iter() {
        let each = field.ladder.cost(found.to.unwrap_or(found.rung)).cache_per_token;
        caches += each.times(found.cached);
        if let Some(to) = found.to {
            used = used.with(to);
            caches += each;
        }
    }
    caches + used.held(field.ladder)
}

/// Candidates that choose alike, since a choice is by class, rung and floor only. There are few of these, however many
/// candidates there are, and so all sets can be weighed by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    class: Class,
    rung: RungIdx,
    floor: RungIdx,
    weight: u64,
    cached: Tokens,
    count: Tokens,
}

impl Group {
    fn of(found: &Candidate) -> Self {
        let Candidate { class, weight, rung, floor, cached, .. } = *found;
        Self { class, rung, floor, weight, cached, count: Tokens::new(1) }
    }

    fn alike(&self, other: &Self) -> bool {
        (self.class, self.rung, self.floor) == (other.class, other.rung, other.floor)
    }
}

/// Groups everybody but the first `parked`; the caches of all who do not run.
fn group(field: &mut Field<'_>, parked: usize) -> Bytes {
    let mut kept = field.parked;
    field.groups.clear();
    for (index, found) in field.candidates.iter().enumerate() {
        if index < parked {
            kept += field.ladder.cost(found.rung).cache_per_token.times(found.cached);
            continue;
        }
        let one = Group::of(found);
        match field.groups.iter_mut().find(|group| group.alike(&one)) {
            Some(group) => {
                group.weight = group.weight.saturating_add(one.weight);
                group.cached += one.cached;
                group.count += one.count;
            }
            None => field.groups.push(one),
        }
    }
    kept
}

/// The rung that a candidate takes of a set.
pub(super) fn option(
    field: &Field<'_>,
    found: &Candidate,
    movable: Movable,
    set: RungSet,
    near: bool,
) -> Option<RungIdx> {
    choice(field.ladder, &Group::of(found), movable, set, near)
}

fn choice(ladder: &LadderCost, group: &Group, movable: Movable, set: RungSet, near: bool) -> Option<RungIdx> {
    let movable = movable.includes(group.class);
    let allowed = |rung: &RungIdx| *rung == group.rung || (movable && *rung > group.rung && *rung <= group.floor);
    let mut options = set.iter().filter(allowed);
    if near { options.next() } else { options.min_by_key(|rung| ladder.cost(*rung).cache_per_token) }
}

/// What an assignment to a set would come to: usage with the next step's growth, and the harm. `None` where somebody
/// finds no rung in the set, or the set holds a rung that nobody takes.
fn weigh(field: &Field<'_>, kept: Bytes, movable: Movable, set: RungSet, pick: Pick) -> Option<(Bytes, (u64, u64))> {
    let (mut used, mut caches, mut harm) = (RungSet::EMPTY, kept, (0u64, 0u64));
    for group in field.groups.iter() {
        let to = choice(field.ladder, group, movable, set, pick.near(group.class))?;
        used = used.with(to);
        caches += field.ladder.cost(to).cache_per_token.times(group.cached + group.count);
        let lost = u64::from(to.index() - group.rung.index()).saturating_mul(group.weight);
        match group.class {
            Class::Foreground => harm.0 = harm.0.saturating_add(lost),
            Class::Batch => harm.1 = harm.1.saturating_add(lost),
        }
    }
    (used == set).then(|| (caches + used.held(field.ladder), harm))
}

/// Assigns everybody but the first `parked` to a set; usage with the next step's growth. `None` where somebody finds no
/// rung in the set.
fn assign(field: &mut Field<'_>, parked: usize, movable: Movable, set: RungSet, pick: Pick) -> Option<Bytes> {
    let mut used = RungSet::EMPTY;
    let mut caches = field.parked;
    for index in 0..field.candidates.len() {
        let found = *field.candidates.get(index)?;
        let (rung, to) = if index < parked {
            (found.rung, None)
        } else {
            let to = option(field, &found, movable, set, pick.near(found.class))?;
            used = used.with(to);
            caches += field.ladder.cost(to).cache_per_token;
            (to, Some(to))
        };
        caches += field.ladder.cost(rung).cache_per_token.times(found.cached);
        if let Some(slot) = field.candidates.get_mut(index) {
            slot.to = to;
        }
    }
    Some(caches + used.held(field.ladder))
}

/// Lets those whom a lever should touch last have back what others have made room for, as far as it fits; with a number
/// of `checks`, only what leaves the transition lawful, and at most that many of them.
fn refine(
    field: &mut Field<'_>,
    parked: usize,
    movable: Movable,
    set: RungSet,
    mut usage: Bytes,
    mut checks: Option<u32>,
) {
    for index in (parked..field.candidates.len()).rev() {
        let Some(found) = field.candidates.get(index).copied() else { break };
        let (Some(to), Some(near)) = (found.to, option(field, &found, movable, set, true)) else { continue };
        let cache = |rung: RungIdx| {
            let each = field.ladder.cost(rung).cache_per_token;
            each.times(found.cached) + each
        };
        let better = usage - cache(to) + cache(near);
        if near >= to || better > field.frame.limit {
            continue;
        }
        let set_to = |field: &mut Field<'_>, rung: RungIdx| {
            if let Some(slot) = field.candidates.get_mut(index) {
                slot.to = Some(rung);
            }
        };
        set_to(field, near);
        if let Some(left) = checks.as_mut() {
            let lawful = *left > 0 && lawful(field);
            *left = left.saturating_sub(1);
            if !lawful {
                set_to(field, to);
                continue;
            }
        }
        usage = better;
    }
}

/// Whether the assignment as it stands can be carried out within the law of transitions.
pub(super) fn lawful(field: &mut Field<'_>) -> bool {
    let mut used = RungSet::EMPTY;
    let mut caches = field.parked;
    field.carries.clear();
    for found in field.candidates.iter() {
        let source = field.ladder.cost(found.rung).cache_per_token.times(found.cached);
        caches += source;
        let Some(to) = found.to else { continue };
        used = used.with(to);
        if to != found.rung {
            let destination = field.ladder.cost(to).cache_per_token.times(found.cached);
            field.carries.push(Carry { decision: 0, source, destination });
        }
    }
    let (kept, loaded) = (used.and(field.resident), used.minus(field.resident));
    field.frame.arrange(field.ladder, caches, kept, loaded, field.carries)
}
