//! A real `moltd` over a real socket, started by hand and stopped when it goes out of scope.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program;

/// How long an answer may take: a debug build on a busy machine included.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a daemon says, line by line. Read to its end by a thread, so that a full pipe never holds the daemon up.
#[derive(Debug, Default)]
struct Log {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Log {
    fn follow(self: &Arc<Self>, from: impl std::io::Read + Send + 'static) {
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                log.lines.lock().unwrap_or_else(PoisonError::into_inner).0.push(line);
                log.more.notify_all();
            }
            log.lines.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
            log.more.notify_all();
        });
    }

    /// The first line that holds this text, once there is one.
    fn wait_for(&self, text: &str) -> Result<String, Vec<String>> {
        let until = Instant::now() + PATIENCE;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(line) = lines.0.iter().find(|line| line.contains(text)) {
                return Ok(line.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if lines.1 || left.is_zero() {
                return Err(lines.0.clone());
            }
            lines = self.more.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A daemon and what it says.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Its socket.
    pub socket: PathBuf,
    log: Arc<Log>,
    /// Of the socket and the configuration, where the daemon has one of its own.
    folder: Option<tempfile::TempDir>,
}

impl Daemon {
    /// With that configuration, on a socket of its own and the embedded ladder.
    pub fn start(config: &str) -> Self {
        Self::start_with(config, &[])
    }

    /// With more arguments.
    pub fn start_with(config: &str, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let (socket, file) = (folder.path().join("molt.sock"), folder.path().join("moltd.toml"));
        std::fs::write(&file, config).expect("the configuration can be written");
        let mut command = Command::new(program("moltd"));
        command.arg("--config").arg(&file).arg("--socket").arg(&socket).args(["--budget-mib", "256"]).args(args);
        let mut daemon = Self::run(&mut command, socket);
        daemon.folder = Some(folder);
        daemon
    }

    /// Starts what the command says, which serves on that socket, and waits until it does.
    pub fn run(command: &mut Command, socket: PathBuf) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let log = Arc::new(Log::default());
        log.follow(child.stderr.take().expect("its log is piped"));
        // Made at once, so that it is stopped even where it never serves.
        let daemon = Self { child, socket, log, folder: None };
        daemon.says("moltd: serving");
        daemon
    }

    /// Waits until it has said a line with this text; that line.
    pub fn says(&self, text: &str) -> String {
        self.log.wait_for(text).unwrap_or_else(|said| panic!("the daemon never said {text:?}: {said:#?}"))
    }

    /// All that it has said so far.
    pub fn said(&self) -> Vec<String> {
        self.log.lines.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The configuration file of a daemon that was started with one.
    pub fn config(&self) -> PathBuf {
        self.folder.as_ref().expect("the daemon has a configuration").path().join("moltd.toml")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the daemon takes no {name}");
    }

    /// Waits for its end.
    pub fn ended_well(&mut self) -> bool {
        self.child.wait().is_ok_and(|status| status.success())
    }

    /// Whether it still runs.
    pub fn alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// Connects to its socket.
    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("the socket takes clients");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// Sends a request, with a key where there is one, and leaves the answer to be read.
    pub fn send_as(&self, key: Option<&str>, method: &str, path: &str, body: &[u8]) -> BufReader<UnixStream> {
        let mut stream = self.connect();
        // A refused request may be cut off by the other side while it is still being sent.
        let _cut = stream.write_all(&request(key, method, path, "any", body));
        BufReader::new(stream)
    }

    /// Posts a request that its client calls by a name of its own.
    pub fn post_named(&self, key: Option<&str>, name: &str, path: &str, body: &[u8]) -> BufReader<UnixStream> {
        let mut stream = self.connect();
        let plain = request(key, "POST", path, "any", body);
        let line = plain.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let named = [&plain[..line], format!("idempotency-key: {name}\r\n").as_bytes(), &plain[line..]].concat();
        let _cut = stream.write_all(&named);
        BufReader::new(stream)
    }

    /// As nobody in particular.
    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> BufReader<UnixStream> {
        self.send_as(None, method, path, body)
    }

    /// Sends a request and reads the whole answer.
    pub fn answer_as(&self, key: Option<&str>, method: &str, path: &str, body: &[u8]) -> Answer {
        Answer::read(self.send_as(key, method, path, body))
    }

    /// Sends a request and reads the whole answer: status and JSON.
    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        self.ask_as(None, method, path, body)
    }

    /// As whoever has that key.
    pub fn ask_as(&self, key: Option<&str>, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let answer = self.answer_as(key, method, path, body);
        (answer.status, answer.json())
    }

    /// The text of an answer; it must be one that succeeded.
    pub fn get(&self, path: &str) -> String {
        let answer = self.answer_as(None, "GET", path, b"");
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.body
    }

    /// Sets the budget.
    pub fn set_budget(&self, bytes: u64) {
        let (status, said) = self.ask("PUT", "/v1/budget", json!({"budget_bytes": bytes}).to_string().as_bytes());
        assert_eq!(status, 200, "{said}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// An answer, complete.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    /// What follows.
    pub body: String,
}

impl Answer {
    /// Reads one to the end of its connection.
    pub fn read(mut from: impl std::io::Read) -> Self {
        let mut answer = Vec::new();
        let _reset_after_answer = from.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).expect("an answer is text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a head has a status");
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    /// The body as JSON, or as text where it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| Value::from(self.body.as_str()))
    }

    /// A header, named in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
    }
}

/// A request as it goes over the wire.
pub fn request(key: Option<&str>, method: &str, path: &str, host: &str, body: &[u8]) -> Vec<u8> {
    let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{key}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// The answer to that request over TCP.
pub fn over_tcp(address: &str, request: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).expect("the port takes clients");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream.write_all(request).expect("the request is taken");
    Answer::read(stream)
}

/// The objects of a stream, as they come.
pub fn chunks(answer: BufReader<UnixStream>) -> impl Iterator<Item = Value> {
    let lines = answer.lines().map(|line| line.expect("a stream is text"));
    let data = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned));
    let parse = |data: String| serde_json::from_str(&data).expect("a chunk is JSON");
    data.take_while(|data| data != "[DONE]").map(parse)
}
