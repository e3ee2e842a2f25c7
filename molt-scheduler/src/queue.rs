//! Who waits to be let in, and whose turn it is: start-time fair queueing over the tenants of a class.
//!
//! - Each tenant's requests wait in their order. Each tenant has a *start*: the virtual time at which its next request
//!   begins, in tokens over weight. The least start is next; of equal ones the request that came first.
//! - Letting a request in moves its tenant's start on by all the tokens that its steps may read, over the weight. What it
//!   has not used when it ends is given back, so that in the end only tokens served count.
//! - The virtual time of the class is the start of the last request let in. A tenant that had nothing waiting begins no
//!   earlier than that: idleness is not saved up.
//! - A tenant beside which others are registered may have as many requests waiting as there are places left, so that a
//!   flood from one of them leaves room for the others.
//!
//! See `climb/admit.rs` for when a turn is used, and what happens where the one whose turn it is does not fit.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use crate::ids::{SequenceId, TenantId};
use crate::input::{Class, Refusal};
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::units::{Span, Tokens};

/// A token over a weight of one, in virtual time. Weights have 16 bits, so every token counts.
pub(crate) const TOKEN: u64 = 1 << 16;

/// A tenant's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Turn {
    /// In virtual time.
    pub(crate) start: u64,
    /// When its next request came, among all that ever came.
    order: u64,
    pub(crate) tenant: TenantId,
}

/// What a tenant has waiting and what it has had.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Account {
    /// Its requests that wait, in their order.
    pub(crate) waiting: VecDeque<SequenceId>,
    /// When its next request begins, in virtual time.
    pub(crate) start: u64,
    /// Its turn, as it stands in the line.
    pub(crate) turn: Option<Turn>,
    /// All that its sequences that are in may cache.
    pub(crate) inside: Tokens,
}

/// The line of a class.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Line {
    /// Turns of the tenants that have something waiting.
    pub(crate) turns: BTreeSet<Turn>,
    /// Requests that wait.
    pub(crate) length: u32,
    /// Of them, those that were not told yet.
    pub(crate) untold: u32,
    /// Virtual time.
    pub(crate) now: u64,
}

impl Line {
    /// The first turn, or the first after another.
    pub(crate) fn next(&self, after: Option<Turn>) -> Option<Turn> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.turns.range((from, Bound::Unbounded)).next().copied()
    }
}

/// The lines.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Queues {
    foreground: Line,
    batch: Line,
}

impl Queues {
    pub(crate) fn of(&self, class: Class) -> &Line {
        match class {
            Class::Foreground => &self.foreground,
            Class::Batch => &self.batch,
        }
    }

    pub(crate) fn of_mut(&mut self, class: Class) -> &mut Line {
        match class {
            Class::Foreground => &mut self.foreground,
            Class::Batch => &mut self.batch,
        }
    }
}

/// Virtual time that tokens take at a weight.
fn virtual_time(tokens: Tokens, weight: u64) -> u64 {
    tokens.get().saturating_mul(TOKEN).checked_div(weight).unwrap_or(u64::MAX)
}

/// At which end of its tenant's requests one joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Front,
    Back,
}

impl Scheduler {
    /// Whether the queue of a class has room for one more of a tenant.
    pub(crate) fn has_room(&self, tenant: TenantId, class: Class) -> Result<(), Refusal> {
        let (length, limit) = (self.queues.of(class).length, self.config.queue_limit);
        if length >= limit {
            return Err(Refusal::QueueFull { length, retry_after: self.wait(0) });
        }
        let own = self.tenants.get(tenant.parts()).map_or(0, |found| found.account.waiting.len());
        let (waiting, left) = (u32::try_from(own).unwrap_or(u32::MAX), limit - length);
        let beside = || self.tenants.iter().any(|found| found.id != tenant && found.spec.class == class);
        if waiting >= left && waiting > 0 && beside() {
            return Err(Refusal::TenantQueueFull { waiting, left, retry_after: self.wait(0) });
        }
        Ok(())
    }

    /// A request joins the requests of its tenant that wait.
    pub(crate) fn enqueue(&mut self, id: SequenceId, end: End) {
        let Some(sequence) = self.sequences.get(id.parts()) else { return };
        let untold = matches!(sequence.phase, Phase::Waiting { told: false, .. });
        let (owner, line) = (sequence.tenant, self.queues.of_mut(sequence.class));
        let Some(tenant) = self.tenants.get_mut(owner.parts()) else { return };
        let account = &mut tenant.account;
        if account.waiting.is_empty() {
            account.start = account.start.max(line.now);
        }
        match end {
            End::Front => account.waiting.push_front(id),
            End::Back => account.waiting.push_back(id),
        }
        line.length += 1;
        line.untold += u32::from(untold);
        self.take_turn_anew(owner);
    }

