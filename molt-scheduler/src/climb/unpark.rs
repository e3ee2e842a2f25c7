//! Unpark: who was stopped runs again, foreground first, then in the order in which they were stopped (of those stopped
//! in one round the heavier first).
//!
//! - On its own rung, as soon as it fits there beside everybody's near growth. Where that means loading weights, it
//!   must have been stopped for at least the patience, so that a budget that jumps up and down loads them once a
//!   patience and not once a jump.
//! - After the patience, on the biggest smaller rung that fits, down to its floor (and after eight patiences below it):
//!   `Demote`, then `Unpark` on the rung it went to.
//! - After the patience, where the first in line is of the foreground and batch holds its room: batch is demoted or
//!   parked instead of it, as it would have been had they been stopped together.
//! - After the patience, where nobody runs at all and nobody can: old context is shed, in order of harm, so far that
//!   the first in line fits. It is the last lever, and the stopped have exhausted those before it. Nothing is shed
//!   where that would not suffice: then everybody waits.

use crate::ids::SequenceId;
use crate::input::Class;
use crate::levers::{self, Candidate, Movable};
use crate::plan::Action;
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::Frame;
use crate::units::{Bytes, RungIdx, Time, Tokens};
use crate::usage::{Books, Entry, Horizon, RungSet};

use super::{floor, lasted};

/// Who is still parked afterwards.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StillParked {
    pub(super) foreground: bool,
    pub(super) batch: bool,
    /// Running and parked.
    pub(super) inside: u64,
}

pub(super) fn unpark(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
) -> StillParked {
    scratch.order.clear();
    let parked = |found: &&Sequence| matches!(found.phase, Phase::Parked { .. });
    scratch.order.extend(scheduler.sequences.iter().filter(parked).map(|found| found.id));
    let get = |id: &SequenceId| scheduler.sequences.get(id.parts());
    scratch.order.sort_unstable_by_key(|id| get(id).map(line));
    let mut still = StillParked { inside: books.running(), ..StillParked::default() };
    let (mut head, mut carried) = (None, false);
    for index in 0..scratch.order.len() {
        let Some(id) = scratch.order.get(index).copied() else { break };
        still.inside += 1;
        let Some(sequence) = scheduler.sequences.get(id.parts()) else { continue };
        // A carry needs the room of two caches on its way, so nothing else starts in a round that has one.
        match (carried, place(scheduler, frame, books, sequence)) {
            (false, Some(to)) => {
                carried = sequence.rung() != Some(to);
                start(scheduler, frame, books, scratch, id, to);
            }
            _ => {
                head = head.or(Some(id));
                match sequence.class {
                    Class::Foreground => still.foreground = true,
                    Class::Batch => still.batch = true,
                }
            }
        }
    }
    if let Some(id) = head
        && scratch.decided.is_empty()
    {
        carried = take_turn(scheduler, frame, books, scratch, id) || rescue(scheduler, frame, books, scratch, id);
    }
    still.foreground |= carried;
    still
}

/// The place in the line of those who come back.
fn line(found: &Sequence) -> (bool, Time, u64, u64) {
    let Phase::Parked { since, ticket, .. } = found.phase else { return (true, Time::START, 0, 0) };
    (found.class != Class::Foreground, since, u64::MAX - found.weight, ticket)
}

/// The rung on which a parked sequence may run now.
fn place(scheduler: &Scheduler, frame: &Frame, books: &Books, sequence: &Sequence) -> Option<RungIdx> {
    let Phase::Parked { rung, since, .. } = sequence.phase else { return None };
    let patient = lasted(since, frame.now, scheduler.config.patience);
    let entry = scheduler.entry(sequence);
    if (patient || scheduler.resident.contains(rung))
        && excess(scheduler, frame, books, entry, rung, rung) == Bytes::ZERO
    {
        return Some(rung);
    }
    if !patient {
        return None;
    }
    options(scheduler, frame, sequence, rung, since)
        .iter()
        .find(|to| excess(scheduler, frame, books, entry, rung, *to) == Bytes::ZERO)
}

