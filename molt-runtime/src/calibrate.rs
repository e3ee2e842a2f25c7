//! `molt fit`: reads text with both models of a pair and fits the bridge between them.

use std::path::Path;

use molt_kv::bridge::{BridgeFit, BridgeSpec, FORMAT, FitError, Fitted, Sample};
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::tune::{self, TuneProgress, TuneReport, TuneSettings};
use molt_models::{Embedding, Ladder, Lesson, Model, ModelError, Precision, Rung, Stored};
use molt_scheduler::units::Tokens;
use sha2::{Digest as _, Sha256};

use crate::texts::Document;

/// How a bridge is fitted.
#[derive(Debug, Clone)]
pub struct FitSettings {
    /// Windows of calibration text.
    pub windows: usize,
    /// Tokens of most windows; every fourth has twice as many.
    pub window_tokens: usize,
    /// First layers of the destination that run natively in a carry.
    pub native_layers: usize,
    /// Source layers that feed one destination layer; odd.
    pub source_layers: usize,
    /// Regularisations to choose from, in shares of the mean diagonal.
    pub lambdas: Vec<f64>,
}

impl Default for FitSettings {
    fn default() -> Self {
        Self { windows: 96, window_tokens: 512, native_layers: 3, source_layers: 5, lambdas: vec![1e-4, 1e-3, 1e-2] }
    }
}

impl FitSettings {
    /// The default frame, made to fit models of so many layers.
    pub fn for_layers(source: usize, destination: usize) -> Self {
        let default = Self::default();
        let odd = |layers: usize| layers - usize::from(layers.is_multiple_of(2) && layers > 0);
        Self {
            native_layers: default.native_layers.min(destination / 3).max(1),
            source_layers: default.source_layers.min(odd(source)).max(1),
            ..default
        }
    }
}

/// Why a fit failed.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The maps.
    #[error(transparent)]
    Fit(#[from] FitError),
    /// A text cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file or folder.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// Not enough text for one window.
    #[error("{what} holds {found} tokens in its longest file; one window needs {needed}")]
    TooShort {
        /// Which text.
        what: &'static str,
        /// Tokens found.
        found: usize,
        /// Tokens needed.
        needed: usize,
    },
    /// Settings that no bridge can have.
    #[error("{0}")]
    Settings(String),
}

/// How far a fit has come: windows read of how many.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

/// Reads every `.txt`, `.md`, `.rs` and `.py` file of folders (and files named outright), in order of their names.
pub fn read_texts(paths: &[impl AsRef<Path>]) -> Result<Vec<Document>, CalibrateError> {
    let mut files = Vec::new();
    for path in paths {
        let path = path.as_ref();
        let error = |source| CalibrateError::Read { path: path.display().to_string(), source };
        if path.is_dir() {
            for entry in std::fs::read_dir(path).map_err(error)? {
                let path = entry.map_err(error)?.path();
                let known = ["txt", "md", "rs", "py"];
                if path.extension().and_then(|e| e.to_str()).is_some_and(|e| known.contains(&e)) {
                    files.push(path);
                }
            }
        } else {
            files.push(path.to_owned());
        }
    }
    files.sort();
    let read = |path: &std::path::PathBuf| {
        let error = |source| CalibrateError::Read { path: path.display().to_string(), source };
        let text = String::from_utf8_lossy(&std::fs::read(path).map_err(error)?).into_owned();
        // The whole path: two folders may each have a file of that name.
        Ok(Document { name: path.display().to_string(), text })
    };
    files.iter().map(read).collect()
}

