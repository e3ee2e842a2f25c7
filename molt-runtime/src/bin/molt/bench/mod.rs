//! `molt bench` and `molt report`: figures, measured and shown.

mod estimate;
mod memory;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use molt_models::{Ladder, LadderFile};
use molt_runtime::bench::ablations::AblationRow;
use molt_runtime::bench::conditions::{self, ConditionRow, Mean};
use molt_runtime::bench::daemon::{self, DaemonSettings};
use molt_runtime::bench::engine::{self, EngineRow, EngineSettings};
use molt_runtime::bench::results::{Claim, Results, Section};
use molt_runtime::bench::shedding::{self, SheddingSettings};
use molt_runtime::bench::switch_cost;
use molt_runtime::bench::{ladder, tasks, tenants, wire};
use molt_runtime::engine::ladder_cost;
use molt_runtime::eval::{self, EvalSettings, Journal, Setting, evaluate};
use molt_runtime::{report, texts};
use molt_scheduler::units::{RungIdx, Tokens};

use crate::eval::{bar, show};
use estimate::Estimate;
use tables::plain_table;

/// Measures on this machine, section by section, and writes `results.json` and `report.html`. Runs of what is compared
/// alternate, so that noise falls on both. An interrupted run is taken up where it ended: sections that are in
/// `results.json` and seams that are in the journal are not measured again.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Built-in ladders, or paths of ladder files. The first is the headline; what does not depend on a ladder is measured
    /// with it alone.
    #[arg(long, value_delimiter = ',', default_value = "qwen2.5-coder,qwen2.5-coder-seed")]
    ladder: Vec<String>,
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
    /// Tokens that are carried in the section on the cost of a switch [default: 32 to 8192, or 128 when quick].
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
    /// Seams of each row of the sections on fidelity: one number, or one for each context [default: 200, or 8 when
    /// quick]. What is exact by construction is judged at 20 of them.
    #[arg(long, value_delimiter = ',')]
    seams: Vec<usize>,
    /// Contexts of these sections [default: 512,2048 or what the models hold, or 128 when quick].
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
    /// Pairs of rungs of the section on fidelity, source first [default: all with different weights].
    #[arg(long, value_delimiter = ',', value_parser = crate::eval::pair, value_name = "tierA:tierB")]
    pairs: Vec<(RungIdx, RungIdx)>,
    /// File of finished seams, as `molt eval --resume` writes it: what is in it is not measured again [default:
    /// `seams.jsonl` beside `results.json`, begun anew with it].
    #[arg(long)]
    journal: Option<PathBuf>,
    /// Questions that are asked across a switch [default: all, or 2 when quick].
    #[arg(long)]
    questions: Option<usize>,
    /// Texts of the section on shedding, and half as many contexts full of facts [default: 12, or 2 when quick].
    #[arg(long)]
    texts: Option<usize>,
    /// Tokens of a context of which a part is shed [default: 512, or 240 when quick or where the models hold no more].
    #[arg(long)]
    shed_context: Option<usize>,
}

/// Sections, in the order of the report.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The rungs.
    Ladder,
    /// A spike in mid-answer, met in several ways.
    Conditions,
    /// Small questions with a right answer, answered across a switch.
    Tasks,
    /// A carry against reading again.
    SwitchCost,
    /// How close carried caches are to native ones.
    Fidelity,
    /// One of the means taken away at a time: of the most faithful carry, and of Molt under the spike.
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
    /// What is still known when the oldest context has gone.
    Shedding,
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
    let file = args.out.join("results.json");
    let mut results = None;
    for (at, name) in args.ladder.iter().enumerate() {
        let (claim, folder) = LadderFile::find(name)?;
        let ladder = Ladder::check(&claim, folder.as_deref(), models)?;
        let fresh = !file.exists();
        let mut found = Results::take_up(&file, ladder.name(), args.quick)?;
        let run = Run { args, models, name, claim, folder, ladder: Arc::new(ladder), first: at == 0 };
        if run.first && (fresh || args.again) {
            run.begin_journal()?;
        }
        for part in Part::value_variants().iter().copied() {
            if !run.wants(part, found.of(&run.claim.name)) {
                continue;
            }
            eprintln!("{}: {}", run.claim.name, part.name());
            run.measure(part, found.of(&run.claim.name))?;
            found.write(&file)?;
        }
        results = Some(found);
    }
    let results = results.context("--ladder names no ladder")?;
    write_page(&results, &args.out.join("report.html"))
}

/// One ladder of a run.
struct Run<'a> {
    args: &'a Args,
    models: &'a Path,
    /// As it was asked for.
    name: &'a str,
    claim: LadderFile,
    folder: Option<PathBuf>,
    ladder: Arc<Ladder>,
    /// Whether it is the headline.
    first: bool,
}

