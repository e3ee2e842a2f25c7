//! The main job: an answer that passes through every rung while the budget falls and comes back.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::{events, models_folder, molt};
use serde_json::Value;

fn of<'a>(events: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |e| e["event"] == kind)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// On `pocket` all weights and caches are anonymous memory: clean pages of the program's own file, of which the kernel
/// maps more or fewer as they happen to be cached, are counted apart. The rest is the growth of the heap.
fn check_anonymous(events: &[Value]) {
    let start = &events[0];
    let before = number(&start["overhead_bytes"]) - number(&start["overhead_file_bytes"]);
    let mut at_peak = (0.0, 0.0);
    for sample in of(events, "sample") {
        let grown = number(&sample["rss_bytes"]) - number(&sample["rss_file_bytes"]) - before;
        let books = number(&sample["usage_bytes"]) - number(&start["overhead_bytes"]);
        assert!(grown <= books * 1.05 + 4e6, "anonymous memory has grown by {grown}, the books hold {books}");
        if books > at_peak.0 {
            at_peak = (books, grown);
        }
    }
    assert!(at_peak.1 >= 0.7 * at_peak.0, "the books hold {}, memory has grown by {} only", at_peak.0, at_peak.1);
}

/// What must hold of every run, on any ladder.
fn check(events: &[Value], rungs: &[u64], slack_bytes: Option<f64>) {
    assert_eq!(events.first().unwrap()["event"], "start");
    let summary = events.last().unwrap();
    assert_eq!(summary["event"], "summary");
    assert_eq!(of(events, "trouble").collect::<Vec<_>>(), Vec::<&Value>::new());

    // Every token is written by the rung that the last switch led to.
    let mut rung = None;
    let (mut tokens, mut used) = (0, Vec::new());
    for event in events {
        if event["event"] == "switch" {
            assert_eq!(Some(&event["from"]), rung.as_ref(), "a switch from where the answer was not");
            assert!(event["tokens"].as_u64().unwrap() > 0 && number(&event["switch_ms"]) >= number(&event["carry_ms"]));
            rung = Some(event["to"].clone());
        }
        if event["event"] == "token" {
            assert_eq!(rung.get_or_insert_with(|| event["rung"].clone()), &event["rung"]);
            tokens += 1;
            if !used.contains(&event["rung"].as_u64().unwrap()) {
                used.push(event["rung"].as_u64().unwrap());
            }
        }
    }
    assert_eq!(summary["tokens"], tokens);
    assert_eq!(used, rungs);
    assert_eq!(summary["rungs"], serde_json::json!(rungs));

    // The budget is kept after enforcement in every round, and the books are the resident set.
    let mut overshoot = f64::NEG_INFINITY;
    for sample in of(events, "sample") {
        let (usage, rss) = (number(&sample["usage_bytes"]), number(&sample["rss_bytes"]));
        overshoot = overshoot.max(usage - number(&sample["budget_bytes"]));
        assert!(
            slack_bytes.is_none_or(|slack| rss <= usage * 1.05 + slack),
            "the system counts {rss}, the books {usage}"
        );
    }
    assert!(overshoot <= 0.0, "overshoot of {overshoot} bytes");
    assert_eq!(number(&summary["overshoot_bytes_max"]), overshoot);
    assert_eq!(summary["killed"], false);

    let switches: Vec<_> = of(events, "switch").map(|s| (s["from"].as_u64(), s["to"].as_u64())).collect();
    assert_eq!(summary["switches"], switches.len());
    assert!(switches.iter().filter(|(from, to)| to > from).count() >= rungs.len() - 1, "{switches:?}");
    assert!(switches.iter().any(|(from, to)| to < from), "never went up again: {switches:?}");
    // Nobody but the levers that were needed: an answer alone is never parked or shed on this trace.
    assert!(of(events, "lever").all(|l| l["kind"] == "demote"), "{:?}", of(events, "lever").collect::<Vec<_>>());
}

fn check_pocket(events: &[Value]) {
    check(events, &[0, 1, 2], None);
    check_anonymous(events);
}

