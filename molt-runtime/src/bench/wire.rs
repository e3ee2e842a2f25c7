//! A session on the wire, recorded from the program as it really came: a chat that streams while the operator takes memory
//! away in mid-answer and gives it back.

use std::io::BufRead as _;
use std::time::{Duration, Instant};

use molt_scheduler::units::{Bytes, Tokens};
use molt_scheduler::{LadderCost, RungCost};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::daemon::{Daemon, DaemonError, DaemonSettings};
use super::results::{Claim, Section};

/// A line of the session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireRow {
    /// From the first request.
    pub at_ms: f64,
    /// Who says it.
    pub from: Side,
    /// What, as it stands on the wire, without the framing of HTTP.
    pub line: String,
}

/// A side of the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Who asks.
    Client,
    /// Who sets the budget.
    Operator,
    /// The service.
    Service,
}

const PROMPT: &str = "Explain in a few paragraphs what an operating system does when memory runs low.";
/// Tokens of the answer, and after how many memory goes and comes back.
const ANSWER: u64 = 120;
const TAKEN: usize = 20;
const GIVEN: usize = 50;

/// Records a session. The budget holds the biggest rung and the smallest beside it at first, then the smallest alone.
pub fn record(settings: &DaemonSettings, cost: &LadderCost) -> Result<Section<WireRow>, DaemonError> {
    let started = Instant::now();
    let (daemon, stream) = Daemon::start(settings)?;
    let overhead = overhead(&daemon)?;
    let rung = |index| cost.rungs().nth(index).map(|(_, cost)| cost);
    let cache = |cost: RungCost| cost.cache_per_token.times(Tokens::new(4 * ANSWER));
    let (Some(top), Some(bottom)) = (rung(0), cost.rungs().next_back().map(|(_, cost)| cost)) else {
        return Err(daemon.silent("the ladder has no rungs".to_owned()));
    };
    let low = overhead + bottom.held() + cache(bottom) + Bytes::new(overhead.get() / 32);
    let both = overhead + top.held() + bottom.held() + cache(top) + cache(bottom);
    let high = Bytes::new(both.get() + both.get() / 8);
    let mut rows = Vec::new();
    let say = |rows: &mut Vec<WireRow>, from, line: String| {
        rows.push(WireRow { at_ms: started.elapsed().as_secs_f64() * 1e3, from, line });
    };
    let set = |rows: &mut Vec<WireRow>, budget: Bytes| -> Result<(), DaemonError> {
        let body = json!({"budget_bytes": budget.get()}).to_string();
        say(rows, Side::Operator, format!("PUT /v1/budget {body}"));
        daemon.whole(("PUT", "/v1/budget"), &body).map(|_| ())
    };
    set(&mut rows, high)?;
    let body = json!({
        "stream": true, "max_tokens": ANSWER, "temperature": 0,
        "messages": [{"role": "user", "content": PROMPT}],
    })
    .to_string();
    say(&mut rows, Side::Client, format!("POST /v1/chat/completions {body}"));
    let (mut tokens, mut switches, mut done) = (0, Vec::new(), false);
    for line in daemon.ask(stream, ("POST", "/v1/chat/completions"), &body)?.lines() {
        let line = line.map_err(|source| daemon.failed(source))?;
        // Keep-alive comments, and nothing else of HTTP's.
        let Some(data) = line.strip_prefix("data: ") else {
            if line.starts_with(':') {
                say(&mut rows, Side::Service, line);
            }
            continue;
        };
        let chunk: Value = serde_json::from_str(data).unwrap_or_default();
        say(&mut rows, Side::Service, data.to_owned());
        done |= data == "[DONE]";
        if chunk["molt"]["event"] == "switch" {
            switches.push((chunk["molt"]["from"].clone(), chunk["molt"]["to"].clone()));
        }
        if chunk["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
            tokens += 1;
            match tokens {
                TAKEN => set(&mut rows, low)?,
                GIVEN => set(&mut rows, high)?,
                _ => {}
            }
        }
    }
    let told: Vec<String> = switches.iter().map(|(from, to)| format!("{from} to {to}")).collect();
    let claims = vec![
        Claim::new("the stream goes on through switches to its end", done, format!("{tokens} chunks with text")),
        Claim::new("each switch is told in the stream", !switches.is_empty(), told.join(", ")),
    ];
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

/// What the process takes without a model, as it says itself once its engine has made a round.
fn overhead(daemon: &Daemon) -> Result<Bytes, DaemonError> {
    for _ in 0..200 {
        let text = daemon.whole(("GET", "/metrics"), "")?;
        let line = text.lines().find_map(|line| line.strip_prefix("molt_usage_kind_bytes{kind=\"overhead\"} "));
        if let Some(bytes) = line.and_then(|number| number.trim().parse::<u64>().ok()).filter(|bytes| *bytes > 0) {
            return Ok(Bytes::new(bytes));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(daemon.silent("no overhead among its metrics".to_owned()))
}
