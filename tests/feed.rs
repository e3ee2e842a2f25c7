//! The live feed over the real socket, and `molt events` on it.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use molt_tests::daemon::{Daemon, chunks, over_tcp, request};
use molt_tests::program;
use serde_json::{Value, json};

const FULL: u64 = 256 << 20;
const PROMPT: &str = "Fellow-citizens of the Senate and House of Representatives: the past year";

fn ask(tokens: u64) -> Vec<u8> {
    json!({"prompt": PROMPT, "max_tokens": tokens, "seed": 3}).to_string().into_bytes()
}

#[test]
fn the_feed_tells_what_happens_and_not_what_is_said() {
    let daemon = Daemon::start("");
    let mut feed = chunks(daemon.send("GET", "/v1/events", b""));
    let start = feed.next().unwrap();
    assert_eq!((&start["event"], &start["ladder"]), (&json!("start"), &json!("pocket")));
    let (status, answer) = daemon.ask("POST", "/v1/completions", &ask(40));
    assert_eq!(status, 200, "{answer}");
    // All of the feed until the answer is complete.
    let mut told: Vec<Value> = Vec::new();
    while told.last().is_none_or(|last| last["event"] != "finished") {
        told.push(feed.next().unwrap());
    }
    let of = |kind: &str| told.iter().filter(|e| e["event"] == kind).collect::<Vec<_>>();
    assert_eq!(of("budget")[0]["budget_bytes"], FULL);
    let (asked, finished) = (of("asked"), of("finished"));
    assert_eq!((asked.len(), of("admitted").len(), finished.len()), (1, 1, 1), "{told:?}");
    assert_eq!(asked[0]["tenant"], "default");
    let tokens = finished[0]["tokens"].as_u64().unwrap();
    assert_eq!(answer["usage"]["completion_tokens"].as_u64(), Some(tokens));
    assert!(of("token").len() as u64 >= tokens && of("token").iter().all(|token| token["text"] == ""));
    assert!(of("load").iter().any(|load| load["rung"] == 0 && load["bytes"].as_u64() > Some(1 << 20)));
    // Numbered, so that a reader sees what was left out.
    let numbers: Vec<u64> = told.iter().map(|e| e["number"].as_u64().unwrap()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    let words: Vec<&str> = answer["choices"][0]["text"].as_str().unwrap().split_whitespace().collect();
    let text = told.iter().map(Value::to_string).collect::<String>();
    let said = words.iter().chain(&["Fellow-citizens", "Senate"]).find(|word| word.len() > 5 && text.contains(**word));
    assert_eq!(said, None, "{text}");
}

#[test]
fn a_client_on_the_socket_needs_no_certificates() {
    let daemon = Daemon::start("");
    let mut ask = Command::new(program("molt"));
    ask.args(["budget", "--socket"]).arg(&daemon.socket);
    let output = ask.env("SSL_CERT_FILE", "/nowhere/file").env("SSL_CERT_DIR", "/nowhere").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn readers_of_the_feed_do_not_hold_the_daemon_up() {
    let mut daemon = Daemon::start("");
    // One that never reads, and one that hears the end.
    let _deaf = daemon.send("GET", "/v1/events", b"");
    let feed = chunks(daemon.send("GET", "/v1/events", b""));
    let (status, _) = daemon.ask("POST", "/v1/completions", &ask(200));
    assert_eq!(status, 200);
    daemon.signal("TERM");
    let last = feed.last().unwrap();
    assert!(last["event"].is_string(), "{last}");
    assert!(daemon.ended_well());
}

#[test]
fn molt_events_prints_lines_for_people_and_programs() {
    let daemon = Daemon::start("");
    let start = |more: &[&str]| {
        let mut child = Command::new(program("molt"))
            .arg("events")
            .args(more)
            .args(["--socket".as_ref(), daemon.socket.as_os_str()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Its first line says that it listens.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let first = lines.next().unwrap();
        (child, first, lines)
    };
    let (mut people, first, mut lines) = start(&[]);
    assert!(first.contains("serving pocket, 3 rungs"), "{first}");
    let (mut programs, first, json_lines) = start(&["--json", "--count", "20"]);
    assert_eq!(serde_json::from_str::<Value>(&first).unwrap()["event"], "start");
    daemon.ask("POST", "/v1/completions", &ask(60));
    daemon.set_budget(1 << 20);
    let wanted = ["default asks", "default is let in on tier0", "default has its answer", "budget 1.0 MiB"];
    for part in wanted {
        let line = lines.find(|line| line.contains(part));
        assert!(line.is_some(), "{part:?} is not told");
    }
    let told: Vec<Value> = json_lines.map(|line| serde_json::from_str(&line).unwrap()).collect();
    assert_eq!(told.len(), 19);
    assert!(programs.wait().unwrap().success());
    people.kill().unwrap();
    people.wait().unwrap();
}

/// With the log as loud as it goes: what was asked, answered, called or refused is in none of what others read.
#[test]
fn logs_and_metrics_hold_nothing_of_what_is_said() {
    let mut daemon = Daemon::start_with("log = \"events\"", &["--metrics-listen", "127.0.0.1:0"]);
    let metrics = daemon.says("metrics on http://");
    let secret = "xylophone-4711";
    let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &chat(secret, json!({"max_tokens": 20})));
    assert_eq!(status, 200, "{answer}");
    let words = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let tool = json!({"type": "function", "function": {"name": secret, "description": secret}});
    for refused in [
        json!({"max_tokens": 1_000_000, "stop": secret}),
        json!({"mood": secret}),
        json!({"response_format": {"type": secret}}),
        json!({"tools": [tool], "tool_choice": "any"}),
    ] {
        let (status, said) = daemon.ask("POST", "/v1/chat/completions", &chat(secret, refused));
        assert!((400..500).contains(&status), "{said}");
    }
    let address = metrics.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let counted = over_tcp(address, &request(None, "GET", "/metrics", "localhost", b"")).body;
    assert!(counted.contains("molt_"), "{counted}");
    daemon.signal("TERM");
    assert!(daemon.ended_well());
    let log = daemon.said().join("\n");
    assert!(log.contains("\"event\":\"load\""), "the log is on: {log}");
    for (name, text) in [("log", &log), ("metrics", &counted)] {
        let said = words.split_whitespace().chain([secret]).find(|word| word.len() > 6 && text.contains(*word));
        assert_eq!(said, None, "is in the {name}: {text}");
    }
}

fn chat(said: &str, more: Value) -> Vec<u8> {
    let mut body = json!({"messages": [{"role": "user", "content": said}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string().into_bytes()
}