/// Fits the bridge from the weights of one rung to those of another. The maps are the same at every precision, so both
/// models are read as stored. Of the calibration windows every tenth chooses the regularisation. What has been read is summed
/// up in the file `keep` every few windows, and a fit of the same goes on from it.
pub fn fit(
    ladder: &Ladder,
    (from, to): (&Rung, &Rung),
    calibration: &[Document],
    held_out: &[Document],
    settings: &FitSettings,
    keep: Option<&Path>,
    progress: Progress<'_>,
) -> Result<Fitted, CalibrateError> {
    let ledger = Ledger::new();
    let (source, destination) = (load(from, &ledger)?, load(to, &ledger)?);
    let spec = spec(&source, &destination, settings)?;
    let windows = windows(ladder, calibration, settings.windows, settings.window_tokens, "the calibration text")?;
    let held_count = (settings.windows / 8).clamp(2, 16);
    let held = self::windows(ladder, held_out, held_count, settings.window_tokens, "the held-out text")?;
    let total = windows.len() + held.len();
    let mut fit = BridgeFit::new(spec.clone());
    let (mut validation, mut samples, mut done) = (Vec::new(), Vec::new(), 0);
    let identity = identity(&spec, &windows);
    let summed = keep.map(|path| fit.resume(path, &identity)).transpose()?.flatten().unwrap_or(0);
    for (at, window) in windows.iter().enumerate() {
        // What is validated on is in no sum.
        if at < summed && at % 10 != 9 {
            done += 1;
            continue;
        }
        let sample = observe(&spec, &source, &destination, window, &ledger)?;
        if at % 10 == 9 {
            validation.push(sample)
        } else {
            fit.add(sample)
        }
        if let Some(path) = keep.filter(|_| at >= summed && (at + 1).is_multiple_of(KEPT_EVERY)) {
            fit.keep(path, &identity, at + 1)?;
        }
        done += 1;
        progress(done, total);
    }
    for window in &held {
        samples.push(observe(&spec, &source, &destination, window, &ledger)?);
        done += 1;
        progress(done, total);
    }
    Ok(fit.finish(&settings.lambdas, &validation, &samples)?)
}

/// Windows from one keeping of the sums to the next: for the pair 1.5B to 0.5B they are half a gigabyte.
const KEPT_EVERY: usize = 8;

/// What tells one fit from another.
fn identity(spec: &BridgeSpec, windows: &[Vec<u32>]) -> String {
    let mut digest = Sha256::new();
    digest.update(format!("{spec:?}"));
    for window in windows {
        digest.update(window.len().to_le_bytes());
        window.iter().for_each(|token| digest.update(token.to_le_bytes()));
    }
    hex::encode(digest.finalize())
}

fn load(rung: &Rung, ledger: &Ledger) -> Result<Model, ModelError> {
    let precision = Precision { linear: Stored::AsStored, table: Stored::AsStored };
    Model::load(rung.file(), rung.source(), precision, Embedding::Shared, ledger, &StopFlag::new())
}

/// Windows that are held apart while maps learn.
const APART: usize = 8;

/// Tunes the maps of a fitted bridge by the output of its destination, on windows of calibration text of which every fourth
/// is twice as long. What is reached is kept in `keep`, and gone on from where it stands there already.
pub fn tune(
    ladder: &Ladder,
    (from, to): (&Rung, &Rung),
    fitted: Fitted,
    calibration: &[Document],
    (settings, window_tokens): (&TuneSettings, usize),
    keep: Option<&Path>,
    progress: &mut dyn FnMut(TuneProgress),
) -> Result<(Fitted, TuneReport), CalibrateError> {
    let ledger = Ledger::new();
    let count = settings.lessons + APART;
    let windows = windows(ladder, calibration, count, window_tokens, "the calibration text")?;
    let (destination, source) = (load(to, &ledger)?, load(from, &ledger)?);
    // Those apart lie evenly among all, and so do their lengths.
    let is_apart = |at: usize| (at + 1) * APART / count > at * APART / count;
    let (apart, mut own): (Vec<_>, Vec<_>) = (0..windows.len()).partition(|at| is_apart(*at));
    // Neighbours come from the same text: steps mix what is learnt.
    own.sort_by_key(|at| (at * STRIDE) % count);
    let learner = fitted.clone();
    let read = |at: usize| Lesson::new(&learner, &source, &destination, &windows[at]);
    let apart = apart.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let read = |number: usize| read(own[number]);
    Ok(tune::tune(fitted, (to.file(), &destination), read, &apart, settings, keep, progress)?)
}

/// A prime, so that multiples of it visit all numbers below any other count before they come again.
const STRIDE: usize = 7919;

fn spec(source: &Model, destination: &Model, settings: &FitSettings) -> Result<BridgeSpec, CalibrateError> {
    let (from, to) = (source.cache_shape(), destination.cache_shape());
    if settings.native_layers == 0 || settings.native_layers >= to.layers {
        let (native, layers) = (settings.native_layers, to.layers);
        return Err(CalibrateError::Settings(format!("{native} native layers of {layers}: give 1 to {}", layers - 1)));
    }
    if settings.source_layers.is_multiple_of(2) || settings.source_layers > from.layers {
        let (window, layers) = (settings.source_layers, from.layers);
        return Err(CalibrateError::Settings(format!(
            "{window} source layers of {layers}: give an odd number up to that"
        )));
    }
    Ok(BridgeSpec {
        format: FORMAT.to_owned(),
        source: source.source().to_owned(),
        destination: destination.source().to_owned(),
        source_shape: from.into(),
        destination_shape: to.into(),
        destination_width: destination.width(),
        native_layers: settings.native_layers,
        window: settings.source_layers,
        calibration_tokens: 0,
        tuning_steps: 0,
        residuals: Vec::new(),
    })
}

