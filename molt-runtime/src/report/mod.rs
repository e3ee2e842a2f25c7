//! The report: one page that a browser opens without a network, made from `results.json` and from nothing else.

mod charts;
mod page;

use std::collections::BTreeMap;

use charts::{Bars, Lines, short};
use page::{Page, mib};

use crate::bench::conditions::{Condition, ConditionRow};
use crate::bench::engine::EngineRow;
use crate::bench::ladder::{ResidualRow, RungRow};
use crate::bench::memory::{During, MemoryRun};
use crate::bench::results::{Results, Section};
use crate::bench::stats::Spread;
use crate::bench::switch_cost::SwitchCostRow;
use crate::bench::tenants::{PolicyRow, TenantsRun};
use crate::bench::wire::{Side, WireRow};
use crate::eval;

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
    page.section("The ladder", results.ladder.as_ref(), ladder)?;
    page.section("A spike in mid-answer", results.conditions.as_ref(), conditions)?;
    page.section("What a switch costs", results.switch_cost.as_ref(), switch_cost)?;
    page.section("Fidelity", results.fidelity.as_ref(), fidelity)?;
    page.section("Ablations", results.ablations.as_ref(), ablations)?;
    page.section("Residuals of the maps", results.residuals.as_ref(), residuals)?;
    page.section("Three tenants, one budget", results.tenants.as_ref(), tenants)?;
    page.section("Beside the policies of others", results.peers.as_ref(), peers)?;
    page.section("A session on the wire", results.wire.as_ref(), wire)?;
    page.section("Engine", results.engine.as_ref(), engine)?;
    page.section("Real memory", results.memory.as_ref(), memory)?;
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

fn median<R>(rows: &[&R], of: impl Fn(&R) -> f64) -> f64 {
    Spread::of(&rows.iter().map(|row| of(row)).collect::<Vec<_>>()).map_or(f64::NAN, |spread| spread.median)
}

fn conditions(page: &mut Page, section: &Section<ConditionRow>) -> Result<(), ReportError> {
    page.text(
        "The budget falls in mid-answer and comes back. A runtime that does not react is counted as killed when it uses more \
         than the budget; no process was killed. Medians over prompts.",
    );
    let groups = by(&section.rows, |row| row.condition);
    let rows = groups.iter().map(|(condition, rows)| {
        let count =
            |of: fn(&ConditionRow) -> bool| format!("{} of {}", rows.iter().filter(|r| of(r)).count(), rows.len());
        let mut written: BTreeMap<&str, u64> = BTreeMap::new();
        for (rung, tokens) in rows.iter().flat_map(|row| &row.tokens_by_rung) {
            *written.entry(rung).or_default() += tokens;
        }
        let all: u64 = written.values().sum();
        let shares =
            written.iter().map(|(rung, tokens)| format!("{rung} {:.0} %", *tokens as f64 / all.max(1) as f64 * 100.0));
        vec![
            condition.to_string(),
            count(|row| row.completed),
            count(|row| row.killed_simulated),
            short(median(rows, |row| row.tokens as f64)),
            shares.collect::<Vec<_>>().join(", "),
            short(median(rows, |row| row.first_token_ms)),
            short(median(rows, |row| row.stall_ms)),
            short(median(rows, |row| row.answer_tok_s)),
            format!("{:.1} MiB", rows.iter().map(|row| row.overshoot_bytes).max().unwrap_or(0) as f64 / 1_048_576.0),
        ]
    });
    page.table(
        &[
            "condition",
            "completed",
            "killed (simulated)",
            "tokens",
            "written by",
            "first token ms",
            "longest stall ms",
            "tokens/s",
            "overshoot at most",
        ],
        rows,
    );
    let groups =
        groups.iter().map(|(condition, rows)| (condition.to_string(), vec![Some(median(rows, |row| row.stall_ms))]));
    let series = vec!["longest stall".to_owned()];
    let bars = Bars { title: "Longest stall between two tokens", unit: "ms, median", series, groups: groups.collect() };
    page.figure(&bars.draw()?, "How long a reader waits at worst, by how the spike is met.");
    let molt = section.rows.iter().filter(|row| row.condition == Condition::Molt);
    let switches: u64 = molt.map(|row| row.switches).sum();
    page.text(&format!("Molt changed rungs {switches} times in these answers."));
    Ok(())
}

fn switch_cost(page: &mut Page, section: &Section<SwitchCostRow>) -> Result<(), ReportError> {
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
        let lines = Lines { title: &title, x: "tokens", y: "ms, median", series: series.into_iter().collect() };
        page.figure(&lines.draw()?, "Carrying against reading again, both rungs warm; both axes logarithmic.");
    }
    Ok(())
}

