//! `molt ladder new`: model files of one's own become a ladder file, biggest first, or an error that names the file.

use std::path::{Path, PathBuf};

use molt_kv::numbers::CachePrecision;
use molt_models::file::ModelFile;
use molt_models::{FileEntry, LadderFile, Model, ModelError, Precision, RungEntry, Stored};
use sha2::{Digest as _, Sha256};

use crate::eval::Row;

/// Why files are no ladder.
#[derive(Debug, thiserror::Error)]
pub enum OwnLadderError {
    /// A name that cannot be that of a file, or that is taken.
    #[error("{name:?} cannot be the name of a ladder: {reason}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A path that leads nowhere.
    #[error("cannot find {}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// Two tokenizers.
    #[error("{} has another tokenizer than {}: {difference}; a conversation cannot change between them",
        second.display(), first.display())]
    Tokenizers {
        /// The bigger file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
        /// The first thing that differs.
        difference: String,
    },
    /// Two files of which none is smaller.
    #[error("{} and {} both take {bytes} bytes of weights; every rung must be smaller than the one above",
        first.display(), second.display())]
    Sizes {
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
        /// Their weights.
        bytes: u64,
    },
    /// A ladder that cannot be written down.
    #[error("the ladder file cannot be written down: {0}")]
    Write(#[from] toml::ser::Error),
}

/// A ladder of these files as stored, biggest first, without bridges.
pub fn arrange(name: &str, paths: &[PathBuf]) -> Result<LadderFile, OwnLadderError> {
    let refuse = |reason| Err(OwnLadderError::Name { name: name.to_owned(), reason });
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) || name.starts_with('.')
    {
        return refuse("letters, digits, `-`, `_` and `.` make a name");
    }
    if LadderFile::built_in().any(|known| known == name) {
        return refuse("a built-in ladder has it");
    }
    let precision = Precision { linear: Stored::AsStored, table: Stored::AsStored };
    let mut models = Vec::new();
    for path in paths {
        let path = path.canonicalize().map_err(|source| OwnLadderError::Path { path: path.clone(), source })?;
        let file = ModelFile::open(&path)?;
        models.push((Model::bytes_of(&file, precision).weights, file));
    }
    models.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    for pair in models.windows(2) {
        let [(above, first), (below, second)] = pair else { continue };
        let paths = || (first.path().to_owned(), second.path().to_owned());
        if let Some(difference) = first.vocabulary().difference(second.vocabulary()) {
            let (first, second) = paths();
            return Err(OwnLadderError::Tokenizers { first, second, difference });
        }
        if above == below {
            let (first, second) = paths();
            return Err(OwnLadderError::Sizes { first, second, bytes: above.get() });
        }
    }
    let mut files: Vec<FileEntry> = Vec::new();
    for (index, (_, file)) in models.iter().enumerate() {
        let bytes = file.region().bytes();
        let sha256 = hex::encode(Sha256::digest(bytes));
        // A gigabyte has been looked at for its hash; its pages need not stay.
        file.region().forget(0..bytes.len());
        let name = file_name(file.path(), index, &files);
        let path = Some(file.path().to_owned());
        files.push(FileEntry { name, sha256, bytes: bytes.len() as u64, path, hub: None, wheels: None });
    }
    let rungs = files.iter().map(|file| RungEntry { file: file.name.clone(), precision }).collect();
    let listed: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    let description = format!("{}, as stored", listed.join(", "));
    Ok(LadderFile {
        name: name.to_owned(),
        description,
        cache: CachePrecision::default(),
        files,
        rungs,
        bridges: Vec::new(),
    })
}

/// The ladder file's text.
pub fn to_text(ladder: &LadderFile) -> Result<String, OwnLadderError> {
    let head = "# Written by `molt ladder new`. Each [[file]] says where its model lies.\n";
    Ok(format!("{head}{}", toml::to_string(ladder)?))
}

/// The file's own name, or its folder's too where another has that name already (`model.safetensors`).
fn file_name(path: &Path, index: usize, taken: &[FileEntry]) -> String {
    let text = |part: Option<&std::ffi::OsStr>| part.map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let own = text(path.file_name());
    let with_folder = format!("{}-{own}", text(path.parent().and_then(Path::file_name)));
    let numbered = format!("{index}-{own}");
    let free = |name: &String| taken.iter().all(|file| file.name != *name);
    [own, with_folder].into_iter().find(free).unwrap_or(numbered)
}

/// How good a carry is, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A reader will hardly notice.
    Close,
    /// The answer goes on sensibly, with another wording.
    Usable,
    /// Better to read again.
    Poor,
}

/// Largest divergences over 64 tokens, in nats, that are called close and usable.
pub const CLOSE_KL_64: f64 = 0.12;
/// See [`CLOSE_KL_64`].
pub const USABLE_KL_64: f64 = 0.35;

impl Verdict {
    /// Of a mean divergence over 64 tokens; what is no number is poor.
    pub fn of(kl_64: f64) -> Self {
        if kl_64 <= CLOSE_KL_64 {
            Self::Close
        } else if kl_64 <= USABLE_KL_64 {
            Self::Usable
        } else {
            Self::Poor
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Close => "close",
            Self::Usable => "usable",
            Self::Poor => "poor",
        })
    }
}

/// A row as a sentence.
pub fn sentence(row: &Row) -> String {
    let (verdict, pair) = (Verdict::of(row.kl_64), row.pair.replace(':', " -> "));
    format!(
        "{pair}: {verdict}: kl over 64 tokens {:.3}, same favourite {:.0} %, {:.1} times cheaper than reading {} tokens again \
         ({} seams)",
        row.kl_64,
        row.top1_64 * 100.0,
        row.cost_ratio,
        row.context_tokens,
        row.seams
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_fall_with_divergence() {
        let check = |kl: f64, expected: Verdict| assert_eq!(Verdict::of(kl), expected, "{kl}");
        check(0.0, Verdict::Close);
        check(CLOSE_KL_64, Verdict::Close);
        check(0.2, Verdict::Usable);
        check(0.36, Verdict::Poor);
        check(f64::NAN, Verdict::Poor);
    }

    #[test]
    fn names_do_not_collide() {
        let taken = |name: &str| FileEntry {
            name: name.to_owned(),
            sha256: String::new(),
            bytes: 0,
            path: None,
            hub: None,
            wheels: None,
        };
        let check = |path: &str, known: &[&str], expected: &str| {
            let known: Vec<FileEntry> = known.iter().map(|name| taken(name)).collect();
            assert_eq!(file_name(Path::new(path), 2, &known), expected);
        };
        check("/a/big.gguf", &[], "big.gguf");
        check("/a/model.safetensors", &["model.safetensors"], "a-model.safetensors");
        check("/a/model.safetensors", &["model.safetensors", "a-model.safetensors"], "2-model.safetensors");
    }
}
