//! A request that its client has named can be sent once more: it is the same answer, also after a restart.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::Read as _;
use std::time::{Duration, Instant};

use molt_tests::daemon::{Answer, Daemon, chunks};
use molt_tests::home::{Home, asked};
use serde_json::{Value, json};

/// A request for a whole answer.
fn whole(seed: u64, tokens: u64) -> Value {
    let mut body = asked(seed, tokens);
    body.as_object_mut().unwrap().retain(|field, _| !field.starts_with("stream"));
    body
}

fn post(daemon: &Daemon, key: Option<&str>, name: &str, body: &Value) -> Answer {
    Answer::read(daemon.post_named(key, name, "/v1/completions", body.to_string().as_bytes()))
}

fn unnamed(daemon: &Daemon, body: &Value) -> Value {
    let (status, answer) = daemon.ask("POST", "/v1/completions", body.to_string().as_bytes());
    assert_eq!(status, 200, "{answer}");
    answer
}

/// What was said, and why no more.
fn said(answer: &Value) -> Value {
    let (choice, usage) = (&answer["choices"][0], &answer["usage"]);
    json!([choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]])
}

/// Waits until the only answer that is being written has so many bytes of tokens behind what it began with.
fn written(home: &Home, bytes: u64) {
    let (started, mut first) = (Instant::now(), None);
    loop {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing is written");
        let length = home.files("answer").first().and_then(|path| path.metadata().ok()).map_or(0, |found| found.len());
        let begun = *first.get_or_insert(length);
        if length >= begun.max(1) + bytes {
            return;
        }
        first = first.filter(|first| *first > 0);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_whole_answer_survives_for_whoever_named_it() {
    let home = Home::new("");
    let check = |signal: &str, name: &str, seed: u64| {
        let (mut daemon, body) = (home.start(), whole(seed, 200));
        let expected = unnamed(&daemon, &body);
        assert_eq!(home.files("answer").len(), 0, "what nobody can ask for is not kept");
        let mut broken = daemon.post_named(None, name, "/v1/completions", body.to_string().as_bytes());
        written(&home, 8 * 20);
        daemon.signal(signal);
        let mut heard = String::new();
        let _reset = broken.read_to_string(&mut heard);
        assert_eq!(daemon.ended_well(), signal == "TERM");
        assert!(!heard.contains("200 OK"), "it had ended before: {heard}");
        assert_eq!(heard.contains("stopped"), signal == "TERM", "{heard}");
        let daemon = home.start();
        let answer = post(&daemon, None, name, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(said(&answer.json()), said(&expected));
        if signal == "TERM" {
            let usage = &answer.json()["usage"];
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            assert_eq!(cached, &usage["prompt_tokens"], "the prompt was read again");
        }
        // It has ended, and its end may have been lost on the way.
        let again = post(&daemon, None, name, &body);
        assert_eq!((again.status, said(&again.json())), (200, said(&expected)));
        for field in ["id", "created"] {
            assert_eq!(again.json()[field], answer.json()[field]);
        }
        assert!(!daemon.said().iter().any(|line| line.contains("\"kind\":\"state\"")), "{:?}", daemon.said());
        std::fs::remove_dir_all(home.state()).unwrap();
    };
    check("KILL", "first", 31);
    check("TERM", "second", 32);
}

#[test]
fn a_name_is_of_one_request_and_of_one_owner() {
    let home = Home::new("");
    let daemon = home.start();
    let body = whole(33, 20);
    let first = post(&daemon, None, "a", &body).json();
    let id = first["id"].as_str().unwrap();
    // Another request.
    let other = post(&daemon, None, "a", &whole(33, 21));
    assert_eq!((other.status, &other.json()["error"]["code"]), (422, &json!("idempotency_key")));
    // Who leaves the seed open is content with the one that it was answered with.
    let mut open = body.clone();
    open.as_object_mut().unwrap().remove("seed");
    assert_eq!(post(&daemon, None, "a", &open).json()["id"], id);
    // Another name, and another owner.
    assert_ne!(post(&daemon, None, "b", &body).json()["id"], id);
    let (_, mail) = daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#);
    let theirs = post(&daemon, mail["token"].as_str(), "a", &whole(33, 22));
    assert_eq!(theirs.status, 200);
    assert_ne!(theirs.json()["id"], id);
    // As a stream it is the same answer.
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let stream = daemon.post_named(None, "a", "/v1/completions", streamed.to_string().as_bytes());
    let text: String =
        chunks(stream).filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(text, first["choices"][0]["text"].as_str().unwrap());
    assert_eq!(post(&daemon, None, "", &body).status, 400);
}

#[test]
fn a_named_answer_is_read_by_one_at_a_time() {
    let home = Home::new("");
    let (daemon, body) = (home.start(), whole(34, 20));
    let before = daemon.ask("GET", "/v1/budget", b"").1["budget_bytes"].as_u64().unwrap();
    // It waits until it is let go on.
    daemon.set_budget(1 << 20);
    let waiting = daemon.post_named(None, "a", "/v1/completions", body.to_string().as_bytes());
    let started = Instant::now();
    while home.files("answer").is_empty() {
        assert!(started.elapsed() < Duration::from_secs(60), "it is not begun");
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..2 {
        let refused = post(&daemon, None, "a", &body);
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("in_use")));
    }
    daemon.set_budget(before);
    let first = Answer::read(waiting);
    assert_eq!(first.status, 200, "{first:?}");
    let again = post(&daemon, None, "a", &body);
    assert_eq!((again.status, &again.json()["id"]), (200, &first.json()["id"]));
    assert_eq!(said(&again.json()), said(&first.json()));
}

#[test]
fn without_a_folder_a_name_says_nothing() {
    let daemon = Daemon::start("");
    let (first, second) = (post(&daemon, None, "a", &whole(35, 5)), post(&daemon, None, "a", &whole(35, 6)));
    assert_eq!((first.status, second.status), (200, 200));
    assert_ne!(first.json()["id"], second.json()["id"]);
}
