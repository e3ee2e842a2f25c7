//! `molt bench`: figures, measured.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use comfy_table::{Table, presets};
use molt_kv::decoder::StopFlag;
use molt_kv::ledger::{Kind, Ledger};
use molt_models::kernels::isa_name;
use molt_models::{Ladder, LadderFile, Stored};
use molt_runtime::bench::LlamaCpp;
use molt_runtime::bench::engine::{self, Workload};
use molt_runtime::bench::stats::Spread;
use molt_runtime::memory;
use molt_scheduler::units::RungIdx;

/// Measures on this machine. Runs of what is compared alternate, so that noise falls on both.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    #[arg(long, default_value = "qwen2.5-coder")]
    ladder: String,
    /// Only these sections.
    #[arg(long)]
    only: Vec<Section>,
    /// A Python interpreter with llama-cpp-python, to compare with.
    #[arg(long)]
    llama_cpp: Option<PathBuf>,
    /// Runs of each, besides one that warms up.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Lengths of prompts.
    #[arg(long, value_delimiter = ',', default_value = "256,2048")]
    prompts: Vec<usize>,
    /// Tokens decoded after each prompt.
    #[arg(long, default_value_t = 64)]
    decode: usize,
    /// Sequences that are decoded together.
    #[arg(long, default_value_t = 8)]
    together: usize,
    /// Only these rungs (tier0, tier1, ...).
    #[arg(long, value_delimiter = ',')]
    rungs: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Section {
    /// Prefill and decode of every rung.
    Engine,
}

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    let (claim, folder) = LadderFile::find(&args.ladder)?;
    let ladder = Ladder::check(&claim, folder.as_deref(), models)?;
    if args.only.is_empty() || args.only.contains(&Section::Engine) {
        measure_engine(args, &ladder)?;
    }
    Ok(())
}

fn measure_engine(args: &Args, ladder: &Ladder) -> Result<()> {
    let threads = rayon::current_num_threads();
    let bandwidth = engine::read_bandwidth();
    println!("kernels for {}, {threads} threads; memory is read at {:.1} GB/s", isa_name(), bandwidth / 1e9);
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "rung",
        "prompt",
        "prefill tok/s",
        "against llama.cpp",
        "decode tok/s",
        "against llama.cpp",
        "of the bandwidth",
        "together tok/s",
        "resident / weights",
    ]);
    for (rung, index) in ladder.rungs().iter().zip(0u8..) {
        let name = RungIdx::new(index).to_string();
        if !args.rungs.is_empty() && !args.rungs.contains(&name) {
            continue;
        }
        let (ledger, stop) = (Ledger::new(), StopFlag::new());
        let before = memory::resident_set();
        let model = rung.load(&ledger, &stop)?;
        for prompt_tokens in &args.prompts {
            let load = Workload { prompt_tokens: *prompt_tokens, decode_tokens: args.decode };
            let python = args.llama_cpp.as_deref();
            let widened = rung.precision().linear == Stored::F32;
            let start = |python| LlamaCpp::start(python, rung.file().path(), widened, threads, load);
            let mut other = python.map(start).transpose()?;
            let mut ratios = (Vec::new(), Vec::new());
            let (mut prefill, mut decode) = (Vec::new(), Vec::new());
            for run in 0..=args.runs {
                let ours = engine::run(&model, load, &ledger)?;
                // The first warms up.
                if run > 0 {
                    prefill.push(ours.prefill_tok_s);
                    decode.push(ours.decode_tok_s);
                    if let Some(theirs) = other.as_mut().map(LlamaCpp::run).transpose()? {
                        ratios.0.push(ours.prefill_tok_s / theirs.prefill_tok_s);
                        ratios.1.push(ours.decode_tok_s / theirs.decode_tok_s);
                    }
                }
            }
            let (prefill, decode) =
                Spread::of(&prefill).zip(Spread::of(&decode)).context("--runs 0 measures nothing")?;
            let resident = memory::resident_set() - before - ledger.used(Kind::Scratch);
            let together =
                engine::run_together(&model, args.together, Workload { prompt_tokens: 32, ..load }, &ledger)?;
            let ratio = |ratios: &[f64]| Spread::of(ratios).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            let share = decode.median * model.bytes_per_token() as f64 / bandwidth;
            table.add_row([
                format!("{name}: {} at {}", stem(rung.file().path()), rung.precision()),
                prompt_tokens.to_string(),
                format!("{prefill:.1}"),
                ratio(&ratios.0),
                format!("{decode:.1}"),
                ratio(&ratios.1),
                format!("{:.0} %", share * 100.0),
                format!("{together:.1} ({:.1} x)", together / decode.median),
                format!("{:.2}", resident.as_mib() / ledger.used(Kind::Weights).as_mib()),
            ]);
        }
    }
    println!("{table}");
    Ok(())
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
