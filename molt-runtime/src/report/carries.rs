//! What a switch costs, and how close what comes over is to what a native read would have made.

use std::collections::BTreeMap;

use super::charts::{Lines, Scale, short};
use super::page::Page;
use super::{ReportError, by};
use crate::bench::ladder::ResidualRow;
use crate::bench::results::Section;
use crate::bench::stats::Spread;
use crate::bench::switch_cost::SwitchCostRow;
use crate::eval;

pub(super) fn switch_cost(page: &mut Page, section: &Section<SwitchCostRow>) -> Result<(), ReportError> {
    page.text(
        "Both models in memory, the same tokens carried and read again in turn. Loading is what a cold switch takes beside.",
    );
    let ms = |samples: &[f64]| Spread::of(samples).map_or("-".to_owned(), |spread| format!("{spread:.0}"));
    let rows = section.rows.iter().map(|row| {
        vec![
            row.pair.clone(),
            row.setting.clone(),
            row.context_tokens.to_string(),
            ms(&row.carry_ms),
            ms(&row.reread_ms),
            format!("{:.1} x", row.cost_ratio),
            format!("{:.0} %", row.flops_ratio * 100.0),
            short(row.load_ms),
        ]
    });
    page.table(&["pair", "setting", "tokens", "carry ms", "read again ms", "cheaper", "operations", "load ms"], rows);
    for (pair, rows) in by(&section.rows, |row| row.pair.clone()) {
        let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows {
            let tokens = row.context_tokens as f64;
            let middle = |samples: &[f64]| Spread::of(samples).map_or(f64::NAN, |spread| spread.median);
            series.entry(format!("carry, {}", row.setting)).or_default().push((tokens, middle(&row.carry_ms)));
            let again = series.entry("read again".to_owned()).or_default();
            if again.last().is_none_or(|(last, _)| *last < tokens) {
                again.push((tokens, middle(&row.reread_ms)));
            }
        }
        let title = format!("What a switch costs, {pair}");
        let (x, y, series) = ("tokens", "ms, median", series.into_iter().collect());
        let lines = Lines { title: &title, x, y, scale: Scale::Logarithmic, series };
        page.figure(&lines.draw()?, "Carrying against reading again, both rungs warm; both axes logarithmic.");
    }
    Ok(())
}

pub(super) fn fidelity(page: &mut Page, section: &Section<eval::Row>) -> Result<(), ReportError> {
    page.text(
        "Reference: the destination after its own native read of the whole context. KL(native || carried) in nats, the mean \
         over the next 64 true tokens; 0 is a cache that nobody could tell from a native one. Held-out texts.",
    );
    divergences(page, section.rows.iter());
    for (pair, rows) in by(&section.rows, |row| row.pair.clone()) {
        let mut series: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.kl_64 > 0.0) {
            series.entry(row.context_tokens).or_default().push((row.cost_ratio, row.kl_64));
        }
        if series.is_empty() {
            continue;
        }
        let named = series.into_iter().map(|(context, mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            (format!("{context} tokens"), points)
        });
        let title = format!("Fidelity against cost, {pair}");
        let (x, y, series) = ("times cheaper than reading again", "kl 64, nats", named.collect());
        let lines = Lines { title: &title, x, y, scale: Scale::Logarithmic, series };
        page.figure(
            &lines.draw()?,
            "Each point is a setting: to the right cheaper, further down closer to native; both axes logarithmic.",
        );
    }
    Ok(())
}

pub(super) fn divergences<'a>(page: &mut Page, rows: impl Iterator<Item = &'a eval::Row>) {
    let rows = rows.map(|row| {
        let interval = row.kl_64_low.zip(row.kl_64_high);
        vec![
            row.pair.clone(),
            row.setting.name().to_owned(),
            row.context_tokens.to_string(),
            format!("{:.1} x", row.cost_ratio),
            row.seam_jsd_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
            format!("{:.4}", row.kl_seam),
            format!("{:.4}", row.kl_8),
            format!("{:.4}", row.kl_64),
            interval.map_or("-".to_owned(), |(low, high)| format!("{low:.4} to {high:.4}")),
            format!("{:.4}", row.kl_256),
            format!("{:.3}", row.top1_64),
            format!("{:+.4}", row.nll_delta_256),
            row.seams.to_string(),
        ]
    });
    page.table(
        &[
            "pair", "setting", "context", "cheaper", "seam JSD", "kl seam", "kl 8", "kl 64", "95 %", "kl 256",
            "top1 64", "nll", "seams",
        ],
        rows,
    );
}

pub(super) fn residuals(page: &mut Page, section: &Section<ResidualRow>) -> Result<(), ReportError> {
    page.text("What the fit leaves unexplained on held-out text; never used to accept a bridge.");
    for (pair, rows) in by(&section.rows, |row| row.pair.clone()) {
        let of = |value: fn(&ResidualRow) -> f64| rows.iter().map(|r| (r.layer as f64, value(r))).collect::<Vec<_>>();
        let series = vec![("keys".to_owned(), of(|r| r.keys_ratio)), ("values".to_owned(), of(|r| r.values_ratio))];
        let title = format!("Relative error by layer, {pair}");
        let (x, y) = ("destination layer", "relative error");
        let lines = Lines { title: &title, x, y, scale: Scale::Linear, series };
        page.figure(&lines.draw()?, "Keys before RoPE and values.");
    }
    Ok(())
}
