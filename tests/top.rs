//! `molt top` on a real daemon: one picture, and a real terminal where there is a program to make one.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use molt_tests::daemon::Daemon;
use molt_tests::program;
use serde_json::json;

fn ask(daemon: &Daemon) {
    let body = json!({"prompt": "The people of the United States", "max_tokens": 300, "seed": 3}).to_string();
    assert_eq!(daemon.ask("POST", "/v1/completions", body.as_bytes()).0, 200);
}

#[test]
fn one_picture_shows_tenants_budget_and_levers() {
    let daemon = Daemon::start("");
    let picture = Command::new(program("molt"))
        .args(["top", "--once", "6", "--socket"])
        .arg(&daemon.socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It has six seconds to begin listening and to hear of this.
    for _ in 0..20 {
        ask(&daemon);
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let output = picture.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for part in ["molt pocket", "budget 256.0 MiB", "default", "foreground", "tier0", "maximum overshoot -", "q quits"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn without_a_terminal_or_a_service_it_says_so() {
    let said = |args: &[&str]| {
        let output = Command::new(program("molt")).arg("top").args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(said(&["--socket", "/nowhere.sock"]).contains("terminal"));
    assert!(said(&["--once", "1", "--socket", "/nowhere.sock"]).contains("/nowhere.sock"));
}

#[test]
fn q_quits_and_the_terminal_is_given_back() {
    let daemon = Daemon::start("");
    let (molt, socket) = (program("molt"), daemon.socket.display());
    let command = format!("stty rows 30 cols 100; exec {} top --socket {socket}", molt.display());
    // util-linux's `script` makes a terminal.
    let child = Command::new("script")
        .args(["-q", "-e", "-c", &command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        // Past the test harness, which would keep it to itself.
        let text = b"SKIPPED: there is no `script` to make a terminal with\n";
        std::io::stderr().write_all(text).unwrap();
        return;
    };
    let (mut screen, mut out) = (String::new(), child.stdout.take().unwrap());
    let mut buffer = [0; 4_096];
    while !screen.contains("quits") {
        let read = out.read(&mut buffer).unwrap();
        assert!(read > 0, "it ended: {screen}");
        screen += &String::from_utf8_lossy(&buffer[..read]);
    }
    assert!(screen.contains("\u{1b}[?1049h"), "it draws on the alternate screen");
    child.stdin.as_mut().unwrap().write_all(b"q").unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rest.contains("\u{1b}[?1049l"), "the alternate screen is left: {rest}");
}
