//! `molt bench`: figures, measured.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use comfy_table::{Table, presets};
use molt_models::kernels::isa_name;
use molt_models::{Ladder, LadderFile};
use molt_runtime::bench::cold::{self, ColdSettings};
use molt_runtime::bench::engine::{self, EngineRow, EngineSettings};
use molt_runtime::bench::memory::{self, BooksRow, During, MemorySettings, ReleaseRow};
use molt_runtime::bench::stats::Spread;
use molt_scheduler::units::Bytes;

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
    /// How fast memory comes back, and whether the books are true.
    Memory,
}

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    let (claim, folder) = LadderFile::find(&args.ladder)?;
    let ladder = Arc::new(Ladder::check(&claim, folder.as_deref(), models)?);
    if args.only.is_empty() || args.only.contains(&Section::Engine) {
        measure_engine(args, &ladder)?;
    }
    if args.only.is_empty() || args.only.contains(&Section::Memory) {
        measure_memory(args, &ladder, models)?;
    }
    Ok(())
}

fn measure_memory(args: &Args, ladder: &Arc<Ladder>, models: &Path) -> Result<()> {
    anyhow::ensure!(args.runs > 0, "--runs 0 measures nothing");
    let prompt_tokens = args.prompts.iter().copied().max().unwrap_or(2_048).min(ladder.trained_context() / 2);
    let settings =
        MemorySettings { rungs: crate::ladder::rungs_of(ladder, &args.rungs)?, prompt_tokens, runs: args.runs };
    let report = memory::measure(ladder, &settings, |row| eprintln!("{} given back {} times", row.rung, args.runs))?;
    println!("{}\n\n{}", releases(&report.releases), books(&report.books));
    let smallest = ladder.cost().rungs().next_back().map_or(Bytes::ZERO, |(_, cost)| cost.weights + cost.scratch);
    let settings = ColdSettings {
        program: cold::beside()?,
        ladder: args.ladder.clone(),
        models: models.to_owned(),
        // Enough for the smallest rung and a short conversation, and for nothing bigger.
        budget_mib: (smallest.get() >> 20) + 160,
        runs: args.runs,
    };
    let row = cold::measure(&settings)?;
    let (serving, first) = (Spread::of(&row.serving_ms), row.first_token());
    let ms = |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| format!("{spread:.0} ms"));
    println!(
        "\ncold start of {}: serving after {}, first token (tier{}) after {}",
        row.ladder,
        ms(serving),
        row.rung,
        ms(first)
    );
    Ok(())
}

fn releases(rows: &[ReleaseRow]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "rung",
        "in the middle of",
        "given back",
        "back with the system, ms",
        "99 %, ms",
        "stall of the reader, ms",
        "highest / before",
        "highest after / budget",
    ]);
    let most = |samples: &[f64]| samples.iter().copied().reduce(f64::max).map_or("-".to_owned(), |m| format!("{m:.3}"));
    for row in rows {
        table.add_row([
            format!("{} at {}", row.rung, row.precision),
            match row.during {
                During::Prefill => format!("a prompt of {}", row.prompt_tokens),
                During::Answer => "an answer".to_owned(),
            },
            (row.before_bytes - row.budget_bytes).to_string(),
            row.reaction().map_or("-".to_owned(), |s| format!("{s:.1}")),
            row.reaction_p99_ms().map_or("-".to_owned(), |ms| format!("{ms:.1}")),
            Spread::of(&row.stall_ms).map_or("-".to_owned(), |s| format!("{s:.0}")),
            most(&row.peak_ratio),
            most(&row.within_ratio),
        ]);
    }
    table
}

fn books(rows: &[BooksRow]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "rung",
        "books",
        "resident",
        "books, files",
        "resident, files",
        "difference",
    ]);
    for row in rows {
        table.add_row([
            format!("{} at {}", row.rung, row.precision),
            row.books_bytes.to_string(),
            row.resident_bytes.to_string(),
            row.books_file_bytes.to_string(),
            row.resident_file_bytes.to_string(),
            format!("{:+.1} %", row.difference_ratio() * 100.0),
        ]);
    }
    table
}

fn measure_engine(args: &Args, ladder: &Ladder) -> Result<()> {
    anyhow::ensure!(args.runs > 0, "--runs 0 measures nothing");
    let settings = EngineSettings {
        rungs: crate::ladder::rungs_of(ladder, &args.rungs)?,
        prompts: args.prompts.clone(),
        decode_tokens: args.decode,
        together: args.together,
        runs: args.runs,
        llama_cpp: args.llama_cpp.clone(),
    };
    println!("kernels for {}, {} threads", isa_name(), rayon::current_num_threads());
    let rows = engine::measure(ladder, &settings, |row| {
        eprintln!("{} after {} tokens: measured", row.rung, row.prompt_tokens);
    })?;
    println!("{}", table(&rows));
    Ok(())
}

fn table(rows: &[EngineRow]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
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
    let spread = |samples: &[f64]| Spread::of(samples).map_or("-".to_owned(), |s| format!("{s:.1}"));
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
