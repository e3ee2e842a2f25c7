//! What a ladder costs in bytes and in time, for running the scheduler without the models.

use std::path::{Path, PathBuf};

use molt_scheduler::simulator::{RungSpeed, Speed};
use molt_scheduler::units::{Bytes, Span};
use molt_scheduler::{LadderCost, LadderCostError, RungCost};
use serde::Deserialize;

use crate::trace::Amount;

/// Costs as they are written down.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct CostsFile {
    name: String,
    overhead: Amount,
    speed: SpeedClaim,
    #[serde(rename = "rung")]
    rungs: Vec<RungClaim>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpeedClaim {
    load_mib_per_s: u64,
    carry_token_us: u64,
    idle_ms: u64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct RungClaim {
    weights: Amount,
    cache_per_token: Amount,
    scratch: Amount,
    decode_token_us: u64,
    prompt_token_us: u64,
}

/// The costs of a ladder, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// Whose they are.
    pub name: String,
    /// What the process takes without any model.
    pub overhead: Bytes,
    /// Bytes.
    pub ladder: LadderCost,
    /// Times.
    pub speed: Speed,
}

/// What is wrong with costs.
#[derive(Debug, thiserror::Error)]
pub enum CostsError {
    /// The file cannot be read.
    #[error("cannot read the costs {}; built in are {known}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What there is without a file.
        known: String,
        /// The reason.
        source: std::io::Error,
    },
    /// It cannot be parsed; the message names the key.
    #[error("the costs {name}: {reason}")]
    Syntax {
        /// The costs.
        name: String,
        /// What the parser says.
        reason: String,
    },
    /// A value that makes no sense.
    #[error("the costs {name}: {key} {reason}")]
    Value {
        /// The costs.
        name: String,
        /// Where it stands.
        key: String,
        /// Why not.
        reason: &'static str,
    },
    /// Its rungs make no ladder.
    #[error("the costs {name}")]
    Ladder {
        /// The costs.
        name: String,
        /// Why not.
        source: LadderCostError,
    },
}

/// Built-in costs, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("phone", include_str!("costs/phone.toml")),
    ("qwen2.5-coder-seed", include_str!("costs/qwen2.5-coder-seed.toml")),
    ("qwen2.5-coder", include_str!("costs/qwen2.5-coder.toml")),
];

/// A step that takes no time would let a replay stand still.
const TOO_FAST: &str = "must be more than nothing";

impl Costs {
    /// Costs that are built in, or those in the file at that path.
    pub fn find(name: &str) -> Result<Self, CostsError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(own, _)| *own == name) {
            return Self::parse(name, text);
        }
        let text = std::fs::read_to_string(Path::new(name)).map_err(|source| {
            let known = BUILT_IN.iter().map(|(own, _)| *own).collect::<Vec<_>>().join(", ");
            CostsError::Read { path: PathBuf::from(name), known, source }
        })?;
        Self::parse(name, &text)
    }

    /// Parses costs.
    pub fn parse(name: &str, text: &str) -> Result<Self, CostsError> {
        let file: CostsFile =
            toml::from_str(text).map_err(|e| CostsError::Syntax { name: name.to_owned(), reason: e.to_string() })?;
        let value = |key: &str, reason| CostsError::Value { name: name.to_owned(), key: key.to_owned(), reason };
        let bytes = |amount: Amount, key: &str| match amount {
            Amount::Bytes(bytes) => Ok(bytes),
            Amount::Rung { .. } => Err(value(key, "must be given in bytes")),
        };
        let at_least_one = |count: u64, key: &str| if count > 0 { Ok(count) } else { Err(value(key, TOO_FAST)) };
        let (mut costs, mut speeds) = (Vec::new(), Vec::new());
        for (index, rung) in file.rungs.iter().enumerate() {
            let key = |key: &str| format!("rung[{index}].{key}");
            costs.push(RungCost {
                weights: bytes(rung.weights, &key("weights"))?,
                cache_per_token: bytes(rung.cache_per_token, &key("cache_per_token"))?,
                scratch: bytes(rung.scratch, &key("scratch"))?,
            });
            speeds.push(RungSpeed {
                decode_token: Span::from_micros(at_least_one(rung.decode_token_us, &key("decode_token_us"))?),
                prompt_token: Span::from_micros(at_least_one(rung.prompt_token_us, &key("prompt_token_us"))?),
            });
        }
        let per_second = Bytes::mib(at_least_one(file.speed.load_mib_per_s, "speed.load_mib_per_s")?);
        Ok(Self {
            overhead: bytes(file.overhead, "overhead")?,
            ladder: LadderCost::new(costs).map_err(|source| CostsError::Ladder { name: name.to_owned(), source })?,
            speed: Speed {
                load_bytes_per_ms: Bytes::new(per_second.get() / 1_000),
                carry_token: Span::from_micros(file.speed.carry_token_us),
                rungs: speeds,
                idle: Span::from_millis(at_least_one(file.speed.idle_ms, "speed.idle_ms")?),
            },
            name: file.name,
        })
    }

    /// The costs of a ladder whose models are at hand. Times are those of a small model, for there is no measuring
    /// without running it.
    pub fn of(name: &str, ladder: LadderCost, overhead: Bytes) -> Self {
        let fast = RungSpeed { decode_token: Span::from_millis(2), prompt_token: Span::from_micros(150) };
        let speed = Speed {
            load_bytes_per_ms: Bytes::new(700_000),
            carry_token: Span::from_micros(80),
            rungs: vec![fast],
            idle: Span::from_millis(20),
        };
        Self { name: name.to_owned(), overhead, ladder, speed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_that_make_no_sense_are_refused_by_key() {
        for (name, text) in BUILT_IN {
            Costs::parse(name, text).unwrap();
            let check = |from: &str, to: &str, named: &[&str]| {
                assert!(text.contains(from));
                let mut reason = String::new();
                let error = Costs::parse(name, &text.replacen(from, to, 1)).unwrap_err();
                let mut cause: Option<&dyn std::error::Error> = Some(&error);
                while let Some(error) = cause {
                    reason = format!("{reason}{error} ");
                    cause = error.source();
                }
                assert!(named.iter().all(|part| reason.contains(part)), "{reason}");
            };
            check("idle_ms = 20", "idle_ms = 0", &[name, "speed.idle_ms"]);
            check("overhead = \"89 MiB\"", "overhead = \"tier1\"", &[name, "overhead", "bytes"]);
            check("scratch = ", "scratches = ", &[name, "scratches"]);
            check("weights = \"", "weights = \"1 B\"\n# \"", &[name, "tier1"]);
        }
    }
}
