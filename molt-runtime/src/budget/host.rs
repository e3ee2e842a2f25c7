//! What the machine has: available memory less a reserve.

use std::path::{Path, PathBuf};

use molt_scheduler::units::{Bytes, Time};
use procfs::process::Status;
use procfs::{FromRead as _, Meminfo};

use crate::budget::BudgetSource;

/// `MemAvailable`, and what this process holds itself, less a reserve for everybody else.
///
/// Weights that are mapped from files are clean pages, which the system counts as available whether or not they are in
/// use: so of the process's own memory only what is anonymous comes on top.
#[derive(Debug, Clone)]
pub struct HostBudget {
    proc: PathBuf,
    reserve: Bytes,
}

impl HostBudget {
    /// Reads `meminfo` and `self/status` below `proc`.
    pub fn new(proc: &Path, reserve: Bytes) -> Self {
        Self { proc: proc.to_owned(), reserve }
    }
}

impl BudgetSource for HostBudget {
    fn budget(&mut self, _now: Time) -> Option<Bytes> {
        let available = Meminfo::from_file(self.proc.join("meminfo")).ok()?.mem_available?;
        Some(Bytes::new(available) + own_anonymous(&self.proc) - self.reserve)
    }

    fn name(&self) -> &'static str {
        "host"
    }

    fn reason(&self) -> String {
        format!("what the machine has available, less {} for other programs", self.reserve)
    }
}

/// Memory of this process that is no file's; zero where the system does not say.
pub(super) fn own_anonymous(proc: &Path) -> Bytes {
    let kib = Status::from_file(proc.join("self/status")).ok().and_then(|status| status.rssanon);
    Bytes::new(kib.unwrap_or(0).saturating_mul(1_024))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This machine's own file with one line altered.
    fn altered(file: &str, key: &str, kib: u64) -> String {
        let text = std::fs::read_to_string(Path::new("/proc").join(file)).unwrap();
        let line = |line: &str| match line.strip_prefix(key) {
            Some(_) => format!("{key} {kib} kB\n"),
            None => format!("{line}\n"),
        };
        text.lines().map(line).collect()
    }

    #[test]
    fn what_is_available_and_what_is_ours_less_the_reserve() {
        let check = |available: Option<u64>, anonymous: Option<u64>, reserve: Bytes, expected: Option<Bytes>| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join("self")).unwrap();
            if let Some(kib) = available {
                let text = altered("meminfo", "MemAvailable:", kib);
                std::fs::write(folder.path().join("meminfo"), text).unwrap();
            }
            if let Some(kib) = anonymous {
                let text = altered("self/status", "RssAnon:", kib);
                std::fs::write(folder.path().join("self/status"), text).unwrap();
            }
            assert_eq!(HostBudget::new(folder.path(), reserve).budget(Time::START), expected);
        };
        let kib = |kib: u64| Bytes::new(kib * 1_024);
        check(Some(4_202_124), None, Bytes::ZERO, Some(kib(4_202_124)));
        check(Some(4_202_124), Some(1_000), kib(202_124), Some(kib(4_001_000)));
        check(Some(4_202_124), Some(0), Bytes::MAX, Some(Bytes::ZERO));
        check(None, Some(1_000), Bytes::ZERO, None);
    }

    #[test]
    fn this_machine_can_be_read() {
        let budget = HostBudget::new(Path::new("/proc"), Bytes::ZERO).budget(Time::START).unwrap();
        assert!(budget > Bytes::mib(1) && budget < Bytes::mib(1 << 30), "{budget}");
    }
}
