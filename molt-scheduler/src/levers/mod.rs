//! The levers, in order of harm. Terminating is not one of them.
//!
//! 1. [`defer`]: nobody is let in. It needs no decision: a round that must use any other lever admits nobody.
//! 2. [`demote`]: sequences go to smaller rungs, together where only that frees the weights they share.
//! 3. [`park`]: sequences stop, those first whom the class and the weight name; their caches stay.
//! 4. [`shed`]: the oldest context of those who are stopped goes, in blocks.
//!
//! With [`Policy::LeverFirst`] each is used only where those before it, over all tenants, do not suffice. With
//! [`Policy::ProtectForeground`] batch tenants run through 2, 3 and 4 before the foreground begins at 2.
//!
//! Idle weights are no lever: they go before anything else, since that harms nobody.

mod defer;
mod demote;
mod park;
mod shed;

use crate::cost::LadderCost;
use crate::input::{Class, Policy};
use crate::plan::{Action, LeverKind};
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::{Carry, Frame};
use crate::units::{Bytes, RungIdx, Tokens};
use crate::usage::{Books, RungSet};

pub(crate) use demote::{Fit, Group};
pub(crate) use shed::{shed, sheddable};

/// The order of harm.
pub const ORDER: [LeverKind; 4] = [LeverKind::Defer, LeverKind::Demote, LeverKind::Park, LeverKind::Shed];

/// A running sequence, as the levers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) parts: (u32, u32),
    pub(crate) class: Class,
    pub(crate) weight: u64,
    pub(crate) rung: RungIdx,
    pub(crate) floor: RungIdx,
    pub(crate) cached: Tokens,
    /// Where it shall run; `None` to park.
    pub(crate) to: Option<RungIdx>,
}

impl Candidate {
    /// A sequence that does not run yet, on the rung on which it shall.
    pub(crate) fn guest(sequence: &Sequence, rung: RungIdx) -> Self {
        Self {
            parts: sequence.id.parts(),
            class: sequence.class,
            weight: sequence.weight,
            rung,
            // Whoever runs below its floor already goes no further down.
            floor: sequence.floor.max(rung),
            cached: sequence.cached,
            to: Some(rung),
        }
    }
}

/// What the levers reckon with: the sequences that run, in order of harm, and all that does not move.
pub(crate) struct Field<'a> {
    pub(crate) ladder: &'a LadderCost,
    pub(crate) frame: &'a Frame,
    pub(crate) resident: RungSet,
    /// Caches of those who are parked already.
    pub(crate) parked: Bytes,
    pub(crate) candidates: &'a mut [Candidate],
    pub(crate) carries: &'a mut Vec<Carry>,
    pub(crate) fits: &'a mut Vec<Fit>,
    pub(crate) groups: &'a mut Vec<Group>,
}

/// Who may be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Movable {
    Batch,
    All,
}

impl Movable {
    pub(crate) fn includes(self, class: Class) -> bool {
        self == Self::All || class == Class::Batch
    }
}

/// Brings usage within the limit, or as near to it as the levers reach.
pub(crate) fn enforce(scheduler: &mut Scheduler, frame: &Frame, books: &mut Books, scratch: &mut Scratch) {
    press(scheduler, frame);
    gather(scheduler, scratch);
    let Scratch { candidates, carries, fits, groups, .. } = scratch;
    let running: Bytes =
        candidates.iter().map(|found| scheduler.ladder.cost(found.rung).cache_per_token.times(found.cached)).sum();
    let parked = books.caches(&scheduler.ladder) - running;
    let batch = candidates.iter().filter(|found| found.class == Class::Batch).count();
    let mut field = Field {
        ladder: &scheduler.ladder,
        frame,
        resident: scheduler.resident,
        parked,
        candidates,
        carries,
        fits,
        groups,
    };
    let mut missing = Bytes::ZERO;
    let mut from_batch = false;
    let settled = match scheduler.config.policy {
        Policy::LeverFirst => demote::choose(&mut field, 0, Movable::All) || park::choose(&mut field, 0, Movable::All),
        Policy::ProtectForeground => {
            let mut settled = demote::choose(&mut field, 0, Movable::Batch)
                || park::choose_among(&mut field, 0, batch, Movable::Batch);
            if !settled {
                // Batch has stopped; may its context make up for what is missing?
                missing = field.missing(batch);
                from_batch = missing
                    <= sheddable(scheduler.sequences.iter(), &scheduler.config, &scheduler.ladder, Movable::Batch);
                settled = from_batch;
            }
            settled
                || {
                    missing = Bytes::ZERO;
                    park::at_most(&mut field, batch, Movable::All)
                }
                || park::choose(&mut field, batch, Movable::All)
        }
    };
    if !settled {
        park::everybody(&mut field);
        let all = field.candidates.len();
        missing = field.missing(all);
    }
    apply(scheduler, frame, books, scratch);
    if missing > Bytes::ZERO {
        let who = if from_batch { Movable::Batch } else { Movable::All };
        shed(scheduler, books, scratch, missing, who);
    }
}

impl Field<'_> {
    /// Parks the first `parked` candidates, leaves the others where they are, and says how much is too much then.
    pub(crate) fn missing(&mut self, parked: usize) -> Bytes {
        let mut used = RungSet::EMPTY;
        let mut total = self.parked;
        for (index, found) in self.candidates.iter_mut().enumerate() {
            let each = self.ladder.cost(found.rung).cache_per_token;
            total += each.times(found.cached);
            found.to = None;
            if index >= parked {
                found.to = Some(found.rung);
                used = used.with(found.rung);
                total += each;
            }
        }
        total + used.held(self.ladder) - self.frame.limit
    }
}

