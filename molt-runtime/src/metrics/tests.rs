use molt_kv::carry::Route;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};
use molt_scheduler::{Census, Class, LeverKind, Standing};

use super::*;
use crate::event::{FinishReason, Switch, TroubleKind, UsageByKind};

/// What the lines of the text are after these events.
fn check(events: &[Event], lines: &[&str]) {
    let metrics = Metrics::new();
    events.iter().for_each(|event| metrics.record(event));
    let text = metrics.render();
    for line in lines {
        assert!(text.lines().any(|found| found == *line), "{line} is not in\n{text}");
    }
}

fn sample(usage: u64, budget: u64) -> Event {
    Event::Sample {
        usage_bytes: Bytes::new(usage),
        budget_bytes: Bytes::new(budget),
        rss_bytes: Bytes::new(500),
        rss_file_bytes: Bytes::new(50),
        drift_bytes: -3,
        by_kind: UsageByKind { cache_bytes: Bytes::new(7), ..UsageByKind::default() },
        sequences: Census { batch: Standing { waiting: 1, running: 2, parked: 3 }, ..Census::default() },
        enforce_ms: 2.0,
    }
}

fn token(nth: u64, wait_ms: Option<f64>) -> Event {
    let (tenant, class, nth) = ("a name that a client chose".to_owned(), Class::Foreground, Tokens::new(nth));
    Event::Token { tenant, class, nth, wait_ms, text: "x".to_owned(), rung: RungIdx::new(1), likelihood: None }
}

fn switch(route: Route) -> Event {
    Event::Switch(Switch {
        tenant: String::new(),
        class: Class::Batch,
        from: RungIdx::TOP,
        to: RungIdx::new(1),
        route,
        switch_ms: 30.0,
        carry_ms: 20.0,
        tokens: Tokens::new(100),
        exact_tokens: Tokens::new(10),
        mapped_tokens: Tokens::new(60),
        flops_saved_ratio: 0.9,
        pressure_ratio: 1.1,
    })
}

#[test]
fn a_sample_sets_what_memory_is_used_for_and_keeps_the_worst() {
    check(
        &[sample(90, 100), sample(130, 100), sample(80, 100)],
        &[
            "molt_usage_bytes 80",
            "molt_budget_bytes 100",
            "molt_overshoot_bytes -20",
            "molt_overshoot_max_bytes 30",
            "molt_drift_bytes -3",
            "molt_resident_bytes 500",
            "molt_usage_kind_bytes{kind=\"cache\"} 7",
            "molt_sequences{class=\"batch\",state=\"waiting\"} 1",
            "molt_sequences{class=\"batch\",state=\"parked\"} 3",
            "molt_rounds_total 3",
            "molt_enforce_seconds_bucket{le=\"0.0025\"} 3",
        ],
    );
}

#[test]
fn tokens_are_timed_as_their_reader_waited() {
    check(
        &[token(1, Some(300.0)), token(2, Some(4.0)), token(3, Some(2_000.0)), token(3, None)],
        &[
            "molt_tokens_total{rung=\"1\",class=\"foreground\"} 3",
            "molt_first_token_seconds_sum{class=\"foreground\"} 0.3",
            "molt_inter_token_seconds_count{class=\"foreground\"} 2",
            "molt_stall_seconds_sum{class=\"foreground\"} 2",
        ],
    );
}

#[test]
fn switches_and_levers_are_counted_by_what_they_did() {
    let trouble = |kind, route| Event::Trouble { kind, route, message: String::new() };
    let lever = |kind, tokens| Event::Lever {
        kind,
        tenant: String::new(),
        class: Class::Batch,
        bytes: Bytes::new(1_000),
        tokens: Tokens::new(tokens),
    };
    let failed = trouble(TroubleKind::Carry, Some(Route::Keepsake));
    check(
        &[failed, switch(Route::Bridge), switch(Route::Reread), lever(LeverKind::Shed, 64), lever(LeverKind::Park, 0)],
        &[
            "molt_switches_total{route=\"keepsake\",result=\"failed\"} 1",
            "molt_switches_total{route=\"bridge\",result=\"done\"} 1",
            "molt_switches_total{route=\"identity\",result=\"done\"} 0",
            "molt_switch_tokens_total{provenance=\"over_mapped\"} 60",
            "molt_reread_tokens_total 100",
            "molt_carry_seconds_count{route=\"bridge\"} 1",
            "molt_troubles_total{kind=\"carry\"} 1",
            "molt_levers_total{kind=\"shed\",class=\"batch\"} 1",
            "molt_lever_freed_bytes_total{kind=\"park\",class=\"batch\"} 1000",
            "molt_shed_tokens_total{class=\"batch\"} 64",
        ],
    );
}

#[test]
fn requests_are_counted_from_asking_to_their_end() {
    let (tenant, class, tokens) = (String::new(), Class::Batch, Tokens::new(5));
    check(
        &[
            Event::Asked { tenant: tenant.clone(), class, prompt_tokens: tokens },
            Event::Admitted {
                tenant: tenant.clone(),
                class,
                rung: RungIdx::TOP,
                wait_ms: 1_500.0,
                cached_tokens: Tokens::new(4),
            },
            Event::Finished { tenant: tenant.clone(), class, tokens, reason: FinishReason::Stop, total_ms: 9_000.0 },
            Event::Cancelled { tenant: tenant.clone(), class, tokens },
            Event::Refused { tenant, reason: "queue_full" },
        ],
        &[
            "molt_requests_total{class=\"batch\"} 1",
            "molt_prompt_tokens_total{class=\"batch\"} 5",
            "molt_reused_tokens_total{class=\"batch\"} 4",
            "molt_reused_tokens_total{class=\"foreground\"} 0",
            "molt_queue_wait_seconds_sum{class=\"batch\"} 1.5",
            "molt_answers_total{class=\"batch\",end=\"stop\"} 1",
            "molt_answers_total{class=\"batch\",end=\"cancelled\"} 1",
            "molt_answer_seconds_sum{class=\"batch\"} 9",
            "molt_refusals_total{reason=\"queue_full\"} 1",
        ],
    );
}

#[test]
fn no_name_that_a_client_chose_is_a_label() {
    let metrics = Metrics::new();
    metrics.record(&token(1, Some(1.0)));
    assert!(!metrics.render().contains("client chose"));
}

#[test]
fn two_engines_do_not_mix() {
    let (one, other) = (Metrics::new(), Metrics::new());
    one.record(&sample(1, 2));
    assert!(one.render().contains("molt_rounds_total 1") && other.render().contains("molt_rounds_total 0"));
}

#[test]
fn only_this_machine_is_local() {
    let check = |host: &str, expected| assert_eq!(is_local(host), expected, "{host}");
    check("127.0.0.1:9753", true);
    check("localhost:9753", true);
    check("LOCALHOST", true);
    check("[::1]:9753", true);
    check("[::1]", true);
    check("127.0.0.1", true);
    check("example.org:9753", false);
    check("127.0.0.1.example.org", false);
    check("localhost.example.org", false);
    check("10.0.0.1:9753", false);
    check("", false);
}
