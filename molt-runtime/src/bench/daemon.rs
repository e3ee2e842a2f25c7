//! `moltd` as a client sees it, for the sections that measure the program and not the library.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What is started.
#[derive(Debug, Clone)]
pub struct DaemonSettings {
    /// `moltd`.
    pub program: PathBuf,
    /// A built-in ladder, or the path of a ladder file.
    pub ladder: String,
    /// The folder of models.
    pub models: PathBuf,
    /// What may be used at first, in MiB.
    pub budget_mib: u64,
}

/// Why there is nothing to measure.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The program or its socket.
    #[error("cannot run {}", program.display())]
    Run {
        /// `moltd`.
        program: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It did not answer as it should.
    #[error("{} did not answer as it should: {said}", program.display())]
    Silent {
        /// `moltd`.
        program: PathBuf,
        /// What it sent instead.
        said: String,
    },
}

/// How long a start, or a line of an answer, may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A daemon that is ended with this value.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It is of no use any more; whether it was still there does not matter.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    /// Starts it; together with a connection, which is there as soon as it serves.
    pub(super) fn start(settings: &DaemonSettings) -> Result<(Self, UnixStream), DaemonError> {
        let error = |source| DaemonError::Run { program: settings.program.clone(), source };
        let folder = tempfile::tempdir().map_err(error)?;
        let socket = folder.path().join("molt.sock");
        let started = Instant::now();
        let child = Command::new(&settings.program)
            .arg("--socket")
            .arg(&socket)
            .args(["--ladder", &settings.ladder, "--budget-mib", &settings.budget_mib.to_string(), "--models"])
            .arg(&settings.models)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut daemon = Self { child: child.map_err(error)?, folder, program: settings.program.clone() };
        loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => return Ok((daemon, stream)),
                Err(refused) if started.elapsed() > PATIENCE => return Err(error(refused)),
                Err(_) => {
                    if let Ok(Some(status)) = daemon.child.try_wait() {
                        return Err(daemon.silent(format!("it ended with {status}")));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    /// Another connection.
    pub(super) fn connect(&self) -> Result<UnixStream, DaemonError> {
        UnixStream::connect(self.folder.path().join("molt.sock")).map_err(|source| self.failed(source))
    }

    /// Sends a request over a connection; the answer's lines, headers among them.
    pub(super) fn ask(
        &self,
        stream: UnixStream,
        (method, path): (&str, &str),
        body: &str,
    ) -> Result<impl BufRead, DaemonError> {
        send(stream, method, path, body).map_err(|source| self.failed(source))
    }

    /// The same on a connection of its own, the answer whole.
    pub(super) fn whole(&self, route: (&str, &str), body: &str) -> Result<String, DaemonError> {
        let mut text = String::new();
        let mut answer = self.ask(self.connect()?, route, body)?;
        answer.read_to_string(&mut text).map_err(|source| self.failed(source))?;
        Ok(text)
    }

    pub(super) fn failed(&self, source: std::io::Error) -> DaemonError {
        DaemonError::Run { program: self.program.clone(), source }
    }

    pub(super) fn silent(&self, said: String) -> DaemonError {
        DaemonError::Silent { program: self.program.clone(), said }
    }
}

fn send(mut stream: UnixStream, method: &str, path: &str, body: &str) -> std::io::Result<BufReader<UnixStream>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: molt\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(BufReader::new(stream))
}

/// `moltd` beside the program that runs.
pub fn beside() -> std::io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    Ok(own.parent().unwrap_or(Path::new(".")).join("moltd"))
}