    /// A request no longer waits, wherever it stood.
    pub(crate) fn dequeue(&mut self, id: SequenceId, phase: Phase) {
        let Some(sequence) = self.sequences.get(id.parts()) else { return };
        let (owner, line) = (sequence.tenant, self.queues.of_mut(sequence.class));
        let Some(tenant) = self.tenants.get_mut(owner.parts()) else { return };
        let waiting = &mut tenant.account.waiting;
        let Some(place) = waiting.iter().position(|found| *found == id) else { return };
        waiting.remove(place);
        line.length -= 1;
        line.untold -= u32::from(matches!(phase, Phase::Waiting { told: false, .. }));
        self.take_turn_anew(owner);
    }

    /// A request is let in: its tenant is charged for all of it.
    pub(crate) fn charge(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(id.parts()) else { return };
        let (owner, longest) = (sequence.tenant, sequence.longest);
        let costs = virtual_time(sequence.work_left(), sequence.weight);
        let line = self.queues.of_mut(sequence.class);
        let Some(tenant) = self.tenants.get_mut(owner.parts()) else { return };
        let account = &mut tenant.account;
        line.now = line.now.max(account.start);
        account.start = account.start.saturating_add(costs);
        account.inside += longest;
        self.take_turn_anew(owner);
    }

    /// When a tenant's next request begins in virtual time, and when one like that request would have begun next.
    pub(crate) fn window(&self, sequence: &Sequence) -> (u64, u64) {
        let start = self.tenants.get(sequence.tenant.parts()).map_or(0, |tenant| tenant.account.start);
        (start, start.saturating_add(virtual_time(sequence.work_left(), sequence.weight)))
    }

    /// A sequence is in no more: its tenant gets back what it has not used.
    pub(crate) fn refund(&mut self, sequence: &Sequence) {
        let Some(tenant) = self.tenants.get_mut(sequence.tenant.parts()) else { return };
        let account = &mut tenant.account;
        account.start = account.start.saturating_sub(virtual_time(sequence.work_left(), sequence.weight));
        account.inside -= sequence.longest;
        self.take_turn_anew(sequence.tenant);
    }

    fn take_turn_anew(&mut self, owner: TenantId) {
        let Some(tenant) = self.tenants.get_mut(owner.parts()) else { return };
        let (line, account) = (self.queues.of_mut(tenant.spec.class), &mut tenant.account);
        let first = account.waiting.front().and_then(|id| self.sequences.get(id.parts()));
        let turn = first.map(|found| Turn { start: account.start, order: found.order, tenant: owner });
        if turn == account.turn {
            return;
        }
        if let Some(old) = account.turn {
            line.turns.remove(&old);
        }
        line.turns.extend(turn);
        account.turn = turn;
    }

    /// All who wait in a class, each with the virtual time at which it begins and its place among all who ever came: in
    /// the order of these two they are let in, if all fit and nobody else comes.
    pub(crate) fn starts(&self, class: Class) -> impl Iterator<Item = (u64, u64, SequenceId)> {
        let tenants = self.queues.of(class).turns.iter().filter_map(|turn| self.tenants.get(turn.tenant.parts()));
        tenants.flat_map(move |tenant| {
            let mut start = tenant.account.start;
            tenant.account.waiting.iter().filter_map(move |id| {
                let found = self.sequences.get(id.parts())?;
                let own = start;
                start = start.saturating_add(virtual_time(found.work_left(), found.weight));
                Some((own, found.order, *id))
            })
        })
    }

    /// How many of its class are let in before a request, if all fit and nobody else comes.
    pub(crate) fn place(&self, class: Class, sequence: SequenceId) -> Option<u32> {
        let (start, order, _) = self.starts(class).find(|(_, _, id)| *id == sequence)?;
        let before = self.starts(class).filter(|(other, came, _)| (*other, *came) < (start, order)).count();
        u32::try_from(before).ok()
    }
}

/// A rough wait for a place in a queue: those who run end one after another, each after its share of the tokens that
/// are left to write, and every end lets one in. `None` while nobody runs or no round has been timed yet.
pub(crate) fn estimate(place: u32, running: u64, tokens_left: u64, pace: Span) -> Option<Span> {
    if running == 0 || pace == Span::ZERO {
        return None;
    }
    let rounds_an_end = (tokens_left / running / running).max(1);
    let rounds = rounds_an_end.saturating_mul(u64::from(place).saturating_add(1));
    Some(Span::from_micros(pace.micros().saturating_mul(rounds)))
}
