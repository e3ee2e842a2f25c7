//! `molt bench` and `molt report`: figures, measured and shown.

mod memory;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use comfy_table::{Table, presets};
use molt_models::{Ladder, LadderFile};
use molt_runtime::bench::conditions::{self, ConditionRow};
use molt_runtime::bench::daemon::{self, DaemonSettings};
use molt_runtime::bench::engine::{self, EngineRow, EngineSettings};
use molt_runtime::bench::results::{Claim, Results, Section};
use molt_runtime::bench::stats::Spread;
use molt_runtime::bench::switch_cost::{self, SwitchCostRow};
use molt_runtime::bench::{ladder, tenants, wire};
use molt_runtime::engine::ladder_cost;
use molt_runtime::eval::{self, EvalSettings, Setting, evaluate};
use molt_runtime::{report, texts};
use molt_scheduler::units::{RungIdx, Tokens};

use crate::eval::{bar, show};

/// Measures on this machine, section by section, and writes `results.json` and `report.html`. Runs of what is compared
/// alternate, so that noise falls on both. An interrupted run is taken up where it ended: sections that are in
/// `results.json` are not measured again.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    #[arg(long, default_value = "qwen2.5-coder")]
    ladder: String,
    /// Little of everything: a minute on `pocket`.
    #[arg(long)]
    quick: bool,
    /// Only these sections [default: all].
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Measure sections again that are there already.
    #[arg(long)]
    again: bool,
    /// Folder of `results.json` and `report.html`.
    #[arg(long, default_value = "molt-bench")]
    out: PathBuf,
    /// A Python interpreter with llama-cpp-python, to compare with.
    #[arg(long)]
    llama_cpp: Option<PathBuf>,
    /// Runs of each, besides one that warms up.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Lengths of prompts [default: 256,2048, or 64 when quick].
    #[arg(long, value_delimiter = ',')]
    prompts: Vec<usize>,
    /// Tokens that are carried in the section on the cost of a switch [default: 128 to 8192, or 128 when quick].
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Tokens decoded after each prompt.
    #[arg(long, default_value_t = 64)]
    decode: usize,
    /// Sequences that are decoded together.
    #[arg(long, default_value_t = 8)]
    together: usize,
    /// Only these rungs (tier0, tier1, ...) in the engine's section.
    #[arg(long, value_delimiter = ',')]
    rungs: Vec<String>,
    /// Prompts of the section on a spike in mid-answer [default: 8, or 1 when quick].
    #[arg(long)]
    answers: Option<usize>,
    /// Seams of each row of the sections on fidelity [default: 200, or 8 when quick].
    #[arg(long)]
    seams: Option<usize>,
    /// Contexts of these sections [default: 512,2048 or what the models hold, or 128 when quick].
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
}

/// Sections, in the order of the report.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The rungs.
    Ladder,
    /// A spike in mid-answer, met in several ways.
    Conditions,
    /// A carry against reading again.
    SwitchCost,
    /// How close carried caches are to native ones.
    Fidelity,
    /// The most faithful carry with one of its means taken away at a time.
    Ablations,
    /// What the maps' fit leaves unexplained.
    Residuals,
    /// Three tenants under one budget, in the simulator; beside the policies of others.
    Tenants,
    /// A session with `moltd`, recorded.
    Wire,
    /// Prefill and decode of every rung.
    Engine,
    /// How fast memory comes back, whether the books are true, and a cold start.
    Memory,
}

/// Shows `results.json` as a page again.
#[derive(clap::Args)]
pub(crate) struct ReportArgs {
    /// The file.
    results: PathBuf,
    /// The page [default: `report.html` beside it].
    #[arg(long)]
    out: Option<PathBuf>,
}

pub(crate) fn report(args: &ReportArgs) -> Result<()> {
    let results = Results::read(&args.results)?;
    let page = args.out.clone().unwrap_or_else(|| args.results.with_file_name("report.html"));
    write_page(&results, &page)
}