/// Rungs that a parked sequence would take, its own first.
fn options(scheduler: &Scheduler, frame: &Frame, sequence: &Sequence, rung: RungIdx, since: Time) -> RungSet {
    let floor = floor(scheduler, frame, sequence, since);
    let within = |(to, _): &(RungIdx, _)| *to >= rung && *to <= floor.max(rung);
    scheduler.ladder.rungs().filter(within).fold(RungSet::EMPTY, |set, (to, _)| set.with(to)).and(frame.usable)
}

/// By how much it would be too much if a parked sequence ran on a rung, be it in the end or on the way.
fn excess(scheduler: &Scheduler, frame: &Frame, books: &Books, entry: Entry, rung: RungIdx, to: RungIdx) -> Bytes {
    if !frame.usable.contains(to) {
        return Bytes::MAX;
    }
    let ladder = &scheduler.ladder;
    let mut after = *books;
    after.drop(rung, entry.cached);
    after.keep(to, entry.cached);
    after.start(to, entry);
    let end = after.needs(ladder, Horizon::Near);
    // While its cache is copied, the old one is still there.
    let source = if to == rung { Bytes::ZERO } else { ladder.cost(rung).cache_per_token.times(entry.cached) };
    let way = after.level(ladder, after.used()) + source;
    end.max(way) - frame.limit
}

fn start(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    id: SequenceId,
    to: RungIdx,
) {
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return };
    let (entry, origin) = (scheduler.entry(sequence), sequence.phase);
    let Some(rung) = sequence.rung() else { return };
    books.drop(rung, entry.cached);
    books.keep(to, entry.cached);
    books.start(to, entry);
    let ladder = &scheduler.ladder;
    if to != rung {
        let cache = |rung: RungIdx| ladder.cost(rung).cache_per_token.times(entry.cached);
        scratch.decided.push(Action::Demote { sequence: id, from: rung, to, frees: cache(rung) - cache(to) });
    }
    scratch.decided.push(Action::Unpark { sequence: id, rung: to });
    scheduler.came.push((id, origin));
    if let Some(sequence) = scheduler.sequences.get_mut(id.parts()) {
        sequence.phase = Phase::Running { rung: to };
        if to != rung {
            sequence.switched = Some(frame.now);
        }
    }
}

/// Lets the first in line, if it is of the foreground, run in place of batch; whether that was done.
fn take_turn(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    id: SequenceId,
) -> bool {
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return false };
    let Phase::Parked { rung, since, .. } = sequence.phase else { return false };
    if sequence.class != Class::Foreground || !lasted(since, frame.now, scheduler.config.patience) {
        return false;
    }
    let near = scheduler.ladder.cost(rung).cache_per_token.times(scheduler.entry(sequence).near);
    let guest = Candidate::guest(sequence, rung);
    let room = levers::make_room(scheduler, frame, books, scratch, guest, near);
    if room {
        start(scheduler, frame, books, scratch, id, rung);
    }
    room
}

/// Sheds so far that the first in line runs; whether that suffices, and so was done.
fn rescue(scheduler: &mut Scheduler, frame: &Frame, books: &mut Books, scratch: &mut Scratch, id: SequenceId) -> bool {
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return false };
    let Phase::Parked { rung, since, .. } = sequence.phase else { return false };
    if books.running() > 0 || !lasted(since, frame.now, scheduler.config.patience) {
        return false;
    }
    // Room for half of its cache again, or it would stop after every block.
    let mut entry = scheduler.entry(sequence);
    let half = Tokens::new(sequence.cached.get() / 2);
    entry.near = entry.near.max(sequence.growth(half));
    let needs = |to: RungIdx| excess(scheduler, frame, books, entry, rung, to);
    let all = levers::sheddable(scheduler.sequences.iter(), &scheduler.config, &scheduler.ladder, Movable::All);
    let options = options(scheduler, frame, sequence, rung, since);
    let Some(to) = options.iter().min_by_key(|to| needs(*to)) else { return false };
    let mut missing = needs(to);
    if missing > all {
        entry.near = scheduler.entry(sequence).near;
        missing = excess(scheduler, frame, books, entry, rung, to);
    }
    if missing > all {
        return false;
    }
    levers::shed(scheduler, books, scratch, missing, Movable::All);
    start(scheduler, frame, books, scratch, id, to);
    true
}