/// Makes room for a foreground sequence that is not running by levers on batch alone: demotes, and where that does not
/// suffice parks. `guest` stands on the rung on which it shall run, `near` is what it must be able to grow by there.
/// Whether there is room now.
pub(crate) fn make_room(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    guest: Candidate,
    near: Bytes,
) -> bool {
    if !frame.usable.contains(guest.rung) {
        return false;
    }
    gather(scheduler, scratch);
    let Scratch { candidates, carries, fits, groups, .. } = scratch;
    candidates.push(guest);
    let ladder = &scheduler.ladder;
    let own: Bytes = candidates.iter().map(|found| ladder.cost(found.rung).cache_per_token.times(found.cached)).sum();
    let parked = books.caches(ladder) - own;
    let batch = candidates.iter().filter(|found| found.class == Class::Batch).count();
    let frame = Frame { limit: frame.limit - near, ..*frame };
    let mut field =
        Field { ladder, frame: &frame, resident: scheduler.resident, parked, candidates, carries, fits, groups };
    let fits =
        demote::choose(&mut field, 0, Movable::Batch) || park::choose_among(&mut field, 0, batch, Movable::Batch);
    if fits {
        press(scheduler, &frame);
        apply(scheduler, &frame, books, scratch);
    }
    fits
}

/// Notes that somebody bears a lever now.
fn press(scheduler: &mut Scheduler, frame: &Frame) {
    scheduler.pressed = Some(frame.now);
    for rung in &mut scheduler.rungs {
        rung.room_since = None;
    }
}

/// Lists who runs, in order of harm.
fn gather(scheduler: &Scheduler, scratch: &mut Scratch) {
    let Scratch { order, candidates, .. } = scratch;
    order.clear();
    let runs = |found: &&Sequence| matches!(found.phase, Phase::Running { .. });
    order.extend(scheduler.sequences.iter().filter(runs).map(|found| found.id));
    let get = |id: &crate::ids::SequenceId| scheduler.sequences.get(id.parts());
    order.sort_by_cached_key(|id| get(id).map(Sequence::harm));
    candidates.clear();
    candidates.extend(order.iter().filter_map(get).filter_map(|found| Some(Candidate::guest(found, found.rung()?))));
}

/// Writes the choice into phases, books and actions.
fn apply(scheduler: &mut Scheduler, frame: &Frame, books: &mut Books, scratch: &mut Scratch) {
    let Scratch { candidates, decided, .. } = scratch;
    let level = |books: &Books, ladder: &LadderCost| books.level(ladder, books.used());
    for found in candidates.iter() {
        let Some(sequence) = scheduler.sequences.get(found.parts) else { continue };
        let (id, from, entry, origin) = (sequence.id, found.rung, scheduler.entry(sequence), sequence.phase);
        if found.to == Some(from) {
            continue;
        }
        let before = level(books, &scheduler.ladder);
        let phase = match found.to {
            None => {
                books.stop(from, entry);
                let frees = before - level(books, &scheduler.ladder);
                decided.push(Action::Park { sequence: id, rung: from, frees });
                scheduler.parkings += 1;
                Phase::Parked { rung: from, since: frame.now, ticket: scheduler.parkings }
            }
            Some(to) => {
                books.carry(from, to, entry);
                decided.push(Action::Demote { sequence: id, from, to, frees: Bytes::ZERO });
                scheduler.came.push((id, origin));
                Phase::Running { rung: to }
            }
        };
        if let Some(sequence) = scheduler.sequences.get_mut(found.parts) {
            if found.to.is_some() {
                sequence.switched = Some(frame.now);
            }
            sequence.phase = phase;
        }
    }
    credit(scheduler, candidates, decided);
}

/// Says what each demotion frees: the whole of a group's saving stands with the first of those who move together.
fn credit(scheduler: &Scheduler, candidates: &[Candidate], decided: &mut [Action]) {
    let ladder = &scheduler.ladder;
    let set = |set: RungSet, rung: RungIdx| set.with(rung);
    let before = candidates.iter().map(|found| found.rung).fold(RungSet::EMPTY, set);
    let after = candidates.iter().filter_map(|found| found.to).fold(RungSet::EMPTY, set);
    let (mut gone, mut come) = (before.minus(after), after.minus(before));
    let mut told = [RungSet::EMPTY; RungIdx::LIMIT as usize];
    for action in decided.iter_mut() {
        let Action::Demote { from, to, frees: stated, .. } = action else { continue };
        let Some(told) = told.get_mut(from.get()).filter(|told| !told.contains(*to)) else { continue };
        *told = told.with(*to);
        let together = candidates.iter().filter(|found| (found.rung, found.to) == (*from, Some(*to)));
        let cached: Tokens = together.map(|found| found.cached).sum();
        let mut frees = ladder.cost(*from).cache_per_token.times(cached);
        let mut takes = ladder.cost(*to).cache_per_token.times(cached);
        if gone.contains(*from) {
            frees += ladder.cost(*from).held();
            gone = gone.without(*from);
        }
        if come.contains(*to) {
            takes += ladder.cost(*to).held();
            come = come.without(*to);
        }
        *stated = frees - takes;
    }
}
