//! The service manager's word that memory is short: systemd's memory pressure protocol (`MEMORY_PRESSURE_WATCH` and
//! `MEMORY_PRESSURE_WRITE`, systemd 254 and later; <https://systemd.io/MEMORY_PRESSURE/>).

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use molt_scheduler::units::{Bytes, Time};
use nix::poll::PollFlags;

use crate::alarm::Alarm;
use crate::budget::squeeze::{Shortage, Squeeze};
use crate::budget::{BudgetSource, Step, Wake};

/// What is wrong with what the service manager says.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The path cannot be used.
    #[error("cannot watch {} (MEMORY_PRESSURE_WATCH)", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The path is none of those that the protocol knows.
    #[error("{} (MEMORY_PRESSURE_WATCH) is no file, FIFO or socket", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// The protocol has no paths that depend on where a program was started.
    #[error("{} (MEMORY_PRESSURE_WATCH) is no absolute path", path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// What should be written first is no base64.
    #[error("MEMORY_PRESSURE_WRITE is no base64")]
    Write {
        /// The reason.
        source: base64::DecodeError,
    },
}

/// What the two variables say, checked as far as it can be without touching the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watch {
    path: PathBuf,
    first: Vec<u8>,
}

impl Watch {
    /// Of a path and of the base64 text that is to be written to it first; `None` where the path is `/dev/null`, which
    /// means that nobody should watch.
    pub fn parse(path: &Path, write: Option<&str>) -> Result<Option<Self>, WatchError> {
        if path == Path::new("/dev/null") {
            return Ok(None);
        }
        if !path.is_absolute() {
            return Err(WatchError::Relative { path: path.to_owned() });
        }
        let first = write.map(|text| BASE64_STANDARD.decode(text)).transpose();
        let first = first.map_err(|source| WatchError::Write { source })?.unwrap_or_default();
        Ok(Some(Self { path: path.to_owned(), first }))
    }
}

/// A limit that falls with every notification, and grows after none has come for a while.
#[derive(Debug)]
pub struct SystemdBudget {
    wake: Wake,
    file: Arc<OwnedFd>,
    alarm: Alarm,
    squeeze: Squeeze,
    woken: bool,
    step: Option<Step>,
}

impl SystemdBudget {
    /// As the environment says; `None` where nobody watches for us.
    pub fn from_environment(alarm: Alarm) -> Result<Option<Self>, WatchError> {
        let Some(path) = std::env::var_os("MEMORY_PRESSURE_WATCH") else { return Ok(None) };
        Self::new(Path::new(&path), std::env::var("MEMORY_PRESSURE_WRITE").ok().as_deref(), alarm)
    }

    /// Of that path, after writing the base64 text to it; see [`Watch::parse`].
    pub fn new(path: &Path, write: Option<&str>, alarm: Alarm) -> Result<Option<Self>, WatchError> {
        Watch::parse(path, write)?.map(|watch| Self::open(&watch, alarm)).transpose()
    }

    /// Opens what is to be watched.
    fn open(watch: &Watch, alarm: Alarm) -> Result<Self, WatchError> {
        let Watch { path, first } = watch;
        let error = |source| WatchError::Open { path: path.clone(), source };
        let kind = std::fs::metadata(path).map_err(error)?.file_type();
        let (file, flags) = if kind.is_socket() {
            let mut stream = UnixStream::connect(path).map_err(error)?;
            stream.write_all(first).map_err(error)?;
            stream.set_nonblocking(true).map_err(error)?;
            (OwnedFd::from(stream), PollFlags::POLLIN)
        } else if kind.is_file() || kind.is_fifo() {
            // Open for writing as well: the kernel takes the threshold by a write, and a FIFO without a writer would
            // always be at its end.
            let mut options = OpenOptions::new();
            let mut file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(error)?;
            file.write_all(first).map_err(error)?;
            (OwnedFd::from(file), if kind.is_fifo() { PollFlags::POLLIN } else { PollFlags::POLLPRI })
        } else {
            return Err(WatchError::Kind { path: path.clone() });
        };
        let file = Arc::new(file);
        let wake = Wake { file: file.clone(), flags };
        Ok(Self { wake, file, alarm, squeeze: Squeeze::default(), woken: false, step: None })
    }

    /// Takes what came with a notification; its content means nothing. Says whether there was any.
    fn drain(&self) -> bool {
        let Ok(mut file) = self.file.try_clone().map(File::from) else { return false };
        let (mut bytes, mut any) = ([0; 256], false);
        loop {
            match file.read(&mut bytes) {
                Ok(0) => return any,
                Ok(_) => any = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return any,
            }
        }
    }
}

