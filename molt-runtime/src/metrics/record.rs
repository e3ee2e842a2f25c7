//! Events become numbers here, and nowhere else. Labels are words of a fixed set or rungs of the ladder; a name that a
//! client chooses is never one.

use metrics::{counter, gauge, histogram};
use molt_kv::carry::Route;
use molt_scheduler::units::{Bytes, RungIdx};
use molt_scheduler::{Class, LeverKind, Standing};

use crate::event::{Event, FinishReason, LimitDirection, Start, Switch, TroubleKind, UsageByKind};

/// A wait for a next token that a reader notices as one: what a carry may take by default.
const STALL_MS: f64 = 1_000.0;

const CLASSES: [Class; 2] = [Class::Foreground, Class::Batch];
/// Histograms with a label for the class.
const OF_A_CLASS: [&str; 6] = [
    "molt_queue_wait_seconds",
    "molt_first_token_seconds",
    "molt_inter_token_seconds",
    "molt_answer_seconds",
    "molt_stall_seconds",
    "molt_reaction_stall_seconds",
];
/// Why requests are refused, for the zeroes.
const REASONS: [&str; 7] =
    ["unknown_tenant", "empty_prompt", "over_context", "over_quota", "never_fits", "queue_full", "tenant_queue_full"];

/// `a - b`, as far as it can be said.
pub(super) fn difference(a: Bytes, b: Bytes) -> i64 {
    let wide = i128::from(a.get()) - i128::from(b.get());
    i64::try_from(wide).unwrap_or(if wide < 0 { i64::MIN } else { i64::MAX })
}

/// Counts one event. `overshoot_max` is the largest of any sample so far.
pub(super) fn record(event: &Event, overshoot_max: i64) {
    match event {
        Event::Start(start) => started(start),
        Event::Asked { class, prompt_tokens, .. } => {
            counter!("molt_requests_total", "class" => class_name(*class)).increment(1);
            counter!("molt_prompt_tokens_total", "class" => class_name(*class)).increment(prompt_tokens.get());
        }
        Event::Refused { reason, .. } => counter!("molt_refusals_total", "reason" => *reason).increment(1),
        Event::Admitted { class, wait_ms, cached_tokens, .. } => {
            seconds("molt_queue_wait_seconds", *class, *wait_ms);
            counter!("molt_reused_tokens_total", "class" => class_name(*class)).increment(cached_tokens.get());
        }
        Event::Token { class, nth, wait_ms: Some(wait_ms), rung, .. } => {
            counter!("molt_tokens_total", "rung" => rung_name(*rung), "class" => class_name(*class)).increment(1);
            if nth.get() <= 1 {
                seconds("molt_first_token_seconds", *class, *wait_ms);
                return;
            }
            seconds("molt_inter_token_seconds", *class, *wait_ms);
            if *wait_ms > STALL_MS {
                seconds("molt_stall_seconds", *class, *wait_ms);
            }
        }
        // Text without a token of its own.
        Event::Token { wait_ms: None, .. } => {}
        // The sample of the same round has the figures.
        Event::Budget { .. } => counter!("molt_budget_changes_total").increment(1),
        Event::Limit { direction, .. } => {
            counter!("molt_limit_steps_total", "direction" => direction_name(*direction)).increment(1);
        }
        Event::Reaction { reaction_ms, .. } => histogram!("molt_reaction_seconds").record(reaction_ms / 1e3),
        Event::Stall { class, stall_ms, .. } => seconds("molt_reaction_stall_seconds", *class, *stall_ms),
        Event::GivenUp { .. } => counter!("molt_given_up_steps_total").increment(1),
        Event::Standby { .. } => counter!("molt_standbys_total").increment(1),
        Event::Switch(switch) => switched(switch),
        Event::Lever { kind, class, bytes, tokens, .. } => {
            let (kind, class) = (lever_name(*kind), class_name(*class));
            counter!("molt_levers_total", "kind" => kind, "class" => class).increment(1);
            counter!("molt_lever_freed_bytes_total", "kind" => kind, "class" => class).increment(bytes.get());
            counter!("molt_shed_tokens_total", "class" => class).increment(tokens.get());
        }
        Event::Unpark { class, .. } => counter!("molt_unparks_total", "class" => class_name(*class)).increment(1),
        Event::Healed { tokens, heal_ms, wait_ms_max, .. } => {
            counter!("molt_healed_tokens_total").increment(tokens.get());
            histogram!("molt_heal_seconds").record(heal_ms / 1e3);
            histogram!("molt_heal_wait_seconds").record(wait_ms_max / 1e3);
        }
        Event::ReadAhead { tokens, read_ms, used, .. } => {
            counter!("molt_read_ahead_tokens_total", "used" => used_name(*used)).increment(tokens.get());
            histogram!("molt_read_ahead_seconds").record(read_ms / 1e3);
        }
        Event::Load { rung, load_ms, .. } => {
            histogram!("molt_load_seconds", "rung" => rung_name(*rung)).record(load_ms / 1e3);
        }
        Event::Release { rung, release_ms, .. } => {
            histogram!("molt_release_seconds", "rung" => rung_name(*rung)).record(release_ms / 1e3);
        }
        Event::Trouble { kind, route, .. } => {
            counter!("molt_troubles_total", "kind" => trouble_name(*kind)).increment(1);
            if let Some(route) = route {
                counter!("molt_switches_total", "route" => route_name(*route), "result" => "failed").increment(1);
            }
        }
        Event::Sample {
            usage_bytes,
            budget_bytes,
            rss_bytes,
            rss_file_bytes,
            drift_bytes,
            by_kind,
            sequences,
            enforce_ms,
        } => {
            counter!("molt_rounds_total").increment(1);
            gauge!("molt_budget_bytes").set(float(*budget_bytes));
            gauge!("molt_usage_bytes").set(float(*usage_bytes));
            gauge!("molt_overshoot_bytes").set(difference(*usage_bytes, *budget_bytes) as f64);
            gauge!("molt_overshoot_max_bytes").set(overshoot_max as f64);
            gauge!("molt_drift_bytes").set(*drift_bytes as f64);
            gauge!("molt_resident_bytes").set(float(*rss_bytes));
            gauge!("molt_resident_file_bytes").set(float(*rss_file_bytes));
            used(by_kind);
            standing("foreground", sequences.foreground);
            standing("batch", sequences.batch);
            histogram!("molt_enforce_seconds").record(enforce_ms / 1e3);
        }
        Event::Finished { class, reason, total_ms, .. } => {
            let end = match reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
            };
            counter!("molt_answers_total", "class" => class_name(*class), "end" => end).increment(1);
            seconds("molt_answer_seconds", *class, *total_ms);
        }
        Event::Cancelled { class, .. } => {
            counter!("molt_answers_total", "class" => class_name(*class), "end" => "cancelled").increment(1);
        }
        // Of a demonstration; it adds up what the other events said.
        Event::Summary(_) => {}
    }
}

