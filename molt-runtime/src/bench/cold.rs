//! How long a person waits who starts the service and asks at once: from the start of `moltd` to the first token.

use std::io::BufRead as _;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::daemon::{Daemon, DaemonError, DaemonSettings};
use super::stats::Spread;

/// Cold starts of one ladder, with its files in the page cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ColdRow {
    /// The ladder.
    pub ladder: String,
    /// The rung that wrote the first token.
    pub rung: u64,
    /// From the start of the program until its socket answers, of each run.
    pub serving_ms: Vec<f64>,
    /// From the start of the program to the first token, of each run.
    pub first_token_ms: Vec<f64>,
}

impl ColdRow {
    /// Median and range.
    pub fn first_token(&self) -> Option<Spread> {
        Spread::of(&self.first_token_ms)
    }
}

const REQUEST: &str =
    r#"{"stream":true,"max_tokens":1,"temperature":0,"messages":[{"role":"user","content":"Say hello."}]}"#;

/// Starts it so many times, besides once that warms the page cache up. The budget chooses the rung.
pub fn measure(settings: &DaemonSettings, runs: usize) -> Result<ColdRow, DaemonError> {
    let mut row =
        ColdRow { ladder: settings.ladder.clone(), rung: 0, serving_ms: Vec::new(), first_token_ms: Vec::new() };
    for run in 0..=runs {
        let started = Instant::now();
        let (daemon, stream) = Daemon::start(settings)?;
        let serving_ms = started.elapsed().as_secs_f64() * 1e3;
        let rung = first_token(&daemon, stream)?;
        let first_token_ms = started.elapsed().as_secs_f64() * 1e3;
        if run > 0 {
            row.serving_ms.push(serving_ms);
            row.first_token_ms.push(first_token_ms);
            row.rung = rung;
        }
    }
    Ok(row)
}

/// Asks; the rung of the first token.
fn first_token(daemon: &Daemon, stream: UnixStream) -> Result<u64, DaemonError> {
    let mut said = String::new();
    for line in daemon.ask(stream, ("POST", "/v1/chat/completions"), REQUEST)?.lines() {
        let line = line.map_err(|source| daemon.failed(source))?;
        let chunk = line.strip_prefix("data: ").and_then(|data| serde_json::from_str::<serde_json::Value>(data).ok());
        if let Some(rung) = chunk.as_ref().and_then(|chunk| chunk["molt"]["rung"].as_u64()) {
            return Ok(rung);
        }
        said.push_str(&line);
        if said.len() > 4_096 {
            break;
        }
    }
    Err(daemon.silent(said))
}
