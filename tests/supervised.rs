//! A running `moltd`, started by hand and stopped when it goes out of scope.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

/// How long an answer may take: a debug build on a busy machine included.
const PATIENCE: Duration = Duration::from_secs(120);

/// A daemon and what it said until it served.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Its socket.
    pub socket: PathBuf,
    /// What it said before it served.
    pub said: Vec<String>,
    // Kept, so that what it says later finds a reader.
    log: BufReader<ChildStderr>,
}

impl Daemon {
    /// Starts what the command says, which serves on that socket, and waits until it does.
    pub fn start(command: &mut Command, socket: PathBuf) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let log = BufReader::new(child.stderr.take().expect("its log is piped"));
        // Made at once, so that it is stopped even where it never serves.
        let mut daemon = Self { child, socket, said: Vec::new(), log };
        while !daemon.said.last().is_some_and(|line| line.contains("serving")) {
            let mut line = String::new();
            let read = daemon.log.read_line(&mut line).expect("its log is text");
            assert!(read > 0, "the daemon ended: {:?}", daemon.said);
            daemon.said.push(line);
        }
        daemon
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end.
    pub fn ended_well(&mut self) -> bool {
        self.child.wait().is_ok_and(|status| status.success())
    }

    /// Sends a request over the socket; the answer, head and all, comes from the reader.
    pub fn send(&self, method: &str, path: &str, body: &str) -> BufReader<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket).expect("the socket takes clients");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream.write_all(request(method, path, "any", body).as_bytes()).expect("the request is taken");
        BufReader::new(stream)
    }

    /// The answer's body over the socket; it must be one that succeeded.
    pub fn get(&self, path: &str) -> String {
        let mut answer = String::new();
        self.send("GET", path, "").read_to_string(&mut answer).expect("the answer is text");
        body(&answer, 200)
    }

    /// Sets the budget.
    pub fn set_budget(&self, bytes: u64) {
        let mut answer = String::new();
        let asked = format!("{{\"budget_bytes\": {bytes}}}");
        self.send("PUT", "/v1/budget", &asked).read_to_string(&mut answer).expect("the answer is text");
        body(&answer, 200);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn request(method: &str, path: &str, host: &str, body: &str) -> String {
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// The body of an answer with that status.
fn body(answer: &str, status: u16) -> String {
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
    assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    body.to_owned()
}

/// The body of an answer over TCP, asked in the name of that host.
pub fn get_over_tcp(address: &str, path: &str, host: &str, status: u16) -> String {
    let mut stream = TcpStream::connect(address).expect("the port takes clients");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream.write_all(request("GET", path, host, "").as_bytes()).expect("the request is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the answer is text");
    body(&answer, status)
}
