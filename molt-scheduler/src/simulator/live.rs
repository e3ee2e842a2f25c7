//! A sequence as the engine sees it.

use crate::ids::TenantId;
use crate::input::{Class, Request, TenantSpec};
use crate::units::{RungIdx, Span, Time, Tokens};

/// How the engine sees a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Live {
    /// Whose it is.
    pub tenant: TenantId,
    /// Its tenant's class.
    pub class: Class,
    /// Its tenant's weight.
    pub weight: u16,
    /// The smallest rung it takes while anything else is left.
    pub floor: RungIdx,
    /// Tokens at the front that are never shed.
    pub pinned: Tokens,
    /// The rung of its cache; `None` while it waits outside.
    pub rung: Option<RungIdx>,
    /// Whether it runs.
    pub running: bool,
    /// Tokens in its cache.
    pub cached: Tokens,
    /// Tokens of the prompt not read yet.
    pub prompt_left: Tokens,
    /// Tokens written.
    pub answered: Tokens,
    /// Tokens that it will write.
    pub answer: Tokens,
    /// Where it is being read ahead, and for how many rounds it has been.
    pub ahead: Option<(RungIdx, u32)>,
    /// Changes of rung.
    pub switches: u64,
    /// Of them, upward ones.
    pub promotions: u64,
    /// When it came.
    pub born: Time,
    /// When it was first let in.
    pub admitted: Option<Time>,
    /// When it stopped, while it is parked.
    pub stopped: Option<Time>,
    /// How long it has been parked in all, up to its last return.
    pub parked: Span,
    /// The longest of those times.
    pub parked_max: Span,
}

impl Live {
    pub(super) fn new(request: &Request, spec: &TenantSpec, bottom: RungIdx, now: Time) -> Self {
        Self {
            tenant: request.tenant,
            class: spec.class,
            weight: spec.weight.get(),
            floor: spec.floor.clamp(spec.ceiling.min(bottom), bottom),
            pinned: request.pinned.min(request.prompt),
            rung: None,
            running: false,
            cached: Tokens::ZERO,
            prompt_left: request.prompt,
            answered: Tokens::ZERO,
            answer: request.answer,
            ahead: None,
            switches: 0,
            promotions: 0,
            born: now,
            admitted: None,
            stopped: None,
            parked: Span::ZERO,
            parked_max: Span::ZERO,
        }
    }

    pub(super) fn stop(&mut self, now: Time) {
        self.running = false;
        self.stopped = Some(now);
    }

    pub(super) fn start(&mut self, now: Time) {
        self.running = true;
        self.admitted = self.admitted.or(Some(now));
        if let Some(since) = self.stopped.take() {
            let away = now.since(since);
            self.parked = self.parked + away;
            self.parked_max = self.parked_max.max(away);
        }
    }
}