impl Run<'_> {
    /// Whether a section is to be measured.
    fn wants(&self, part: Part, results: &Results) -> bool {
        let asked = self.args.only.is_empty() || self.args.only.contains(&part);
        // The simulator has a ladder of its own.
        let asked = asked && (self.first || part != Part::Tenants);
        let there = match part {
            Part::Ladder => results.ladder.is_some(),
            Part::Conditions => results.conditions.is_some(),
            Part::Tasks => results.tasks.is_some(),
            Part::SwitchCost => results.switch_cost.is_some(),
            Part::Fidelity => results.fidelity.is_some(),
            Part::Ablations => results.ablations.is_some(),
            Part::Residuals => results.residuals.is_some(),
            Part::Tenants => results.tenants.is_some() && results.peers.is_some(),
            Part::Wire => results.wire.is_some(),
            Part::Engine => results.engine.is_some(),
            Part::Memory => results.memory.is_some(),
            Part::Shedding => results.shedding.is_some(),
        };
        if asked && there && !self.args.again {
            eprintln!("{}: {}: measured already", self.claim.name, part.name());
        }
        asked && (!there || self.args.again)
    }

    fn measure(&self, part: Part, results: &mut Results) -> Result<()> {
        let (args, ladder) = (self.args, &*self.ladder);
        match part {
            Part::Ladder => results.ladder = Some(ladder::rungs(ladder)),
            Part::Conditions => results.conditions = Some(self.conditions()?),
            Part::Tasks => {
                let count = args.questions.unwrap_or(if args.quick { 2 } else { usize::MAX }).min(tasks::how_many());
                let mut estimate = Estimate::of(count);
                let section = tasks::measure(ladder, count, |row| estimate.done(&row.kind))?;
                println!("{}", tables::tasks(&section.rows));
                results.tasks = Some(said(part, section));
            }
            Part::SwitchCost => results.switch_cost = Some(self.switch_cost()?),
            Part::Fidelity => {
                let pairs = (!args.pairs.is_empty()).then(|| args.pairs.clone());
                results.fidelity = Some(self.judge(pairs, &Setting::ALL)?);
            }
            Part::Ablations => results.ablations = Some(self.ablations()?),
            Part::Residuals => results.residuals = Some(ladder::residuals(ladder)?),
            Part::Tenants => {
                let (section, peers) = (tenants::measure()?, tenants::compare()?);
                (results.tenants, results.peers) = (Some(said(part, section)), Some(said(part, peers)));
            }
            Part::Wire => {
                let settings = DaemonSettings {
                    program: daemon::beside()?,
                    ladder: self.name.to_owned(),
                    models: self.models.to_owned(),
                    // Until the session sets its own.
                    budget_mib: 64 << 10,
                };
                results.wire = Some(said(part, wire::record(&settings, &ladder_cost(ladder)?)?));
            }
            Part::Engine => results.engine = Some(measure_engine(args, ladder)?),
            Part::Memory => results.memory = Some(memory::measure(args, self.name, &self.ladder, self.models)?),
            Part::Shedding => results.shedding = Some(self.shedding()?),
        }
        Ok(())
    }

    /// Prompts and the length of an answer.
    fn answers(&self) -> (usize, Tokens) {
        let (prompts, answer) = if self.args.quick { (1, Tokens::new(64)) } else { (8, Tokens::new(260)) };
        (self.args.answers.unwrap_or(prompts), answer)
    }

    fn conditions(&self) -> Result<Section<ConditionRow>> {
        let size = self.answers();
        let mut estimate = Estimate::of(size.0 * conditions::ways(&self.claim));
        let done = |row: &ConditionRow| estimate.done(&answered(row));
        let section = conditions::measure((&self.claim, self.folder.as_deref()), self.models, size, done)?;
        println!("{}", tables::answers(&section.rows));
        Ok(said(Part::Conditions, section))
    }

    fn ablations(&self) -> Result<Section<AblationRow>> {
        let carried = self.judge(Some(ladder::bridged(&self.ladder)?), &Setting::ABLATIONS)?;
        let (started, size) = (Instant::now(), self.answers());
        let mut estimate = Estimate::of(size.0 * (1 + Mean::ALL.len()));
        let done = |row: &ConditionRow| estimate.done(&answered(row));
        let traced = conditions::ablate((&self.claim, self.folder.as_deref()), self.models, size, done)?;
        println!("{}", tables::answers(&traced));
        let took_s = carried.took_s + started.elapsed().as_secs_f64();
        let traced = traced.into_iter().map(AblationRow::Trace);
        let rows = carried.rows.into_iter().map(AblationRow::Carry).chain(traced).collect();
        Ok(Section { rows, claims: carried.claims, took_s })
    }

    fn switch_cost(&self) -> Result<Section<switch_cost::SwitchCostRow>> {
        let (args, ladder) = (self.args, &self.ladder);
        let usual: &[usize] = if args.quick { &[128] } else { &[32, 128, 512, 1_024, 2_048, 4_096, 8_192] };
        let lengths = if args.lengths.is_empty() { usual } else { &args.lengths };
        let rows = ladder::bridged(ladder)?.len() * switch_cost::SETTINGS.len();
        let fitting = lengths.iter().filter(|length| **length <= ladder.trained_context()).count();
        let mut estimate = Estimate::of(rows * fitting);
        let section = switch_cost::measure(ladder, lengths, args.runs, |row| {
            let (pair, tokens, setting) = (&row.pair, row.context_tokens, &row.setting);
            estimate.done(&format!("{pair}, {tokens} tokens, {setting}: {:.1} times cheaper", row.cost_ratio));
        })?;
        println!("{}", tables::switch_costs(&section.rows));
        Ok(said(Part::SwitchCost, section))
    }

    fn shedding(&self) -> Result<Section<shedding::SheddingRun>> {
        let (args, ladder) = (self.args, &self.ladder);
        let short = args.quick || ladder.trained_context() < 1_024;
        let texts = args.texts.unwrap_or(if args.quick { 2 } else { 12 });
        let settings = SheddingSettings {
            rung: ladder.cost().bottom(),
            context_tokens: args.shed_context.unwrap_or(if short { 240 } else { 512 }),
            facts: texts.div_ceil(2),
            windows: texts,
        };
        let documents = texts::held_out(ladder.template())?;
        let mut estimate = Estimate::of(settings.facts + settings.windows);
        let section = shedding::measure(ladder, &documents, &settings, |what| estimate.done(what))?;
        println!("{}", tables::shedding(&section.rows));
        Ok(said(Part::Shedding, section))
    }

    /// Where finished seams are kept.
    fn journal(&self) -> PathBuf {
        self.args.journal.clone().unwrap_or_else(|| self.args.out.join("seams.jsonl"))
    }

    /// Seams of an earlier program do not count as this one's, unless a person says so.
    fn begin_journal(&self) -> Result<()> {
        let path = self.journal();
        if self.args.journal.is_none() && path.exists() {
            std::fs::remove_file(&path).with_context(|| format!("cannot begin {} anew", path.display()))?;
        }
        Ok(())
    }

    /// Carries of those pairs (all where none is given), in those ways.
    fn judge(&self, pairs: Option<Vec<(RungIdx, RungIdx)>>, ways: &[Setting]) -> Result<Section<eval::Row>> {
        let (args, ladder, started) = (self.args, &self.ladder, Instant::now());
        let usual = if args.quick { EvalSettings::quick() } else { EvalSettings::full() };
        let mut settings = EvalSettings { pairs, ways: ways.to_vec(), ..usual };
        if !args.contexts.is_empty() {
            settings.contexts = Some(args.contexts.clone());
        }
        if !args.seams.is_empty() {
            settings.seams.clone_from(&args.seams);
        }
        let documents = texts::held_out(ladder.template())?;
        std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
        let (mut journal, bar) = (Journal::open(&self.journal())?, bar()?);
        let mut windows = None;
        let reports = evaluate(ladder, &documents, &settings, Some(&mut journal), &mut |at| {
            show(&bar, at);
            // Where there is no terminal, lines: each pair has windows of its own.
            let (pair, estimate) = windows.get_or_insert_with(|| (at.pair.clone(), Estimate::of(at.total)));
            if *pair != at.pair {
                (*pair, *estimate) = (at.pair.clone(), Estimate::of(at.total));
            }
            if bar.is_hidden() && at.done > 0 {
                estimate.done(&at.pair);
            }
        })?;
        bar.finish_and_clear();
        let rows: Vec<eval::Row> = reports.into_iter().flat_map(|report| report.rows).collect();
        println!("{}", crate::eval::table(&rows.iter().collect::<Vec<_>>()));
        let claims = eval::claims(&rows);
        Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
    }
}

fn answered(row: &ConditionRow) -> String {
    format!("prompt {}, {}: {} tokens", row.prompt, row.condition, row.tokens)
}

impl Part {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The section, once its claims have been printed.
fn said<T>(part: Part, section: Section<T>) -> Section<T> {
    for Claim { claim, holds, found } in &section.claims {
        println!("{}: {}: {claim} ({found})", part.name(), if *holds { "holds" } else { "does not hold" });
    }
    section
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
    let rungs = if settings.rungs.is_empty() { ladder.rungs().len() } else { settings.rungs.len() };
    let mut estimate = Estimate::of(rungs * settings.prompts.len());
    let rows = engine::measure(ladder, &settings, |row| {
        estimate.done(&format!("{} after {} tokens", row.rung, row.prompt_tokens));
    })?;
    println!("{}", tables::speeds(&rows));
    Ok(Section { rows, claims: Vec::new(), took_s: started.elapsed().as_secs_f64() })
}
