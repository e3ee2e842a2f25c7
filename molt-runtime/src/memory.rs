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

/// What is resident, as the system adds it up page by page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// All of it.
    pub rss: Bytes,
    /// What is no file's.
    pub anonymous: Bytes,
}

impl Resident {
    /// Of this process, from `/proc/self/smaps_rollup`: exact, where [`resident_set`] is off by some pages a processor, and
    /// slow where much is mapped. `None` where the system does not say.
    pub fn now() -> Option<Self> {
        let rollup = Process::myself().and_then(|me| me.smaps_rollup()).ok()?.memory_map_rollup;
        let of = |key: &str| rollup.0.iter().find_map(|map| map.extension.map.get(key)).map(|bytes| Bytes::new(*bytes));
        Some(Self { rss: of("Rss")?, anonymous: of("Anonymous")? })
    }
}

/// All memory of the machine; `None` where the system does not say.
pub fn total() -> Option<Bytes> {
    Meminfo::current().ok().map(|info| Bytes::new(info.mem_total))
}

/// What the system could give to programs now without swapping; `None` where it does not say.
pub fn available() -> Option<Bytes> {
    Meminfo::current().ok()?.mem_available.map(Bytes::new)
}