impl BudgetSource for SystemdBudget {
    fn budget(&mut self, now: Time) -> Option<Bytes> {
        let shortage = if std::mem::take(&mut self.woken) { Shortage::Rising } else { Shortage::Quiet };
        let moved = self.squeeze.feel(now, shortage, self.alarm.used());
        let reason = match shortage {
            Shortage::Rising => "the service manager says that memory is short",
            _ => "the service manager has said nothing for a while",
        };
        if let Some(moved) = moved {
            self.step = Some(Step { source: self.name(), moved, reason: reason.to_owned() });
        }
        self.squeeze.limit()
    }

    fn name(&self) -> &'static str {
        "systemd"
    }

    fn reason(&self) -> String {
        "the service manager said that memory is short when the limit last fell".to_owned()
    }

    fn step(&mut self) -> Option<Step> {
        self.step.take()
    }

    fn wake(&self) -> Option<Wake> {
        Some(self.wake.clone())
    }

    fn woken(&mut self) -> bool {
        // A file of the kernel's is told by the poll itself, and reading it would give its averages.
        let told = self.wake.flags == PollFlags::POLLPRI || self.drain();
        self.woken |= told;
        // A descriptor that is ready and has nothing to say is at its end.
        told
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::budget::{Move, Strictest, Watched};

    const USED: Bytes = Bytes::mib(800);

    fn alarm() -> Alarm {
        let alarm = Alarm::default();
        alarm.note(USED);
        alarm
    }

    /// Starts a watcher on that path, and has it notified: the engine must be interrupted, and the step be told.
    fn check(path: &Path, write: &str, notify: impl FnOnce()) {
        let alarm = alarm();
        let source = SystemdBudget::new(path, Some(write), alarm.clone()).unwrap().unwrap();
        let watched = Watched::start(Strictest::new(vec![Box::new(source)], Vec::new()), alarm.clone()).unwrap();
        assert_eq!((watched.budget(), alarm.flag().is_up()), (Bytes::MAX, false), "nothing was said yet");
        notify();
        let started = Instant::now();
        while !alarm.flag().is_up() {
            assert!(started.elapsed() < Duration::from_secs(60), "{}: nobody was interrupted", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(watched.budget(), Bytes::mib(700), "an eighth less than is used");
        let steps = watched.steps();
        assert!(matches!(steps[..], [Step { source: "systemd", moved: Move::Shrunk(_), .. }]), "{steps:?}");
    }

    #[test]
    fn a_fifo_and_a_socket_interrupt_the_engine() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        // Whatever is written first comes back to the only reader, which is no notification but cannot be told from one:
        // systemd writes nothing to a FIFO.
        check(&fifo, "", || {
            // Kept open for the moment of the write only: the end of a writer is no notification.
            OpenOptions::new().write(true).open(&fifo).unwrap().write_all(b"x").unwrap();
        });
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let (send, written) = std::sync::mpsc::channel();
        let (notify, notified) = std::sync::mpsc::channel::<()>();
        let manager = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut first = [0; 5];
            stream.read_exact(&mut first).unwrap();
            send.send(first).unwrap();
            notified.recv().unwrap();
            stream.write_all(b"x").unwrap();
            // Closing is no notification either; the watcher must not spin on it.
        });
        check(&socket, "aGVsbG8=", || notify.send(()).unwrap());
        assert_eq!(&written.recv().unwrap(), b"hello");
        manager.join().unwrap();
    }

    #[test]
    fn a_file_gets_what_is_to_be_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = BASE64_STANDARD.encode("some 200000 2000000\0");
        let source = SystemdBudget::new(file.path(), Some(&text), alarm()).unwrap().unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"some 200000 2000000\0");
        assert_eq!(source.wake().unwrap().flags, PollFlags::POLLPRI);
    }

    #[test]
    fn what_makes_no_sense_is_named_and_off_is_off() {
        let check = |path: &Path, write: Option<&str>, part: &str| {
            let error = SystemdBudget::new(path, write, alarm()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        check(Path::new("/nowhere/pressure"), None, "/nowhere/pressure");
        check(Path::new("pressure"), None, "no absolute path");
        check(Path::new("/"), None, "no file, FIFO or socket");
        check(Path::new("/proc/self/status"), Some("***"), "MEMORY_PRESSURE_WRITE");
        assert!(SystemdBudget::new(Path::new("/dev/null"), None, alarm()).unwrap().is_none());
    }
}
