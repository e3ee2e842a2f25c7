//! What the service tells systemd, and what it takes from it. Without systemd all of it does nothing.

use std::io::{self, Write as _};
use std::os::fd::FromRawFd as _;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// Says that the engine gets on: ready with its first round, alive with those that follow. It is beaten by the rounds
/// themselves and by no timer, so that an engine that hangs is found out.
#[derive(Debug)]
pub struct Heartbeat {
    /// Between two beats that are sent; none where nobody watches.
    every: Option<Duration>,
    last: Option<Instant>,
}

impl Heartbeat {
    /// As the environment asks for.
    pub fn from_environment() -> Self {
        // Four in the time that systemd allows, so that one long round is forgiven.
        Self { every: sd_notify::watchdog_enabled().map(|allowed| allowed / 4), last: None }
    }

    /// A round has been made.
    pub fn beat(&mut self) {
        if let Some(state) = self.due(Instant::now()) {
            if matches!(state, NotifyState::Ready) {
                READY.store(true, Ordering::Relaxed);
            }
            tell(&[state]);
        }
    }

    /// What is to be said of a round at that time, if anything.
    fn due(&mut self, now: Instant) -> Option<NotifyState<'static>> {
        let state = match (self.last, self.every) {
            (None, _) => NotifyState::Ready,
            (Some(last), Some(every)) if now.duration_since(last) >= every => NotifyState::Watchdog,
            _ => return None,
        };
        self.last = Some(now);
        Some(state)
    }
}

/// Whether the first round has said that the service is ready: a reload before that must not say so for it.
static READY: AtomicBool = AtomicBool::new(false);

/// The configuration is being read again; when this goes, it has been, and the supervisor is told that it is ready again.
#[derive(Debug)]
#[must_use = "the reload ends where this is dropped"]
pub struct Reloading {
    told: bool,
}

/// Says that the configuration is read again. By the time that comes along the supervisor knows whether this answers its
/// own request.
pub fn reloading() -> Reloading {
    let told = READY.load(Ordering::Relaxed);
    if told {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => tell(&[NotifyState::Reloading, now]),
            Err(error) => failed(&error),
        }
    }
    Reloading { told }
}

impl Drop for Reloading {
    fn drop(&mut self) {
        if self.told {
            tell(&[NotifyState::Ready]);
        }
    }
}

/// Says that the service ends because it was told to.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// One line for `systemctl status`.
pub fn status(text: &str) {
    tell(&[NotifyState::Status(text)]);
}

/// A supervisor that cannot be reached is no reason to stop; it will notice by itself.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        failed(&error);
    }
}

fn failed(error: &io::Error) {
    // Nor is a closed log.
    let _closed = writeln!(io::stderr(), "moltd: cannot notify the supervisor: {error}");
}

/// The socket that systemd has bound for this process, if it has.
pub fn passed_socket() -> io::Result<Option<UnixListener>> {
    let mut passed = sd_notify::listen_fds()?;
    let Some(fd) = passed.next() else { return Ok(None) };
    if passed.next().is_some() {
        return Err(io::Error::other("more than one socket was passed; moltd takes one"));
    }
    // SAFETY: the supervisor opened this descriptor for this process, by number; `main` asks once and nothing else in
    // the program takes it.
    let listener = unsafe { UnixListener::from_raw_fd(fd) };
    // A descriptor that is no Unix socket has no such address.
    listener.local_addr()?;
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What rounds at these milliseconds say: `r` ready, `w` alive, `.` nothing.
    fn check(every_ms: Option<u64>, rounds_ms: &[u64], expected: &str) {
        let mut heartbeat = Heartbeat { every: every_ms.map(Duration::from_millis), last: None };
        let start = Instant::now();
        let said = rounds_ms.iter().map(|ms| match heartbeat.due(start + Duration::from_millis(*ms)) {
            Some(NotifyState::Ready) => 'r',
            Some(NotifyState::Watchdog) => 'w',
            _ => '.',
        });
        assert_eq!(said.collect::<String>(), expected);
    }

    #[test]
    fn rounds_say_ready_once_and_alive_as_often_as_is_asked_for() {
        check(Some(100), &[0, 50, 100, 101, 199, 200, 1_000, 1_001], "r.w..ww.");
        check(None, &[0, 1_000, 100_000], "r..");
    }
}
