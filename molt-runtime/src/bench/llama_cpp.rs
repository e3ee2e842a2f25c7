//! llama.cpp as a measure: the Python package `llama-cpp-python`, in a process of its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Deserialize;

use super::engine::{Speed, Workload};

/// Why llama.cpp could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum LlamaCppError {
    /// The interpreter does not start.
    #[error("cannot run {}", python.display())]
    Start {
        /// The interpreter.
        python: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It broke off.
    #[error("{} did not measure {}; is llama-cpp-python installed there?", python.display(), file.display())]
    Broken {
        /// The interpreter.
        python: PathBuf,
        /// The model file.
        file: PathBuf,
    },
}

/// llama.cpp with a model loaded, waiting to be measured. It sleeps while it is not asked.
#[derive(Debug)]
pub struct LlamaCpp {
    process: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
    python: PathBuf,
    file: PathBuf,
}

#[derive(Deserialize)]
struct Answer {
    prefill_tok_s: f64,
    decode_tok_s: f64,
}

impl LlamaCpp {
    /// Loads the file, as it is or widened to 2-byte floats, and warms up.
    pub fn start(
        python: &Path,
        file: &Path,
        widened: bool,
        threads: usize,
        load: Workload,
    ) -> Result<Self, LlamaCppError> {
        let start = |source| LlamaCppError::Start { python: python.to_owned(), source };
        let mut process = Command::new(python)
            .args(["-c", include_str!("llama_cpp.py")])
            .arg(file)
            .args([threads, load.prompt_tokens, load.decode_tokens].map(|n| n.to_string()))
            .arg(if widened { "f16" } else { "as_stored" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let (Some(ask), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both are piped")
        };
        let (python, file) = (python.to_owned(), file.to_owned());
        let mut own = Self { process, ask, answers: BufReader::new(answers), python, file };
        match own.line()?.trim() {
            "ready" => Ok(own),
            _ => Err(own.broken()),
        }
    }

    /// One run.
    pub fn run(&mut self) -> Result<Speed, LlamaCppError> {
        writeln!(self.ask, "run").and_then(|()| self.ask.flush()).map_err(|_| self.broken())?;
        let line = self.line()?;
        let answer: Answer = serde_json::from_str(&line).map_err(|_| self.broken())?;
        Ok(Speed { prefill_tok_s: answer.prefill_tok_s, decode_tok_s: answer.decode_tok_s })
    }

    fn line(&mut self) -> Result<String, LlamaCppError> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(read) if read > 0 => Ok(line),
            _ => Err(self.broken()),
        }
    }

    fn broken(&self) -> LlamaCppError {
        LlamaCppError::Broken { python: self.python.clone(), file: self.file.clone() }
    }
}

impl Drop for LlamaCpp {
    fn drop(&mut self) {
        // It holds a model; it is no use any more, and whether it was still there does not matter.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
