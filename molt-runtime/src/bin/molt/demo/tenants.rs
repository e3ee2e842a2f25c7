//! `molt demo --tenants` on a terminal: what happens to whom as it happens, and the table at the end.

use std::io::{ErrorKind, Write as _};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use comfy_table::{Table, presets};
use crossbeam_channel::Receiver;
use molt_models::Ladder;
use molt_runtime::demo::tenants::{TenantRow, TenantsSettings, TenantsSummary, run as run_tenants};
use molt_runtime::event::Event;
use molt_runtime::trace::Trace;
use molt_runtime::workers::Workers;
use molt_scheduler::Class;
use molt_scheduler::units::Bytes;

use super::screen::signed;
use super::{beside_the_engine, print_json};
use crate::told::News;

pub(super) fn run(
    ladder: Arc<Ladder>,
    trace: Trace,
    settings: TenantsSettings,
    json: bool,
    workers: Workers,
) -> Result<()> {
    let head = format!("ladder {}, trace {}, tenants {}", ladder.name(), trace.name(), settings.tenants.name);
    let summary = beside_the_engine(
        workers,
        move |tell| run_tenants(&ladder, &trace, &settings, tell),
        |told| if json { print_json(told) } else { print(&head, told) },
    )?;
    let Some(summary) = summary else { return Ok(()) };
    let text = match json {
        true => {
            let mut line = serde_json::to_value(&summary)?;
            line["event"] = "tenants_summary".into();
            line.to_string()
        }
        false => table(&summary),
    };
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot print"),
    }
}

/// Everything but tokens and samples, in the words of `molt events`.
fn print(head: &str, told: &Receiver<Event>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{head}\n")?;
    for event in told {
        let news: News = serde_json::from_value(serde_json::to_value(&event)?)?;
        if let Some(words) = news.words().filter(|_| !news.is_frequent()) {
            writeln!(out, "  {words}")?;
        }
    }
    writeln!(out)
}

fn table(summary: &TenantsSummary) -> String {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "tenant",
        "class",
        "answers",
        "tokens",
        "rungs (tokens)",
        "switches",
        "deferred",
        "demoted",
        "parked",
        "shed tokens",
        "longest wait to be let in",
        "longest wait for a token",
    ]);
    for (name, row) in &summary.tenants {
        let TenantRow { class, asked, answered, tokens, tokens_by_rung, switches, .. } = row;
        let TenantRow { defers, demotes, parks, shed_tokens, .. } = row;
        let class = match class {
            Some(Class::Foreground) => "foreground",
            Some(Class::Batch) => "batch",
            None => "",
        };
        let rungs: Vec<String> = tokens_by_rung.iter().map(|(rung, tokens)| format!("{rung} ({tokens})")).collect();
        table.add_row([
            name.clone(),
            class.to_owned(),
            format!("{answered} of {asked}"),
            tokens.to_string(),
            rungs.join(", "),
            switches.to_string(),
            defers.to_string(),
            demotes.to_string(),
            parks.to_string(),
            shed_tokens.to_string(),
            format!("{:.0} ms", row.admission_wait_ms_max),
            format!("{:.0} ms", row.token_wait_ms_max),
        ]);
    }
    let TenantsSummary { rounds, overshoot_bytes_max, rss_bytes_max, killed, .. } = summary;
    let (overshoot, resident) = (signed(*overshoot_bytes_max), Bytes::new(*rss_bytes_max));
    format!(
        "{table}\n\n{:24} {rounds}\n{:24} {overshoot}\n{:24} {resident}\n{:24} {killed}",
        "rounds", "maximum overshoot", "largest resident set", "killed"
    )
}
