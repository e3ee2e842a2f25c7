//! `molt demo --tenants`: a reader in front and two batch jobs behind, under pressure, with the real engine.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::{events, molt};
use serde_json::Value;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

/// The summary against the events that came before it.
fn check(all: &[Value]) {
    let (summary, events) = all.split_last().unwrap();
    assert_eq!(summary["event"], "tenants_summary");
    let count = |tenant: &str, kind: &str| {
        let of = |e: &&Value| e["event"] == kind && e["tenant"] == tenant;
        events.iter().filter(of).count() as u64
    };
    for (name, row) in summary["tenants"].as_object().unwrap() {
        assert_eq!(number(&row["asked"]), count(name, "asked"), "{name}");
        assert_eq!(number(&row["answered"]), count(name, "finished"), "{name}");
        assert_eq!(number(&row["switches"]), count(name, "switch"), "{name}");
        let levers = ["defers", "demotes", "parks"].map(|kind| number(&row[kind])).iter().sum::<u64>();
        let sheds = events.iter().filter(|e| e["kind"] == "shed" && e["tenant"] == name.as_str()).count() as u64;
        assert_eq!(levers + sheds, count(name, "lever"), "{name}");
        let by_rung: u64 = row["tokens_by_rung"].as_object().unwrap().values().map(number).sum();
        assert_eq!(number(&row["tokens"]), by_rung, "{name}");
    }
    let samples = events.iter().filter(|e| e["event"] == "sample");
    let over = samples.map(|s| s["usage_bytes"].as_i64().unwrap() - s["budget_bytes"].as_i64().unwrap());
    assert_eq!(summary["overshoot_bytes_max"].as_i64(), over.max());
}

#[test]
fn everybody_is_answered_and_nobody_is_killed() {
    let all = events(&["demo", "--tenants", "--json"]);
    check(&all);
    let summary = all.last().unwrap();
    assert!(summary["overshoot_bytes_max"].as_i64().unwrap() <= 0, "{summary}");
    assert_eq!(summary["killed"], 0);
    // What tenants/profiles/phone.toml asks for.
    for (name, class, answers, tokens) in
        [("reader", "foreground", 3, 540), ("mail", "batch", 6, 360), ("notes", "batch", 6, 360)]
    {
        let row = &summary["tenants"][name];
        assert_eq!((row["class"].as_str(), number(&row["answered"])), (Some(class), answers), "{summary}");
        assert_eq!(number(&row["tokens"]), tokens, "{name}: {row}");
    }
    let rows = || summary["tenants"].as_object().unwrap().values();
    assert!(rows().any(|row| row["tokens_by_rung"].as_object().unwrap().len() > 1), "one rung wrote all: {summary}");
    assert!(rows().map(|row| number(&row["switches"])).sum::<u64>() > 0, "{summary}");
}

#[test]
fn a_person_sees_levers_and_the_table() {
    let output = molt(&["demo", "--tenants", "phone", "--trace", "slow_squeeze"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in [
        "ladder pocket, trace slow_squeeze, tenants phone",
        "reader asks",
        "budget",
        "| tenant",
        "| reader",
        "| notes",
        "maximum overshoot",
        "killed                   0",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    for (args, named) in
        [(&["demo", "--tenants", "nobody"][..], "nobody"), (&["demo", "--tenants", "--tokens", "5"], "--tokens")]
    {
        let refused = molt(args);
        assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains(named));
    }
}
