//! The report: one page that a browser opens without a network, made from `results.json` and from nothing else.

mod answers;
mod carries;
mod charts;
mod page;
mod published;
mod service;
mod shedding;

use std::collections::BTreeMap;

use page::{Page, mib};

use crate::bench::ladder::RungRow;
use crate::bench::results::{Results, Section};

/// A picture that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw {what}: {reason}")]
pub struct ReportError {
    what: &'static str,
    reason: String,
}

/// The page.
pub fn html(results: &Results) -> Result<String, ReportError> {
    let mut page = Page::new(results);
    for (at, of) in results.each().enumerate() {
        page.part(of, at == 0);
        published::published(&mut page, of);
        page.section("The ladder", of.ladder.as_ref(), ladder)?;
        page.section("A spike in mid-answer", of.conditions.as_ref(), answers::conditions)?;
        page.section("Answers that are right or wrong", of.tasks.as_ref(), answers::tasks)?;
        page.section("What a switch costs", of.switch_cost.as_ref(), carries::switch_cost)?;
        page.section("Fidelity", of.fidelity.as_ref(), carries::fidelity)?;
        page.section("Ablations", of.ablations.as_ref(), answers::ablations)?;
        page.section("Residuals of the maps", of.residuals.as_ref(), carries::residuals)?;
        // The simulator has a ladder of its own, and says the same beside every other.
        if at == 0 {
            page.section("Three tenants, one budget", of.tenants.as_ref(), service::tenants)?;
            page.section("Beside the policies of others", of.peers.as_ref(), service::peers)?;
        }
        page.section("A session on the wire", of.wire.as_ref(), service::wire)?;
        page.section("Engine", of.engine.as_ref(), service::engine)?;
        page.section("Real memory", of.memory.as_ref(), service::memory)?;
        page.section("Shedding", of.shedding.as_ref(), shedding::shedding)?;
    }
    Ok(page.close())
}

fn ladder(page: &mut Page, section: &Section<RungRow>) -> Result<(), ReportError> {
    let rows = section.rows.iter().map(|row| {
        vec![
            row.rung.clone(),
            row.file.clone(),
            row.precision.clone(),
            format!("{:.0} M", row.parameters as f64 / 1e6),
            mib(row.weights_bytes),
            format!("{:.1} KiB", row.cache_bytes_per_token as f64 / 1024.0),
            row.route.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    });
    page.table(&["rung", "file", "precision", "parameters", "weights", "cache a token", "from above by"], rows);
    Ok(())
}

/// Rows by a key, in the order of the keys.
fn by<K: Ord, R>(rows: &[R], key: impl Fn(&R) -> K) -> BTreeMap<K, Vec<&R>> {
    let mut groups: BTreeMap<K, Vec<&R>> = BTreeMap::new();
    for row in rows {
        groups.entry(key(row)).or_default().push(row);
    }
    groups
}
