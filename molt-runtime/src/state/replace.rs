//! Putting a file in the place of another, so that whoever reads finds the old one or the new one, whole.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use molt_kv::faults::{Boundary, pass};
use tempfile::NamedTempFile;

/// How the names of files begin that are not in their places yet.
pub(super) const UNFINISHED: &str = ".tmp";

/// Writes a file that only its owner reads.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    put_in_place(file, path)
}

/// Gives a file that is written its name, once the disk has all of it.
pub(super) fn put_in_place(file: NamedTempFile, path: &Path) -> io::Result<()> {
    pass(Boundary::WriteState)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    File::open(folder)?.sync_all()
}
