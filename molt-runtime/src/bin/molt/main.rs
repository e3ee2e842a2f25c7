//! `molt`: demonstrations, replays of pressure, fetching models, fitting and judging bridges.

mod batch;
mod bench;
mod client;
mod connection;
mod demo;
#[cfg(test)]
mod docs;
mod doctor;
mod eval;
mod events;
mod fit;
mod hog;
mod ladder;
mod manual;
mod record;
mod replay;
mod told;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use molt_models::LadderFile;
use molt_models::pull::{self, PullOptions};
use molt_runtime::manual::EXIT_CODES;
use molt_runtime::paths;
use molt_runtime::workers::Workers;

/// Language models that change between two tokens when memory is wanted back, and take the conversation along.
#[derive(Parser)]
#[command(name = "molt", version, after_help = EXIT_CODES)]
struct Cli {
    /// Folder of the model files [default: $MOLT_MODELS, or molt/models in the user's data folder].
    #[arg(long, global = true)]
    models: Option<PathBuf>,
    #[command(flatten)]
    workers: Workers,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a conversation that changes models while the budget moves.
    Demo(demo::Args),
    Chat(client::ChatArgs),
    Complete(client::CompleteArgs),
    Batch(batch::Args),
    Budget(client::BudgetArgs),
    Tenants(client::TenantsArgs),
    Events(events::Args),
    Top(top::Args),
    Doctor(doctor::Args),
    /// Fetch the model files of a ladder.
    Pull(PullArgs),
    /// Fit the bridges of a ladder from text.
    Fit(fit::Args),
    /// Judge how well conversations come from rung to rung, on held-out text.
    Eval(eval::Args),
    /// Ladders of your own.
    #[command(subcommand)]
    Ladder(ladder::Command),
    /// Run the scheduler under a pressure trace, without any model.
    Replay(replay::Args),
    /// Record a pressure trace from what this machine says of its memory.
    Record(record::Args),
    Hog(hog::Args),
    Bench(bench::Args),
    Report(bench::ReportArgs),
    /// List the built-in ladders.
    Ladders,
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

#[derive(clap::Args)]
struct PullArgs {
    /// A built-in ladder, or the path of a ladder file.
    ladder: String,
    /// Take the files from this folder and from nowhere else.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Address of the model hub [default: $HF_ENDPOINT or the public hub].
    #[arg(long)]
    endpoint: Option<String>,
    /// Draw no progress bars.
    #[arg(long)]
    quiet: bool,
}

const NO_FOLDER: &str = "no folder for models: give --models, or set MOLT_MODELS or HOME";

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("molt: {error:#}");
            if error.is::<connection::Ended>() { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let Cli { models, workers, command } = cli;
    // Clients of the service need no models.
    let folder = || models.clone().or_else(paths::models_folder).context(NO_FOLDER);
    match command {
        Command::Chat(args) => client::chat(&args),
        Command::Complete(args) => client::complete(&args),
        Command::Batch(args) => batch::run(&args),
        Command::Budget(args) => client::budget(&args),
        Command::Tenants(args) => client::tenants(&args),
        Command::Events(args) => events::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Doctor(args) => {
            // Where nobody has named a folder, the service's own may be meant.
            let named = models.or_else(paths::named_models_folder);
            doctor::run(&args, named, paths::models_folder())
        }
        Command::Hog(args) => hog::run(&args),
        Command::Demo(args) => demo::run(&args, &folder()?, workers),
        Command::Report(args) => bench::report(&args),
        Command::Bench(args) => workers.run(|| bench::run(&args, &folder()?))?,
        Command::Fit(args) => workers.run(|| fit::run(&args, &folder()?))?,
        Command::Eval(args) => workers.run(|| eval::run(&args, &folder()?))?,
        Command::Ladder(command) => workers.run(|| ladder::run(&command, &folder()?))?,
        Command::Replay(args) => replay::run(&args, &folder()?),
        Command::Record(args) => record::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
        Command::Ladders => {
            let models = folder()?;
            for name in LadderFile::built_in() {
                let (ladder, _) = LadderFile::find(name)?;
                let state = if ladder.is_pulled(&models) { "ready" } else { "not pulled" };
                println!("{name:20} {state:12} {}", ladder.description);
            }
            Ok(())
        }
        Command::Pull(args) => {
            let (ladder, _) = LadderFile::find(&args.ladder)?;
            let options = PullOptions {
                endpoint: args.endpoint,
                from: args.from,
                progress: !args.quiet,
                ..PullOptions::default()
            };
            pull_ladder(&ladder, &folder()?, &options)
        }
    }
}

/// Fetches what a ladder needs and says where it came from.
fn pull_ladder(ladder: &LadderFile, models: &std::path::Path, options: &PullOptions) -> Result<()> {
    let files = ladder.files_to_pull();
    if files.is_empty() {
        let own = ladder.files.iter().any(|file| file.path.is_some());
        let where_it_is = if own { "lies where its ladder file says" } else { "is part of the program" };
        eprintln!("{} {where_it_is}; there is nothing to fetch", ladder.name);
        return Ok(());
    }
    std::fs::create_dir_all(models).with_context(|| format!("cannot make the folder {}", models.display()))?;
    for pulled in pull::pull(&files, models, options)? {
        eprintln!("{}: {:?}, {} bytes", pulled.path.display(), pulled.origin, pulled.bytes);
    }
    Ok(())
}
