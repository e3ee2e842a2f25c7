//! `molt bench` and `molt report` as a person runs them, on the embedded ladder.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::path::Path;

use molt_tests::molt;
use serde_json::Value;

fn bench(out: &Path, more: &[&str]) -> (bool, String) {
    let mut args = vec!["bench", "--ladder", "pocket", "--quick", "--runs", "1", "--decode", "8"];
    args.extend(["--out", out.to_str().unwrap()]);
    args.extend(more);
    let output = molt(&args);
    let told = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (output.status.success(), told)
}

fn results(out: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(out.join("results.json")).unwrap()).unwrap()
}

#[test]
fn everything_is_measured_once_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path();
    // Interrupted after its first sections.
    let (fine, told) = bench(out, &["--only", "ladder,residuals"]);
    assert!(fine, "{told}");
    let (fine, told) = bench(out, &[]);
    assert!(fine && told.contains("ladder: measured already"), "{told}");
    let found = results(out);
    let rows = |section: &str| found[section]["rows"].as_array().unwrap_or_else(|| panic!("no {section}")).clone();
    assert_eq!(rows("ladder").len(), 3);
    assert_eq!(rows("residuals").len(), 6, "a row for each mapped layer of both bridges");
    // Three rungs held, the biggest model as stored, switch and read again, Molt.
    let conditions = rows("conditions");
    assert_eq!(conditions.len(), 6);
    let of = |name: Value| conditions.iter().find(|row| row["condition"] == name).unwrap();
    let (held, ours) = (of(serde_json::json!({ "hold": 0 })), of("molt".into()));
    assert_eq!((held["killed_simulated"].as_bool(), held["completed"].as_bool()), (Some(true), Some(false)));
    assert!(held["overshoot_bytes"].as_i64().unwrap() > 0, "what is killed used more than it might: {held}");
    assert_eq!((ours["tokens"].as_u64(), ours["completed"].as_bool()), (Some(64), Some(true)));
    assert!(ours["overshoot_bytes"].as_i64().unwrap() <= 0 && ours["switches"].as_u64().unwrap() > 0);
    assert!(ours["transition_overshoot_bytes"].as_i64().unwrap() <= 0, "a switch takes no more than there was: {ours}");
    assert!(ours["answer"].as_str().unwrap().len() > 64 && ours["judged"]["mean_logprob_nats"].as_f64() < Some(0.0));
    let seams = ours["seams"].as_array().unwrap();
    assert_eq!(seams.len() as u64, ours["switches"].as_u64().unwrap());
    let compared = |seam: &&Value| seam["kl_8"].as_f64().is_some_and(|kl| kl > 0.0 && kl < 1.0);
    assert!(seams.iter().any(|seam| compared(&seam)) && held["seams"].is_null(), "{seams:?}");
    for row in rows("tasks") {
        assert_eq!(row["said"].as_object().unwrap().len(), 8, "{row}");
    }
    for row in rows("switch_cost") {
        assert!(row["carry_ms"][0].as_f64().unwrap() > 0.0 && row["reread_ms"][0].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(rows("fidelity").iter().any(|row| row["setting"] == "healed" && row["kl_64"].as_f64() < Some(1e-6)));
    assert!(rows("ablations").iter().any(|row| row["setting"] == "without_chosen"));
    let without = |mean: &str| serde_json::json!({ "without": mean });
    let ablated = |name: Value| rows("ablations").iter().filter(|row| row["condition"] == name).count();
    for mean in ["bridges", "keepsakes", "reading_ahead", "healing"] {
        assert_eq!(ablated(without(mean)), ablated("molt".into()), "{mean}");
    }
    assert_eq!(ablated("molt".into()), 1);
    assert_eq!(rows("tenants").len(), 2);
    let policies = rows("peers");
    let named = |name: &str| policies.iter().find(|row| row["policy"].as_str().unwrap().contains(name)).unwrap();
    assert_eq!((named("Molt")["kills"].as_u64(), named("Molt")["wasted_tokens"].as_u64()), (Some(0), Some(0)));
    assert_eq!(named("Molt")["finished"], named("Molt")["requests"]);
    assert!(named("unload")["kills"].as_u64() > Some(0), "a process that does not hear the budget: {policies:?}");
    assert!(named("evict")["wasted_tokens"].as_u64() > Some(0), "{policies:?}");
    let session = rows("wire");
    assert!(session.iter().any(|row| row["line"].as_str().unwrap().contains("\"event\":\"switch\"")), "no switch");
    assert_eq!(session.last().unwrap()["line"], "[DONE]");
    assert_eq!(rows("memory")[0]["cold"]["first_token_ms"].as_array().map(Vec::len), Some(1));
    let shed = rows("shedding");
    assert_eq!(shed.iter().map(|run| run["shed_tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [64, 128]);
    for run in &shed {
        let asked = |row: &Value| row["asked"].as_u64().unwrap();
        let places = run["recall"].as_array().unwrap();
        assert!(
            places.len() == 8 && places.iter().all(|row| row["likeliest"].as_u64().unwrap() <= asked(row)),
            "{places:?}"
        );
        // Which blocks are looked at least depends on the text, and a block may cut every fact of it.
        assert!(places.iter().all(|row| asked(row) > 0 || row["left"] == "least_seen"), "{places:?}");
        for text in run["rest"].as_array().unwrap() {
            let loss = |of: &str| text[of].as_f64().unwrap();
            assert!(loss("loss_whole") > 0.0 && loss("loss_shed") != loss("loss_whole"), "{text}");
        }
        assert!(run["freed_bytes"].as_u64() > Some(0), "{run}");
    }
    assert!(rows("engine").iter().all(|row| row["decode_tok_s"][0].as_f64().unwrap() > 0.0));

    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    for title in [
        "The ladder",
        "A spike in mid-answer",
        "Answers that are right or wrong",
        "What a switch costs",
        "Fidelity",
        "on the wire",
        "Engine",
        "Shedding",
        "Against the published prototype",
        "Its seams",
        "does not show",
    ] {
        assert!(page.contains(title), "the page has no {title:?}");
    }
    // One file, and no network: the only address is the name of SVG's vocabulary.
    let addresses = page.matches("http").count();
    assert_eq!(addresses, page.matches("http://www.w3.org/2000/svg").count());
    assert!(!page.contains("<script") && !page.contains(" src="));
    for anchor in page.split("href=\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert_eq!(page.matches(&format!("id=\"{anchor}\"")).count(), 1, "{anchor}");
    }
    for tag in ["table", "figure", "svg", "ul", "div", "h1", "nav"] {
        let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "every {tag} is closed");
    }
    // The page comes out of the file alone.
    let again = out.join("again.html");
    let shown = molt(&["report", out.join("results.json").to_str().unwrap(), "--out", again.to_str().unwrap()]);
    assert!(shown.status.success());
    assert_eq!(std::fs::read_to_string(again).unwrap(), page);
}

