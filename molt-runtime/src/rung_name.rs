//! How rungs are written in configurations and profiles: `"tier2"`, or its number.

use molt_scheduler::units::RungIdx;
use serde::{Deserialize, Deserializer};

/// Reads `"tier0"`, `"tier1"` and so on.
///
/// # Errors
/// What is wrong, and how it is written.
pub fn parse(text: &str) -> Result<RungIdx, String> {
    let index = text.strip_prefix("tier").and_then(|index| index.parse().ok());
    index.map(RungIdx::new).ok_or_else(|| format!("is {text:?}; write \"tier0\", \"tier1\" and so on"))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u8),
    Name(String),
}

/// A rung in a file, by number or by name.
pub(crate) fn number_or_name<'de, D: Deserializer<'de>>(from: D) -> Result<RungIdx, D::Error> {
    match Written::deserialize(from).map_err(|_| serde::de::Error::custom("a rung is a number or \"tier0\""))? {
        Written::Number(index) => Ok(RungIdx::new(index)),
        Written::Name(name) => parse(&name).map_err(serde::de::Error::custom),
    }
}

/// The same where a rung may be left out.
pub(crate) fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<RungIdx>, D::Error> {
    number_or_name(from).map(Some)
}
