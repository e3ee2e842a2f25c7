//! What was measured, as tables on a terminal.

use comfy_table::{Table, presets};
use molt_runtime::bench::conditions::ConditionRow;
use molt_runtime::bench::engine::EngineRow;
use molt_runtime::bench::shedding::{Left, Place, SheddingRun};
use molt_runtime::bench::stats::{Spread, wilson};
use molt_runtime::bench::switch_cost::SwitchCostRow;
use molt_runtime::bench::tasks::{TaskRow, Way, named, right};

pub(super) fn plain_table<const N: usize>(head: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(head);
    table
}

fn spread(samples: &[f64]) -> String {
    Spread::of(samples).map_or("-".to_owned(), |spread| format!("{spread:.1}"))
}

pub(super) fn switch_costs(rows: &[SwitchCostRow]) -> Table {
    let mut table = plain_table(["pair", "setting", "tokens", "carry ms", "read again ms", "cheaper", "operations"]);
    for row in rows {
        table.add_row([
            row.pair.clone(),
            row.setting.clone(),
            row.context_tokens.to_string(),
            spread(&row.carry_ms),
            spread(&row.reread_ms),
            format!("{:.1} x", row.cost_ratio),
            format!("{:.0} %", row.flops_ratio * 100.0),
        ]);
    }
    table
}

pub(super) fn speeds(rows: &[EngineRow]) -> Table {
    let mut table = plain_table([
        "rung",
        "prompt",
        "prefill tok/s",
        "against llama.cpp",
        "decode tok/s",
        "against llama.cpp",
        "memory GB/s",
        "of the bandwidth",
        "llama.cpp's",
        "together tok/s",
        "resident / weights",
    ]);
    let ratio = |ratio: Option<Spread>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    for row in rows {
        let gigabytes: Vec<f64> = row.bandwidth_bytes_s.iter().map(|bytes| bytes / 1e9).collect();
        table.add_row([
            format!("{}: {} at {}", row.rung, row.file, row.precision),
            row.prompt_tokens.to_string(),
            spread(&row.prefill_tok_s),
            ratio(row.prefill_ratio()),
            spread(&row.decode_tok_s),
            ratio(row.decode_ratio()),
            spread(&gigabytes),
            ratio(row.bandwidth_ratio()),
            ratio(row.llama_cpp_bandwidth_ratio()),
            format!("{:.1} ({:.1} x)", row.together_tok_s, row.together_tok_s / row.alone_tok_s),
            format!("{:.2}", row.resident_bytes as f64 / row.weights_bytes as f64),
        ]);
    }
    table
}

/// Right answers, each way.
pub(super) fn tasks(rows: &[TaskRow]) -> Table {
    let mut table = plain_table(["who answers", "right", "95 %", "named at least"]);
    for way in Way::ALL {
        let count = right(rows, way);
        let range = wilson(count, rows.len())
            .map_or("-".to_owned(), |(low, high)| format!("{:.0} to {:.0} %", low * 100.0, high * 100.0));
        let named = named(rows, way).to_string();
        table.add_row([way.to_string(), format!("{count} of {}", rows.len()), range, named]);
    }
    table
}

/// Answers under the spike.
pub(super) fn answers(rows: &[ConditionRow]) -> Table {
    let mut table = plain_table([
        "condition",
        "prompt",
        "tokens",
        "first token ms",
        "longest stall ms",
        "tokens/s",
        "log-probability",
        "repeated",
    ]);
    for row in rows {
        let judged = |of: fn(&molt_runtime::bench::judge::Judged) -> f64| {
            row.judged.as_ref().map_or("-".to_owned(), |judged| format!("{:.3}", of(judged)))
        };
        table.add_row([
            row.condition.to_string(),
            row.prompt.to_string(),
            row.tokens.to_string(),
            format!("{:.0}", row.first_token_ms),
            format!("{:.0}", row.stall_ms),
            format!("{:.1}", row.answer_tok_s),
            judged(|judged| judged.mean_logprob_nats),
            judged(|judged| judged.repeated_ratio),
        ]);
    }
    table
}

/// What is still known.
pub(super) fn shedding(runs: &[SheddingRun]) -> Table {
    let mut table = plain_table([
        "rung",
        "shed",
        "what is left",
        "kept facts: likeliest",
        "said",
        "shed facts: likeliest",
        "said",
        "perplexity",
    ]);
    for run in runs {
        for left in Left::ALL {
            let facts = |place| match run.recall_of(left, place) {
                Some(row) => [format!("{} of {}", row.likeliest, row.asked), row.said.to_string()],
                None => ["-".to_owned(), "-".to_owned()],
            };
            let ([kept, kept_said], [shed, shed_said]) = (facts(Place::Kept), facts(Place::Shed));
            table.add_row([
                run.rung.clone(),
                format!("{} of {}", run.shed_tokens, run.context_tokens),
                left.to_string(),
                kept,
                kept_said,
                shed,
                shed_said,
                format!("{:.2}", run.perplexity(left)),
            ]);
        }
    }
    table
}
