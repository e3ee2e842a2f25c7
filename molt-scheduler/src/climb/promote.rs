//! Promote: sequences go up, one group a round, from the smallest rung in use.
//!
//! A sequence may go up where its ceiling allows it and enough of its answer is left to be worth a carry
//! ([`Config::promote_for_tokens`](crate::Config::promote_for_tokens)). The move must leave headroom
//! ([`Config::headroom_percent`](crate::Config::headroom_percent)), must have been possible in every round for
//! [`Config::patience`](crate::Config::patience), and comes no sooner than
//! [`Config::residence`](crate::Config::residence) after the last switch of anybody who moves. It goes one rung up, or
//! past a rung that does not fit or cannot be loaded.
//!
//! Where everybody on a rung may go, they go together: the destination loads beside the source where both fit, and the
//! source's weights are idle afterwards; otherwise the source goes first. Where somebody has to stay, both rungs must
//! fit, and those go who fit, foreground first and heavier first.
//!
//! Where both rungs fit together, the engine may read ahead on the bigger one, so that nobody waits when the move comes
//! ([`Plan::prospects`](crate::Plan::prospects)). From the first round with room those who would go are named, and the
//! move waits until all of them are read ahead, but no longer than
//! [`Config::catch_up`](crate::Config::catch_up) after the patience.

use crate::ids::SequenceId;
use crate::input::Config;
use crate::plan::{Action, Prospect};
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::{Carry, Frame};
use crate::units::{Bytes, RungIdx, Span, Tokens};
use crate::usage::{Books, Horizon, RungSet};

use super::{below_headroom, lasted};

pub(super) fn promote(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    prospects: &mut Vec<Prospect>,
) {
    let mut roomy = RungSet::EMPTY;
    // One change at a time: what was let in or came back in this round moves no further in it.
    let mut moved = !scratch.decided.is_empty();
    let bottom = scheduler.ladder.bottom().index();
    for from in (1..=bottom).rev().map(RungIdx::new) {
        if books.users(from) == 0 {
            continue;
        }
        let mut next = from.above();
        while let Some(to) = next {
            next = to.above();
            let whole = gather(scheduler, scratch, books, from, to);
            let going = trial(scheduler, frame, books, scratch, (from, to), whole);
            if going == 0 {
                continue;
            }
            roomy = roomy.with(to);
            let since = scheduler.rungs.get(to.get()).and_then(|state| state.room_since);
            let lasted = |span| since.is_some_and(|since| lasted(since, frame.now, span));
            scratch.order.truncate(going);
            let Config { patience, catch_up, .. } = scheduler.config;
            let waits = catch_up > Span::ZERO && beside(scheduler, frame, books, scratch, to);
            let ahead = !waits || is_ahead(scheduler, scratch, to) || lasted(patience + catch_up);
            if !moved && lasted(patience) && ahead && rested(scheduler, frame, scratch) {
                go(scheduler, frame, books, scratch, (from, to));
                moved = true;
            } else if waits && prospects.is_empty() {
                prospects.extend(scratch.order.iter().map(|id| Prospect { sequence: *id, to }));
            }
            break;
        }
    }
    for ((rung, _), state) in scheduler.ladder.rungs().zip(&mut scheduler.rungs) {
        state.room_since = if roomy.contains(rung) { state.room_since.or(Some(frame.now)) } else { None };
    }
}

/// Lists those on a rung who may go to another, in order; whether that is everybody on it.
fn gather(scheduler: &Scheduler, scratch: &mut Scratch, books: &Books, from: RungIdx, to: RungIdx) -> bool {
    let order = &mut scratch.order;
    order.clear();
    let worth = scheduler.config.promote_for_tokens;
    let may = |found: &&Sequence| {
        found.phase == (Phase::Running { rung: from }) && found.ceiling <= to && found.answer_left() >= worth
    };
    order.extend(scheduler.sequences.iter().filter(may).map(|found| found.id));
    let key = |id: &SequenceId| {
        let found = scheduler.sequences.get(id.parts());
        found.map(|found| (std::cmp::Reverse((found.class, found.weight)), found.order))
    };
    order.sort_unstable_by_key(key);
    u64::try_from(order.len()).is_ok_and(|count| count == books.users(from))
}