/// Windows spread evenly over all texts; every fourth is twice as long where the text allows it.
fn windows(
    ladder: &Ladder,
    texts: &[Document],
    count: usize,
    tokens: usize,
    what: &'static str,
) -> Result<Vec<Vec<u32>>, CalibrateError> {
    let encoded = texts.iter().map(|t| ladder.tokenizer().encode(&t.text)).collect::<Result<Vec<_>, _>>()?;
    let long = tokens * 2;
    let found = encoded.iter().map(Vec::len).max().unwrap_or(0);
    let usable: Vec<&Vec<u32>> = encoded.iter().filter(|t| t.len() >= tokens).collect();
    let total: usize = usable.iter().map(|t| t.len()).sum();
    if usable.is_empty() {
        return Err(CalibrateError::TooShort { what, found, needed: tokens });
    }
    let mut windows = Vec::with_capacity(count);
    for index in 0..count {
        // The window's middle, as a place in the texts joined.
        let mut at = total * (2 * index + 1) / (2 * count);
        for text in &usable {
            if at < text.len() {
                let wished = if index % 4 == 3 { long } else { tokens };
                let length = wished.min(text.len()).min(ladder.trained_context());
                let start = at.saturating_sub(length / 2).min(text.len() - length);
                windows.push(text[start..start + length].to_vec());
                break;
            }
            at -= text.len();
        }
    }
    Ok(windows)
}

/// Rows of a window that are not fitted: the first tokens are sinks of their own kind, and carried exactly.
const SKIPPED: usize = 8;

/// Reads a window natively with both models.
fn observe(
    spec: &BridgeSpec,
    source: &Model,
    destination: &Model,
    window: &[u32],
    ledger: &Ledger,
) -> Result<Sample, ModelError> {
    let (stop, limit) = (StopFlag::new(), Tokens::from(window.len()));
    let mut from = KvCache::new(source.cache_shape(), limit, ledger)?;
    source.read(window, &mut from, &stop)?;
    let mut to = KvCache::new(destination.cache_shape(), limit, ledger)?;
    let (after_native, _) = destination.read_halves(spec.native_layers, window, &mut to, &stop)?;
    let skipped = SKIPPED.min(window.len() / 2);
    let hidden = &after_native[skipped * spec.destination_width..];
    let slots = skipped..window.len();
    Ok(Sample::new(spec, (&from, source.rope()), (&to, destination.rope()), hidden, slots))
}

#[cfg(test)]
mod tests {
    use molt_kv::bridge::PlainMap;
    use molt_scheduler::units::RungIdx;

    use super::*;
    use crate::texts;

    #[test]
    fn a_fit_that_was_broken_off_goes_on_and_comes_out_the_same() {
        let ladder = Ladder::open("pocket", Path::new("")).unwrap();
        let text = texts::calibration(ladder.template()).unwrap();
        let rung = |index: u8| ladder.rung(RungIdx::new(index)).unwrap();
        let settings = FitSettings { windows: 20, window_tokens: 128, ..FitSettings::for_layers(4, 4) };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sums");
        let fit = |settings: &FitSettings, keep: Option<&Path>| {
            let mut seen = Vec::new();
            let done = fit(&ladder, (rung(0), rung(2)), &text, &text, settings, keep, &mut |done, _| seen.push(done));
            done.map(|fitted| (fitted.maps().collect::<Vec<PlainMap>>(), fitted.spec().clone(), seen))
        };
        let whole = fit(&settings, None).unwrap();
        let kept = fit(&settings, Some(&path)).unwrap();
        assert_eq!((&kept.0, &kept.1), (&whole.0, &whole.1));
        // The file now says what was reached after sixteen of twenty windows: what an interrupt leaves behind.
        let again = fit(&settings, Some(&path)).unwrap();
        assert_eq!((&again.0, &again.1), (&whole.0, &whole.1));
        assert!(again.2.len() < whole.2.len(), "{} of {} windows were read", again.2.len(), whole.2.len());
        let refused = |result: Result<(Vec<PlainMap>, BridgeSpec, Vec<usize>), CalibrateError>, reason: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("delete it"), "{error}");
        };
        refused(fit(&FitSettings { windows: 21, ..settings.clone() }, Some(&path)), "another fit");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        refused(fit(&settings, Some(&path)), "damaged");
    }
}