#[test]
fn the_embedded_ladder_uses_three_rungs() {
    let events = events(&["demo", "--json"]);
    check_pocket(&events);
    let routes: Vec<_> = of(&events, "switch").map(|s| s["route"].as_str().unwrap().to_owned()).collect();
    assert_eq!(&routes[..2], ["identity", "bridge"], "same weights first, another model then");
    // There is room for both rungs, and little to read: the bigger one has caught up before it takes over.
    assert!(routes.contains(&"read_ahead".to_owned()), "{routes:?}");
    let text: String = of(&events, "token").map(|t| t["text"].as_str().unwrap()).collect();
    assert!(text.split_whitespace().count() > 100, "{text}");
    // The same seed and trace give the same run on one machine.
    let again = molt_tests::events(&["demo", "--json"]);
    let words =
        |events: &[Value]| of(events, "token").map(|t| (t["text"].clone(), t["rung"].clone())).collect::<Vec<_>>();
    assert_eq!(words(&events), words(&again));
}

#[test]
fn without_keepsakes_the_way_up_is_still_whole() {
    let events = events(&["demo", "--json", "--no-keepsakes"]);
    check_pocket(&events);
}

#[test]
fn caches_at_f32_go_the_same_ways() {
    let (half, whole) = (events(&["demo", "--json"]), events(&["demo", "--json", "--cache", "f32"]));
    let summary = of(&whole, "summary").next().unwrap();
    assert_eq!((&summary["tokens"], &summary["killed"]), (&Value::from(260), &Value::from(false)));
    for route in ["identity", "bridge", "read_ahead"] {
        assert!(of(&whole, "switch").any(|switch| switch["route"] == route), "{route}");
    }
    let most = |events: &[Value]| {
        of(events, "sample").map(|sample| number(&sample["by_kind"]["cache_bytes"])).fold(0.0, f64::max)
    };
    let (half, whole) = (most(&half), most(&whole));
    assert!(whole > half * 1.5, "no more memory than at f16: {whole} and {half}");
}

#[test]
fn without_bridges_the_conversation_is_read_again() {
    let built_in = concat!(env!("CARGO_MANIFEST_DIR"), "/../molt-models/ladders/pocket.toml");
    let text = std::fs::read_to_string(built_in).unwrap();
    let without: String =
        text.split("\n[[").filter(|part| !part.starts_with("bridge]]")).collect::<Vec<_>>().join("\n[[");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bare.toml");
    std::fs::write(&path, without).unwrap();
    let events = events(&["demo", "--json", "--no-keepsakes", "--ladder", path.to_str().unwrap()]);
    check_pocket(&events);
    let crossing = of(&events, "switch").filter(|s| s["route"] != "identity").collect::<Vec<_>>();
    assert_eq!(crossing[0]["route"], "reread", "{crossing:?}");
    // Natively in any case; on the way up, perhaps before it goes.
    let native = |switch: &&Value| switch["route"] == "reread" || switch["route"] == "read_ahead";
    assert!(crossing.iter().all(native) && crossing.iter().all(|s| s["mapped_tokens"] == 0), "{crossing:?}");
}

#[test]
fn a_person_sees_budget_switches_and_the_closing_table() {
    let output = molt(&["demo"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "[tier0]",
        "switch tier0 -> tier1",
        "switch tier1 -> tier2",
        "carried over the bridge",
        "budget",
        "pressure",
        "largest stall between two tokens",
        "maximum overshoot",
        "largest resident set",
        "killed                             false",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "colours where nobody can see them");
}

#[test]
fn the_everyday_ladder_between_its_two_rungs() {
    let pulled = |name: &str| models_folder().join(name).exists();
    let files = ["qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"];
    if !files.iter().all(|f| pulled(f)) {
        // Past the test harness, which would keep it to itself.
        let text = b"SKIPPED: the models are not there; `molt pull qwen2.5-coder` fetches them\n";
        std::io::Write::write_all(&mut std::io::stderr(), text).unwrap();
        return;
    }
    check(&events(&["demo", "--json", "--ladder", "qwen2.5-coder"]), &[0, 1], Some(80e6));
}
