//! `molt events`: what the service does, as it does it.

use std::io::{ErrorKind, Write as _};
use std::ops::ControlFlow;

use anyhow::{Context as _, Result, bail};
use reqwest::Method;

use crate::connection::{self, Client, Service};
use crate::told::Told;

/// Show what the service does, as it does it: levers, switches, the budget, who asks and who is done.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tokens and samples of memory too, of which there are many.
    #[arg(long)]
    all: bool,
    /// End after so many events.
    #[arg(long)]
    count: Option<u64>,
    /// Print one JSON object a line instead, with every event.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    service: Service,
}

/// The route of the feed.
pub(crate) const PATH: &str = "/v1/events";

pub(crate) fn run(args: &Args) -> Result<()> {
    let client = Client::new(&args.service)?;
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut out = std::io::stdout();
    let mut line = |text: &str| {
        match writeln!(out, "{text}").and_then(|()| out.flush()) {
            // A reader that has seen enough is no error.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(ControlFlow::Break(())),
            written => written.context("cannot print")?,
        }
        left = left.saturating_sub(1);
        Ok(if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let hear = |data: &[u8]| {
        let text = std::str::from_utf8(data).context("the service sent something else than text")?;
        if args.json {
            return line(text);
        }
        let told: Told = serde_json::from_str(text).context("the service sent something else than an event")?;
        match told.event.words().filter(|_| args.all || !told.event.is_frequent()) {
            Some(words) => line(&format!("{:>10} s  {words}", seconds(told.at_ms))),
            None => Ok(ControlFlow::Continue(())),
        }
    };
    let heard_enough = connection::runtime()?.block_on(client.listen(Method::GET, PATH, None, hear))?;
    if !heard_enough {
        bail!("the service has stopped");
    }
    Ok(())
}

fn seconds(ms: u64) -> String {
    format!("{}.{:03}", ms / 1_000, ms % 1_000)
}
