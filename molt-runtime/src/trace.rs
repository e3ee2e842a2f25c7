//! Pressure traces: how a budget moves, written in a file so that a run can be repeated on any ladder and machine.

use std::path::{Path, PathBuf};

use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Config, LadderCost};
use serde::Deserialize;

/// A trace as it is written down.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceFile {
    name: String,
    ms_per_token: Option<u64>,
    tenants: Option<String>,
    #[serde(rename = "step")]
    steps: Vec<StepClaim>,
    #[serde(default)]
    scheduler: Settings,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepClaim {
    at_ms: u64,
    budget: Amount,
}

/// A trace, checked: at least one step, the first at the start, times rising.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    name: String,
    per_token: Option<Span>,
    tenants: Option<String>,
    steps: Vec<(Time, Amount)>,
    settings: Settings,
}

/// Settings of the scheduler that a trace brings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Headroom must have lasted this long before anything goes up.
    pub patience_ms: Option<u64>,
    /// A sequence stays at least this long on a rung before it goes up.
    pub residence_ms: Option<u64>,
    /// Requests that may wait in each class.
    pub queue_limit: Option<u32>,
    /// Sequences that may be in at once.
    pub admit_limit: Option<u32>,
}

impl Settings {
    /// A configuration with these settings in place of its own.
    pub fn over(self, config: Config) -> Config {
        Config {
            patience: self.patience_ms.map_or(config.patience, Span::from_millis),
            residence: self.residence_ms.map_or(config.residence, Span::from_millis),
            queue_limit: self.queue_limit.unwrap_or(config.queue_limit),
            admit_limit: self.admit_limit.unwrap_or(config.admit_limit),
            ..config
        }
    }
}

/// Bytes, given outright (`"512 MiB"`) or relative to a rung (`"tier1 + 19 %"`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Amount {
    /// That many.
    Bytes(Bytes),
    /// The process's overhead, and what a lone sequence of full length needs on that rung with so many percent more.
    Rung {
        /// The rung; below the last of a shorter ladder, the last.
        rung: RungIdx,
        /// Percent more.
        percent: u64,
    },
}

impl TryFrom<String> for Amount {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let rung = |word: &str| word.strip_prefix("tier").and_then(|n| n.parse().ok()).map(RungIdx::new);
        let amount = match words[..] {
            [tier] => rung(tier).map(|rung| Self::Rung { rung, percent: 0 }),
            [tier, "+", percent, "%"] => {
                rung(tier).zip(percent.parse().ok()).map(|(rung, percent)| Self::Rung { rung, percent })
            }
            [count, "MiB"] => count.parse().ok().map(|n| Self::Bytes(Bytes::mib(n))),
            [count, "B"] => count.parse().ok().map(|n| Self::Bytes(Bytes::new(n))),
            _ => None,
        };
        amount.ok_or_else(|| format!("{text:?} is no amount; write \"512 MiB\", \"tier1\" or \"tier1 + 19 %\""))
    }
}

/// What is wrong with a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read.
    #[error("cannot read the trace {}; built in are {known}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What there is without a file.
        known: String,
        /// The reason.
        source: std::io::Error,
    },
    /// It cannot be parsed; the message names the key.
    #[error("the trace {name}: {reason}")]
    Syntax {
        /// The trace.
        name: String,
        /// What the parser says.
        reason: String,
    },
}

/// Built-in traces, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("spike_mid_answer", include_str!("../../traces/spike_mid_answer.toml")),
    ("saw_tooth", include_str!("../../traces/saw_tooth.toml")),
    ("slow_squeeze", include_str!("../../traces/slow_squeeze.toml")),
    ("camera_launch", include_str!("../../traces/camera_launch.toml")),
    ("collapse", include_str!("../../traces/collapse.toml")),
    ("thousand_tenants", include_str!("../../traces/thousand_tenants.toml")),
    ("recorded_build", include_str!("../../traces/recorded_build.toml")),
];

