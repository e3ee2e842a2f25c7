//! `molt replay`: the scheduler under a pressure trace, without any model.

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use molt_models::{Ladder, LadderFile};
use molt_runtime::engine::ladder_cost;
use molt_runtime::replay::{Costs, Plot, PlotError, Round, Setup, Tenants, Text, run as run_replay};
use molt_runtime::trace::Trace;
use molt_scheduler::Policy;
use molt_scheduler::units::Bytes;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in pressure trace, or the path of one.
    trace: String,
    /// Built-in tenants, or the path of a file of them [default: the trace's own, or phone].
    #[arg(long)]
    tenants: Option<String>,
    /// What a ladder costs: phone, qwen2.5-coder, qwen2.5-coder-seed, pocket, or the path of a file of costs.
    #[arg(long, default_value = "phone")]
    ladder: String,
    /// Who bears the levers.
    #[arg(long, value_enum, default_value_t = PolicyName::LeverFirst)]
    policy: PolicyName,
    /// Draw budget, usage, levers and rungs over time into this file.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Print one JSON object a line instead: each round in which something happens, then the summary.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum PolicyName {
    LeverFirst,
    ProtectForeground,
}

/// Of the process with the embedded ladder and nothing loaded, as `molt demo` prints it.
const POCKET_OVERHEAD: Bytes = Bytes::mib(13);

pub(crate) fn run(args: &Args, models: &Path) -> Result<()> {
    let trace = Trace::find(&args.trace)?;
    let tenants = Tenants::find(args.tenants.as_deref().or(trace.tenants()).unwrap_or("phone"))?;
    let costs = match args.ladder.as_str() {
        "pocket" => pocket(models)?,
        other => Costs::find(other)?,
    };
    let policy = match args.policy {
        PolicyName::LeverFirst => Policy::LeverFirst,
        PolicyName::ProtectForeground => Policy::ProtectForeground,
    };
    let setup = Setup { trace: &trace, tenants: &tenants, costs: &costs, policy };
    match print(args, &setup) {
        // A reader that has seen enough is no error.
        Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            Ok(())
        }
        printed => printed,
    }
}

fn print(args: &Args, setup: &Setup<'_>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut text = Text::new(setup.tenants.tenants.len());
    let mut plot = args.svg.as_ref().map(|_| Plot::new());
    let mut printed = Ok(());
    if !args.json {
        write!(out, "{}", text.head())?;
    }
    let summary = run_replay(setup, |round: &Round| {
        if let Some(plot) = &mut plot {
            plot.round(round);
        }
        if printed.is_err() {
            return;
        }
        printed = match args.json {
            false => write!(out, "{}", text.round(round)),
            true if round.is_quiet() => Ok(()),
            true => serde_json::to_writer(&mut out, round).map_err(std::io::Error::from).and_then(|()| writeln!(out)),
        };
    })?;
    printed?;
    if args.json {
        serde_json::to_writer(&mut out, &summary).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        write!(out, "{}\n{summary}", text.close())?;
    }
    if let (Some(path), Some(plot)) = (&args.svg, plot) {
        let title = format!("{} with {} on {}", summary.trace, summary.tenants_name, summary.ladder);
        let picture = plot.draw(&title)?;
        std::fs::write(path, picture).map_err(|source| PlotError::Write { path: path.clone(), source })?;
    }
    Ok(())
}

fn pocket(models: &Path) -> Result<Costs> {
    let (claim, beside) = LadderFile::find("pocket")?;
    let ladder = Arc::new(Ladder::check(&claim, beside.as_deref(), models)?);
    let cost = ladder_cost(&ladder).context("the embedded ladder")?;
    Ok(Costs::of("pocket", cost, POCKET_OVERHEAD))
}
