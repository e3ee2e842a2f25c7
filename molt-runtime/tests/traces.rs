//! Every trace as the text that `molt replay` prints, for a person to review; and what must hold whatever the text says.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_runtime::replay::{Costs, Plot, Setup, Summary, Tenants, Text, run};
use molt_runtime::trace::Trace;
use molt_scheduler::units::{Bytes, RungIdx};
use molt_scheduler::{Class, Policy};

fn replay(name: &str, policy: Policy) -> (String, Summary, Plot) {
    let trace = Trace::find(name).unwrap();
    let tenants = Tenants::find(trace.tenants().unwrap_or("phone")).unwrap();
    let costs = Costs::find("phone").unwrap();
    let mut text = Text::new(tenants.tenants.len());
    let (mut told, mut plot) = (text.head(), Plot::new());
    let setup = Setup { trace: &trace, tenants: &tenants, costs: &costs, policy };
    let summary = run(&setup, |round| {
        plot.round(round);
        told.push_str(&text.round(round));
        assert_eq!(round.drift_bytes, 0, "the simulator's books are the scheduler's");
        let rungs: u64 = round.census.rungs.iter().map(|(running, parked)| running + parked).sum();
        let named = u64::try_from(round.standing.len()).unwrap();
        assert!(round.standing.is_empty() || named == rungs + round.census.waiting);
    });
    let summary = summary.unwrap();
    told.push_str(&text.close());
    (format!("{told}\n{summary}"), summary, plot)
}

/// The text under its name; nobody is ended or refused, and the budget is kept except by so many bytes.
fn check(name: &str, policy: Policy, overshoot: i64) -> Summary {
    let (text, summary, _) = replay(name, policy);
    let suffix = if policy == Policy::LeverFirst { "" } else { "_protect_foreground" };
    insta::assert_snapshot!(format!("{name}{suffix}"), text);
    assert!(summary.overshoot_bytes_max <= overshoot, "{}", summary.overshoot_bytes_max);
    for tenant in &summary.tenants {
        assert_eq!((tenant.finished, tenant.refused), (tenant.requests, 0), "{}", tenant.name);
    }
    summary
}

#[test]
fn every_trace_tells_its_story() {
    for name in Trace::built_in() {
        // Only the collapse goes below what parking and shedding can reach: the conversations themselves.
        let floor = if name == "collapse" { i64::try_from(Bytes::mib(8).get()).unwrap() } else { 0 };
        let summary = check(name, Policy::LeverFirst, floor);
        assert!(summary.levers.demote > 0, "{name} moves nobody");
    }
}

#[test]
fn traces_are_told_with_the_foreground_protected_too() {
    for name in ["camera_launch", "slow_squeeze"] {
        check(name, Policy::ProtectForeground, 0);
    }
}

#[test]
fn a_thousand_tenants_wait_their_turns() {
    let (_, summary, _) = replay("thousand_tenants", Policy::LeverFirst);
    assert_eq!(summary.tenants.len(), 1_000);
    let wait = |class: Class| {
        let of = summary.tenants.iter().filter(move |tenant| tenant.class == class);
        of.map(|tenant| tenant.wait_us_max).max().unwrap()
    };
    assert!(wait(Class::Foreground) < wait(Class::Batch));
    assert!(summary.levers.defer > 500 && summary.levers.park > 0);
}

#[test]
fn a_picture_shows_what_it_should() {
    let (_, summary, plot) = replay("collapse", Policy::LeverFirst);
    let picture = plot.draw("the title").unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    let mut named = vec!["the title", "budget", "usage", "parked", "waiting", "demote", "park", "shed", "MiB"];
    let rungs: Vec<String> =
        (0..summary.rungs.len()).map(|n| format!("on {}", RungIdx::new(u8::try_from(n).unwrap()))).collect();
    named.extend(rungs.iter().map(String::as_str));
    for name in named {
        assert!(picture.contains(name), "{name:?} is not in the picture");
    }
    assert!(picture.len() < 200_000, "{} bytes", picture.len());
}

#[test]
fn a_replay_is_a_function_of_its_inputs() {
    let (first, second) = (replay("camera_launch", Policy::LeverFirst), replay("camera_launch", Policy::LeverFirst));
    assert_eq!((first.0, first.1), (second.0, second.1));
}
