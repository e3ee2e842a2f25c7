//! As much of the runtime's `budget` as the operator's needs.

use molt_scheduler::units::{Bytes, Time};

#[path = "../../molt-runtime/src/budget/operator.rs"]
pub(crate) mod operator;

/// As `molt-runtime` has it, without what has a default.
pub(crate) trait BudgetSource {
    fn budget(&mut self, now: Time) -> Option<Bytes>;

    /// As in `molt_runtime`.
    fn name(&self) -> &'static str;

    /// As in `molt_runtime`.
    fn reason(&self) -> String;
}
