//! `molt doctor` on this machine and on made-up ones, with and without a service.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::path::Path;
use std::process::{Command, Output};

use molt_tests::daemon::Daemon;
use molt_tests::program;
use serde_json::Value;

fn doctor(socket: &Path, more: &[&str]) -> Output {
    Command::new(program("molt")).arg("doctor").arg("--socket").arg(socket).args(more).output().unwrap()
}

fn findings(output: &Output) -> Vec<Value> {
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["ok"], output.status.success());
    told["findings"].as_array().unwrap().clone()
}

fn of<'a>(findings: &'a [Value], about: &str) -> &'a Value {
    findings.iter().find(|finding| finding["about"] == about).unwrap()
}

#[test]
fn a_machine_with_a_service_can_run_molt() {
    let daemon = Daemon::start("");
    let output = doctor(&daemon.socket, &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    let found = findings(&output);
    assert_eq!(of(&found, "service")["state"], "good");
    assert!(of(&found, "service")["says"].as_str().unwrap().contains("serves pocket"));
    assert_eq!(of(&found, "ladder pocket")["state"], "good");
    let people = doctor(&daemon.socket, &[]);
    let text = String::from_utf8(people.stdout).unwrap();
    assert!(text.lines().any(|line| line.starts_with("good ") && line.contains("memory")), "{text}");
    assert!(!text.contains('\u{1b}'), "colours where nobody can see them");
}

#[test]
fn what_is_missing_comes_with_advice_and_what_is_broken_fails() {
    let folder = tempfile::tempdir().unwrap();
    // No service is no harm; a socket that nobody listens on is.
    let socket = folder.path().join("molt.sock");
    let absent = findings(&doctor(&socket, &["--json"]));
    assert_eq!(of(&absent, "service")["state"], "missing");
    assert!(of(&absent, "service")["advice"].as_str().unwrap().contains("moltd"));
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let left_behind = doctor(&socket, &["--json"]);
    assert_eq!(left_behind.status.code(), Some(1));
    assert_eq!(of(&findings(&left_behind), "service")["state"], "broken");
    // A machine without anything.
    let nothing = doctor(&folder.path().join("none.sock"), &["--json", "--root", folder.path().to_str().unwrap()]);
    assert_eq!(nothing.status.code(), Some(1));
    let found = findings(&nothing);
    assert_eq!(of(&found, "memory")["state"], "broken");
    assert_eq!(of(&found, "pressure files")["state"], "missing");
    assert!(found.iter().all(|finding| (finding["state"] == "good") == finding["advice"].is_null()), "{found:?}");
}
