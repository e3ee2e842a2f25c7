//! Several tenants, a session on the wire, the engine, and memory.

use super::ReportError;
use super::charts::{Bar, Bars, short};
use super::page::{Page, mib};
use crate::bench::engine::EngineRow;
use crate::bench::memory::{During, MemoryRun};
use crate::bench::results::Section;
use crate::bench::stats::Spread;
use crate::bench::tenants::{PolicyRow, TenantsRun};
use crate::bench::wire::{Side, WireRow};

pub(super) fn tenants(page: &mut Page, section: &Section<TenantsRun>) -> Result<(), ReportError> {
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
        page.large_figure(
            &run.picture_svg,
            &format!("{}, {}: budget and usage; who stands where.", run.trace, run.policy),
        );
    }
    Ok(())
}

pub(super) fn peers(page: &mut Page, section: &Section<PolicyRow>) -> Result<(), ReportError> {
    page.text(
        "The same trace, tenants, costs and speeds, reckoned: what runtimes do that hold one big model. No program of others \
         was run. A killed process is started again once a request fits, and its clients ask again.",
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

pub(super) fn wire(page: &mut Page, section: &Section<WireRow>) -> Result<(), ReportError> {
    page.text(
        "Recorded from the socket of the program. Chunks of text are left out but for the first of each rung; nothing else is \
         changed.",
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

pub(super) fn engine(page: &mut Page, section: &Section<EngineRow>) -> Result<(), ReportError> {
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
    let bar = |samples: &[f64]| {
        Spread::of(samples).map(|spread| Bar { value: spread.median, range: Some((spread.min, spread.max)) })
    };
    let groups = section.rows.iter().map(|row| {
        let values = vec![bar(&row.decode_tok_s), bar(&row.llama_cpp_decode_tok_s)];
        (format!("{}, {} tokens", row.rung, row.prompt_tokens), values)
    });
    let series = vec!["Molt".to_owned(), "llama.cpp".to_owned()];
    let bars = Bars { title: "Decode", unit: "tokens/s, median and range", series, groups: groups.collect() };
    page.figure(&bars.draw()?, "One conversation, greedy; lines span the runs.");
    Ok(())
}

pub(super) fn memory(page: &mut Page, section: &Section<MemoryRun>) -> Result<(), ReportError> {
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
