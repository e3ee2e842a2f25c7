//! Finished seams, one a line, so that an evaluation can be taken up where it was left.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use molt_kv::carry::CarrySettings;
use serde::{Deserialize, Serialize};

use super::error::EvalError;
use super::metrics::SeamFigures;
use super::setting::Setting;

/// Everything that a seam's figures depend on, beside the program itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Place {
    /// Rungs, as `tier0:tier1`.
    pub(super) pair: String,
    /// SHA-256 of the source's file, and its precision.
    pub(super) source: String,
    /// The same of the destination.
    pub(super) destination: String,
    /// The digest of the bridge, where one is used.
    pub(super) bridge: Option<String>,
    /// What is read natively beside it.
    pub(super) carry: Option<CarrySettings>,
    pub(super) setting: Setting,
    pub(super) context_tokens: usize,
    pub(super) document: String,
    /// SHA-256 of the window's tokens.
    pub(super) text: String,
    pub(super) prefix_tokens: usize,
}

/// A finished seam.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) place: Place,
    pub(super) figures: SeamFigures,
    pub(super) carry_ms: f64,
    pub(super) reread_ms: f64,
}

/// The file of finished seams.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    pub(super) records: Vec<Record>,
}

impl Journal {
    /// Opens a file, or begins one. A last line that was cut off is done again; any other that is no seam is an error.
    pub fn open(path: &Path) -> Result<Self, EvalError> {
        let error = |source| EvalError::Journal { path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.create(true).read(true).append(true).open(path).map_err(error)?;
        let (mut records, mut whole) = (Vec::new(), 0);
        let mut reader = BufReader::new(&file);
        for line in 1.. {
            let mut text = String::new();
            let read = reader.read_line(&mut text).map_err(error)?;
            if read == 0 || !text.ends_with('\n') {
                break;
            }
            let malformed = |e: serde_json::Error| {
                let (path, reason) = (path.to_owned(), e.to_string());
                EvalError::JournalLine { path, line, reason }
            };
            records.push(serde_json::from_str(&text).map_err(malformed)?);
            whole += read as u64;
        }
        file.set_len(whole).map_err(error)?;
        Ok(Self { path: path.to_owned(), file, records })
    }

    pub(super) fn write(&mut self, record: &Record) -> Result<(), EvalError> {
        let error = |source: std::io::Error| EvalError::Journal { path: self.path.clone(), source };
        let mut line = serde_json::to_string(record).map_err(|e| error(e.into()))?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(error)
    }
}
