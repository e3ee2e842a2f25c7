//! `molt batch` against a real daemon: killed in the middle, run again, every request answered once.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use molt_tests::daemon::Daemon;
use molt_tests::program;
use serde_json::{Value, json};

fn batch(daemon: &Daemon, file: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(program("molt"));
    command.arg("batch").arg(file).args(more).arg("--socket").arg(&daemon.socket);
    command.stderr(Stdio::piped());
    command
}

fn answers(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Requests of both forms; every third is a conversation.
fn jobs(count: usize) -> String {
    let job = |n: usize| match n % 3 {
        0 => json!({"custom_id": format!("job-{n}"), "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "pocket", "messages": [{"role": "user", "content": format!("{n} people of")}]}}),
        _ => json!({"id": format!("job-{n}"), "prompt": format!("The year {n} has been"), "seed": n}),
    };
    (0..count).map(|n| format!("{}\n", job(n))).collect()
}

#[test]
fn a_batch_that_was_killed_goes_on_and_answers_everything_once() {
    const JOBS: usize = 60;
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("mail box.jsonl"), folder.path().join("mail box.answers.jsonl"));
    std::fs::write(&file, jobs(JOBS)).unwrap();
    let mut killed = batch(&daemon, &file, &["--max-tokens", "200", "--in-flight", "3"]).spawn().unwrap();
    let started = Instant::now();
    let lines = || std::fs::read_to_string(&out).unwrap_or_default().lines().count();
    while lines() < 5 {
        assert!(started.elapsed() < Duration::from_secs(120), "nothing is answered");
        assert!(killed.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (_, tenants) = daemon.ask("GET", "/v1/tenants", b"");
    let own = tenants["data"].as_array().unwrap().iter().find(|t| t["tenant"]["name"] == "batch-mail_box").unwrap();
    assert_eq!(own["tenant"]["class"], "batch");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let before = lines();
    assert!(before < JOBS, "it was killed too late to show anything");
    // As a kill in the middle of a write leaves it.
    std::fs::OpenOptions::new().append(true).open(&out).unwrap().write_all(b"{\"custom_id\":\"job-").unwrap();

    let again = batch(&daemon, &file, &["--max-tokens", "20"]).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success(), "{said}");
    assert!(said.contains(&format!("{} answered, {before} before, 0 failed", JOBS - before)), "{said}");
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for answer in answers(&out) {
        *times.entry(answer["custom_id"].as_str().unwrap().to_owned()).or_default() += 1;
        assert_eq!((&answer["error"], &answer["response"]["status_code"]), (&Value::Null, &json!(200)), "{answer}");
        let choice = &answer["response"]["body"]["choices"][0];
        assert!(choice["text"].is_string() || choice["message"]["content"].is_string(), "{answer}");
    }
    assert_eq!(times, (0..JOBS).map(|n| (format!("job-{n}"), 1)).collect());
    // Once more there is nothing to do, and nothing is asked.
    let (_, tenants) = daemon.ask("GET", "/v1/tenants", b"");
    let done = batch(&daemon, &file, &[]).output().unwrap();
    assert!(done.status.success() && String::from_utf8_lossy(&done.stderr).contains("all 60 requests are answered"));
    assert_eq!(daemon.ask("GET", "/v1/tenants", b"").1, tenants);
}

#[test]
fn what_fails_is_written_and_tried_again() {
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("a.jsonl"), folder.path().join("b.jsonl"));
    let out_text = out.to_str().unwrap();
    let write = |second: &str| std::fs::write(&file, format!("{{\"prompt\": \"The\"}}\n{second}\n")).unwrap();
    write(r#"{"prompt": "The people", "colour": "red"}"#);
    let run = batch(&daemon, &file, &["--max-tokens", "5", "--out", out_text]).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    let failed = answers(&out).into_iter().find(|answer| answer["custom_id"] == "line-2").unwrap();
    assert_eq!((&failed["response"]["status_code"], &failed["error"]["code"]), (&json!(400), &json!("colour")));
    write(r#"{"prompt": "The people"}"#);
    let run = batch(&daemon, &file, &["--max-tokens", "5", "--out", out_text]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let found = answers(&out);
    assert!(found.len() == 2 && found.iter().all(|answer| answer["error"].is_null()), "{found:?}");
    let refused = |file: &str, part: &str| {
        let run = batch(&daemon, Path::new(file), &[]).output().unwrap();
        assert_eq!(run.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&run.stderr).contains(part));
    };
    refused("/nowhere/jobs.jsonl", "/nowhere/jobs.jsonl");
    write("{");
    refused(file.to_str().unwrap(), "line 2");
}
