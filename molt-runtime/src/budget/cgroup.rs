//! What the control group allows: version 2, and the memory controller of version 1. The tightest ancestor counts.

use std::path::{Path, PathBuf};

use molt_scheduler::units::{Bytes, Time};

use crate::budget::BudgetSource;
use crate::budget::host::own_anonymous;

/// The limit of the process's group and of every group above it, less what is used there beside this process.
///
/// Page cache is charged to a group too, and goes when memory is wanted: it counts as free.
#[derive(Debug, Clone)]
pub struct CgroupBudget {
    proc: PathBuf,
    /// From the process's own group up to the root, those that can be limited.
    groups: Vec<PathBuf>,
    version: Version,
    reserve: Bytes,
    /// Which of them had the least when that was last looked at.
    tightest: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Version 1 writes "no limit" as the largest number of whole pages.
const NO_LIMIT: u64 = 1 << 62;

impl CgroupBudget {
    /// The group that `proc/self/cgroup` names, below the folder where control groups are mounted; `None` where there is no
    /// memory controller.
    pub fn new(proc: &Path, mount: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(proc.join("self/cgroup")).ok()?;
        let mut lines = text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            Some((parts.next()?, parts.next()?))
        });
        let one = lines.clone().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        let two = lines.find(|(controllers, _)| controllers.is_empty());
        let (version, root, path) = match (one, two) {
            (Some((_, path)), _) => (Version::One, mount.join("memory"), path),
            (None, Some((_, path))) => (Version::Two, mount.to_owned(), path),
            (None, None) => return None,
        };
        let own = root.join(path.trim_start_matches('/'));
        let groups: Vec<PathBuf> =
            own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned).collect();
        // Where the group is mounted as the root of a container, its path is not below the mount.
        let groups = if own.is_dir() { groups } else { vec![root] };
        let known = |group: &PathBuf| group.join(version.current()).is_file();
        groups.iter().any(known).then(|| Self {
            proc: proc.to_owned(),
            groups,
            version,
            reserve: Bytes::ZERO,
            tightest: 0,
        })
    }

    /// Leaves so much of every group's limit to whoever else is in it.
    pub fn reserving(self, reserve: Bytes) -> Self {
        Self { reserve, ..self }
    }

    /// Where the own group's waiting for memory is added up; version 1 has none.
    pub fn pressure_file(&self) -> Option<PathBuf> {
        let file = self.groups.first()?.join("memory.pressure");
        (self.version == Version::Two && file.is_file()).then_some(file)
    }

    /// What is free in a group, without what its page cache could give.
    fn free(&self, group: &Path) -> Option<Bytes> {
        let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok().filter(|bytes| *bytes < NO_LIMIT);
        // "max" is no number, and no limit.
        let limit = self.version.limits().iter().filter_map(|file| number(file)).min()?;
        let current = number(self.version.current())?;
        let stat = read("memory.stat").unwrap_or_default();
        let of = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let cache: u64 = self.version.cache().iter().map(|name| of(name)).sum();
        let used = Bytes::new(current) - Bytes::new(cache);
        Some(Bytes::new(limit) - self.reserve - used)
    }
}

impl Version {
    fn limits(self) -> &'static [&'static str] {
        match self {
            Self::One => &["memory.limit_in_bytes", "memory.soft_limit_in_bytes"],
            Self::Two => &["memory.max", "memory.high"],
        }
    }

    fn current(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }

    /// Page cache that can be taken back, in `memory.stat`.
    fn cache(self) -> &'static [&'static str] {
        match self {
            Self::One => &["total_inactive_file", "total_active_file"],
            Self::Two => &["inactive_file", "active_file"],
        }
    }
}

impl BudgetSource for CgroupBudget {
    fn budget(&mut self, _now: Time) -> Option<Bytes> {
        let free = self.groups.iter().enumerate().filter_map(|(at, group)| Some((self.free(group)?, at)));
        let (free, tightest) = free.min()?;
        self.tightest = tightest;
        Some(free + own_anonymous(&self.proc))
    }

    fn name(&self) -> &'static str {
        "cgroup"
    }

    fn reason(&self) -> String {
        let group = self.groups.get(self.tightest).map(|group| group.display().to_string()).unwrap_or_default();
        format!("the limit of the control group {group}, less what others use in it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A tree of files, each `(path, text)`; the expected budget in bytes.
    fn check(files: &[(&str, &str)], expected: Option<u64>) {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(path, text)| write(folder.path(), path, text));
        let source = CgroupBudget::new(&folder.path().join("proc"), &folder.path().join("cgroup"));
        let found = source.and_then(|mut source| source.budget(Time::START));
        assert_eq!(found, expected.map(Bytes::new), "{files:?}");
    }

    #[test]
    fn version_two_counts_the_tightest_ancestor_and_not_the_page_cache() {
        const STAT: &str = "anon 300\nfile 500\nkernel 20\nshmem 0\ninactive_file 350\nactive_file 100\nslab 4\n";
        let own = ("proc/self/cgroup", "0::/system.slice/moltd.service\n");
        let group = |max, high| {
            [
                own,
                ("cgroup/system.slice/moltd.service/memory.max", max),
                ("cgroup/system.slice/moltd.service/memory.high", high),
                ("cgroup/system.slice/moltd.service/memory.current", "800\n"),
                ("cgroup/system.slice/moltd.service/memory.stat", STAT),
            ]
        };
        check(&group("max\n", "max\n"), None);
        check(&group("1000\n", "max\n"), Some(1_000 - 350));
        check(&group("1000\n", "900\n"), Some(900 - 350));
        let tight = [
            ("cgroup/system.slice/memory.max", "2000\n"),
            ("cgroup/system.slice/memory.current", "1900\n"),
            ("cgroup/system.slice/memory.stat", "inactive_file 0\nactive_file 0\n"),
        ];
        check(&[&group("1000\n", "max\n")[..], &tight].concat(), Some(100));
        // Over the limit there is nothing.
        check(&group("300\n", "max\n"), Some(0));
        check(&[("proc/self/cgroup", "0::/\n")], None);
        check(&[], None);
    }

    #[test]
    fn version_one_and_hybrids() {
        const HYBRID: &str = "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/\n0::/\n";
        const STAT: &str =
            "cache 90\ninactive_file 1\ntotal_cache 500\ntotal_inactive_file 200\ntotal_active_file 50\n";
        let group = |limit| {
            [
                ("proc/self/cgroup", HYBRID),
                ("cgroup/memory/box/memory.limit_in_bytes", limit),
                ("cgroup/memory/box/memory.soft_limit_in_bytes", "9223372036854771712\n"),
                ("cgroup/memory/box/memory.usage_in_bytes", "700\n"),
                ("cgroup/memory/box/memory.stat", STAT),
            ]
        };
        check(&group("1000\n"), Some(1_000 - 450));
        check(&group("9223372036854771712\n"), None);
    }
}
