//! The log: what concerns everybody, one JSON object a line on standard error. Never what anybody said or was answered.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::Deserialize;

use crate::event::Event;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// Nothing of what happens.
    Nothing,
    /// What failed and was dealt with.
    Trouble,
    /// Everything but samples, which would drown it, and the words of answers.
    Events,
}

/// Writes the log. Clones share their level.
#[derive(Debug, Clone)]
pub struct Log(Arc<AtomicU8>);

impl Log {
    /// At that level.
    pub fn new(level: LogLevel) -> Self {
        let log = Self(Arc::default());
        log.set(level);
        log
    }

    /// From now on at that level.
    pub fn set(&self, level: LogLevel) {
        let number = match level {
            LogLevel::Nothing => 0,
            LogLevel::Trouble => 1,
            LogLevel::Events => 2,
        };
        self.0.store(number, Ordering::Relaxed);
    }

    /// Something happened.
    pub(super) fn tell(&self, event: &Event) {
        let needs = match event {
            Event::Sample { .. } | Event::Token { .. } => return,
            Event::Trouble { .. } => 1,
            _ => 2,
        };
        if self.0.load(Ordering::Relaxed) < needs {
            return;
        }
        if let Ok(line) = serde_json::to_string(event) {
            // A closed log is no reason to stop.
            let _closed = writeln!(std::io::stderr(), "{line}");
        }
    }
}
