//! What things cost in bytes: the only knowledge of models that the scheduler has.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, RungIdx, Tokens};

/// The bytes of one rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RungCost {
    /// Resident weights, paid once however many sequences use the rung.
    pub weights: Bytes,
    /// Cache of one token of one sequence.
    pub cache_per_token: Bytes,
    /// Scratch of a step, paid once while the rung's weights are resident.
    pub scratch: Bytes,
}

impl RungCost {
    /// A rung that no ladder has: it fits no budget.
    const IMPOSSIBLE: Self = Self { weights: Bytes::MAX, cache_per_token: Bytes::MAX, scratch: Bytes::MAX };

    /// What the rung holds while it is resident, without caches.
    pub fn held(self) -> Bytes {
        self.weights + self.scratch
    }
}

/// The bytes of a whole ladder, checked: one to [`RungIdx::LIMIT`] rungs whose weights fall strictly.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<RungCost>", into = "Vec<RungCost>")]
pub struct LadderCost(Vec<RungCost>);

/// Why a ladder's costs were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LadderCostError {
    /// No rung, or too many.
    #[error("a ladder has 1 to {limit} rungs, this one has {rungs}", limit = RungIdx::LIMIT)]
    Count {
        /// How many there are.
        rungs: usize,
    },
    /// A rung that is no smaller than the one above it.
    #[error("{rung} takes {bytes} of weights, no less than the rung above it ({above})")]
    NotFalling {
        /// The rung.
        rung: RungIdx,
        /// Its weights.
        bytes: Bytes,
        /// The weights of the rung above.
        above: Bytes,
    },
}

impl LadderCost {
    /// Checks the costs, biggest rung first.
    pub fn new(rungs: Vec<RungCost>) -> Result<Self, LadderCostError> {
        if rungs.is_empty() || rungs.len() > usize::from(RungIdx::LIMIT) {
            return Err(LadderCostError::Count { rungs: rungs.len() });
        }
        for ((above, below), index) in rungs.iter().zip(&rungs[1..]).zip(1u8..) {
            if below.weights >= above.weights {
                let rung = RungIdx::new(index);
                return Err(LadderCostError::NotFalling { rung, bytes: below.weights, above: above.weights });
            }
        }
        Ok(Self(rungs))
    }

    /// The rungs, biggest first.
    pub fn rungs(&self) -> impl DoubleEndedIterator<Item = (RungIdx, RungCost)> + ExactSizeIterator + '_ {
        self.0.iter().enumerate().map(|(index, cost)| (RungIdx::new(u8::try_from(index).unwrap_or(u8::MAX)), *cost))
    }

    /// The cost of a rung, or `None` below the last.
    pub fn get(&self, rung: RungIdx) -> Option<RungCost> {
        self.0.get(rung.get()).copied()
    }

    /// The cost of a rung; below the last one it is more than there can be.
    pub(crate) fn cost(&self, rung: RungIdx) -> RungCost {
        self.get(rung).unwrap_or(RungCost::IMPOSSIBLE)
    }

    /// The smallest rung.
    pub fn bottom(&self) -> RungIdx {
        RungIdx::new(u8::try_from(self.0.len() - 1).unwrap_or(u8::MAX))
    }

    /// What a lone sequence of that many tokens needs on a rung, without the fixed overhead.
    pub fn alone(&self, rung: RungIdx, tokens: Tokens) -> Option<Bytes> {
        self.get(rung).map(|c| c.weights + c.scratch + c.cache_per_token.times(tokens))
    }
}

impl TryFrom<Vec<RungCost>> for LadderCost {
    type Error = LadderCostError;
    fn try_from(rungs: Vec<RungCost>) -> Result<Self, Self::Error> {
        Self::new(rungs)
    }
}

impl From<LadderCost> for Vec<RungCost> {
    fn from(ladder: LadderCost) -> Self {
        ladder.0
    }
}
