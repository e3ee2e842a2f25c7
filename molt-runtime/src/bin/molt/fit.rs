//! `molt fit`: bridges from text.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use molt_models::{Ladder, LadderFile, ModelError};
use molt_runtime::calibrate::{FitSettings, fit, read_texts};
use molt_runtime::texts::{self, Document};

/// Reads text with both models of every pair that the ladder file names, and writes the bridges. On two cores the pair
/// 1.5B to 0.5B takes about half an hour with the default of 96 windows; `pocket` takes seconds.
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
        let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} windows {elapsed} < {eta}")?;
        let bar = ProgressBar::new(0).with_style(style).with_message(format!("{} -> {}", pair.from, pair.to));
        let fitted = fit(&ladder, (from, to), &text, &held_out, &settings, &mut |done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        })?;
        bar.finish();
        let path = args.out.join(&pair.file);
        fitted.write(&path)?;
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

/// The texts of the paths given, or those that ship with the program where none is.
pub(crate) fn texts_or(
    paths: &[PathBuf],
    shipped: impl FnOnce() -> Result<Vec<Document>, ModelError>,
) -> Result<Vec<Document>> {
    Ok(if paths.is_empty() { shipped()? } else { read_texts(paths)? })
}
