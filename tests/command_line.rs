//! What a person gets for a wrong word: an error that names it, and a failing exit code.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::molt;

fn check(args: &[&str], named: &[&str]) {
    let output = molt(args);
    assert!(!output.status.success(), "molt {args:?} must fail");
    let reason = String::from_utf8_lossy(&output.stderr);
    for name in named {
        assert!(reason.contains(name), "{name:?} is not named by molt {args:?}: {reason}");
    }
    assert!(!reason.contains("panicked"), "{reason}");
}

#[test]
fn errors_name_the_thing() {
    check(&["demo", "--ladder", "pockets"], &["pockets", "qwen2.5-coder"]);
    check(&["demo", "--ladder", "/nowhere/mine.toml"], &["/nowhere/mine.toml"]);
    check(&["demo", "--trace", "storm"], &["storm"]);
    check(&["demo", "--tokens", "100000"], &["512 tokens"]);
    check(&["demo", "--tokens", "many"], &["many"]);
    check(&["pull", "nothing"], &["nothing"]);
    check(&["fit", "pocket", "--text", "/nowhere", "--held-out", "/nowhere", "--out", "/tmp"], &["/nowhere"]);
    let empty = tempfile::tempdir().unwrap();
    let folder = empty.path().to_str().unwrap();
    check(&["--models", folder, "pull", "qwen2.5-coder", "--from", folder, "--quiet"], &["qwen2.5-coder-1.5b"]);
}

#[test]
fn the_embedded_ladder_needs_no_pull() {
    let output = molt(&["pull", "pocket"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("part of the program"));
    let listed = String::from_utf8(molt(&["ladders"]).stdout).unwrap();
    assert!(listed.lines().any(|l| l.starts_with("pocket ") && l.contains("ready")), "{listed}");
}

#[test]
fn a_reader_that_leaves_is_no_crash() {
    use std::io::Read as _;
    let mut child = std::process::Command::new(molt_tests::program("molt"))
        .args(["demo", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 64];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    let reason = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && reason.is_empty(), "{reason}");
}
