//! A file at hand in another folder.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::part::{Part, settle};
use super::progress::Bar;
use super::{FileSource, PullError, verify};

/// Takes the file from the folder `from`, by a hard link where that can be had and by a copy where it cannot.
///
/// The link gets a name of its own rather than `NAME.part`: a later download appends to that one, and must never
/// append to somebody else's file.
pub(super) fn fetch(source: &FileSource, from: &Path, folder: &Path, bar: &Bar) -> Result<(), PullError> {
    let there = from.join(&source.name);
    // Resolved, because a link to a symbolic link would depend on the folder it came from.
    let there = match there.canonicalize() {
        Ok(path) => path,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(PullError::NotInFolder { name: source.name.clone(), folder: from.to_owned() });
        }
        Err(e) => return Err(PullError::io("open", &there, e)),
    };
    let size = std::fs::metadata(&there).map_err(|e| PullError::io("look at", &there, e))?.len();
    if size != source.bytes {
        let what = there.display().to_string();
        return Err(PullError::WrongSize { what, expected: source.bytes, found: size });
    }
    let link = folder.join(format!("{}.link", source.name));
    remove_if_there(&link)?;
    if std::fs::hard_link(&there, &link).is_err() {
        return copy(source, &there, folder, bar);
    }
    let settled = check_and_settle(source, &there, &link, folder, bar);
    if settled.is_err() {
        remove_if_there(&link)?;
    } else {
        // Bytes that an earlier download gathered are of no more use.
        remove_if_there(&folder.join(format!("{}.part", source.name)))?;
    }
    settled
}

fn check_and_settle(source: &FileSource, there: &Path, link: &Path, folder: &Path, bar: &Bar) -> Result<(), PullError> {
    let mut file = File::open(link).map_err(|e| PullError::io("open", link, e))?;
    let found = verify::hash(&mut file, link, |done| bar.set(done))?;
    if found != source.sha256 {
        let what = there.display().to_string();
        return Err(PullError::WrongHash { what, expected: source.sha256.clone(), found });
    }
    settle(&file, link, folder, source)
}

fn copy(source: &FileSource, there: &Path, folder: &Path, bar: &Bar) -> Result<(), PullError> {
    let origin = there.display().to_string();
    let mut file = File::open(there).map_err(|e| PullError::io("open", there, e))?;
    let mut part = Part::fresh(folder, source, bar)?;
    let mut buffer = vec![0; verify::BUFFER_BYTES];
    loop {
        let read = file.read(&mut buffer).map_err(|e| PullError::io("read", there, e))?;
        if read == 0 {
            return part.finish(&origin);
        }
        part.append(&buffer[..read], &origin)?;
    }
}

fn remove_if_there(path: &Path) -> Result<(), PullError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(PullError::io("remove", path, e)),
        _ => Ok(()),
    }
}
