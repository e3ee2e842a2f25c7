//! `molt fit`: bridges from text.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use molt_kv::bridge::{Bridge, Fitted};
use molt_kv::ledger::Ledger;
use molt_models::tune::{TuneProgress, TuneReport, TuneSettings};
use molt_models::{Ladder, LadderFile, ModelError, Rung};
use molt_runtime::calibrate::{FitSettings, fit, read_texts, tune};
use molt_runtime::texts::{self, Document};
use molt_scheduler::units::RungIdx;

/// Reads text with both models of every pair that the ladder file names, and writes the bridges. What has been reached is kept
/// beside them until they are written: after an interrupt the same command goes on. On two cores the pair
/// 1.5B to 0.5B takes about half an hour with the default of 96 windows; `pocket` takes seconds. Tuning reads its lessons with
/// both models first, and then takes some seconds a step.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    ladder: String,
    /// Files and folders of text to fit on [default: the calibration texts that ship with the program].
    #[arg(long, num_args = 1..)]
    text: Vec<PathBuf>,
    /// Files and folders of text that residuals are measured on; must not be among those to fit on [default: the held-out
    /// texts that ship with the program].
    #[arg(long, num_args = 1..)]
    held_out: Vec<PathBuf>,
    /// Folder that the bridges are written to.
    #[arg(long)]
    out: PathBuf,
    /// Windows of text.
    #[arg(long, default_value_t = 96)]
    windows: usize,
    /// Tokens of most windows; every fourth has twice as many.
    #[arg(long, default_value_t = 512)]
    window_tokens: usize,
    /// First layers of the destination that run natively in a carry.
    #[arg(long, default_value_t = 3)]
    native_layers: usize,
    /// Source layers that feed one destination layer; odd.
    #[arg(long, default_value_t = 5)]
    source_layers: usize,
    /// Start from the bridges that the ladder has instead of fitting them anew.
    #[arg(long, requires = "tune")]
    from_bridges: bool,
    /// Windows of text on which the maps are then tuned by the output of the model that they lead to; 0 for none. What was
    /// reached is kept beside the bridges, and the same command goes on from it.
    #[arg(long, value_name = "WINDOWS", default_value_t = 0)]
    tune: usize,
    /// Tokens of most windows to tune on; every fourth has twice as many.
    #[arg(long, default_value_t = 1152)]
    tune_tokens: usize,
    /// How far the first steps of tuning go.
    #[arg(long, default_value_t = TuneSettings::default().learning_rate)]
    learning_rate: f64,
}

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    let (mut claim, _) = LadderFile::find(&args.ladder)?;
    let pairs = std::mem::take(&mut claim.bridges);
    ensure!(!pairs.is_empty(), "the ladder {} names no bridge", claim.name);
    // Without its bridges, which may not exist yet.
    let ladder = Ladder::check(&claim, None, models)?;
    let text = texts_or(&args.text, || texts::calibration(ladder.template()))?;
    let held_out = texts_or(&args.held_out, || texts::held_out(ladder.template()))?;
    let settings = FitSettings {
        windows: args.windows,
        window_tokens: args.window_tokens,
        native_layers: args.native_layers,
        source_layers: args.source_layers,
        ..FitSettings::default()
    };
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    for pair in &pairs {
        let rung = |file: &str| {
            let at = claim.rungs.iter().position(|r| r.file == file);
            at.and_then(|at| ladder.rungs().get(at)).with_context(|| format!("no rung of the ladder uses {file}"))
        };
        let (from, to) = (rung(&pair.from)?, rung(&pair.to)?);
        // What was reached, until the bridge is written.
        let mut kept = Vec::new();
        let bar = bar(&format!("{} -> {}", pair.from, pair.to))?;
        let mut fitted = if args.from_bridges {
            Fitted::from_bridge(&own_bridge(&args.ladder, models, (&pair.from, &pair.to))?)
        } else {
            let keep = args.out.join(format!("{}.sums", pair.file));
            kept.push(keep.clone());
            fit(&ladder, (from, to), &text, &held_out, &settings, Some(&keep), &mut |done, total| {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            })?
        };
        if args.tune > 0 {
            let settings =
                TuneSettings { lessons: args.tune, learning_rate: args.learning_rate, ..TuneSettings::default() };
            let size = (&settings, args.tune_tokens);
            let keep = args.out.join(format!("{}.tuning", pair.file));
            let (tuned, report) = tune(&ladder, (from, to), fitted, &text, size, Some(&keep), &mut |at| {
                let TuneProgress { lessons, steps, divergence } = at;
                bar.set_length(args.tune as u64);
                bar.set_position(lessons as u64);
                // Past the bar, which is silent where nobody looks on.
                bar.suspend(|| {
                    eprintln!("{lessons} windows, {steps} steps: mean divergence {divergence:.4} on windows held apart")
                });
            })?;
            fitted = tuned;
            kept.push(keep);
            let TuneReport { before, after, best_step } = report;
            bar.suspend(|| println!("tuned for {best_step} steps: divergence {after:.4} instead of {before:.4}"));
        }
        bar.finish();
        let path = args.out.join(&pair.file);
        fitted.write(&path)?;
        for kept in kept.iter().filter(|kept| kept.exists()) {
            std::fs::remove_file(kept).with_context(|| format!("cannot remove {}", kept.display()))?;
        }
        let spec = fitted.spec();
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["layer", "keys", "values"]);
        let (mut keys, mut values) = (0.0, 0.0);
        for r in &spec.residuals {
            table.add_row([r.layer.to_string(), format!("{:.3}", r.keys), format!("{:.3}", r.values)]);
            (keys, values) = (keys + r.keys, values + r.values);
        }
        let count = spec.residuals.len().max(1) as f64;
        table.add_row(["mean".to_owned(), format!("{:.3}", keys / count), format!("{:.3}", values / count)]);
        println!("{}: {} calibration tokens, held-out relative errors", path.display(), spec.calibration_tokens);
        println!("{table}");
    }
    Ok(())
}

fn bar(pair: &str) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} windows {elapsed} < {eta}")?;
    Ok(ProgressBar::new(0).with_style(style).with_message(pair.to_owned()))
}

/// The bridge that the ladder has between two of its files.
fn own_bridge(ladder: &str, models: &Path, (from, to): (&str, &str)) -> Result<Bridge> {
    let ladder = Ladder::open(ladder, models)?;
    let rung = |file: &str| {
        let named = |rung: &Rung| rung.file().path().file_name().is_some_and(|name| name == file);
        let found = ladder.rungs().iter().zip(0u8..).find(|(rung, _)| named(rung));
        found.map(|(_, index)| RungIdx::new(index))
    };
    let bridge = match rung(from).zip(rung(to)) {
        Some((from, to)) => ladder.bridge(from, to, &Ledger::new())?,
        None => None,
    };
    bridge.with_context(|| format!("the ladder {} has no bridge from {from} to {to} to start from", ladder.name()))
}

/// The texts of the paths given, or those that ship with the program where none is.
pub(crate) fn texts_or(
    paths: &[PathBuf],
    shipped: impl FnOnce() -> Result<Vec<Document>, ModelError>,
) -> Result<Vec<Document>> {
    Ok(if paths.is_empty() { shipped()? } else { read_texts(paths)? })
}
