//! `molt record`: what the system says of its memory, as a pressure trace.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use molt_runtime::record::{Reader, condense, write};
use molt_scheduler::units::Time;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Time between two samples.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..))]
    every_ms: u64,
    /// For how long.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Most steps of the trace; small changes are left out until it has no more.
    #[arg(long, default_value_t = 200)]
    steps: usize,
    /// The budget, in percent of what is available.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100))]
    share: u64,
    /// What is going on meanwhile, for the head of the trace.
    #[arg(long, default_value = "The memory of a machine.")]
    about: String,
    /// Name of the trace.
    #[arg(long, default_value = "recorded")]
    name: String,
    /// Where the trace goes [default: standard output].
    #[arg(long)]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let reader = Reader::new("/proc");
    let (started, whole) = (Instant::now(), Duration::from_secs(args.seconds));
    let mut samples = Vec::new();
    loop {
        let past = started.elapsed();
        let at = if samples.is_empty() { 0 } else { u64::try_from(past.as_millis())? };
        samples.push(reader.read(Time::from_millis(at))?);
        if past >= whole {
            break;
        }
        std::thread::sleep(Duration::from_millis(args.every_ms).min(whole - past));
    }
    let text = write(&args.name, &args.about, args.share, &condense(&samples, args.steps));
    match &args.out {
        Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}
