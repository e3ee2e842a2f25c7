//! One pull at a time in a folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

use super::PullError;
use super::progress::Progress;

/// The lock's file. It stays when the lock is gone: removing it would let two pulls hold two locks of one name.
const NAME: &str = ".pull.lock";

/// An advisory lock on a folder, held until it is dropped or the process ends.
pub(super) struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Takes the lock, waiting for another pull to end if need be.
    pub(super) fn acquire(folder: &Path, progress: &Progress) -> Result<Self, PullError> {
        let path = folder.join(NAME);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| PullError::io("open", &path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!("another pull is at work in {}; waiting for it", folder.display()));
                file.lock().map_err(|e| PullError::io("lock", &path, e))?;
            }
            Err(TryLockError::Error(e)) => return Err(PullError::io("lock", &path, e)),
        }
        Ok(Self { _file: file })
    }
}
