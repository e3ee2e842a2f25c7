//! What no plan may do, and the numbers where one did.

use crate::ids::SequenceId;
use crate::plan::{Action, Prospect, Step};
use crate::state::SequenceState;
use crate::units::{Bytes, RungIdx, Time};

/// A law that did not hold in a round.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("in the round at {} us", at.micros())]
pub struct BrokenLaw {
    /// When.
    pub at: Time,
    /// Which law.
    #[source]
    pub law: Law,
}

/// The laws that an engine can see.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Law {
    /// Nobody that is not there is named.
    #[error("{sequence} is not there")]
    Unknown {
        /// Who is named.
        sequence: SequenceId,
    },
    /// An action suits where its sequence stands and what is resident.
    #[error("{what}: {action:?}")]
    Misplaced {
        /// What does not suit.
        what: &'static str,
        /// The action.
        action: Action,
    },
    /// Usage never rises above what it was, and once within the budget it stays there.
    #[error("{usage} in use on the way, over {cap}: {action:?}")]
    OverOnTheWay {
        /// In use then.
        usage: Bytes,
        /// What was allowed at that point.
        cap: Bytes,
        /// The action that did it.
        action: Action,
    },
    /// A step is one of somebody who runs, where it runs, on weights that are there.
    #[error("a step that cannot be: {step:?}")]
    Step {
        /// The step.
        step: Step,
    },
    /// Read ahead is who runs, on a bigger rung than its own.
    #[error("a prospect that cannot be: {prospect:?}")]
    Prospect {
        /// The prospect.
        prospect: Prospect,
    },
    /// After enforcement usage is within the budget wherever the floor fits.
    #[error("{usage} in use over a budget of {budget}, though {bottom} would fit")]
    OverBudget {
        /// In use.
        usage: Bytes,
        /// Allowed.
        budget: Bytes,
        /// With all weights gone and every cache shed.
        bottom: Bytes,
    },
    /// Usage does not rise over the budget.
    #[error("usage rose from {before} to {usage} over a budget of {budget}")]
    Rose {
        /// Before the round.
        before: Bytes,
        /// After it.
        usage: Bytes,
        /// Allowed.
        budget: Bytes,
    },
    /// A plan says truly what will be in use: in the end, at most, and at most once everything is released.
    #[error("the plan says usage {said}, peak {said_peak} and crest {said_crest}, it was {usage}, {peak} and {crest}")]
    Reckoned {
        /// Usage by the plan.
        said: Bytes,
        /// Peak by the plan.
        said_peak: Bytes,
        /// Crest by the plan.
        said_crest: Bytes,
        /// Usage by the engine's books.
        usage: Bytes,
        /// Peak by the engine's books.
        peak: Bytes,
        /// Crest by the engine's books.
        crest: Bytes,
    },
    /// Scheduler and engine say the same of every sequence.
    #[error("{sequence} is {said:?} by the scheduler; by the engine it {} on {rung:?}", if *running { "runs" } else { "stands" })]
    Disagree {
        /// Who.
        sequence: SequenceId,
        /// What the scheduler says.
        said: Option<SequenceState>,
        /// What the engine says.
        rung: Option<RungIdx>,
        /// What the engine says.
        running: bool,
    },
    /// Scheduler and engine say the same of every rung.
    #[error("resident are {said:?} by the scheduler, {is:?} by the engine")]
    Resident {
        /// What the scheduler says.
        said: Vec<RungIdx>,
        /// What the engine says.
        is: Vec<RungIdx>,
    },
}