#[test]
fn results_that_are_none_are_refused_by_name() {
    let check = |text: &str, named: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("results.json");
        std::fs::write(&file, text).unwrap();
        let shown = molt(&["report", file.to_str().unwrap()]);
        let told = String::from_utf8(shown.stderr).unwrap();
        assert!(!shown.status.success() && told.contains("results.json") && told.contains(named), "{told}");
        // Nor are they written over.
        let (fine, told) = bench(folder.path(), &["--only", "ladder"]);
        assert!(!fine && told.contains("results.json"), "{told}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    };
    check("not at all", "no results");
    check("{\"schema\": 2}", "machine");
    check("{\"schema\": 1}", "schema is 1");
    let folder = tempfile::tempdir().unwrap();
    assert!(bench(folder.path(), &["--only", "ladder"]).0);
    let mut other = results(folder.path());
    other["schema"] = 99.into();
    check(&other.to_string(), "99");
}

#[test]
fn results_of_another_program_are_not_added_to() {
    let folder = tempfile::tempdir().unwrap();
    assert!(bench(folder.path(), &["--only", "ladder"]).0);
    let mut other = results(folder.path());
    other["program"]["version"] = "9.9.9".into();
    std::fs::write(folder.path().join("results.json"), other.to_string()).unwrap();
    let (fine, told) = bench(folder.path(), &["--only", "residuals"]);
    assert!(!fine && told.contains("9.9.9") && told.contains("--out"), "{told}");
}

#[test]
fn another_ladder_stands_beside_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("two.toml");
    let text = include_str!("../molt-models/ladders/pocket.toml");
    std::fs::write(&file, text.replace("name = \"pocket\"", "name = \"two\"")).unwrap();
    let out = folder.path().join("out");
    let run = |more: &[&str]| {
        let output = molt(&[&["bench", "--quick", "--out", out.to_str().unwrap()], more].concat());
        let told = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert!(output.status.success(), "{told}");
        told
    };
    let both = format!("pocket,{}", file.display());
    run(&["--ladder", &both, "--only", "residuals,tenants"]);
    // Each can be gone on with alone, and neither loses what it had.
    let told = run(&["--ladder", file.to_str().unwrap(), "--only", "ladder,residuals"]);
    assert!(told.contains("two: residuals: measured already"), "{told}");
    let found = results(&out);
    let beside = &found["beside"][0];
    assert_eq!((found["name"].as_str(), beside["name"].as_str()), (Some("pocket"), Some("two")));
    assert_eq!(found["residuals"]["rows"], beside["residuals"]["rows"]);
    assert!(found["ladder"].is_null() && beside["ladder"]["rows"].as_array().unwrap().len() == 3);
    assert!(found["tenants"].is_object() && beside["tenants"].is_null(), "the simulator has a ladder of its own");
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("Molt on pocket</h1>") && page.contains("Molt on two</h1>"));
}

#[test]
fn seams_that_are_finished_are_not_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path();
    assert!(bench(out, &["--only", "ladder"]).0);
    let journal = out.join("seams.jsonl");
    let lines = || std::fs::read_to_string(&journal).unwrap().lines().count();
    let few = ["--only", "fidelity", "--seams", "4", "--pairs", "tier0:tier2"];
    assert!(bench(out, &few).0);
    let seams = lines();
    // As if it had been interrupted: the section is not there, and the last seam was cut off. What is there is believed.
    let mut interrupted = results(out);
    interrupted.as_object_mut().unwrap().remove("fidelity");
    std::fs::write(out.join("results.json"), interrupted.to_string()).unwrap();
    let mut text = String::new();
    for line in std::fs::read_to_string(&journal).unwrap().lines() {
        let mut seam: Value = serde_json::from_str(line).unwrap();
        seam["figures"]["kl_64"] = 0.5.into();
        text += &format!("{seam}\n");
    }
    std::fs::write(&journal, &text[..text.len() - 9]).unwrap();
    let (fine, told) = bench(out, &few);
    assert!(fine, "{told}");
    assert_eq!(lines(), seams);
    let found = results(out)["fidelity"]["rows"].clone();
    let believed = found.as_array().unwrap().iter().filter(|row| row["kl_64"].as_f64() == Some(0.5)).count();
    assert_eq!(believed, found.as_array().unwrap().len() - 1, "only the row of the last seam was measured: {found}");
}