fn started(start: &Start) {
    let (ladder, version) = (start.ladder.clone(), env!("CARGO_PKG_VERSION"));
    gauge!("molt_info", "ladder" => ladder, "version" => version, "isa" => start.isa).set(1.0);
    for info in &start.rungs {
        let (rung, precision) = (rung_name(info.rung), info.precision.clone());
        for class in CLASSES.map(class_name) {
            counter!("molt_tokens_total", "rung" => rung.clone(), "class" => class).absolute(0);
        }
        let _made = histogram!("molt_load_seconds", "rung" => rung.clone());
        let _made = histogram!("molt_release_seconds", "rung" => rung.clone());
        gauge!("molt_rung_weights_bytes", "rung" => rung, "precision" => precision).set(float(info.weights_bytes));
    }
}

fn switched(switch: &Switch) {
    let route = route_name(switch.route);
    counter!("molt_switches_total", "route" => route, "result" => "done").increment(1);
    histogram!("molt_switch_seconds", "route" => route).record(switch.switch_ms / 1e3);
    histogram!("molt_carry_seconds", "route" => route).record(switch.carry_ms / 1e3);
    let over_mapped = switch.tokens.saturating_sub(switch.exact_tokens + switch.mapped_tokens);
    for (provenance, tokens) in
        [("exact", switch.exact_tokens), ("over_mapped", over_mapped), ("mapped", switch.mapped_tokens)]
    {
        counter!("molt_switch_tokens_total", "provenance" => provenance).increment(tokens.get());
    }
    if switch.route == Route::Reread {
        counter!("molt_reread_tokens_total").increment(switch.tokens.get());
    }
}

fn used(by_kind: &UsageByKind) {
    let UsageByKind { weights_bytes, cache_bytes, scratch_bytes, bridge_bytes, tables_bytes, overhead_bytes } = by_kind;
    gauge!("molt_usage_kind_bytes", "kind" => "weights").set(float(*weights_bytes));
    gauge!("molt_usage_kind_bytes", "kind" => "cache").set(float(*cache_bytes));
    gauge!("molt_usage_kind_bytes", "kind" => "scratch").set(float(*scratch_bytes));
    gauge!("molt_usage_kind_bytes", "kind" => "bridge").set(float(*bridge_bytes));
    gauge!("molt_usage_kind_bytes", "kind" => "tables").set(float(*tables_bytes));
    gauge!("molt_usage_kind_bytes", "kind" => "overhead").set(float(*overhead_bytes));
}