fn write_page(results: &Results, page: &Path) -> Result<()> {
    std::fs::write(page, report::html(results)?).with_context(|| format!("cannot write {}", page.display()))?;
    eprintln!("{}", page.display());
    Ok(())
}

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    ensure!(args.runs > 0, "--runs 0 measures nothing");
    let (claim, folder) = LadderFile::find(&args.ladder)?;
    let ladder = Ladder::check(&claim, folder.as_deref(), models)?;
    let file = args.out.join("results.json");
    let mut results = Results::take_up(&file, ladder.name(), args.quick)?;
    let wanted = |part: Part, there: bool| {
        let asked = args.only.is_empty() || args.only.contains(&part);
        if asked && there && !args.again {
            eprintln!("{}: measured already", part.name());
        }
        asked && (!there || args.again)
    };
    if wanted(Part::Ladder, results.ladder.is_some()) {
        results.ladder = Some(ladder::rungs(&ladder));
        results.write(&file)?;
    }
    if wanted(Part::Conditions, results.conditions.is_some()) {
        let (prompts, answer) = if args.quick { (1, Tokens::new(64)) } else { (8, Tokens::new(260)) };
        let size = (args.answers.unwrap_or(prompts), answer);
        let done = |row: &ConditionRow| {
            eprintln!("prompt {}, {}: {} tokens", row.prompt, row.condition, row.tokens);
        };
        let section = conditions::measure((&claim, folder.as_deref()), models, size, done)?;
        say(Part::Conditions, &section.claims);
        results.conditions = Some(section);
        results.write(&file)?;
    }
    if wanted(Part::SwitchCost, results.switch_cost.is_some()) {
        let usual: &[usize] = if args.quick { &[128] } else { &[128, 256, 512, 1_024, 2_048, 4_096, 8_192] };
        let lengths = if args.lengths.is_empty() { usual } else { &args.lengths };
        let section = switch_cost::measure(&ladder, lengths, args.runs, |row| {
            eprintln!(
                "{}, {} tokens, {}: {:.1} times cheaper",
                row.pair, row.context_tokens, row.setting, row.cost_ratio
            );
        })?;
        say(Part::SwitchCost, &section.claims);
        println!("{}", switch_costs(&section.rows));
        results.switch_cost = Some(section);
        results.write(&file)?;
    }
    if wanted(Part::Fidelity, results.fidelity.is_some()) {
        results.fidelity = Some(judge(args, &ladder, None, &Setting::ALL)?);
        results.write(&file)?;
    }
    if wanted(Part::Ablations, results.ablations.is_some()) {
        let pairs = ladder::bridged(&ladder)?;
        results.ablations = Some(judge(args, &ladder, Some(pairs), &Setting::ABLATIONS)?);
        results.write(&file)?;
    }
    if wanted(Part::Residuals, results.residuals.is_some()) {
        results.residuals = Some(ladder::residuals(&ladder)?);
        results.write(&file)?;
    }
    if wanted(Part::Tenants, results.tenants.is_some() && results.peers.is_some()) {
        let (section, peers) = (tenants::measure()?, tenants::compare()?);
        say(Part::Tenants, &section.claims);
        say(Part::Tenants, &peers.claims);
        (results.tenants, results.peers) = (Some(section), Some(peers));
        results.write(&file)?;
    }
    if wanted(Part::Wire, results.wire.is_some()) {
        let settings = DaemonSettings {
            program: daemon::beside()?,
            ladder: args.ladder.clone(),
            models: models.to_owned(),
            // Until the session sets its own.
            budget_mib: 64 << 10,
        };
        let section = wire::record(&settings, &ladder_cost(&ladder)?)?;
        say(Part::Wire, &section.claims);
        results.wire = Some(section);
        results.write(&file)?;
    }
    if wanted(Part::Engine, results.engine.is_some()) {
        results.engine = Some(measure_engine(args, &ladder)?);
        results.write(&file)?;
    }
    if wanted(Part::Memory, results.memory.is_some()) {
        results.memory = Some(memory::measure(args, &Arc::new(ladder), models)?);
        results.write(&file)?;
    }
    write_page(&results, &args.out.join("report.html"))
}

