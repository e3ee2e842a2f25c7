//! A real `moltd` over a real socket.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::program;

/// A running daemon; stopped when it goes out of scope.
pub struct Daemon {
    /// The process.
    pub child: Child,
    /// Its socket.
    pub socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Daemon {
    /// With that configuration, on a socket of its own and the embedded ladder.
    pub fn start(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (socket, file) = (folder.path().join("molt.sock"), folder.path().join("moltd.toml"));
        std::fs::write(&file, config).unwrap();
        let mut child = Command::new(program("moltd"))
            .args(["--config".as_ref(), file.as_os_str(), "--socket".as_ref(), socket.as_os_str()])
            .args(["--budget-mib", "256"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It says where it serves once it does.
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("serving pocket"), "{line}");
        Self { child, socket, _folder: folder }
    }

    /// Sends a request, with a key where there is one, and leaves the answer to be read.
    pub fn send_as(&self, key: Option<&str>, method: &str, path: &str, body: &[u8]) -> BufReader<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: any\r\nconnection: close\r\n{key}content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A refused body may be cut off by the other side while it is still being sent.
        let _cut = stream.write_all(body);
        BufReader::new(stream)
    }

    /// As nobody in particular.
    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> BufReader<UnixStream> {
        self.send_as(None, method, path, body)
    }

    /// Sends a request and reads the whole answer: status and JSON.
    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        self.ask_as(None, method, path, body)
    }

    /// As whoever has that key.
    pub fn ask_as(&self, key: Option<&str>, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let mut answer = Vec::new();
        let _reset_after_answer = self.send_as(key, method, path, body).read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| Value::from(body)))
    }

    /// Sets the budget.
    pub fn set_budget(&self, bytes: u64) {
        let (status, _) = self.ask("PUT", "/v1/budget", json!({"budget_bytes": bytes}).to_string().as_bytes());
        assert_eq!(status, 200);
    }

    /// Whether it still runs.
    pub fn alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The objects of a stream, as they come.
pub fn chunks(answer: BufReader<UnixStream>) -> impl Iterator<Item = Value> {
    let lines = answer.lines().map(Result::unwrap).filter_map(|l| l.strip_prefix("data: ").map(str::to_owned));
    lines.take_while(|l| l != "[DONE]").map(|l| serde_json::from_str(&l).unwrap())
}
