//! Rungs that are built from a file, kept as files of their own: the next load is a mapping, whose pages the system may
//! drop and read again, instead of minutes of arithmetic into memory that only we can give back.
//!
//! A kept rung is a safetensors file: every matrix as the bytes that the kernels read, and in the metadata which model
//! file at which precision it was built from.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use molt_kv::decoder::StopFlag;
use molt_kv::ledger::{Kind, Ledger};
use molt_kv::region::FileRegion;
use safetensors::View;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};

use crate::error::ModelError;
use crate::file::{ModelFile, TensorEntry};
use crate::matrix::Matrix;
use crate::precision::{self, Precision, Stored};

/// Says which layout a file has; another version is not read.
const VERSION: &str = "1";

/// A kept rung, mapped and checked.
#[derive(Debug)]
pub struct KeptRung {
    region: Arc<FileRegion>,
    header: usize,
    tensors: Metadata,
}

impl KeptRung {
    /// Where the rung of a model file (named by its SHA-256) at a precision is kept; `None` where everything lies in the
    /// model file as it is.
    pub(crate) fn path(models: &Path, file: &ModelFile, source: &str, precision: Precision) -> Option<PathBuf> {
        if to_build(file, precision).is_empty() {
            return None;
        }
        let start = source.get(..16).unwrap_or(source);
        let precision = precision.to_string().replace(", ", "-").replace(' ', "-");
        Some(models.join("built").join(format!("{start}-{precision}.safetensors")))
    }

    /// Opens a kept rung and holds it against the model file that it should have been built from.
    ///
    /// # Errors
    /// Where the file is damaged, or is the rung of another file or precision; the message says what to do.
    pub(crate) fn open(path: &Path, file: &ModelFile, source: &str, precision: Precision) -> Result<Self, ModelError> {
        let unusable = |reason: String| ModelError::Kept { path: path.to_owned(), reason };
        let region = FileRegion::open(path)?;
        let (header, tensors) =
            SafeTensors::read_metadata(region.bytes()).map_err(|e| unusable(format!("its header: {e}")))?;
        let header = header.saturating_add(size_of::<u64>());
        let expected = stamp(source, precision);
        let found = tensors.metadata().clone().unwrap_or_default();
        for (key, expected) in &expected {
            let found = found.get(key).map_or("nothing", String::as_str);
            if found != expected {
                return Err(unusable(format!("its {key} is {found}, not {expected}")));
            }
        }
        let kept = Self { region, header, tensors };
        for (name, stored) in to_build(file, precision) {
            let entry = file.tensor(&name).ok_or_else(|| unusable(format!("{name} is in no model")))?;
            let bytes = precision::bytes_at(entry, stored);
            match kept.range(&name).and_then(|range| kept.region.bytes().get(range)) {
                Some(found) if found.len() == bytes => {}
                found => {
                    let found = found.map_or(0, <[u8]>::len);
                    return Err(unusable(format!("tensor {name} has {found} bytes, it should have {bytes}")));
                }
            }
        }
        Ok(kept)
    }

    /// The file.
    pub(crate) fn region(&self) -> &FileRegion {
        &self.region
    }

    /// Builds a rung and writes it to `path`, one matrix at a time; `done` hears of bytes built and of all of them.
    ///
    /// # Errors
    /// Where the file cannot be written; nothing is left of it then.
    pub(crate) fn write(
        path: &Path,
        file: &ModelFile,
        source: &str,
        precision: Precision,
        done: impl FnMut(usize, usize),
    ) -> Result<(), ModelError> {
        let error = |source| ModelError::Keep { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(error)?;
        }
        let to_build = to_build(file, precision);
        let entry = |name: &String, stored: Stored| {
            let entry = file.tensor(name)?;
            Some((entry, precision::bytes_at(entry, stored)))
        };
        let total = to_build.iter().filter_map(|(name, stored)| entry(name, *stored)).map(|(_, bytes)| bytes).sum();
        let progress = RefCell::new(Progress { built: 0, total, done });
        let views = to_build.iter().filter_map(|(name, stored)| {
            let (entry, bytes) = entry(name, *stored)?;
            let shape = [bytes];
            Some((name.as_str(), Building { file, entry, stored: *stored, shape, progress: &progress }))
        });
        // Written aside and renamed, so that nobody maps half a rung.
        let aside = path.with_extension(format!("{}.part", std::process::id()));
        let written = safetensors::serialize_to_file(views, Some(stamp(source, precision)), &aside)
            .map_err(std::io::Error::other)
            .and_then(|()| std::fs::File::open(&aside)?.sync_all())
            .and_then(|()| std::fs::rename(&aside, path));
        written.map_err(|reason| {
            // It may never have been made, and the reason for that is what is told.
            let _ = std::fs::remove_file(&aside);
            error(reason)
        })
    }

    /// A matrix in place; `None` for one that the rung has as the model file stores it.
    pub(crate) fn matrix(&self, name: &str, entry: &TensorEntry, stored: Stored, ledger: &Ledger) -> Option<Matrix> {
        let part = self.region.part(ledger, Kind::Weights, self.range(name)?)?;
        Matrix::mapped(precision::format_at(entry, stored), entry.rows, entry.columns, part)
    }

    fn range(&self, name: &str) -> Option<std::ops::Range<usize>> {
        let (start, end) = self.tensors.info(name)?.data_offsets;
        Some(self.header.checked_add(start)?..self.header.checked_add(end)?)
    }
}

/// What a kept rung says of itself.
fn stamp(source: &str, precision: Precision) -> HashMap<String, String> {
    let entries = [("rung", VERSION.to_owned()), ("model", source.to_owned()), ("precision", precision.to_string())];
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The matrices that a rung has in another form than the model file.
fn to_build(file: &ModelFile, precision: Precision) -> Vec<(String, Stored)> {
    let linears = (0..file.config().layers)
        .flat_map(|layer| ModelFile::linears(file.config()).map(|(part, _, _)| format!("blk.{layer}.{part}.weight")));
    let table = (file.shared_table().to_owned(), precision.table);
    let all = linears.map(|name| (name, precision.linear)).chain([table]);
    all.filter(|(name, stored)| {
        file.tensor(name).is_some_and(|entry| precision::format_at(entry, *stored) != entry.format)
    })
    .collect()
}

struct Progress<F> {
    built: usize,
    total: usize,
    done: F,
}

/// A matrix that is built when it is written.
struct Building<'a, F> {
    file: &'a ModelFile,
    entry: &'a TensorEntry,
    stored: Stored,
    shape: [usize; 1],
    progress: &'a RefCell<Progress<F>>,
}

impl<F: FnMut(usize, usize)> View for Building<'_, F> {
    fn dtype(&self) -> Dtype {
        Dtype::U8
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.shape[0]];
        let stored = &self.file.region().bytes()[self.entry.range.clone()];
        // Nobody raises this flag.
        let built = precision::fill(self.entry, stored, self.stored, &mut bytes, &StopFlag::new());
        debug_assert!(built.is_some_and(|whole| whole), "a checked tensor is built");
        self.file.region().release(self.entry.range.clone());
        let mut progress = self.progress.borrow_mut();
        progress.built += bytes.len();
        let Progress { built, total, done } = &mut *progress;
        done(*built, *total);
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape[0]
    }
}
