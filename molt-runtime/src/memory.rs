//! What the system says this process uses.

use molt_scheduler::units::Bytes;
use procfs::process::Process;
use procfs::{Current as _, Meminfo};

/// The resident set of this process. Zero where `/proc` cannot be read (the books then stand alone).
pub fn resident_set() -> Bytes {
    let pages = Process::myself().and_then(|me| me.statm()).map(|statm| statm.resident);
    Bytes::new(pages.unwrap_or(0).saturating_mul(procfs::page_size()))
}

/// The part of the resident set that is pages of files, the program's own among them: clean, and the system's to drop.
pub fn resident_files() -> Bytes {
    let pages = Process::myself().and_then(|me| me.statm()).map(|statm| statm.shared);
    Bytes::new(pages.unwrap_or(0).saturating_mul(procfs::page_size()))
}

/// All memory of the machine; `None` where the system does not say.
pub fn total() -> Option<Bytes> {
    Meminfo::current().ok().map(|info| Bytes::new(info.mem_total))
}

/// What the system could give to programs now without swapping; `None` where it does not say.
pub fn available() -> Option<Bytes> {
    Meminfo::current().ok()?.mem_available.map(Bytes::new)
}
