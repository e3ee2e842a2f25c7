//! What the system says of itself. Everything is read below a root folder, so that other machines can be looked at.

use std::path::{Path, PathBuf};

use molt_models::kernels;
use molt_runtime::budget::{BudgetSource as _, CgroupBudget};
use molt_scheduler::units::{Bytes, Time};
use procfs::{FromRead as _, Meminfo, MemoryPressure};

use super::Finding;

/// A system: its files below a root, and the environment of a process on it.
pub(super) struct Machine<'a> {
    pub(super) root: &'a Path,
    pub(super) environment: &'a dyn Fn(&str) -> Option<String>,
}

/// What a small everyday ladder wants: the 0.5B as stored with a conversation.
const SMALL: Bytes = Bytes::mib(512);

impl Machine<'_> {
    pub(super) fn findings(&self) -> Vec<Finding> {
        vec![self.memory(), self.pressure(), self.control_group(), self.systemd(), self.processor(), self.keepsakes()]
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn memory(&self) -> Finding {
        let path = self.path("proc/meminfo");
        let about = "memory";
        let Ok(info) = Meminfo::from_file(&path) else {
            let says = format!("{} cannot be read", path.display());
            return Finding::broken(about, says, "mount /proc; without it neither budget nor resident set is known");
        };
        let (total, swap) = (Bytes::new(info.mem_total), Bytes::new(info.swap_total));
        let Some(available) = info.mem_available.map(Bytes::new) else {
            return Finding::broken(about, "the system does not say what is available", "a kernel from 3.14 on does");
        };
        let says = format!("{available} of {total} available, swap {swap}");
        match available < SMALL {
            true => {
                Finding::missing(about, says, "the embedded ladder `pocket` fits; for real models free some memory")
            }
            false => Finding::good(about, says),
        }
    }

    fn pressure(&self) -> Finding {
        let path = self.path("proc/pressure/memory");
        match MemoryPressure::from_file(&path) {
            Ok(pressure) => {
                let (some, full) = (pressure.some.avg10, pressure.full.avg10);
                Finding::good("pressure files", format!("some {some:.2} %, full {full:.2} % of the last 10 s"))
            }
            Err(_) => Finding::missing(
                "pressure files",
                format!("there is no {}", path.display()),
                "start the kernel with psi=1 (it is built with CONFIG_PSI on all large distributions)",
            ),
        }
    }

    fn control_group(&self) -> Finding {
        let about = "control group";
        let text = std::fs::read_to_string(self.path("proc/self/cgroup")).unwrap_or_default();
        let version = match (text.contains(":memory:"), text.lines().any(|line| line.starts_with("0::"))) {
            (true, _) => "version 1",
            (false, true) => "version 2",
            (false, false) => {
                return Finding::missing(about, "none", "limits of a container or a unit are not seen; set a budget");
            }
        };
        let Some(mut source) = CgroupBudget::new(&self.path("proc"), &self.path("sys/fs/cgroup")) else {
            return Finding::missing(
                about,
                format!("{version} without a memory controller"),
                "limits are not seen; under systemd `Delegate=memory` or any memory limit of the unit switches it on",
            );
        };
        match source.budget(Time::START) {
            Some(budget) => Finding::good(about, format!("{version}, {budget} for this process")),
            None => Finding::good(about, format!("{version}, no limit")),
        }
    }

    fn systemd(&self) -> Finding {
        let about = "systemd";
        let set = |name: &&&str| (self.environment)(name).is_some_and(|value| !value.is_empty());
        let told = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "MEMORY_PRESSURE_WATCH"];
        let told: Vec<&str> = told.iter().filter(set).copied().collect();
        if !self.path("run/systemd/system").is_dir() {
            return Finding::missing(
                about,
                "this machine was not started by systemd",
                "run `moltd` by hand or under another supervisor; it needs nothing of systemd's",
            );
        }
        match told.is_empty() {
            true => Finding::good(about, "runs this machine; the units stand in deploy/systemd"),
            false => Finding::good(about, format!("runs this machine and tells this process {}", told.join(", "))),
        }
    }

    fn processor(&self) -> Finding {
        let text = std::fs::read_to_string(self.path("proc/cpuinfo")).unwrap_or_default();
        let processors = text.lines().filter(|line| line.starts_with("processor")).count();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
        let known = ["avx2", "fma", "f16c", "avx512f", "avx512_vnni"];
        let has = |name: &&&str| flags.split_whitespace().any(|flag| flag == **name);
        let found: Vec<&str> = known.iter().filter(has).copied().collect();
        let isa = kernels::isa_name();
        let says = format!("{processors} processors, {}; the kernels are {isa}", found.join(" "));
        match isa {
            "portable" => Finding::missing(
                "processor",
                says,
                "answers are right but slow; fast kernels need AVX2, FMA and F16C (in a virtual machine: -cpu host)",
            ),
            _ => Finding::good("processor", says),
        }
    }

    fn keepsakes(&self) -> Finding {
        let about = "keepsakes";
        let folder = self.path("var/tmp");
        if !folder.is_dir() {
            let says = format!("there is no {}", folder.display());
            return Finding::missing(about, says, "name a folder on disk in the configuration: [keepsakes] folder");
        }
        let mounts = std::fs::read_to_string(self.path("proc/self/mounts")).unwrap_or_default();
        match in_memory(&mounts, Path::new("/var/tmp")) {
            true => Finding::missing(
                about,
                "/var/tmp is memory, which keepsakes are to save",
                "name a folder on disk in the configuration: [keepsakes] folder",
            ),
            false => Finding::good(about, "are written to /var/tmp"),
        }
    }
}

