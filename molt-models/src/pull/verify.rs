//! Is a file the one whose hash was checked?
//!
//! Hashing a gigabyte at every start would cost a second or more. So the first check leaves a record beside the file,
//! `NAME.checked`, and while the file's size, modification time and inode are those of the record, the record's hash
//! is the file's. This guards against accidents, not against somebody who may write into the folder.

use std::fs::{File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PullError;

/// Read buffer for hashing: large enough that system calls cost nothing, small enough for the cache.
pub(super) const BUFFER_BYTES: usize = 256 * 1024;

/// A record is a short line; a longer file of that name is something else and is not read to its end.
const RECORD_BYTES_MAX: u64 = 4096;

/// How a file was found to be the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verified {
    /// By the record of an earlier check; the file was not read.
    Recorded,
    /// By hashing it; a record was written.
    Hashed,
}

/// What stands for the hash after it has been checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    sha256: String,
    bytes: u64,
    mtime_ns: u64,
    inode: u64,
}

impl Record {
    /// The record of a file with this hash; none if its time of modification lies before 1970.
    fn new(sha256: &str, metadata: &Metadata) -> Option<Self> {
        let age = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let mtime_ns = u64::try_from(age.as_nanos()).ok()?;
        Some(Self { sha256: sha256.to_owned(), bytes: metadata.len(), mtime_ns, inode: inode(metadata) })
    }

    /// The record beside `path`, if there is one that can be read. Anything else only means that the file is hashed.
    fn read(path: &Path) -> Option<Self> {
        let mut text = String::new();
        File::open(beside(path)).ok()?.take(RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }
}

/// Checks that the file at `path` has this size and this SHA-256 (64 lower-case hexadecimal digits).
///
/// The file is read only if no record of an earlier check fits it; a fitting record is written then.
///
/// # Errors
/// [`PullError::Missing`], [`PullError::WrongSize`] or [`PullError::WrongHash`] if the right content is not there,
/// [`PullError::Io`] if that cannot be told.
pub fn verify(path: &Path, sha256: &str, bytes: u64) -> Result<Verified, PullError> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(PullError::Missing { path: path.to_owned() });
        }
        Err(e) => return Err(PullError::io("open", path, e)),
    };
    let metadata = file.metadata().map_err(|e| PullError::io("look at", path, e))?;
    if metadata.len() != bytes {
        let what = path.display().to_string();
        return Err(PullError::WrongSize { what, expected: bytes, found: metadata.len() });
    }
    let recorded = Record::read(path).filter(|r| Record::new(&r.sha256, &metadata).as_ref() == Some(r));
    let (found, how) = match recorded {
        Some(record) => (record.sha256, Verified::Recorded),
        None => (hash(&mut file, path, |_| {})?, Verified::Hashed),
    };
    if found != sha256 {
        let what = path.display().to_string();
        return Err(PullError::WrongHash { what, expected: sha256.to_owned(), found });
    }
    if how == Verified::Hashed {
        // Stamps from before the reading: a change during it leaves a record that fits no longer.
        record(path, sha256, &metadata);
    }
    Ok(how)
}

/// Notes that the file at `path`, as `metadata` describes it, has this hash.
///
/// A record that cannot be written (a read-only folder) is no failure: the file is then hashed again next time.
pub(super) fn record(path: &Path, sha256: &str, metadata: &Metadata) {
    let Some(text) = Record::new(sha256, metadata).and_then(|record| serde_json::to_string(&record).ok()) else {
        return;
    };
    // Written aside and renamed, so that a reader never sees half a record.
    let aside = path.with_added_extension("checked.new");
    if std::fs::write(&aside, text + "\n").and_then(|()| std::fs::rename(&aside, beside(path))).is_err() {
        let _ = std::fs::remove_file(&aside);
    }
}

/// The SHA-256 of the rest of `file`, in lower-case hexadecimal; `done` hears of the bytes read so far.
pub(super) fn hash(file: &mut File, path: &Path, mut done: impl FnMut(u64)) -> Result<String, PullError> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer).map_err(|e| PullError::io("read", path, e))?;
        if read == 0 {
            return Ok(format!("{:x}", hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        bytes += u64::try_from(read).unwrap_or(u64::MAX);
        done(bytes);
    }
}

fn beside(path: &Path) -> PathBuf {
    path.with_added_extension("checked")
}

#[cfg(unix)]
fn inode(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

/// Where there are no inodes, size and time must do.
#[cfg(not(unix))]
fn inode(_: &Metadata) -> u64 {
    0
}