fn fidelity(page: &mut Page, section: &Section<eval::Row>) -> Result<(), ReportError> {
    page.text(
        "Reference: the destination after its own native read of the whole context. KL(native || carried) in nats, the mean \
         over the next 64 true tokens; 0 is a cache that nobody could tell from a native one. Held-out texts.",
    );
    divergences(page, section);
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
        let lines =
            Lines { title: &title, x: "times cheaper than reading again", y: "kl 64, nats", series: named.collect() };
        page.figure(&lines.draw()?, "Each point is a setting: to the right cheaper, further down closer to native.");
    }
    Ok(())
}

fn ablations(page: &mut Page, section: &Section<eval::Row>) -> Result<(), ReportError> {
    page.text(
        "The most faithful carry, and the same without one of its means: first tokens, last window, chosen tokens.",
    );
    divergences(page, section);
    Ok(())
}

fn divergences(page: &mut Page, section: &Section<eval::Row>) {
    let rows = section.rows.iter().map(|row| {
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

fn residuals(page: &mut Page, section: &Section<ResidualRow>) -> Result<(), ReportError> {
    page.text("What the fit leaves unexplained on held-out text; never used to accept a bridge.");
    for (pair, rows) in by(&section.rows, |row| row.pair.clone()) {
        let of = |value: fn(&ResidualRow) -> f64| rows.iter().map(|r| (r.layer as f64, value(r))).collect::<Vec<_>>();
        let series = vec![("keys".to_owned(), of(|r| r.keys_ratio)), ("values".to_owned(), of(|r| r.values_ratio))];
        let title = format!("Relative error by layer, {pair}");
        let lines = Lines { title: &title, x: "destination layer", y: "relative error", series };
        page.figure(&lines.draw()?, "Keys before RoPE and values.");
    }
    Ok(())
}

fn tenants(page: &mut Page, section: &Section<TenantsRun>) -> Result<(), ReportError> {
    page.text("The real scheduler over its simulator; costs and speeds are those of an assumed phone.");
    for run in &section.rows {
        let rows = run.tenants.iter().map(|tenant| {
            vec![
                tenant.tenant.clone(),
                format!("{} of {}", tenant.finished, tenant.requests),
                tenant.tokens.to_string(),
                short(tenant.wait_mean_ms),
                short(tenant.parked_max_ms),
            ]
        });
        page.text(&format!(
            "{}: {} defers, {} demotions, {} parks, {} sheds; nobody killed.",
            run.policy, run.defers, run.demotes, run.parks, run.sheds
        ));
        page.table(&["tenant", "finished", "tokens", "mean wait ms", "longest stop ms"], rows);
        page.figure(&run.picture_svg, &format!("{}, {}: budget and usage; who stands where.", run.trace, run.policy));
    }
    Ok(())
}

fn peers(page: &mut Page, section: &Section<PolicyRow>) -> Result<(), ReportError> {
    page.text(
        "The same trace, tenants, costs and speeds, reckoned: what runtimes do that hold one big model. No program of others          was run. A killed process is started again once a request fits, and its clients ask again.",
    );
    let rows = section.rows.iter().map(|row| {
        vec![
            row.policy.clone(),
            format!("{} of {}", row.finished, row.requests),
            row.kills.to_string(),
            row.restarts.to_string(),
            row.wasted_tokens.to_string(),
            format!("{:.1} MiB", row.overshoot_bytes as f64 / 1_048_576.0),
            format!("{:.1} s", row.answer_mean_ms / 1e3),
            format!("{:.1} s", row.lasted_ms / 1e3),
        ]
    });
    page.table(
        &[
            "policy",
            "answered",
            "killed",
            "began again",
            "tokens for nothing",
            "overshoot at most",
            "an answer takes",
            "all takes",
        ],
        rows,
    );
    Ok(())
}

fn wire(page: &mut Page, section: &Section<WireRow>) -> Result<(), ReportError> {
    page.text(
        "Recorded from the socket of the program. Chunks of text are left out but for the first of each rung; nothing else is          changed.",
    );
    let (mut text, mut rung, mut left_out) = (String::new(), None, 0u64);
    let omitted = |text: &mut String, left_out: &mut u64| {
        if *left_out > 0 {
            text.push_str(&format!("           ... {left_out} chunks of text\n"));
        }
        *left_out = 0;
    };
    for row in &section.rows {
        let chunk: serde_json::Value = serde_json::from_str(&row.line).unwrap_or_default();
        let plain =
            chunk["choices"][0]["delta"]["content"].is_string() && chunk["choices"][0]["finish_reason"].is_null();
        let own = chunk["molt"]["rung"].as_u64();
        if row.from == Side::Service && plain && own == rung {
            left_out += 1;
            continue;
        }
        omitted(&mut text, &mut left_out);
        rung = own.or(rung);
        let from = match row.from {
            Side::Client => "client  ",
            Side::Operator => "operator",
            Side::Service => "service ",
        };
        text.push_str(&format!("{:>8.0} ms  {from}  {}\n", row.at_ms, row.line));
    }
    omitted(&mut text, &mut left_out);
    page.verbatim(&text);
    Ok(())
}

fn engine(page: &mut Page, section: &Section<EngineRow>) -> Result<(), ReportError> {
    page.text(
        "Tokens a second: median (smallest to largest) of runs that alternate with llama.cpp on the same file and threads. \
         The bandwidth is what plain reading reached right before each run.",
    );
    let spread = |samples: &[f64]| Spread::of(samples).map_or("-".to_owned(), |spread| format!("{spread:.1}"));
    let ratio = |ratio: Option<Spread>| ratio.map_or("-".to_owned(), |ratio| format!("{:.2}", ratio.median));
    let rows = section.rows.iter().map(|row| {
        vec![
            format!("{} {} ({})", row.rung, row.file, row.precision),
            row.prompt_tokens.to_string(),
            spread(&row.prefill_tok_s),
            ratio(row.prefill_ratio()),
            spread(&row.decode_tok_s),
            ratio(row.decode_ratio()),
            ratio(row.bandwidth_ratio()),
            format!("{:.1} ({:.1} x one)", row.together_tok_s, row.together_tok_s / row.alone_tok_s),
            format!("{:.2}", row.resident_bytes as f64 / row.weights_bytes.max(1) as f64),
        ]
    });
    let together = section.rows.first().map_or(0, |row| row.together);
    let together = format!("{together} together tok/s");
    page.table(
        &[
            "rung",
            "prompt",
            "prefill tok/s",
            "/ llama.cpp",
            "decode tok/s",
            "/ llama.cpp",
            "of the bandwidth",
            &together,
            "resident / weights",
        ],
        rows,
    );
    let middle = |samples: &[f64]| Spread::of(samples).map(|spread| spread.median);
    let groups = section.rows.iter().map(|row| {
        let values = vec![middle(&row.decode_tok_s), middle(&row.llama_cpp_decode_tok_s)];
        (format!("{}, {} tokens", row.rung, row.prompt_tokens), values)
    });
    let series = vec!["Molt".to_owned(), "llama.cpp".to_owned()];
    let bars = Bars { title: "Decode", unit: "tokens/s, median", series, groups: groups.collect() };
    page.figure(&bars.draw()?, "One conversation, greedy.");
    Ok(())
}

fn memory(page: &mut Page, section: &Section<MemoryRun>) -> Result<(), ReportError> {
    page.text(
        "The budget falls below what is used while a rung is busy. Time runs from that signal until the resident set, without \
         pages of the program's own file, is within 2 % of the budget; a sampler looks every 5 ms.",
    );
    for run in &section.rows {
        let ms = |samples: &[f64]| Spread::of(samples).map_or("-".to_owned(), |spread| format!("{spread:.1}"));
        let most =
            |samples: &[f64]| samples.iter().copied().reduce(f64::max).map_or("-".to_owned(), |m| format!("{m:.3}"));
        let rows = run.releases.iter().map(|row| {
            vec![
                format!("{} at {}", row.rung, row.precision),
                match row.during {
                    During::Prefill => format!("a prompt of {}", row.prompt_tokens),
                    During::Answer => "an answer".to_owned(),
                },
                mib((row.before_bytes - row.budget_bytes).get()),
                ms(&row.reaction_ms),
                row.reaction_p99_ms().map_or("-".to_owned(), |ms| format!("{ms:.1}")),
                ms(&row.stall_ms),
                most(&row.peak_ratio),
                most(&row.within_ratio),
            ]
        });
        page.table(
            &[
                "rung",
                "in the middle of",
                "given back",
                "ms until it is back",
                "99 %",
                "stall of the reader ms",
                "highest / before",
                "highest after / budget",
            ],
            rows,
        );
        let rows = run.books.iter().map(|row| {
            vec![
                format!("{} at {}", row.rung, row.precision),
                mib(row.books_bytes.get()),
                mib(row.resident_bytes.get()),
                mib(row.books_file_bytes.get()),
                mib(row.resident_file_bytes.get()),
                format!("{:+.1} %", row.difference_ratio() * 100.0),
            ]
        });
        page.table(&["rung", "books", "resident", "books, files", "resident, files", "difference"], rows);
        let ms = |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| format!("{spread:.0} ms"));
        page.text(&format!(
            "Cold start of {}: serving after {}, first token (tier{}) after {}.",
            run.cold.ladder,
            ms(Spread::of(&run.cold.serving_ms)),
            run.cold.rung,
            ms(run.cold.first_token())
        ));
    }
    Ok(())
}