/// How many of those listed, from the front, could go now.
fn trial(
    scheduler: &Scheduler,
    frame: &Frame,
    books: &Books,
    scratch: &mut Scratch,
    (from, to): (RungIdx, RungIdx),
    whole: bool,
) -> usize {
    let Scratch { order, carries, .. } = scratch;
    if order.is_empty() || !frame.usable.contains(to) {
        return 0;
    }
    let ladder = &scheduler.ladder;
    let limit = below_headroom(scheduler, frame.limit);
    let carry = |id: &SequenceId| {
        let cached = scheduler.sequences.get(id.parts()).map_or(Tokens::ZERO, |found| found.cached);
        let cache = |rung: RungIdx| ladder.cost(rung).cache_per_token.times(cached);
        Carry { decision: 0, source: cache(from), destination: cache(to) }
    };
    let entry =
        |id: &SequenceId| scheduler.sequences.get(id.parts()).map(|found| scheduler.entry(found)).unwrap_or_default();
    let lawful = |after: &Books, carries: &mut [Carry]| {
        let used = after.used();
        let (kept, loaded) = (used.and(scheduler.resident), used.minus(scheduler.resident));
        frame.arrange(ladder, books.caches(ladder), kept, loaded, carries)
    };
    carries.clear();
    let mut after = *books;
    if whole {
        for id in order.iter() {
            after.carry(from, to, entry(id));
            carries.push(carry(id));
        }
        if after.needs(ladder, Horizon::Near) <= limit && lawful(&after, carries) {
            return order.len();
        }
        // Not together; perhaps some of them beside the others.
        carries.clear();
        after = *books;
    }
    let mut going = 0;
    for id in order.iter().take(order.len() - usize::from(whole)) {
        after.carry(from, to, entry(id));
        carries.push(carry(id));
        if after.needs(ladder, Horizon::Near) > limit || !lawful(&after, carries) {
            break;
        }
        going += 1;
    }
    going
}

/// Whether the rung and its caches of everybody listed fit beside what there is.
fn beside(scheduler: &Scheduler, frame: &Frame, books: &Books, scratch: &Scratch, to: RungIdx) -> bool {
    let ladder = &scheduler.ladder;
    let cached = |id: &SequenceId| scheduler.sequences.get(id.parts()).map_or(Tokens::ZERO, |found| found.cached);
    let copies: Bytes = scratch.order.iter().map(|id| ladder.cost(to).cache_per_token.times(cached(id))).sum();
    let both = books.level(ladder, books.used().with(to)) + copies + books.growth(ladder, Horizon::Near);
    both <= below_headroom(scheduler, frame.limit)
}

/// Whether everybody listed has been read ahead there.
fn is_ahead(scheduler: &Scheduler, scratch: &Scratch, to: RungIdx) -> bool {
    scratch.order.iter().all(|id| scheduler.sequences.get(id.parts()).is_none_or(|found| found.ahead == Some(to)))
}

/// Whether everybody listed has been on this rung long enough.
fn rested(scheduler: &Scheduler, frame: &Frame, scratch: &Scratch) -> bool {
    let rested = |found: &Sequence| {
        found.switched.is_none_or(|switched| lasted(switched, frame.now, scheduler.config.residence))
    };
    scratch.order.iter().all(|id| scheduler.sequences.get(id.parts()).is_none_or(rested))
}

fn go(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    (from, to): (RungIdx, RungIdx),
) {
    let Scratch { order, decided, .. } = scratch;
    for id in order.iter() {
        let Some(sequence) = scheduler.sequences.get(id.parts()) else { continue };
        let (entry, origin) = (scheduler.entry(sequence), sequence.phase);
        books.carry(from, to, entry);
        decided.push(Action::Promote { sequence: *id, from, to });
        scheduler.came.push((*id, origin));
        if let Some(sequence) = scheduler.sequences.get_mut(id.parts()) {
            sequence.phase = Phase::Running { rung: to };
            sequence.switched = Some(frame.now);
        }
    }
}
