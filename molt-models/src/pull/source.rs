//! What a ladder says about a file, and the checks that make it safe to act on.
//!
//! These values come from a text file. Names become paths and requirements become arguments of a command, so all of
//! them are checked before the first byte moves.

use std::path::Path;

use super::{Origin, PullError, Pulled};

/// One file of a ladder and where it can come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSource {
    /// The file's final name: a plain name, without folders.
    pub name: String,
    /// The file's SHA-256: 64 digits, lower-case hexadecimal.
    pub sha256: String,
    /// The file's size.
    pub bytes: u64,
    /// The file on the model hub.
    pub hub: Option<HubSource>,
    /// The file inside Python wheels.
    pub wheels: Option<WheelSource>,
}

/// A file on the model hub, on the main revision of its repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSource {
    /// `owner/name` of the repository.
    pub repository: String,
    /// The file's path inside the repository.
    pub file: String,
}

/// A file that lies, whole or in pieces, inside Python wheels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WheelSource {
    /// The packages, each `name==version`, in the order in which their pieces are joined.
    pub packages: Vec<String>,
    /// The piece inside each wheel: the last components of its path, such as `data/part*.bin`.
    ///
    /// Every component may hold one `*`, which stands for any characters within that component. Exactly one entry of
    /// each wheel must match.
    pub member: String,
}

impl FileSource {
    /// The report on this file, standing in `folder`.
    pub(super) fn pulled(&self, folder: &Path, origin: Origin) -> Pulled {
        Pulled { name: self.name.clone(), path: folder.join(&self.name), origin, bytes: self.bytes }
    }

    fn check(&self) -> Result<(), String> {
        if !is_plain_name(&self.name) {
            return Err("its name must be a plain file name without folders, not starting with a dot".to_owned());
        }
        if self.sha256.len() != 64 || !self.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(format!("its SHA-256 must be 64 lower-case hexadecimal digits, not {:?}", self.sha256));
        }
        if self.bytes == 0 {
            return Err("its size must not be zero".to_owned());
        }
        if let Some(hub) = &self.hub {
            hub.check()?;
        }
        self.wheels.as_ref().map_or(Ok(()), WheelSource::check)
    }
}

impl HubSource {
    fn check(&self) -> Result<(), String> {
        let parts: Vec<_> = self.repository.split('/').collect();
        if parts.len() != 2 || !parts.iter().all(|part| is_plain_name(part)) {
            return Err(format!("the repository must read owner/name, not {:?}", self.repository));
        }
        if !self.file.split('/').all(is_plain_name) {
            return Err(format!("the file in the repository must be a relative path, not {:?}", self.file));
        }
        Ok(())
    }
}

impl WheelSource {
    fn check(&self) -> Result<(), String> {
        if self.packages.is_empty() {
            return Err("it names no packages".to_owned());
        }
        for package in &self.packages {
            if Requirement::parse(package).is_none() {
                return Err(format!("a package must read name==version, not {package:?}"));
            }
        }
        let component = |part: &str| !part.is_empty() && part.matches('*').count() <= 1;
        if !self.member.split('/').all(component) {
            return Err(format!(
                "the member must be the end of a path with at most one * a component, not {:?}",
                self.member
            ));
        }
        Ok(())
    }
}

/// A pinned package, `name==version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Requirement<'a> {
    pub(super) name: &'a str,
    pub(super) version: &'a str,
}

impl<'a> Requirement<'a> {
    /// Only pinned names pass: anything else (an option, an address, a path) would be an instruction to pip.
    pub(super) fn parse(text: &'a str) -> Option<Self> {
        let (name, version) = text.split_once("==")?;
        let starts_well = |s: &str| s.starts_with(|c: char| c.is_ascii_alphanumeric());
        let allowed = |s: &str, extra: &str| s.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(c));
        let good = starts_well(name) && starts_well(version) && allowed(name, "-_.") && allowed(version, "-_.+!");
        good.then_some(Self { name, version })
    }

    /// Is a file of this name the wheel of this package? Wheels are named `NAME-VERSION-...whl`, with the name's
    /// runs of `-`, `_` and `.` written as one `_`.
    pub(super) fn is_wheel_name(&self, file_name: &str) -> bool {
        let Some(stem) = file_name.strip_suffix(".whl") else { return false };
        let mut fields = stem.split('-');
        let (name, version) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        normal(name) == normal(self.name) && version == self.version
    }
}

fn normal(name: &str) -> String {
    let words: Vec<_> = name.split(['-', '_', '.']).filter(|word| !word.is_empty()).collect();
    words.join("_").to_ascii_lowercase()
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// Refuses any entry that could not be acted on, before anything is.
pub(super) fn check_all(files: &[FileSource]) -> Result<(), PullError> {
    for (at, file) in files.iter().enumerate() {
        let refuse = |why: String| PullError::BadSource { name: file.name.clone(), why };
        file.check().map_err(refuse)?;
        if files[..at].iter().any(|other| other.name == file.name && other.sha256 != file.sha256) {
            return Err(refuse("another entry has the same name and a different SHA-256".to_owned()));
        }
    }
    Ok(())
}
