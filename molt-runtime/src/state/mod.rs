//! What outlives the daemon: answers that are being written, their caches, who had registered, and, where it is told to stop,
//! what ended conversations leave for their next turn.
//!
//! All of it lies in one folder, which one daemon holds at a time. It must never be in the way: what cannot be written is
//! told once, and the service goes on without it.

mod answers;
mod journal;
mod prefixes;
mod records;
mod replace;
#[cfg(test)]
mod torn;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use molt_scheduler::TenantId;
use parking_lot::Mutex;
use rand::Rng as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use answers::{Keeping, NotTaken, Taken};
pub use journal::{AnswerHead, JournalError, Owner};
pub use records::Recorder;

use answers::Answer;

/// Bytes of the secret.
const SECRET: usize = 32;
/// Most bytes of the file of registrations.
const REGISTRATIONS: u64 = 16 << 20;

/// Why nothing is kept.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The folder or something in it cannot be used.
    #[error("cannot use {}", path.display())]
    File {
        /// What.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Two daemons would write over each other.
    #[error("{} is in use by another daemon", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
}

/// How things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSettings {
    /// A cache is written again after so many tokens.
    pub every_tokens: usize,
    /// How long what nobody reads is kept.
    pub grace: Duration,
}

/// What is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Registrations,
    Answers,
    Caches,
    Conversations,
}

/// The folder, and what is in it.
#[derive(Debug)]
pub struct State {
    folder: PathBuf,
    /// Held as long as the folder is.
    _lock: File,
    settings: StateSettings,
    secret: [u8; SECRET],
    answers: Mutex<BTreeMap<String, Answer>>,
    /// What tenants are called outside of this process.
    tenants: Mutex<BTreeMap<TenantId, Option<String>>>,
    /// Of what the last that should have been written was not.
    failing: Mutex<BTreeSet<What>>,
    /// Not told yet.
    troubles: Mutex<Vec<String>>,
}

impl State {
    /// Opens a folder, makes it if it is not there, and looks through what an earlier daemon left.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(folder: &Path, settings: StateSettings) -> Result<Arc<Self>, StateError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| StateError::File { path, source }
        };
        for folder in [folder, &folder.join(answers::FOLDER)] {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed(folder))?;
        }
        let path = folder.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StateError::InUse { path: folder.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(failed(&path)(error)),
        }
        let path = folder.join("secret");
        let secret = secret(&path).map_err(failed(&path))?;
        let state = Self {
            folder: folder.to_owned(),
            _lock: lock,
            settings,
            secret,
            answers: Mutex::default(),
            tenants: Mutex::default(),
            failing: Mutex::default(),
            troubles: Mutex::default(),
        };
        state.look_through().map_err(failed(&folder.join(answers::FOLDER)))?;
        Ok(Arc::new(state))
    }

    /// What digests of tokens are made with.
    pub fn secret(&self) -> [u8; SECRET] {
        self.secret
    }

    /// How things are kept.
    pub fn settings(&self) -> StateSettings {
        self.settings
    }

    /// Who had registered; nobody where that cannot be read, which is told.
    pub fn registrations<T: DeserializeOwned + Default>(&self) -> T {
        let path = self.folder.join("tenants.json");
        let read = std::fs::metadata(&path).and_then(|found| match found.len() <= REGISTRATIONS {
            true => std::fs::read(&path),
            false => Err(io::Error::other("it is too long")),
        });
        let parsed = match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return T::default(),
            read => read.and_then(|bytes| Ok(serde_json::from_slice(summed(&bytes)?)?)),
        };
        parsed.unwrap_or_else(|error| {
            self.tell(format!("{} is not used, and tenants register again: {error}", path.display()));
            T::default()
        })
    }

    /// Keeps who has registered.
    pub fn keep_registrations(&self, all: &impl Serialize) {
        let path = self.folder.join("tenants.json");
        let kept = serde_json::to_vec(all).map_err(io::Error::from).and_then(|mut bytes| {
            add_sum(&mut bytes);
            replace::replace(&path, &bytes)
        });
        self.judge(What::Registrations, &path, kept);
    }

    /// Something to be told that is no failure to write.
    pub fn tell(&self, message: String) {
        self.troubles.lock().push(message);
    }

    /// What has not been told yet.
    pub fn troubles(&self) -> Vec<String> {
        std::mem::take(&mut self.troubles.lock())
    }

    /// Whether something could be written. What cannot is told once, until something can again.
    fn judge<T>(&self, what: What, path: &Path, written: io::Result<T>) -> Option<T> {
        match written {
            Ok(written) => {
                self.failing.lock().remove(&what);
                Some(written)
            }
            Err(error) => {
                if self.failing.lock().insert(what) {
                    self.tell(format!(
                        "{} cannot be written, and the service goes on without: {error}",
                        path.display()
                    ));
                }
                None
            }
        }
    }
}

