//! `moltd` over its real socket: answers, streams, pressure in the middle of a stream, hostile input.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use molt_tests::daemon::{Daemon, chunks};
use serde_json::{Value, json};

fn chat(tokens: u64, stream: bool) -> Vec<u8> {
    let prompt = "Fellow-citizens of the Senate and House of Representatives: The past year has been one of peace.";
    json!({"model": "pocket", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": stream,
        "temperature": 0.8, "seed": 3})
    .to_string()
    .into_bytes()
}

#[test]
fn an_answer_whole_and_streamed() {
    let daemon = Daemon::start("");
    assert_eq!(daemon.ask("GET", "/health", b"").0, 200);
    let (_, models) = daemon.ask("GET", "/v1/models", b"");
    assert_eq!(models["data"][0]["id"], "pocket");
    let (status, whole) = daemon.ask("POST", "/v1/chat/completions", &chat(20, false));
    assert_eq!(status, 200, "{whole}");
    let streamed: Vec<Value> = chunks(daemon.send("POST", "/v1/chat/completions", &chat(20, true))).collect();
    let text: String = streamed.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text, "the same seed gives the same answer");
    assert_eq!(streamed.last().unwrap()["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert!(
        streamed.iter().filter(|c| c["choices"][0]["delta"]["content"].is_string()).all(|c| c["molt"]["rung"] == 0)
    );
}

#[test]
fn a_stream_lives_through_a_budget_that_holds_nothing() {
    let daemon = Daemon::start("");
    let is_token = |c: &Value| c["choices"][0]["delta"]["content"].is_string();
    // The answer is short-lived and the budget comes over another connection: the cut may come too late, so try again.
    for _ in 0..20 {
        daemon.set_budget(256 << 20);
        let mut stream = chunks(daemon.send("POST", "/v1/chat/completions", &chat(300, true)));
        let mut tokens = u32::from(is_token(&stream.next().unwrap()));
        daemon.set_budget(1 << 20);
        let (mut seen, mut reason) = (Vec::new(), Value::Null);
        for chunk in &mut stream {
            tokens += u32::from(is_token(&chunk));
            if chunk["molt"]["kind"] == "park" {
                assert_eq!(chunk["choices"], json!([]), "clients go on unharmed");
                seen.push("park");
                daemon.set_budget(256 << 20);
            }
            if chunk["molt"]["event"] == "unpark" {
                seen.push("unpark");
            }
            if chunk["choices"][0]["finish_reason"].is_string() {
                reason = chunk["choices"][0]["finish_reason"].clone();
            }
        }
        assert!(reason == "stop" || (reason == "length" && tokens == 300), "{reason} after {tokens} tokens");
        if seen == ["park", "unpark"] {
            return;
        }
        assert!(seen.is_empty(), "{seen:?}");
    }
    panic!("twenty answers ended before their budget could be cut");
}

#[test]
fn clients_that_misbehave_get_an_error_and_nothing_else_suffers() {
    let mut daemon = Daemon::start("");
    let refused = |method: &str, path: &str, body: &[u8], status: u16, named: &str| {
        let (found, answer) = daemon.ask(method, path, body);
        assert_eq!(found, status, "{answer}");
        assert!(answer.to_string().contains(named), "{named:?} is not named in {answer}");
    };
    refused("POST", "/v1/chat/completions", b"{", 400, "body");
    refused("POST", "/v1/chat/completions", &[0xff; 100], 400, "body");
    refused("POST", "/v1/chat/completions", br#"{"messages":[{"role":"user","content":"x"}],"n":3}"#, 400, "n: 3");
    refused("POST", "/v1/chat/completions", &vec![b' '; 5 << 20], 413, "invalid_request_error");
    refused("DELETE", "/v1/budget", b"", 405, "does not take this method");
    refused("POST", "/v1/chat/completions", &chat(100_000, false), 400, "context_length_exceeded");
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(3_000)}]}).to_string();
    refused("POST", "/v1/chat/completions", long.as_bytes(), 400, "context_length_exceeded");
    refused("PUT", "/v1/budget", b"{}", 400, "budget_bytes");
    refused("GET", "/v2/everything", b"", 404, "no such route");
    // Clients that vanish in the middle of an answer, or never finish their request.
    for _ in 0..20 {
        drop(daemon.send("POST", "/v1/chat/completions", &chat(400, true)));
        UnixStream::connect(&daemon.socket).unwrap().write_all(b"POST /v1/chat/completions HTTP/1.1\r\n").unwrap();
    }
    let (status, _) = daemon.ask("POST", "/v1/chat/completions", &chat(10, false));
    assert_eq!(status, 200);
    assert!(daemon.alive());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("molt.sock");
    // Left behind by a listener that is gone.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let start = || {
        Command::new(molt_tests::program("moltd"))
            .args(["--socket", socket.to_str().unwrap(), "--budget-mib", "256"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut first = start();
    // Its first round may be told before.
    let mut told = BufReader::new(first.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(told.any(|line| line.contains("serving")), "it ended before it served");
    let second = start().wait_with_output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("serves on"));
    let pid = first.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(first.wait().unwrap().success(), "a clean stop");
    assert!(!socket.exists(), "the socket is gone");
}