impl Part {
    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

fn say(part: Part, claims: &[Claim]) {
    for Claim { claim, holds, found } in claims {
        println!("{}: {}: {claim} ({found})", part.name(), if *holds { "holds" } else { "does not hold" });
    }
}

/// Carries of those pairs (all where none is given), in those ways.
fn judge(
    args: &Args,
    ladder: &Ladder,
    pairs: Option<Vec<(RungIdx, RungIdx)>>,
    ways: &[Setting],
) -> Result<Section<eval::Row>> {
    let started = Instant::now();
    let usual = if args.quick { EvalSettings::quick() } else { EvalSettings::full() };
    let mut settings = EvalSettings { pairs, ways: ways.to_vec(), ..usual };
    if !args.contexts.is_empty() {
        settings.contexts = Some(args.contexts.clone());
    }
    settings.seams = args.seams.unwrap_or(settings.seams).max(1);
    let documents = texts::held_out(ladder.template())?;
    let bar = bar()?;
    let reports = evaluate(ladder, &documents, &settings, None, &mut |at| show(&bar, at))?;
    bar.finish_and_clear();
    let rows: Vec<eval::Row> = reports.into_iter().flat_map(|report| report.rows).collect();
    println!("{}", crate::eval::table(&rows.iter().collect::<Vec<_>>()));
    Ok(Section { rows, claims: Vec::new(), took_s: started.elapsed().as_secs_f64() })
}

fn measure_engine(args: &Args, ladder: &Ladder) -> Result<Section<EngineRow>> {
    let started = Instant::now();
    let usual: &[usize] = if args.quick { &[64] } else { &[256, 2_048] };
    let asked = if args.prompts.is_empty() { usual } else { &args.prompts };
    let fits = |prompt: &&usize| **prompt + args.decode < ladder.trained_context();
    let settings = EngineSettings {
        rungs: crate::ladder::rungs_of(ladder, &args.rungs)?,
        prompts: asked.iter().filter(fits).copied().collect(),
        decode_tokens: args.decode,
        together: args.together,
        runs: args.runs,
        llama_cpp: args.llama_cpp.clone(),
    };
    ensure!(!settings.prompts.is_empty(), "the models hold {} tokens: no such prompt", ladder.trained_context());
    let rows = engine::measure(ladder, &settings, |row| {
        eprintln!("{} after {} tokens: measured", row.rung, row.prompt_tokens);
    })?;
    println!("{}", speeds(&rows));
    Ok(Section { rows, claims: Vec::new(), took_s: started.elapsed().as_secs_f64() })
}

fn plain_table<const N: usize>(head: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(head);
    table
}

fn spread(samples: &[f64]) -> String {
    Spread::of(samples).map_or("-".to_owned(), |spread| format!("{spread:.1}"))
}

fn switch_costs(rows: &[SwitchCostRow]) -> Table {
    let mut table = plain_table(["pair", "setting", "tokens", "carry ms", "read again ms", "cheaper", "operations"]);
    for row in rows {
        table.add_row([
            row.pair.clone(),
            row.setting.clone(),
            row.context_tokens.to_string(),
            spread(&row.carry_ms),
            spread(&row.reread_ms),
            format!("{:.1} x", row.cost_ratio),
            format!("{:.0} %", row.flops_ratio * 100.0),
        ]);
    }
    table
}

fn speeds(rows: &[EngineRow]) -> Table {
    let mut table = plain_table([
        "rung",
        "prompt",
        "prefill tok/s",
        "against llama.cpp",
        "decode tok/s",
        "against llama.cpp",
        "memory GB/s",
        "of the bandwidth",
        "llama.cpp's",
        "together tok/s",
        "resident / weights",
    ]);
    let ratio = |ratio: Option<Spread>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    for row in rows {
        let gigabytes: Vec<f64> = row.bandwidth_bytes_s.iter().map(|bytes| bytes / 1e9).collect();
        table.add_row([
            format!("{}: {} at {}", row.rung, row.file, row.precision),
            row.prompt_tokens.to_string(),
            spread(&row.prefill_tok_s),
            ratio(row.prefill_ratio()),
            spread(&row.decode_tok_s),
            ratio(row.decode_ratio()),
            spread(&gigabytes),
            ratio(row.bandwidth_ratio()),
            ratio(row.llama_cpp_bandwidth_ratio()),
            format!("{:.1} ({:.1} x)", row.together_tok_s, row.together_tok_s / row.alone_tok_s),
            format!("{:.2}", row.resident_bytes as f64 / row.weights_bytes as f64),
        ]);
    }
    table
}