/// Adds a line with a checksum of what stands before it.
fn add_sum(bytes: &mut Vec<u8>) {
    let line = sum_line(bytes);
    bytes.extend_from_slice(line.as_bytes());
}

fn sum_line(text: &[u8]) -> String {
    format!("\n{:08x}\n", crc32fast::hash(text))
}

/// What stands before the line with its checksum.
fn summed(bytes: &[u8]) -> io::Result<&[u8]> {
    let broken = || io::Error::other("a checksum does not hold");
    let (text, line) = bytes.split_at_checked(bytes.len().wrapping_sub(10)).ok_or_else(broken)?;
    (line == sum_line(text).as_bytes()).then_some(text).ok_or_else(broken)
}

/// The secret in that file, made if there is none.
fn secret(path: &Path) -> io::Result<[u8; SECRET]> {
    match std::fs::read(path) {
        Ok(bytes) => match bytes.try_into() {
            Ok(secret) => Ok(secret),
            // Without the old one no token that was given out is known any more, and its owner registers again.
            Err(_) => new_secret(path),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => new_secret(path),
        Err(error) => Err(error),
    }
}

fn new_secret(path: &Path) -> io::Result<[u8; SECRET]> {
    let secret: [u8; SECRET] = rand::rng().random();
    replace::replace(path, &secret)?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const SETTINGS: StateSettings = StateSettings { every_tokens: 8, grace: Duration::from_secs(60) };

    #[test]
    fn a_folder_has_one_owner_and_one_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/state");
        let state = State::open(&path, SETTINGS).unwrap();
        let secret = state.secret();
        assert!(matches!(State::open(&path, SETTINGS), Err(StateError::InUse { .. })));
        let mode = |name: &str| std::fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("secret"), mode("."), mode("answers")), (0o600, 0o700, 0o700));
        drop(state);
        assert_eq!(State::open(&path, SETTINGS).unwrap().secret(), secret);
        std::fs::write(path.join("secret"), b"torn").unwrap();
        assert_ne!(State::open(&path, SETTINGS).unwrap().secret(), secret);
        let error = State::open(&path.join("secret"), SETTINGS).unwrap_err().to_string();
        assert!(error.contains("deep/state/secret"), "{error}");
    }

    #[test]
    fn registrations_are_kept_or_refused_by_name_and_trouble_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let state = State::open(folder.path(), SETTINGS).unwrap();
        assert!(state.registrations::<Vec<u32>>().is_empty());
        state.keep_registrations(&vec![1, 2]);
        assert_eq!((state.registrations::<Vec<u32>>(), state.troubles().len()), (vec![1, 2], 0));
        std::fs::write(folder.path().join("tenants.json"), b"[1, ").unwrap();
        assert!(state.registrations::<Vec<u32>>().is_empty());
        assert!(state.troubles().iter().all(|told| told.contains("tenants.json")));
        std::fs::remove_dir_all(folder.path()).unwrap();
        for _ in 0..3 {
            state.keep_registrations(&vec![3]);
        }
        let told = state.troubles();
        assert!(told.len() == 1 && told[0].contains("tenants.json"), "{told:?}");
        std::fs::create_dir(folder.path()).unwrap();
        state.keep_registrations(&vec![3]);
        assert_eq!(state.registrations::<Vec<u32>>(), [3]);
    }
}