fn standing(class: &'static str, standing: Standing) {
    let Standing { waiting, running, parked } = standing;
    gauge!("molt_sequences", "class" => class, "state" => "waiting").set(f64::from(waiting));
    gauge!("molt_sequences", "class" => class, "state" => "running").set(f64::from(running));
    gauge!("molt_sequences", "class" => class, "state" => "parked").set(f64::from(parked));
}

/// Makes what can be made before anything happens.
pub(super) fn zeroes() {
    let none = |name: &'static str, labels: &[(&'static str, &'static str)]| counter!(name, labels).absolute(0);
    for name in [
        "molt_rounds_total",
        "molt_budget_changes_total",
        "molt_given_up_steps_total",
        "molt_standbys_total",
        "molt_reread_tokens_total",
        "molt_healed_tokens_total",
    ] {
        none(name, &[]);
    }
    for class in CLASSES.map(class_name) {
        for name in [
            "molt_shed_tokens_total",
            "molt_unparks_total",
            "molt_requests_total",
            "molt_prompt_tokens_total",
            "molt_reused_tokens_total",
        ] {
            none(name, &[("class", class)]);
        }
        for kind in molt_scheduler::LEVERS.map(lever_name) {
            none("molt_levers_total", &[("kind", kind), ("class", class)]);
            none("molt_lever_freed_bytes_total", &[("kind", kind), ("class", class)]);
        }
        for end in ["stop", "length", "cancelled"] {
            none("molt_answers_total", &[("class", class), ("end", end)]);
        }
        for name in OF_A_CLASS {
            let _made = histogram!(name, "class" => class);
        }
    }
    for used in [false, true].map(used_name) {
        none("molt_read_ahead_tokens_total", &[("used", used)]);
    }
    for route in Route::ALL.map(route_name) {
        for result in ["done", "failed"] {
            none("molt_switches_total", &[("route", route), ("result", result)]);
        }
        let _made = histogram!("molt_switch_seconds", "route" => route);
        let _made = histogram!("molt_carry_seconds", "route" => route);
    }
    for provenance in ["exact", "over_mapped", "mapped"] {
        none("molt_switch_tokens_total", &[("provenance", provenance)]);
    }
    for direction in LimitDirection::ALL.map(direction_name) {
        none("molt_limit_steps_total", &[("direction", direction)]);
    }
    for kind in TroubleKind::ALL.map(trouble_name) {
        none("molt_troubles_total", &[("kind", kind)]);
    }
    for name in [
        "molt_enforce_seconds",
        "molt_reaction_seconds",
        "molt_heal_seconds",
        "molt_heal_wait_seconds",
        "molt_read_ahead_seconds",
    ] {
        let _made = histogram!(name);
    }
    for reason in REASONS {
        none("molt_refusals_total", &[("reason", reason)]);
    }
}

fn seconds(name: &'static str, class: Class, ms: f64) {
    histogram!(name, "class" => class_name(class)).record(ms / 1e3);
}

fn float(bytes: Bytes) -> f64 {
    bytes.get() as f64
}

/// As the streams name it.
fn rung_name(rung: RungIdx) -> String {
    rung.index().to_string()
}

fn direction_name(direction: LimitDirection) -> &'static str {
    match direction {
        LimitDirection::Down => "down",
        LimitDirection::Up => "up",
        LimitDirection::Lifted => "lifted",
    }
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Foreground => "foreground",
        Class::Batch => "batch",
    }
}

fn lever_name(kind: LeverKind) -> &'static str {
    match kind {
        LeverKind::Defer => "defer",
        LeverKind::Demote => "demote",
        LeverKind::Park => "park",
        LeverKind::Shed => "shed",
    }
}

fn used_name(used: bool) -> &'static str {
    if used { "yes" } else { "no" }
}

fn route_name(route: Route) -> &'static str {
    match route {
        Route::Identity => "identity",
        Route::Bridge => "bridge",
        Route::Keepsake => "keepsake",
        Route::ReadAhead => "read_ahead",
        Route::Reread => "reread",
    }
}

fn trouble_name(kind: TroubleKind) -> &'static str {
    match kind {
        TroubleKind::Load => "load",
        TroubleKind::Cache => "cache",
        TroubleKind::Carry => "carry",
        TroubleKind::Keepsake => "keepsake",
        TroubleKind::Shed => "shed",
        TroubleKind::State => "state",
        TroubleKind::Step => "step",
        TroubleKind::Grammar => "grammar",
        TroubleKind::Panic => "panic",
    }
}