impl Trace {
    /// Names of the traces that are built in.
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A trace that is built in, or the file at that path.
    pub fn find(name: &str) -> Result<Self, TraceError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(own, _)| *own == name) {
            return Self::parse(name, text);
        }
        let text = std::fs::read_to_string(Path::new(name)).map_err(|source| {
            let known = Self::built_in().collect::<Vec<_>>().join(", ");
            TraceError::Read { path: PathBuf::from(name), known, source }
        })?;
        Self::parse(name, &text)
    }

    /// Parses and checks a trace.
    pub fn parse(name: &str, text: &str) -> Result<Self, TraceError> {
        let error = |reason: String| TraceError::Syntax { name: name.to_owned(), reason };
        let claim: TraceFile = toml::from_str(text).map_err(|e| error(e.to_string()))?;
        if claim.steps.first().is_none_or(|s| s.at_ms != 0) {
            return Err(error("its first step must be at_ms = 0".into()));
        }
        if let Some(pair) = claim.steps.windows(2).find(|w| w[1].at_ms <= w[0].at_ms) {
            return Err(error(format!("the step at {} does not come after {}", pair[1].at_ms, pair[0].at_ms)));
        }
        if claim.ms_per_token == Some(0) {
            return Err(error("ms_per_token must be more than nothing".into()));
        }
        Ok(Self {
            name: claim.name,
            per_token: claim.ms_per_token.map(Span::from_millis),
            tenants: claim.tenants,
            steps: claim.steps.iter().map(|step| (Time::from_millis(step.at_ms), step.budget)).collect(),
            settings: claim.scheduler,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The profile of tenants that it was made for, where there is one.
    pub fn tenants(&self) -> Option<&str> {
        self.tenants.as_deref()
    }

    /// What the scheduler should be set to while it runs.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// The budget at a time.
    pub fn budget_at(&self, now: Time, frame: &Frame<'_>) -> Bytes {
        let past = self.steps.partition_point(|(at, _)| *at <= now);
        past.checked_sub(1).and_then(|last| self.steps.get(last)).map_or(Bytes::MAX, |(_, b)| frame.resolve(*b))
    }

    /// The largest budget that there is at any time.
    pub fn budget_max(&self, frame: &Frame<'_>) -> Bytes {
        self.steps.iter().map(|(_, budget)| frame.resolve(*budget)).max().unwrap_or(Bytes::MAX)
    }

    /// When the last step begins.
    pub fn last_step(&self) -> Time {
        self.steps.last().map_or(Time::START, |(at, _)| *at)
    }

    /// How much time a token stands for, where the trace counts in tokens.
    pub fn per_token(&self) -> Option<Span> {
        self.per_token
    }
}

/// What relative amounts refer to.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// The ladder's costs.
    pub ladder: &'a LadderCost,
    /// What the process takes anyway.
    pub overhead: Bytes,
    /// Full length of a sequence.
    pub context: Tokens,
}

impl Frame<'_> {
    /// The bytes of an amount.
    pub fn resolve(&self, amount: Amount) -> Bytes {
        match amount {
            Amount::Bytes(bytes) => bytes,
            Amount::Rung { rung, percent } => {
                let rung = rung.min(self.ladder.bottom());
                let alone = self.ladder.alone(rung, self.context).unwrap_or(Bytes::ZERO);
                let more = u128::from(alone.get()) * u128::from(percent) / 100;
                self.overhead + alone + Bytes::new(u64::try_from(more).unwrap_or(u64::MAX))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<Amount, &str>) {
        match (Amount::try_from(text.to_owned()), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(found), Err(part)) => assert!(found.contains(part), "{found}"),
            (found, expected) => panic!("{text}: {found:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn amounts() {
        let rung = |n, percent| Ok(Amount::Rung { rung: RungIdx::new(n), percent });
        check("512 MiB", Ok(Amount::Bytes(Bytes::mib(512))));
        check("tier1", rung(1, 0));
        check("tier2 + 8 %", rung(2, 8));
        check("tier2 + many %", Err("tier2 + many %"));
        check("512 MB", Err("512 MB"));
    }

    #[test]
    fn traces_that_make_no_sense_are_refused_by_name() {
        let reason = |text: &str| Trace::parse("t", text).unwrap_err().to_string();
        let step = |at: u64| format!("[[step]]\nat_ms = {at}\nbudget = \"1 MiB\"\n");
        assert!(reason(&format!("name = \"t\"\n{}", step(5))).contains("at_ms = 0"));
        assert!(reason(&format!("name = \"t\"\n{}{}", step(0), step(0))).contains("does not come after"));
        assert!(reason(&format!("name = \"t\"\nspeed = 1\n{}", step(0))).contains("speed"));
        assert!(reason(&format!("name = \"t\"\nms_per_token = 0\n{}", step(0))).contains("ms_per_token"));
        Trace::parse("t", &format!("name = \"t\"\n{}{}", step(0), step(7))).unwrap();
    }

    #[test]
    fn every_built_in_trace_parses_and_moves() {
        for name in Trace::built_in() {
            let trace = Trace::find(name).unwrap();
            assert_eq!(trace.name(), name);
            assert!(
                trace.steps.windows(2).all(|pair| pair[0].1 != pair[1].1),
                "{name} has a step that changes nothing"
            );
        }
    }
}
