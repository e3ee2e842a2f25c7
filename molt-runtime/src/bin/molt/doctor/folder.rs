//! Whose models are looked at: those of the service that is installed, where they may be seen, or the user's own.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use molt_runtime::config::ServiceConfig;

/// A folder of model files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Whether it is the service's, which its own user must fill.
    pub(super) of_service: bool,
}

impl Folder {
    /// The one that was named, or the service's below that root, or the user's own.
    pub(super) fn find(named: Option<PathBuf>, root: &Path, own: Option<PathBuf>) -> Option<Self> {
        if let Some(path) = named {
            return Some(Self { path, of_service: false });
        }
        // What others may not look into would seem empty.
        let seen = |path: &PathBuf| match std::fs::read_dir(path) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::NotFound,
        };
        match of_service(root).map(|path| root.join(path.strip_prefix("/").unwrap_or(&path))).filter(seen) {
            Some(path) => Some(Self { path, of_service: true }),
            None => own.map(|path| Self { path, of_service: false }),
        }
    }

    /// What to call for a ladder's files.
    pub(super) fn pull(&self, ladder: &str) -> String {
        match self.of_service {
            true => format!("`sudo -u molt molt pull {ladder} --models {}`", self.path.display()),
            false => format!("`molt pull {ladder}`"),
        }
    }
}

/// Where units lie, the strongest first.
const UNITS: [&str; 5] = ["etc", "run", "usr/local/lib", "usr/lib", "lib"];

/// Where the service that is installed below that root looks for models, in the order in which it does itself: its
/// arguments, its configuration, its environment.
fn of_service(root: &Path) -> Option<PathBuf> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
    let folders: Vec<PathBuf> = UNITS.iter().map(|base| Path::new(base).join("systemd/system")).collect();
    let unit = folders.iter().find_map(|folder| read(&folder.join("moltd.service")))?;
    let defaults = read(Path::new("etc/default/moltd")).unwrap_or_default();
    let config = read(Path::new("etc/molt/moltd.toml"))
        .and_then(|text| ServiceConfig::parse(Path::new("/etc/molt/moltd.toml"), &text).ok())
        .and_then(|config| config.models);
    let argument = || {
        let line = setting(&defaults, "MOLTD_ARGS=")?.replace("--models=", "--models ");
        let mut words = line.split_ascii_whitespace().skip_while(|word| *word != "--models").skip(1);
        words.next().map(str::to_owned)
    };
    // A drop-in's word goes before the unit's, and a file of settings before both.
    let drop_ins = folders.iter().filter_map(|folder| {
        let entries = std::fs::read_dir(root.join(folder).join("moltd.service.d")).ok()?;
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        files.iter().rev().find_map(|file| setting(&std::fs::read_to_string(file).ok()?, "Environment=MOLT_MODELS="))
    });
    argument()
        .map(PathBuf::from)
        .or(config)
        .or_else(|| setting(&defaults, "MOLT_MODELS=").map(PathBuf::from))
        .or_else(|| drop_ins.map(PathBuf::from).next())
        .or_else(|| setting(&unit, "Environment=MOLT_MODELS=").map(PathBuf::from))
}

/// The last value of a setting, without its quotes.
fn setting(text: &str, name: &str) -> Option<String> {
    let value = text.lines().rev().find_map(|line| line.trim().strip_prefix(name))?;
    Some(value.trim().trim_matches(['"', '\'']).to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found on a machine with these files, each `(path, text)`.
    fn check(files: &[(&str, &str)], named: Option<&str>, path: &str, of_service: bool) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let found = Folder::find(named.map(PathBuf::from), root.path(), Some(PathBuf::from("/home/own"))).unwrap();
        let path = if of_service { root.path().join(path) } else { PathBuf::from(path) };
        assert_eq!(found, Folder { path, of_service }, "{files:?}");
    }

    #[test]
    fn the_service_is_asked_where_it_looks() {
        let unit =
            ("usr/lib/systemd/system/moltd.service", include_str!("../../../../../deploy/systemd/moltd.service"));
        let config = ("etc/molt/moltd.toml", include_str!("../../../../../deploy/moltd.toml"));
        let defaults = |text| ("etc/default/moltd", text);
        check(&[], None, "/home/own", false);
        check(&[config], None, "/home/own", false);
        check(&[unit, config], None, "var/lib/molt/models", true);
        check(&[unit, config], Some("/named"), "/named", false);
        let drop_in = |folder| (folder, "[Service]\nEnvironment=MOLT_MODELS=/srv/drop-in\n");
        check(&[unit, drop_in("etc/systemd/system/moltd.service.d/a.conf")], None, "srv/drop-in", true);
        check(&[unit, defaults("MOLT_MODELS=\"/srv/set\"\nMOLTD_ARGS=--pin\n")], None, "srv/set", true);
        check(&[unit, ("etc/molt/moltd.toml", "models = \"/srv/file\"")], None, "srv/file", true);
        let last = defaults("MOLTD_ARGS=\"--pin --models /srv/args\"");
        check(&[unit, ("etc/molt/moltd.toml", "models = \"/srv/file\""), last], None, "srv/args", true);
        check(&[unit, defaults("MOLTD_ARGS=--models=/srv/args")], None, "srv/args", true);
    }
}
