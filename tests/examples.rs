//! The example tenants as a reader would run them, against a real daemon.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use molt_tests::daemon::Daemon;
use molt_tests::{example, root};
use serde_json::Value;

fn tenants(daemon: &Daemon) -> Vec<Value> {
    daemon.ask("GET", "/v1/tenants", b"").1["data"].as_array().unwrap().clone()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the Rust tenant prints when the budget is taken away after its first words and comes back once it is parked.
fn through_a_cut(daemon: &Daemon) -> String {
    daemon.set_budget(256 << 20);
    let mut child = Command::new(example("chat"))
        .arg(&daemon.socket)
        .args(["Fellow-citizens of the Senate: the past year", "400"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut buffer) = (child.stdout.take().unwrap(), [0; 512]);
    let (mut said, mut cut) = (String::new(), true);
    loop {
        let read = out.read(&mut buffer).unwrap();
        if read == 0 {
            break;
        }
        said += &text(&buffer[..read]);
        if std::mem::take(&mut cut) {
            daemon.set_budget(1 << 20);
        }
        if said.contains("[parked") {
            daemon.set_budget(256 << 20);
        }
    }
    daemon.set_budget(256 << 20);
    assert!(child.wait().unwrap().success(), "{said}");
    said
}

#[test]
fn what_the_documents_show_in_rust_is_a_program_that_runs() {
    let example_text = std::fs::read_to_string(root().join("tenants/ask.rs")).unwrap();
    let mut seen = 0;
    for page in ["README.md", "docs/app-developer.md", "docs/bring-your-own-models.md", "docs/contributor.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        for shown in text.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            seen += 1;
            assert!(example_text.contains(shown), "{page} shows what is not in tenants/ask.rs: {shown}");
        }
    }
    assert!(seen > 0, "the documents show no Rust");
    let daemon = Daemon::start("");
    let ran = Command::new(example("ask")).arg(&daemon.socket).arg("The people of").output().unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let answer: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 12, "{answer}");
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{answer}");
}

#[test]
fn the_rust_tenant_streams_through_pressure_and_leaves() {
    let daemon = Daemon::start("");
    // The answer is short-lived and the budget comes over another connection: the cut may come too late, so try again.
    let told = (0..20).map(|_| through_a_cut(&daemon)).find(|said| said.contains("[parked"));
    let said = told.expect("twenty answers ended before their budget could be cut");
    assert!(said.contains("[goes on]") && said.split_whitespace().count() > 50, "{said}");
    assert_eq!(tenants(&daemon).len(), 1, "it has left");
    let refused = Command::new(example("chat")).args(["/nowhere.sock", "x"]).output().unwrap();
    assert!(!refused.status.success());
}

#[test]
fn the_python_tenant_is_the_official_client() {
    let python = std::env::var("MOLT_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let importable = Command::new(&python).args(["-c", "import openai"]).stderr(Stdio::null()).status();
    if !importable.is_ok_and(|status| status.success()) {
        // Past the test harness, which would keep it to itself.
        let text =
            format!("SKIPPED: {python} cannot import openai; `pip install openai`, or name another in MOLT_PYTHON\n");
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return;
    }
    let daemon = Daemon::start("");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tenants/batch.py");
    let mut command = Command::new(&python);
    command.arg(script).arg(&daemon.socket).args(["notes", "The year", "The people of", "The trade of our ports"]);
    // The first request waits to be let in, and its stream says so in a chunk without choices.
    daemon.set_budget(1 << 20);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    daemon.set_budget(256 << 20);
    let output = child.wait_with_output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    assert_eq!(out.lines().filter(|line| line.contains(" by tier")).count(), 3, "{out} {err}");
    assert_eq!(tenants(&daemon).len(), 1, "it has left");
}
