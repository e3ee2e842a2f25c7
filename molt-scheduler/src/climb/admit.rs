//! Admit: who waits is let in, foreground first, and within a class by tenant: the one that was served least for its
//! weight is next (see [`crate::queue`]), its own requests in their order.
//!
//! - A foreground request waits while a foreground sequence is parked, a batch request while anybody is: who was in
//!   comes back before anybody new comes in.
//! - There must be room for it and for what everybody who runs will still read and write (up to
//!   [`Config::admit_for_tokens`](crate::Config::admit_for_tokens) of each answer): deferring is the least of the levers.
//!   Where nobody runs, room for its prompt and a block of its answer is enough.
//! - One that does not fit does not block the others: the next tenants have their turns, and then the lighter requests
//!   behind it. But it is not passed for ever. Another tenant passes it only until that tenant is ahead by what the one
//!   that does not fit costs, so that shares stay what they are; and after eight have passed it, nobody whose turn is
//!   later goes in before it.
//! - A tenant that waits for its own quota holds up nobody, and nobody passes it.
//! - With [`Policy::ProtectForeground`] a foreground request for which there is no room makes batch move over.
//! - It starts on the biggest rung of those it may use that fits. Beside others, weights are loaded for it only where
//!   headroom remains and nobody has borne a lever for the patience; otherwise it joins a rung that is in use.

use crate::ids::{SequenceId, TenantId};
use crate::input::{Class, Policy};
use crate::levers::{self, Candidate};
use crate::plan::Action;
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::Frame;
use crate::units::RungIdx;
use crate::usage::{Books, Horizon};

use super::unpark::StillParked;
use super::{below_headroom, floor, lasted};

/// How many may pass one that does not fit; how many that do not fit are looked at in one round; and how many of a
/// tenant that waits for its quota.
const PASSED_AT_MOST: u32 = 8;
const LOOKED_AT: usize = PASSED_AT_MOST as usize;

/// What came of looking at a request.
enum Look {
    /// There is none.
    None,
    /// It is in.
    In,
    /// It stays outside, and the next one is looked at.
    Out,
    /// Its tenant is too far ahead of one that does not fit.
    Ahead,
    /// Nobody else goes in.
    Stop,
}

/// Those of a class that were looked at in this round and do not fit.
#[derive(Default)]
struct Stuck {
    requests: [Option<(SequenceId, TenantId, u64)>; LOOKED_AT],
    count: usize,
}

impl Stuck {
    /// Whether another tenant's request that does not fit would not have that one go first.
    fn holds_back(&self, tenant: TenantId, start: u64) -> bool {
        self.requests.iter().flatten().any(|(_, other, until)| *other != tenant && start > *until)
    }
}

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
        let mut stuck = Stuck::default();
        let mut look = |scheduler: &mut Scheduler, scratch: &mut Scratch, id: Option<SequenceId>| {
            let Some(id) = id else { return Look::None };
            look_at(scheduler, frame, books, scratch, (id, class), &mut parked.inside, &mut stuck)
        };
        scratch.behind.clear();
        // Whoever was let in has a later turn afterwards, so one walk over the turns sees them all.
        let (mut turn, mut open) = (scheduler.queues.of(class).next(None), true);
        while let Some(own) = turn.filter(|_| open) {
            let first = nth(scheduler, own.tenant, 0);
            match look(scheduler, scratch, first) {
                Look::None | Look::In => {}
                Look::Out => scratch.behind.push((own.tenant, 1)),
                // So are all who come later.
                Look::Ahead => break,
                Look::Stop => open = false,
            }
            turn = scheduler.queues.of(class).next(Some(own));
        }
        let mut index = 0;
        while let Some((tenant, place)) = scratch.behind.get(index).copied().filter(|_| open) {
            let next = nth(scheduler, tenant, place);
            match look(scheduler, scratch, next) {
                Look::None | Look::Ahead => {}
                Look::In => scratch.behind.push((tenant, place)),
                Look::Out if place < LOOKED_AT => scratch.behind.push((tenant, place + 1)),
                Look::Out => {}
                Look::Stop => open = false,
            }
            index += 1;
        }
    }
}

fn nth(scheduler: &Scheduler, tenant: TenantId, place: usize) -> Option<SequenceId> {
    scheduler.tenants.get(tenant.parts())?.account.waiting.get(place).copied()
}

/// Lets a request in if it may and fits.
fn look_at(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    (id, class): (SequenceId, Class),
    inside: &mut u64,
    stuck: &mut Stuck,
) -> Look {
    if *inside >= u64::from(scheduler.config.admit_limit) {
        return Look::Stop;
    }
    let Some(sequence) = scheduler.sequences.get(id.parts()) else { return Look::None };
    if !within_quota(scheduler, sequence) {
        return Look::Out;
    }
    let (tenant, (begins, until)) = (sequence.tenant, scheduler.window(sequence));
    if stuck.holds_back(tenant, begins) {
        return Look::Ahead;
    }
    if let Some(rung) = place_for(scheduler, frame, books, sequence) {
        start(scheduler, books, scratch, id, rung);
        *inside += 1;
        return if pass(scheduler, stuck) { Look::Stop } else { Look::In };
    }
    if class == Class::Foreground && displace(scheduler, frame, books, scratch, id) {
        // What follows would find the room of those who had to move.
        *inside = u64::MAX;
        return Look::Stop;
    }
    if let Some(slot) = stuck.requests.get_mut(stuck.count) {
        *slot = Some((id, tenant, until));
    }
    stuck.count += 1;
    let often = overtaken(scheduler, id) >= PASSED_AT_MOST;
    if often || stuck.count >= LOOKED_AT { Look::Stop } else { Look::Out }
}

fn overtaken(scheduler: &Scheduler, id: SequenceId) -> u32 {
    match scheduler.sequences.get(id.parts()).map(|sequence| sequence.phase) {
        Some(Phase::Waiting { overtaken, .. }) => overtaken,
        _ => 0,
    }
}

/// Everybody who does not fit was passed once more; whether somebody was so for the last time.
fn pass(scheduler: &mut Scheduler, stuck: &Stuck) -> bool {
    let mut last = false;
    for (id, ..) in stuck.requests.iter().flatten() {
        if let Some(sequence) = scheduler.sequences.get_mut(id.parts())
            && let Phase::Waiting { overtaken, .. } = &mut sequence.phase
        {
            *overtaken = overtaken.saturating_add(1);
            last |= *overtaken >= PASSED_AT_MOST;
        }
    }
    last
}

/// Whether the tenant's quota has room for all that the request may cache.
fn within_quota(scheduler: &Scheduler, sequence: &Sequence) -> bool {
    let Some(tenant) = scheduler.tenants.get(sequence.tenant.parts()) else { return true };
    tenant.spec.quota.is_none_or(|quota| tenant.account.inside + sequence.longest <= quota)
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
    scheduler.dequeue(id, origin);
    scheduler.charge(id);
}
