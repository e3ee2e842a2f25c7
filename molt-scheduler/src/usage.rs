//! The books: what everything takes, from the ladder's costs and the tokens of every sequence.
//!
//! Usage is overhead, the weights and scratch of each resident rung once, and for every sequence that is in (running
//! or parked) its cached tokens at the price of its rung. Coming growth is kept apart, in three horizons: the next
//! step, the near future (what anything that starts again or goes up must have room for), and the far one (what an
//! admission leaves to those who are in).

use serde::{Deserialize, Serialize};

use crate::cost::LadderCost;
use crate::units::{Bytes, RungIdx, Tokens};

const RUNGS: usize = RungIdx::LIMIT as usize;

/// A set of rungs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RungSet(u16);

impl RungSet {
    pub(crate) const EMPTY: Self = Self(0);

    /// The set with that number, for walking through all sets of a ladder in order.
    pub(crate) const fn numbered(bits: u16) -> Self {
        Self(bits)
    }

    /// All rungs of a ladder.
    pub(crate) fn whole(ladder: &LadderCost) -> Self {
        ladder.rungs().fold(Self::EMPTY, |set, (rung, _)| set.with(rung))
    }

    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    const fn bit(rung: RungIdx) -> u16 {
        match 1u16.checked_shl(rung.index() as u32) {
            Some(bit) => bit,
            None => 0,
        }
    }

    pub(crate) const fn with(self, rung: RungIdx) -> Self {
        Self(self.0 | Self::bit(rung))
    }

    pub(crate) const fn without(self, rung: RungIdx) -> Self {
        Self(self.0 & !Self::bit(rung))
    }

    pub(crate) const fn contains(self, rung: RungIdx) -> bool {
        self.0 & Self::bit(rung) != 0
    }

    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Biggest rung first.
    pub(crate) fn iter(self) -> impl Iterator<Item = RungIdx> {
        let mut bits = self.0;
        std::iter::from_fn(move || {
            let lowest = u8::try_from(bits.trailing_zeros()).ok().filter(|_| bits != 0)?;
            bits &= bits - 1;
            Some(RungIdx::new(lowest))
        })
    }

    /// Weights and scratch of the set.
    pub(crate) fn held(self, ladder: &LadderCost) -> Bytes {
        self.iter().map(|rung| ladder.cost(rung).held()).sum()
    }
}

/// How far to look ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Horizon {
    /// One token for each running sequence: what the next step takes at least. A prefill chunk may take more, but is
    /// cut to the room there is.
    Step,
    /// The prompt left and a block of the answer.
    Near,
    /// The prompt left and as much of the answer as an admission reserves.
    Far,
}

/// What a sequence brings to the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Entry {
    pub(crate) cached: Tokens,
    pub(crate) near: Tokens,
    pub(crate) far: Tokens,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Line {
    cached: Tokens,
    users: Tokens,
    near: Tokens,
    far: Tokens,
}

/// Tokens by rung, summed over all sequences. Copied freely to try a decision out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Books {
    lines: [Line; RUNGS],
}

impl Books {
    /// A cache that is kept on a rung, whether or not it runs.
    pub(crate) fn keep(&mut self, rung: RungIdx, cached: Tokens) {
        if let Some(line) = self.lines.get_mut(rung.get()) {
            line.cached += cached;
        }
    }

    /// A cache leaves a rung.
    pub(crate) fn drop(&mut self, rung: RungIdx, cached: Tokens) {
        if let Some(line) = self.lines.get_mut(rung.get()) {
            line.cached -= cached;
        }
    }

    /// A sequence, whose cache is counted already, runs on a rung.
    pub(crate) fn start(&mut self, rung: RungIdx, entry: Entry) {
        if let Some(line) = self.lines.get_mut(rung.get()) {
            line.users += Tokens::new(1);
            line.near += entry.near;
            line.far += entry.far;
        }
    }

    /// A running sequence stops; its cache stays.
    pub(crate) fn stop(&mut self, rung: RungIdx, entry: Entry) {
        if let Some(line) = self.lines.get_mut(rung.get()) {
            line.users -= Tokens::new(1);
            line.near -= entry.near;
            line.far -= entry.far;
        }
    }

    /// A running sequence goes from one rung to another with its cache.
    pub(crate) fn carry(&mut self, from: RungIdx, to: RungIdx, entry: Entry) {
        self.stop(from, entry);
        self.drop(from, entry.cached);
        self.keep(to, entry.cached);
        self.start(to, entry);
    }

    /// Rungs on which somebody runs.
    pub(crate) fn used(&self) -> RungSet {
        let runs = |rung: &RungIdx| self.users(*rung) > 0;
        (0..RungIdx::LIMIT).map(RungIdx::new).filter(runs).fold(RungSet::EMPTY, RungSet::with)
    }

    /// How many run on a rung.
    pub(crate) fn users(&self, rung: RungIdx) -> u64 {
        self.lines.get(rung.get()).map_or(0, |line| line.users.get())
    }

    /// How many run at all.
    pub(crate) fn running(&self) -> u64 {
        self.lines.iter().map(|line| line.users.get()).sum()
    }

    /// All caches.
    pub(crate) fn caches(&self, ladder: &LadderCost) -> Bytes {
        ladder.rungs().zip(&self.lines).map(|((_, cost), line)| cost.cache_per_token.times(line.cached)).sum()
    }

    /// Caches, and the weights and scratch of a set of rungs.
    pub(crate) fn level(&self, ladder: &LadderCost, resident: RungSet) -> Bytes {
        self.caches(ladder) + resident.held(ladder)
    }

    /// What running sequences will take on top.
    pub(crate) fn growth(&self, ladder: &LadderCost, horizon: Horizon) -> Bytes {
        let tokens = |line: &Line| match horizon {
            Horizon::Step => line.users,
            Horizon::Near => line.near,
            Horizon::Far => line.far,
        };
        ladder.rungs().zip(&self.lines).map(|((_, cost), line)| cost.cache_per_token.times(tokens(line))).sum()
    }

    /// What is needed up to a horizon with nothing resident but what is used: idle weights count as free memory,
    /// because they go before anything else does.
    pub(crate) fn needs(&self, ladder: &LadderCost, horizon: Horizon) -> Bytes {
        self.level(ladder, self.used()) + self.growth(ladder, horizon)
    }
}
