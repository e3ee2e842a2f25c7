//! Each of Molt's means taken away on its own: those of a carry on held-out texts, those of the engine under the same
//! pressure and with the same prompts. As measured, what did not pay too.

use serde::{Deserialize, Serialize};

use super::conditions::ConditionRow;
use crate::eval;

/// One measurement without something, or with everything to compare with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AblationRow {
    /// An answer under pressure.
    Trace(ConditionRow),
    /// Carries.
    Carry(eval::Row),
}

/// The answers under pressure.
pub fn traced(rows: &[AblationRow]) -> Vec<&ConditionRow> {
    rows.iter().filter_map(|row| if let AblationRow::Trace(row) = row { Some(row) } else { None }).collect()
}

/// The carries.
pub fn carried(rows: &[AblationRow]) -> Vec<&eval::Row> {
    rows.iter().filter_map(|row| if let AblationRow::Carry(row) = row { Some(row) } else { None }).collect()
}
