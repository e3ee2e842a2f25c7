//! `molt ladder`: ladders of one's own.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use molt_kv::bridge::Bridge;
use molt_kv::ledger::Ledger;
use molt_models::{BridgeEntry, Ladder, LadderFile};
use molt_runtime::calibrate::{FitSettings, fit};
use molt_runtime::eval::{EvalError, EvalSettings, evaluate};
use molt_runtime::own_ladder::{CLOSE_KL_64, USABLE_KL_64, arrange, sentence, to_text};
use molt_runtime::texts::{self, Document};
use molt_scheduler::units::RungIdx;

use crate::eval::{bar, show};
use crate::fit::texts_or;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make a ladder of model files: order them, fit the bridges between neighbours, and say how good each is.
    #[command(after_help = verdicts())]
    New(New),
    Keep(Keep),
}

/// Keep the rungs that are built from a model file (f32, f16, q8_0, q4_0) as files in the models folder: loading them is
/// then a mapping. Takes their size on the disk; delete the folder `built` to have it back.
#[derive(clap::Args)]
pub(crate) struct Keep {
    /// A built-in ladder, or the path of a ladder file.
    ladder: String,
    /// Only these rungs (tier0, tier1, ...).
    #[arg(long, value_delimiter = ',')]
    rungs: Vec<String>,
}

#[derive(clap::Args)]
pub(crate) struct New {
    /// The ladder's name.
    name: String,
    /// Model files of the qwen2 and llama families, GGUF or safetensors (with `config.json` and `tokenizer.json` beside
    /// it), all with the same tokenizer. They stay where they are.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Folder that the ladder file and the bridges are written to.
    #[arg(long, default_value = ".")]
    out: PathBuf,
    /// Fit bridges up as well; without them going up restores a keepsake or reads again.
    #[arg(long)]
    both: bool,
    /// Windows of text that each bridge is fitted on: half an hour for 1.5B and 0.5B on two cores with 96.
    #[arg(long, default_value_t = 96)]
    windows: usize,
    /// Seams that each bridge is judged at.
    #[arg(long, default_value_t = 12)]
    seams: usize,
    /// Files and folders of text to fit on [default: the calibration texts that ship with the program].
    #[arg(long, num_args = 1..)]
    text: Vec<PathBuf>,
    /// Files and folders of text to judge on [default: the held-out texts that ship with the program].
    #[arg(long, num_args = 1..)]
    held_out: Vec<PathBuf>,
}

fn verdicts() -> String {
    format!(
        "A carry is called close where the mean divergence KL(native || carried) over 64 tokens after the seam is at most \
         {CLOSE_KL_64} nats, usable up to {USABLE_KL_64}, poor beyond that or where a control that should ruin the \
         continuation is not twice as bad."
    )
}

pub(crate) fn run(command: &Command, models: &Path) -> Result<()> {
    match command {
        Command::New(args) => new(args, models),
        Command::Keep(args) => keep(args, models),
    }
}

/// The rungs with these names, in the ladder's order; all of them where no name is given.
pub(crate) fn rungs_of(ladder: &Ladder, names: &[String]) -> Result<Vec<RungIdx>> {
    let rungs: Vec<RungIdx> = ladder.cost().rungs().map(|(rung, _)| rung).collect();
    if let Some(stranger) = names.iter().find(|name| !rungs.iter().any(|rung| rung.to_string() == **name)) {
        let known = rungs.iter().map(RungIdx::to_string).collect::<Vec<_>>().join(", ");
        anyhow::bail!("the ladder {} has no rung {stranger}; it has {known}", ladder.name());
    }
    Ok(rungs.into_iter().filter(|rung| names.is_empty() || names.contains(&rung.to_string())).collect())
}

fn keep(args: &Keep, models: &Path) -> Result<()> {
    let ladder = Ladder::open(&args.ladder, models)?;
    for index in rungs_of(&ladder, &args.rungs)? {
        let Some((rung, name)) = ladder.rung(index).zip(Some(index.to_string())) else { continue };
        let Some(path) = rung.kept_path(models) else {
            println!("{name}: lies in the model file as it is");
            continue;
        };
        if rung.kept().is_some() {
            println!("{name}: {} is there already", path.display());
            continue;
        }
        let style = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {elapsed} < {eta}")?;
        let bar = ProgressBar::new(0).with_style(style).with_message(name.clone());
        rung.keep(models, |done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        })?;
        bar.finish_and_clear();
        println!("{name}: {}", path.display());
    }
    Ok(())
}

