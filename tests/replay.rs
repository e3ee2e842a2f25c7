//! `molt replay` and `molt record` as a person runs them.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::{events, molt};

fn out(args: &[&str]) -> String {
    let output = molt(args);
    assert!(output.status.success(), "molt {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_replay_is_told_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("replay.svg");
    let told = out(&["replay", "camera_launch", "--svg", svg.to_str().unwrap()]);
    for part in ["reader/1 asks", "demote", "quiet rounds", "levers ", "maximum overshoot", "of weight", "mail "] {
        assert!(told.contains(part), "{part:?} is not told:\n{told}");
    }
    let picture = std::fs::read_to_string(svg).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("camera_launch with phone on phone"));
}

#[test]
fn every_trace_tenants_and_ladder_can_be_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("two.toml");
    let tenant = |name: &str, class: &str| {
        format!(
            "[[tenant]]\nname = \"{name}\"\nclass = \"{class}\"\ncontext_limit = 400\n\
             [[tenant.request]]\nprompt = 40\nanswer = 30\ncount = 2\nevery_ms = 9_000\n"
        )
    };
    std::fs::write(&file, format!("name = \"two\"\n{}{}", tenant("a", "foreground"), tenant("b", "batch"))).unwrap();
    let file = file.to_str().unwrap();
    for ladder in ["phone", "qwen2.5-coder", "qwen2.5-coder-seed", "pocket"] {
        for policy in ["lever-first", "protect-foreground"] {
            let args =
                ["replay", "spike_mid_answer", "--tenants", file, "--ladder", ladder, "--policy", policy, "--json"];
            let events = events(&args);
            let summary = events.last().unwrap();
            assert_eq!((summary["ladder"].as_str(), summary["tenants_name"].as_str()), (Some(ladder), Some("two")));
            let finished: u64 =
                summary["tenants"].as_array().unwrap().iter().map(|t| t["finished"].as_u64().unwrap()).sum();
            assert_eq!(finished, 4, "{ladder} {policy}");
            assert!(summary["overshoot_bytes_max"].as_i64().unwrap() <= 0);
            let asked = events.iter().filter_map(|round| round["asked"].as_array()).flatten().count();
            assert_eq!(asked, 4);
        }
    }
}

#[test]
fn a_recording_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("now.toml");
    let trace = trace.to_str().unwrap();
    out(&["record", "--seconds", "1", "--every-ms", "100", "--share", "50", "--name", "now", "--out", trace]);
    let text = std::fs::read_to_string(trace).unwrap();
    assert!(text.starts_with("# ") && text.contains("each budget is 50 %"), "{text}");
    assert!(out(&["replay", trace]).contains("now, phone, phone"));
}

#[test]
fn errors_name_the_file_and_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let check = |content: &str, option: &[&str], named: &[&str]| {
        let file = folder.path().join("wrong.toml");
        std::fs::write(&file, content).unwrap();
        let file = file.to_str().unwrap();
        let args: Vec<&str> = option.iter().map(|word| if *word == "FILE" { file } else { *word }).collect();
        let output = molt(&args);
        let reason = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && !reason.contains("panicked"), "{reason}");
        for name in named {
            assert!(reason.contains(name), "{name:?} is not named: {reason}");
        }
    };
    let tenants = ["replay", "collapse", "--tenants", "FILE"];
    let head = "name = \"w\"\n[[tenant]]\nname = \"mail\"\nclass = \"batch\"\ncontext_limit = 9\n";
    check(&format!("{head}weight = 0"), &tenants, &["wrong.toml", "weight", "mail"]);
    check(&format!("{head}wait = 0"), &tenants, &["wrong.toml", "wait"]);
    check("name = \"w\"", &["replay", "FILE"], &["wrong.toml", "step"]);
    check("name = \"w\"", &["replay", "collapse", "--ladder", "FILE"], &["wrong.toml", "overhead"]);
    check("", &["replay", "storm"], &["storm", "camera_launch"]);
    check("", &["replay", "collapse", "--tenants", "crowd"], &["crowd", "thousand"]);
    check("", &["replay", "collapse", "--ladder", "tower"], &["tower", "qwen2.5-coder"]);
    check("", &["record", "--seconds", "0", "--out", "/nowhere/trace.toml"], &["/nowhere/trace.toml"]);
}
