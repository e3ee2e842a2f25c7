//! The law of transitions: usage never rises above what it was, and once within the limit it stays there.
//!
//! Weights go before weights come, and carries are made one after another, each with both its caches in memory until it
//! is checked. In which order they are made decides how high that goes.

use crate::cost::LadderCost;
use crate::units::{Bytes, Time};
use crate::usage::RungSet;

/// A cache on its way from one rung to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carry {
    /// Which of the decisions it is.
    pub(crate) decision: usize,
    pub(crate) source: Bytes,
    pub(crate) destination: Bytes,
}

impl Carry {
    fn grows(&self) -> bool {
        self.destination > self.source
    }

    /// The order in which a row of carries peaks lowest: first those that free, smallest copy first; then those that
    /// grow, biggest original first.
    fn place(&self) -> (bool, u64) {
        (self.grows(), if self.grows() { u64::MAX - self.source.get() } else { self.destination.get() })
    }

    fn biggest_first(&self) -> (bool, u64) {
        (self.grows(), u64::MAX - if self.grows() { self.source.get() } else { self.destination.get() })
    }
}

/// What holds throughout a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) now: Time,
    /// The budget less overhead and drift: what weights and caches may take.
    pub(crate) limit: Bytes,
    /// What weights and caches take before anything is decided.
    pub(crate) before: Bytes,
    /// Rungs that are resident or may be loaded.
    pub(crate) usable: RungSet,
}

impl Frame {
    /// Puts carries into an order that keeps to the law; whether that is possible. `caches` are all caches before,
    /// `kept` the weights that stay, `loaded` those that come.
    ///
    /// The order of least peak is tried first. While usage is over the limit anyway there is more room than there will
    /// be, which a big copy may need: so the second try makes the big ones first, until the limit is reached.
    pub(crate) fn arrange(
        &self,
        ladder: &LadderCost,
        caches: Bytes,
        kept: RungSet,
        loaded: RungSet,
        carries: &mut [Carry],
    ) -> bool {
        let level = caches + kept.held(ladder);
        let within = level <= self.limit;
        let level = level + loaded.held(ladder);
        carries.sort_by_key(Carry::place);
        self.lawful(level, within) && (self.walk(level, within, carries) || (!within && self.big_first(level, carries)))
    }

    fn big_first(&self, level: Bytes, carries: &mut [Carry]) -> bool {
        carries.sort_by_key(Carry::biggest_first);
        let mut after = level;
        let over = carries.iter().take_while(|carry| {
            let over = after > self.limit;
            after = after + carry.destination - carry.source;
            over
        });
        let over = over.count();
        if let Some(rest) = carries.get_mut(over..) {
            rest.sort_by_key(Carry::place);
        }
        self.walk(level, false, carries)
    }

    /// Whether carries in that order keep to the law.
    fn walk(&self, mut level: Bytes, mut within: bool, carries: &[Carry]) -> bool {
        within |= level <= self.limit;
        for carry in carries {
            if !self.lawful(level + carry.destination, within) {
                return false;
            }
            level = level + carry.destination - carry.source;
            within |= level <= self.limit;
        }
        true
    }

    fn lawful(&self, level: Bytes, within: bool) -> bool {
        level <= if within { self.limit } else { self.before.max(self.limit) }
    }
}
