//! A control group with a memory limit, for this process and its children.

use std::path::{Path, PathBuf};

use molt_scheduler::units::Bytes;

/// Why there is no limited control group.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The kernel counts memory of groups nowhere.
    #[error("this system has no memory controller for control groups; molt demo without --real needs none")]
    NoController,
    /// A group could not be made or entered.
    #[error(
        "cannot make a control group with a limit: {} ({what}). Run it as root, or inside of a group that has one: \
         systemd-run --user --scope -p MemoryMax={limit_mib}M molt demo --real", path.display()
    )]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// A limit that suits.
        limit_mib: u64,
        /// The reason.
        source: std::io::Error,
    },
}

/// A group that this process has entered. Dropping it moves the process back and removes the group.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
    parent: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Group {
    /// Makes a group with that limit below the process's own (version 1), or beside it (version 2, where a group that
    /// holds processes cannot have limited children), and moves this process into it.
    pub fn enter(limit: Bytes) -> Result<Self, GroupError> {
        let (version, own) = own(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))?;
        let at = match version {
            Version::One => own.clone(),
            Version::Two => own.parent().filter(|at| at.join("cgroup.procs").exists()).unwrap_or(&own).to_owned(),
        };
        let path = at.join(format!("molt-demo-{}", std::process::id()));
        let refused = |path: &Path, what, source| {
            let limit_mib = (limit.get() >> 20) + 1;
            GroupError::Refused { path: path.to_owned(), what, limit_mib, source }
        };
        std::fs::create_dir(&path).map_err(|source| refused(&path, "making the folder", source))?;
        let group = Self { path, parent: own, version };
        let file = match version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        for (file, text, what) in [
            (file, limit.get().to_string(), "setting the limit"),
            ("cgroup.procs", std::process::id().to_string(), "moving into it"),
        ] {
            let path = group.path.join(file);
            std::fs::write(&path, text).map_err(|source| refused(&path, what, source))?;
        }
        Ok(group)
    }

    /// Processes that the kernel has killed in it for want of memory; `None` where it does not say.
    pub fn oom_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let text = std::fs::read_to_string(self.path.join(file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What cannot be undone is left; the group is empty when the process ends, and costs nothing.
        let _left = std::fs::write(self.parent.join("cgroup.procs"), std::process::id().to_string());
        let _left = std::fs::remove_dir(&self.path);
    }
}

/// The process's own group of the memory controller.
fn own(cgroup: &Path, mount: &Path) -> Result<(Version, PathBuf), GroupError> {
    let text = std::fs::read_to_string(cgroup).map_err(|_| GroupError::NoController)?;
    let fields = |line: &'_ str| -> Option<(String, String)> {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        Some((controllers.to_owned(), path.trim_start_matches('/').to_owned()))
    };
    let lines: Vec<_> = text.lines().filter_map(fields).collect();
    let one = lines.iter().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
    let two = lines.iter().find(|(controllers, _)| controllers.is_empty());
    let found = match (one, two) {
        (Some((_, path)), _) => (Version::One, mount.join("memory").join(path)),
        (None, Some((_, path))) => (Version::Two, mount.join(path)),
        (None, None) => return Err(GroupError::NoController),
    };
    match found.1.join("cgroup.procs").exists() {
        true => Ok(found),
        false => Err(GroupError::NoController),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_of_both_versions() {
        let check = |text: &str, folder: &str, expected: Option<Version>| {
            let root = tempfile::tempdir().unwrap();
            let mount = root.path().join("cgroup");
            std::fs::create_dir_all(mount.join(folder)).unwrap();
            std::fs::write(mount.join(folder).join("cgroup.procs"), "1\n").unwrap();
            std::fs::write(root.path().join("own"), text).unwrap();
            let found = own(&root.path().join("own"), &mount).ok();
            assert_eq!(found, expected.map(|version| (version, mount.join(folder))), "{text:?}");
        };
        check("9:name=systemd:/\n4:memory:/box\n0::/\n", "memory/box", Some(Version::One));
        check("0::/user.slice/a.scope\n", "user.slice/a.scope", Some(Version::Two));
        check("0::/elsewhere\n", "user.slice", None);
        check("3:cpu:/\n", "memory", None);
    }
}
