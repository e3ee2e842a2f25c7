//! How long a person waits who starts the service and asks at once: from the start of `moltd` to the first token.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum ColdError {
    /// The program or its socket.
    #[error("cannot run {}", program.display())]
    Run {
        /// `moltd`.
        program: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It did not answer.
    #[error("{} wrote no token: {said}", program.display())]
    Silent {
        /// `moltd`.
        program: PathBuf,
        /// What it sent instead.
        said: String,
    },
}

/// What is started.
#[derive(Debug, Clone)]
pub struct ColdSettings {
    /// `moltd`.
    pub program: PathBuf,
    /// A built-in ladder, or the path of a ladder file.
    pub ladder: String,
    /// The folder of models.
    pub models: PathBuf,
    /// What may be used, in MiB: it chooses the rung.
    pub budget_mib: u64,
    /// Starts, besides one that warms the page cache up.
    pub runs: usize,
}

/// How long a start may take.
const PATIENCE: Duration = Duration::from_secs(120);
const REQUEST: &str =
    r#"{"stream":true,"max_tokens":1,"temperature":0,"messages":[{"role":"user","content":"Say hello."}]}"#;

/// A daemon that is ended with this value.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It is of no use any more; whether it was still there does not matter.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts it again and again.
pub fn measure(settings: &ColdSettings) -> Result<ColdRow, ColdError> {
    let mut row =
        ColdRow { ladder: settings.ladder.clone(), rung: 0, serving_ms: Vec::new(), first_token_ms: Vec::new() };
    for run in 0..=settings.runs {
        let (serving_ms, first_token_ms, rung) = start(settings)?;
        if run > 0 {
            row.serving_ms.push(serving_ms);
            row.first_token_ms.push(first_token_ms);
            row.rung = rung;
        }
    }
    Ok(row)
}

fn start(settings: &ColdSettings) -> Result<(f64, f64, u64), ColdError> {
    let error = |source| ColdError::Run { program: settings.program.clone(), source };
    let folder = tempfile::tempdir().map_err(error)?;
    let socket = folder.path().join("molt.sock");
    let started = Instant::now();
    let daemon = Command::new(&settings.program)
        .arg("--socket")
        .arg(&socket)
        .args(["--ladder", &settings.ladder, "--budget-mib", &settings.budget_mib.to_string(), "--models"])
        .arg(&settings.models)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut daemon = Daemon(daemon.map_err(error)?);
    let stream = loop {
        match UnixStream::connect(&socket) {
            Ok(stream) => break stream,
            Err(refused) if started.elapsed() > PATIENCE => return Err(error(refused)),
            Err(_) => {
                if let Ok(Some(status)) = daemon.0.try_wait() {
                    let said = format!("it ended with {status}");
                    return Err(ColdError::Silent { program: settings.program.clone(), said });
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    let serving_ms = started.elapsed().as_secs_f64() * 1e3;
    let (rung, first_token_ms) = first_token(stream, started)
        .map_err(error)?
        .map_err(|said| ColdError::Silent { program: settings.program.clone(), said })?;
    Ok((serving_ms, first_token_ms, rung))
}

/// Asks; the rung of the first token, and when it came. What else was said, where none came.
fn first_token(mut stream: UnixStream, started: Instant) -> std::io::Result<Result<(u64, f64), String>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = REQUEST.len();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: molt\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{REQUEST}"
    )?;
    let mut said = String::new();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        let chunk = line.strip_prefix("data: ").and_then(|data| serde_json::from_str::<serde_json::Value>(data).ok());
        if let Some(rung) = chunk.as_ref().and_then(|chunk| chunk["molt"]["rung"].as_u64()) {
            return Ok(Ok((rung, started.elapsed().as_secs_f64() * 1e3)));
        }
        said.push_str(&line);
        if said.len() > 4_096 {
            break;
        }
    }
    Ok(Err(said))
}

/// `moltd` beside the program that runs.
pub fn beside() -> std::io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    Ok(own.parent().unwrap_or(Path::new(".")).join("moltd"))
}
