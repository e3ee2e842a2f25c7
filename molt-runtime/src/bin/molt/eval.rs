//! `molt eval`: how well caches come over.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use molt_models::Ladder;
use molt_runtime::eval::{EvalSettings, Gates, Journal, Progress, Row, Setting, evaluate};
use molt_runtime::texts;
use molt_scheduler::units::RungIdx;

use crate::fit::texts_or;

/// Judges how well conversations come from each rung to each other, on text that no map has seen: the carried cache
/// against a native read by the destination. Gates are tried first; when one fails, no row is printed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    ladder: String,
    /// One JSON object a row.
    #[arg(long)]
    json: bool,
    /// 8 seams after 128 tokens: seconds on `pocket`.
    #[arg(long)]
    quick: bool,
    /// Pairs of rungs, source first [default: all with different weights].
    #[arg(long, value_delimiter = ',', value_parser = pair, value_name = "tierA:tierB")]
    pairs: Vec<(RungIdx, RungIdx)>,
    /// Tokens before a seam; seams lie there and up to three sixteenths earlier [default: 512,2048, or what the models
    /// hold].
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
    /// Seams of each row, rounded up to windows of four: one number, or one for each context [default: 200]. What is
    /// exact by construction is judged at 20 of them.
    #[arg(long, value_delimiter = ',')]
    seams: Vec<usize>,
    /// Ways to the destination [default: all]. `healed` is timed with the whole healing.
    #[arg(long, value_delimiter = ',')]
    settings: Vec<Setting>,
    /// File of finished seams: they are added to it, and those that are in it are not done again. Delete it when the
    /// program has changed.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Files and folders of text to judge on [default: the held-out texts that ship with the program].
    #[arg(long, num_args = 1..)]
    held_out: Vec<PathBuf>,
}

/// `tier0:tier1`.
pub(crate) fn pair(text: &str) -> Result<(RungIdx, RungIdx), String> {
    let rung = |text: &str| text.strip_prefix("tier")?.parse().ok().filter(|i| *i < RungIdx::LIMIT).map(RungIdx::new);
    let both = text.split_once(':').and_then(|(from, to)| rung(from).zip(rung(to)));
    both.ok_or_else(|| format!("{text:?} is no pair such as tier0:tier1"))
}

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    let ladder = Ladder::open(&args.ladder, models)?;
    let documents = texts_or(&args.held_out, || texts::held_out(ladder.template()))?;
    let mut settings = if args.quick { EvalSettings::quick() } else { EvalSettings::full() };
    if !args.pairs.is_empty() {
        settings.pairs = Some(args.pairs.clone());
    }
    if !args.contexts.is_empty() {
        settings.contexts = Some(args.contexts.clone());
    }
    if !args.settings.is_empty() {
        settings.ways.clone_from(&args.settings);
    }
    if !args.seams.is_empty() {
        settings.seams.clone_from(&args.seams);
    }
    let mut journal = args.resume.as_deref().map(Journal::open).transpose()?;
    let bar = bar()?;
    let reports = evaluate(&ladder, &documents, &settings, journal.as_mut(), &mut |at| show(&bar, at))?;
    bar.finish_and_clear();
    for report in &reports {
        eprintln!("{}: {}", report.pair, gates(&report.gates));
        if !report.bridged {
            eprintln!("{}: no bridge; only a keepsake can be judged", report.pair);
        }
    }
    let rows: Vec<&Row> = reports.iter().flat_map(|report| &report.rows).collect();
    if args.json {
        for row in rows {
            println!("{}", serde_json::to_string(row).context("a row is no JSON")?);
        }
    } else {
        println!("{}", table(&rows));
    }
    Ok(())
}

pub(crate) fn bar() -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} windows {elapsed} < {eta}")?;
    Ok(ProgressBar::new(0).with_style(style))
}

pub(crate) fn show(bar: &ProgressBar, at: &Progress) {
    bar.set_message(at.pair.clone());
    bar.set_length(at.total as u64);
    bar.set_position(at.done as u64);
}

/// The gates, which all hold, with their numbers.
fn gates(gates: &Gates) -> String {
    let control = |(control, kl): &(_, f64)| format!("{control:?} {kl:.3}");
    let controls: Vec<String> = gates.controls.iter().map(control).collect();
    format!(
        "gates hold: own cache off by {}, keys turned back and forth by {:.0e}, the same token's keys by {:.0e} (as cached \
         {:.2}); kl over 64 tokens carried {:.4}, {}",
        gates.own_cache_kl_max,
        gates.turned_error,
        gates.same_key_error.0,
        gates.same_key_error.1,
        gates.carried_kl_64,
        controls.join(", ")
    )
}

pub(crate) fn table(rows: &[&Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "pair",
        "setting",
        "context",
        "cost ratio",
        "carry ms",
        "reread ms",
        "seam JSD",
        "kl seam",
        "kl 8",
        "kl 64",
        "(95 %)",
        "kl 256",
        "top1 64",
        "nll",
        "ppl",
        "seams",
    ]);
    for row in rows {
        let interval = row.kl_64_low.zip(row.kl_64_high);
        table.add_row([
            row.pair.clone(),
            row.setting.name().to_owned(),
            row.context_tokens.to_string(),
            format!("{:.1}", row.cost_ratio),
            format!("{:.1}", row.carry_ms),
            format!("{:.1}", row.reread_ms),
            row.seam_jsd_ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            format!("{:.4}", row.kl_seam),
            format!("{:.4}", row.kl_8),
            format!("{:.4}", row.kl_64),
            interval.map_or_else(|| "-".to_owned(), |(low, high)| format!("{low:.4} to {high:.4}")),
            format!("{:.4}", row.kl_256),
            format!("{:.3}", row.top1_64),
            format!("{:+.4}", row.nll_delta_256),
            format!("{:.4}", row.ppl_ratio),
            row.seams.to_string(),
        ]);
    }
    table
}
