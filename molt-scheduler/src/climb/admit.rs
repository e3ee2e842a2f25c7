//! Admit: who waits is let in, foreground first, in the order of arrival.
//!
//! - A foreground request waits while a foreground sequence is parked, a batch request while anybody is: who was in
//!   comes back before anybody new comes in.
//! - There must be room for it and for what everybody who runs will still read and write (up to
//!   [`Config::admit_for_tokens`](crate::Config::admit_for_tokens) of each answer): deferring is the least of the levers.
//!   Where nobody runs, room for its prompt and a block of its answer is enough.
//! - One that does not fit does not block the lighter ones behind it, but it cannot be passed for ever: after eight
//!   have passed it, nobody does until it is in.
//! - With [`Policy::ProtectForeground`] a foreground request for which there is no room makes batch move over.
//! - It starts on the biggest rung of those it may use that fits. Beside others, weights are loaded for it only where
//!   headroom remains and nobody has borne a lever for the patience; otherwise it joins a rung that is in use.

use crate::ids::SequenceId;
use crate::input::{Class, Policy};
use crate::levers::{self, Candidate};
use crate::plan::Action;
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::Frame;
use crate::units::{RungIdx, Tokens};
use crate::usage::{Books, Horizon};

use super::unpark::StillParked;
use super::{below_headroom, floor, lasted};

/// How many may pass one that does not fit, and how many that do not fit are looked at in one round.
const PASSED_AT_MOST: u32 = 8;

pub(super) fn admit(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    mut parked: StillParked,
) {
    for class in Scheduler::CLASSES {
        if parked.foreground || (parked.batch && class == Class::Batch) {
            continue;
        }
        let mut place = 0;
        let mut stuck = 0;
        while let Some(id) = scheduler.queues.of(class).get(place).copied() {
            if parked.inside >= u64::from(scheduler.config.admit_limit) {
                return;
            }
            let Some(sequence) = scheduler.sequences.get(id.parts()) else {
                scheduler.queues.of_mut(class).remove(place);
                continue;
            };
            let quota = within_quota(scheduler, sequence);
            if quota && let Some(rung) = place_for(scheduler, frame, books, sequence) {
                start(scheduler, books, scratch, id, rung);
                parked.inside += 1;
                pass(scheduler, class, place);
                scheduler.queues.of_mut(class).remove(place);
                continue;
            }
            if quota && class == Class::Foreground && displace(scheduler, frame, books, scratch, id) {
                scheduler.queues.of_mut(class).remove(place);
                return;
            }
            // A tenant that waits for its own quota holds up nobody, and nobody can hold it up.
            if quota {
                stuck += 1;
                if stuck >= PASSED_AT_MOST || overtaken(scheduler, id) >= PASSED_AT_MOST {
                    break;
                }
            }
            place += 1;
        }
    }
}

fn overtaken(scheduler: &Scheduler, id: SequenceId) -> u32 {
    match scheduler.sequences.get(id.parts()).map(|sequence| sequence.phase) {
        Some(Phase::Waiting { overtaken, .. }) => overtaken,
        _ => 0,
    }
}

/// Everybody before that place was passed once more.
fn pass(scheduler: &mut Scheduler, class: Class, place: usize) {
    for id in scheduler.queues.of(class).iter().take(place) {
        if let Some(sequence) = scheduler.sequences.get_mut(id.parts())
            && let Phase::Waiting { overtaken, .. } = &mut sequence.phase
        {
            *overtaken = overtaken.saturating_add(1);
        }
    }
}

/// Whether the tenant's quota has room for all that the request may cache.
fn within_quota(scheduler: &Scheduler, sequence: &Sequence) -> bool {
    let quota = scheduler.tenants.get(sequence.tenant.parts()).and_then(|tenant| tenant.spec.quota);
    quota.is_none_or(|quota| {
        let own = |found: &&Sequence| found.tenant == sequence.tenant && found.rung().is_some();
        let inside: Tokens = scheduler.sequences.iter().filter(own).map(|found| found.longest).sum();
        inside + sequence.longest <= quota
    })
}

/// The rung on which a request starts, if there is one.
fn place_for(scheduler: &Scheduler, frame: &Frame, books: &Books, sequence: &Sequence) -> Option<RungIdx> {
    let ladder = &scheduler.ladder;
    let entry = scheduler.entry(sequence);
    let floor = floor(scheduler, frame, sequence, sequence.submitted);
    let used = books.used();
    let alone = used.is_empty();
    let calm = scheduler.pressed.is_none_or(|pressed| lasted(pressed, frame.now, scheduler.config.patience));
    let options = || {
        let within = |rung: &RungIdx| *rung >= sequence.ceiling && *rung <= floor;
        frame.usable.iter().filter(within)
    };
    let fits = |rung: &RungIdx, headroom: bool| {
        let mut after = *books;
        after.start(*rung, entry);
        let horizon = if alone { Horizon::Near } else { Horizon::Far };
        let limit = if headroom { below_headroom(scheduler, frame.limit) } else { frame.limit };
        after.needs(ladder, horizon) <= limit
    };
    if alone {
        return options().find(|rung| fits(rung, false));
    }
    let joins = |rung: &RungIdx| used.contains(*rung);
    if calm || !options().any(|rung| joins(&rung)) {
        options().find(|rung| fits(rung, !joins(rung)))
    } else {
        options().find(|rung| joins(rung) && fits(rung, false))
    }
}

/// Under [`Policy::ProtectForeground`] the foreground does not wait while batch has any lever left: lets a request in at
/// the cost of batch, on the biggest rung where that goes; whether it did.
fn displace(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    id: SequenceId,
) -> bool {
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return false };
    // A plan that moves somebody already is not mixed with another move.
    if scheduler.config.policy != Policy::ProtectForeground || !scratch.decided.is_empty() {
        return false;
    }
    let (entry, floor) = (scheduler.entry(sequence), floor(scheduler, frame, sequence, sequence.submitted));
    let batch = |found: &Sequence| found.class == Class::Batch && matches!(found.phase, Phase::Running { .. });
    if !scheduler.sequences.iter().any(batch) {
        return false;
    }
    let within = |rung: &RungIdx| *rung >= sequence.ceiling && *rung <= floor;
    let guests = |rung: RungIdx| {
        let near = scheduler.ladder.cost(rung).cache_per_token.times(entry.near);
        (Candidate::guest(sequence, rung), near)
    };
    let mut options = [None; RungIdx::LIMIT as usize];
    for (option, rung) in options.iter_mut().zip(frame.usable.iter().filter(within)) {
        *option = Some(guests(rung));
    }
    for (guest, near) in options.into_iter().flatten() {
        if levers::make_room(scheduler, frame, books, scratch, guest, near) {
            start(scheduler, books, scratch, id, guest.rung);
            return true;
        }
    }
    false
}

fn start(scheduler: &mut Scheduler, books: &mut Books, scratch: &mut Scratch, id: SequenceId, rung: RungIdx) {
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return };
    let (entry, origin) = (scheduler.entry(sequence), sequence.phase);
    books.start(rung, entry);
    scratch.decided.push(Action::Admit { sequence: id, rung });
    scheduler.came.push((id, origin));
    if let Some(sequence) = scheduler.sequences.get_mut(id.parts()) {
        sequence.phase = Phase::Running { rung };
    }
}
