//! `NAME.part`: bytes on their way to a final name.
//!
//! The one way to a final name. Nothing else in this module set creates, renames to or writes under it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::progress::Bar;
use super::{FileSource, PullError, verify};

/// A prefix of a file, with the hash of that prefix.
pub(super) struct Part<'a> {
    source: &'a FileSource,
    bar: &'a Bar,
    folder: &'a Path,
    path: PathBuf,
    file: File,
    hasher: Sha256,
    bytes: u64,
}

impl<'a> Part<'a> {
    /// Takes up what an earlier pull left, or begins with nothing.
    pub(super) fn resume(folder: &'a Path, source: &'a FileSource, bar: &'a Bar) -> Result<Self, PullError> {
        let mut part = Self::open(folder, source, bar)?;
        let left = part.file.metadata().map_err(|e| PullError::io("look at", &part.path, e))?.len();
        if left > source.bytes {
            part.restart()?;
        }
        part.take_up()?;
        Ok(part)
    }

    /// Begins with nothing, whatever an earlier pull left.
    pub(super) fn fresh(folder: &'a Path, source: &'a FileSource, bar: &'a Bar) -> Result<Self, PullError> {
        let mut part = Self::open(folder, source, bar)?;
        part.restart()?;
        Ok(part)
    }

    fn open(folder: &'a Path, source: &'a FileSource, bar: &'a Bar) -> Result<Self, PullError> {
        let path = folder.join(format!("{}.part", source.name));
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(|e| PullError::io("open", &path, e))?;
        Ok(Self { source, bar, folder, path, file, hasher: Sha256::new(), bytes: 0 })
    }

    /// Bytes at hand.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes still to come.
    pub(super) fn remaining(&self) -> u64 {
        self.source.bytes - self.bytes
    }

    /// Throws the bytes at hand away.
    pub(super) fn restart(&mut self) -> Result<(), PullError> {
        self.file.set_len(0).map_err(|e| PullError::io("empty", &self.path, e))?;
        self.hasher = Sha256::new();
        self.bytes = 0;
        self.bar.set(0);
        Ok(())
    }

    /// Adds `chunk`, which came from `origin`. Refuses bytes beyond the size of the file.
    pub(super) fn append(&mut self, chunk: &[u8], origin: &str) -> Result<(), PullError> {
        let length = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
        if length > self.remaining() {
            let found = self.bytes.saturating_add(length);
            return Err(PullError::WrongSize { what: origin.to_owned(), expected: self.source.bytes, found });
        }
        self.file.write_all(chunk).map_err(|e| PullError::io("write to", &self.path, e))?;
        self.hasher.update(chunk);
        self.bytes += length;
        self.bar.set(self.bytes);
        Ok(())
    }

    /// Gives the bytes their final name if they are the file, and throws them away if they are not.
    pub(super) fn finish(self, origin: &str) -> Result<(), PullError> {
        let Self { source, bar: _, folder, path, file, hasher, bytes } = self;
        if bytes != source.bytes {
            return Err(PullError::WrongSize { what: origin.to_owned(), expected: source.bytes, found: bytes });
        }
        let found = format!("{:x}", hasher.finalize());
        if found != source.sha256 {
            std::fs::remove_file(&path).map_err(|e| PullError::io("remove", &path, e))?;
            return Err(PullError::WrongHash { what: origin.to_owned(), expected: source.sha256.clone(), found });
        }
        settle(&file, &path, folder, source)
    }

    /// Hashes what the file holds already.
    fn take_up(&mut self) -> Result<(), PullError> {
        let mut buffer = vec![0; verify::BUFFER_BYTES];
        loop {
            let read = self.file.read(&mut buffer).map_err(|e| PullError::io("read", &self.path, e))?;
            if read == 0 {
                return Ok(());
            }
            self.hasher.update(&buffer[..read]);
            self.bytes += u64::try_from(read).unwrap_or(u64::MAX);
            self.bar.resume_at(self.bytes);
        }
    }
}

/// Moves `path`, whose open handle is `file` and whose hash is known to be right, to its final name for good: synced
/// before the rename, the folder synced after it, and the record of the check beside it.
pub(super) fn settle(file: &File, path: &Path, folder: &Path, source: &FileSource) -> Result<(), PullError> {
    file.sync_all().map_err(|e| PullError::io("sync", path, e))?;
    let at = folder.join(&source.name);
    std::fs::rename(path, &at).map_err(|e| PullError::io("rename to its final name", path, e))?;
    sync_folder(folder)?;
    let metadata = file.metadata().map_err(|e| PullError::io("look at", &at, e))?;
    verify::record(&at, &source.sha256, &metadata);
    Ok(())
}

/// A rename is durable once its folder is. Only Unix can open a folder to sync it.
fn sync_folder(folder: &Path) -> Result<(), PullError> {
    if cfg!(unix) {
        File::open(folder).and_then(|f| f.sync_all()).map_err(|e| PullError::io("sync", folder, e))?;
    }
    Ok(())
}
