//! The memory section: measured, and printed as tables.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use comfy_table::Table;
use molt_models::Ladder;
use molt_runtime::bench::cold;
use molt_runtime::bench::daemon::{self, DaemonSettings};
use molt_runtime::bench::memory::{self, BooksRow, During, MemoryRun, MemorySettings, ReleaseRow};
use molt_runtime::bench::results::Section;
use molt_runtime::bench::stats::Spread;
use molt_scheduler::units::Bytes;

use super::{Args, Part, plain_table, said};

/// Room beside the smallest rung for a short conversation, in MiB, and for nothing bigger.
const COLD_ROOM_MIB: u64 = 160;

pub(super) fn measure(args: &Args, name: &str, ladder: &Arc<Ladder>, models: &Path) -> Result<Section<MemoryRun>> {
    let started = Instant::now();
    let asked = if args.quick { 128 } else { args.prompts.iter().copied().max().unwrap_or(2_048) };
    let settings = MemorySettings {
        rungs: crate::ladder::rungs_of(ladder, &args.rungs)?,
        prompt_tokens: asked.min(ladder.trained_context() / 2),
        runs: args.runs,
    };
    let report = memory::measure(ladder, &settings, |row| eprintln!("{} given back {} times", row.rung, args.runs))?;
    println!("{}\n\n{}", releases(&report.releases), books(&report.books));
    let smallest = ladder.cost().rungs().next_back().map_or(Bytes::ZERO, |(_, cost)| cost.weights + cost.scratch);
    let start = DaemonSettings {
        program: daemon::beside()?,
        ladder: name.to_owned(),
        models: models.to_owned(),
        budget_mib: (smallest.get() >> 20) + COLD_ROOM_MIB,
    };
    let cold = cold::measure(&start, args.runs)?;
    let ms = |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| format!("{spread:.0} ms"));
    let (serving, first) = (ms(Spread::of(&cold.serving_ms)), ms(cold.first_token()));
    println!("\ncold start of {}: serving after {serving}, first token (tier{}) after {first}", cold.ladder, cold.rung);
    let run = MemoryRun { releases: report.releases, books: report.books, cold };
    let claims = run.claims();
    Ok(said(Part::Memory, Section { rows: vec![run], claims, took_s: started.elapsed().as_secs_f64() }))
}

fn releases(rows: &[ReleaseRow]) -> Table {
    let mut table = plain_table([
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
    let mut table = plain_table(["rung", "books", "resident", "books, files", "resident, files", "difference"]);
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