/// Whether a folder lies on a file system that is memory: the deepest mount point above it decides.
fn in_memory(mounts: &str, folder: &Path) -> bool {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((Path::new(fields.next()?), fields.next()?))
    });
    let above = mounts.filter(|(point, _)| folder.starts_with(point));
    above
        .max_by_key(|(point, _)| point.components().count())
        .is_some_and(|(_, kind)| kind == "tmpfs" || kind == "ramfs")
}

#[cfg(test)]
mod tests {
    use super::super::State::{self, Broken, Good, Missing};
    use super::*;

    const PRESSURE: &str =
        "some avg10=1.50 avg60=0.00 avg300=0.00 total=12\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=3\n";

    /// This machine's meminfo with another amount available.
    fn meminfo(available_kib: u64) -> String {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = |line: &str| match line.starts_with("MemAvailable:") {
            true => format!("MemAvailable: {available_kib} kB\n"),
            false => format!("{line}\n"),
        };
        text.lines().map(line).collect()
    }

    /// A tree of files (a path that ends in a slash is a folder) and an environment; what is found of `about`.
    fn check(about: &str, files: &[(&str, &str)], environment: &[(&str, &str)], expected: State, part: &str) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path_on_disk = folder.path().join(path);
            match path.ends_with('/') {
                true => std::fs::create_dir_all(path_on_disk).unwrap(),
                false => {
                    std::fs::create_dir_all(path_on_disk.parent().unwrap()).unwrap();
                    std::fs::write(path_on_disk, text).unwrap();
                }
            }
        }
        let of = |name: &str| environment.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        let findings = Machine { root: folder.path(), environment: &of }.findings();
        let found = findings.iter().find(|finding| finding.about == about).unwrap();
        assert_eq!(found.state, expected, "{found:?}");
        assert!(found.says.contains(part), "{part:?} is not in {found:?}");
        assert_eq!(found.advice.is_some(), expected != Good, "what is not good comes with advice: {found:?}");
    }

    #[test]
    fn memory_and_pressure() {
        check("memory", &[], &[], Broken, "proc/meminfo");
        check("memory", &[("proc/meminfo", &meminfo(4 << 20))], &[], Good, "4096.0 MiB of");
        check("memory", &[("proc/meminfo", &meminfo(100 << 10))], &[], Missing, "100.0 MiB of");
        check("pressure files", &[], &[], Missing, "proc/pressure/memory");
        check("pressure files", &[("proc/pressure/memory", PRESSURE)], &[], Good, "some 1.50 %, full 0.25 %");
    }

    #[test]
    fn control_groups() {
        let two = ("proc/self/cgroup", "0::/box\n");
        let limited = [
            two,
            ("sys/fs/cgroup/box/memory.max", "1048576000\n"),
            ("sys/fs/cgroup/box/memory.current", "0\n"),
            ("sys/fs/cgroup/box/memory.stat", "inactive_file 0\n"),
        ];
        check("control group", &[], &[], Missing, "none");
        check("control group", &[two], &[], Missing, "without a memory controller");
        check("control group", &limited, &[], Good, "version 2, 1000.0 MiB");
        check("control group", &[two, ("sys/fs/cgroup/box/memory.current", "5\n")], &[], Good, "no limit");
        let one = [
            ("proc/self/cgroup", "4:memory:/\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576\n"),
        ];
        check("control group", &one, &[], Good, "version 1, 1.0 MiB");
    }

    #[test]
    fn systemd_and_keepsakes() {
        check("systemd", &[], &[("NOTIFY_SOCKET", "/x")], Missing, "not started by systemd");
        let booted = ("run/systemd/system/", "");
        check("systemd", &[booted], &[], Good, "deploy/systemd");
        let told = [("NOTIFY_SOCKET", "/run/x"), ("MEMORY_PRESSURE_WATCH", "/sys/x"), ("LISTEN_FDS", "")];
        check("systemd", &[booted], &told, Good, "NOTIFY_SOCKET, MEMORY_PRESSURE_WATCH");
        check("keepsakes", &[], &[], Missing, "var/tmp");
        let disk =
            ("proc/self/mounts", "/dev/vda / ext4 rw 0 0\ntmpfs /var tmpfs rw 0 0\n/dev/vdb /var/tmp xfs rw 0 0\n");
        check("keepsakes", &[("var/tmp/", ""), disk], &[], Good, "/var/tmp");
        let memory =
            ("proc/self/mounts", "/dev/vda / ext4 rw 0 0\ntmpfs /var tmpfs rw 0 0\n/dev/vdb /varnish xfs rw 0 0\n");
        check("keepsakes", &[("var/tmp/", ""), memory], &[], Missing, "is memory");
    }

    #[test]
    fn processors() {
        let text = "processor : 0\nflags : fpu avx2 fma f16c\n\nprocessor : 1\nflags : fpu avx2 fma f16c\n";
        let expected = if kernels::isa_name() == "portable" { Missing } else { Good };
        check("processor", &[("proc/cpuinfo", text)], &[], expected, "2 processors, avx2 fma f16c;");
    }
}