fn new(args: &New, models: &Path) -> Result<()> {
    let mut claim = arrange(&args.name, &args.files)?;
    let path = args.out.join(format!("{}.toml", claim.name));
    anyhow::ensure!(!path.exists(), "{} is there already", path.display());
    // Held against the files before anything is written: a ladder that would be refused is not left behind.
    let ladder = Ladder::check(&claim, Some(&args.out), models)?;
    let text = texts_or(&args.text, || texts::calibration(ladder.template()))?;
    let held_out = texts_or(&args.held_out, || texts::held_out(ladder.template()))?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let rungs: Vec<RungIdx> = ladder.cost().rungs().map(|(rung, _)| rung).collect();
    for rung in &rungs {
        println!("{rung}  {}", claim.rungs[rung.get()].file);
    }
    let down = rungs.windows(2).map(|pair| (pair[0], pair[1]));
    let up = down.clone().map(|(above, below)| (below, above)).filter(|_| args.both);
    let pairs: Vec<(RungIdx, RungIdx)> = down.chain(up).collect();
    for (from, to) in &pairs {
        let file = format!("{}-{from}-to-{to}.bridge.safetensors", claim.name);
        bridge(args, &ladder, (*from, *to), &args.out.join(&file), (&text, &held_out))?;
        let name = |rung: &RungIdx| claim.rungs[rung.get()].file.clone();
        claim.bridges.push(BridgeEntry { from: name(from), to: name(to), file });
    }
    let with_bridges = Ladder::check(&claim, Some(&args.out), models)?;
    std::fs::write(&path, to_text(&claim)?).with_context(|| format!("cannot write {}", path.display()))?;
    for pair in pairs {
        println!("{}", judge(&with_bridges, &held_out, pair, args.seams)?);
    }
    println!("{} is ready: molt demo --ladder {}", path.display(), path.display());
    // The file as a stranger would read it.
    LadderFile::find(&path.display().to_string())?;
    Ok(())
}

/// Fits a bridge, unless one of these models is there from a run that was broken off.
fn bridge(
    args: &New,
    ladder: &Ladder,
    (from, to): (RungIdx, RungIdx),
    path: &Path,
    (text, held_out): (&[Document], &[Document]),
) -> Result<()> {
    let rung = |rung: RungIdx| ladder.rung(rung).with_context(|| format!("the ladder has no {rung}"));
    let (source, destination) = (rung(from)?, rung(to)?);
    if path.exists() {
        Bridge::open(path, &Ledger::new())?.check_models(source.source(), destination.source())?;
        eprintln!("{} is there already; delete it to have it fitted again", path.display());
        return Ok(());
    }
    let (layers_from, layers_to) = (source.config().layers, destination.config().layers);
    let settings = FitSettings { windows: args.windows, ..FitSettings::for_layers(layers_from, layers_to) };
    let bar = bar()?.with_message(format!("{from} -> {to}"));
    let keep = path.with_extension("sums");
    let fitted = fit(ladder, (source, destination), text, held_out, &settings, Some(&keep), &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    fitted.write(path)?;
    if keep.exists() {
        std::fs::remove_file(&keep).with_context(|| format!("cannot remove {}", keep.display()))?;
    }
    Ok(())
}

/// What a carry is worth, as a sentence; one that does no better than the controls is poor as well.
fn judge(ladder: &Ladder, held_out: &[Document], pair: (RungIdx, RungIdx), seams: usize) -> Result<String> {
    let settings = EvalSettings::brief(ladder, pair, seams)?;
    let bar = bar()?;
    let judged = evaluate(ladder, held_out, &settings, None, &mut |at| show(&bar, at));
    bar.finish_and_clear();
    match judged {
        Ok(reports) => {
            let rows = reports.iter().flat_map(|report| &report.rows);
            Ok(rows.map(sentence).collect::<Vec<_>>().join("\n"))
        }
        Err(EvalError::Gate { gate, found, .. }) => {
            Ok(format!("{} -> {}: poor: the gate \"{gate}\" fails: {found}", pair.0, pair.1))
        }
        Err(error) => Err(error.into()),
    }
}
