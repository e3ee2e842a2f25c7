//! `molt hog`: a program that wants memory.

use std::io::Write as _;

use anyhow::Result;
use molt_runtime::hog::{Schedule, run as run_hog};
use molt_scheduler::units::Bytes;

/// Take and touch memory on a schedule, as a camera, a browser or a leak does; to be run beside a service.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How memory is wanted over time.
    schedule: Schedule,
    /// How much of it at the most, in MiB.
    #[arg(long)]
    mib: u64,
    /// Print one JSON object a line instead.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let name = format!("{:?}", args.schedule);
    run_hog(args.schedule, Bytes::mib(args.mib), |held| {
        let line = match args.json {
            true => serde_json::to_string(&held).unwrap_or_default(),
            false => format!("{name}: {} held after {:.1} s", held.held_bytes, held.after_ms / 1e3),
        };
        // Whoever does not read on any more still sees the memory go.
        let _closed = writeln!(std::io::stdout(), "{line}");
    })?;
    Ok(())
}
