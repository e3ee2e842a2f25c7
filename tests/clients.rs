//! Clients that people have: curl, and the official OpenAI client of Python. What the page for app developers shows is run.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::process::{Command, Stdio};

use molt_tests::daemon::{Daemon, chunks};
use serde_json::Value;

const PAGE: &str = include_str!("../docs/app-developer.md");

#[test]
fn every_command_of_the_page_works() {
    if Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("SKIPPED: curl is not installed (Debian: apt install curl)");
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&format!("[state]\nfolder = {:?}\n", state.path().display().to_string()));
    // One that the page goes on with.
    let streamed = br#"{"prompt": "The people of", "max_tokens": 4, "stream": true}"#;
    let last = chunks(daemon.send("POST", "/v1/completions", streamed)).last().unwrap();
    let id = last["id"].as_str().unwrap();
    let commands: Vec<&str> = PAGE.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    assert!(commands.len() >= 7, "{commands:?}");
    for command in commands {
        let run = Command::new("sh")
            .args(["-c", command])
            .env("SOCKET", &daemon.socket)
            .env("ID", id)
            .env("TOKENS", "2")
            .output()
            .unwrap();
        let said = String::from_utf8(run.stdout).unwrap();
        assert!(run.status.success() && !said.contains("\"error\""), "{command}: {said}");
        match said.strip_prefix("data: ") {
            Some(stream) => assert!(stream.trim_end().ends_with("data: [DONE]"), "{command}: {said}"),
            None => assert!(serde_json::from_str::<Value>(&said).unwrap().is_object(), "{command}: {said}"),
        }
    }
}

/// The interpreter that has the official client, or nothing and a word about it.
fn python() -> Option<String> {
    let python = std::env::var("MOLT_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python).args(["-c", "import openai, httpx"]).stderr(Stdio::null()).status();
    if probe.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    eprintln!("SKIPPED: {python} cannot import openai (pip install openai, and name the interpreter in MOLT_PYTHON)");
    None
}

fn run_python(python: &str, daemon: &Daemon, program: &str) -> String {
    let run = Command::new(python).args(["-c", program]).env("SOCKET", &daemon.socket).output().unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{said}{wrong}");
    said.into_owned()
}

#[test]
fn the_official_client_runs_the_page_and_streams_through_a_switch() {
    let Some(python) = python() else { return };
    let daemon = Daemon::start("");
    let example = PAGE.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(run_python(&python, &daemon, example).trim().len() > 10);
    let said = run_python(&python, &daemon, include_str!("clients.py"));
    assert!(said.contains("all is well"), "{said}");
}
