//! Many clients at once, and clients that mean harm or merely stop: nobody else suffers.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use molt_tests::daemon::{Answer, Daemon, chunks};
use molt_tests::sum;
use serde_json::{Value, json};

fn chat(tokens: u64, stream: bool, seed: usize) -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": "The past year has been one of peace."}], "max_tokens": tokens,
        "stream": stream, "temperature": 0.8, "seed": seed})
    .to_string()
    .into_bytes()
}

/// Waits until the engine is idle and nothing is in its caches.
fn until_nothing_is_cached(daemon: &Daemon) {
    let started = Instant::now();
    loop {
        let figures = daemon.get("/metrics");
        if sum(&figures, "molt_usage_kind_bytes", &["cache"]) == 0.0 && sum(&figures, "molt_sequences", &[]) == 0.0 {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{figures}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn two_hundred_clients_at_once_are_all_served() {
    let daemon = Daemon::start("[tenants]\nrequests_in_flight = 256\n");
    let alone: Vec<String> = (0..4).map(|seed| text(&daemon, seed)).collect();
    let answers: Vec<(usize, String)> = std::thread::scope(|scope| {
        let ask = |client: usize| {
            let daemon = &daemon;
            scope.spawn(move || (client, text(daemon, client % 4)))
        };
        let clients: Vec<_> = (0..200).map(ask).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    for (client, answer) in answers {
        assert_eq!(answer, alone[client % 4], "client {client} gets what it would get alone");
    }
}

/// An answer, streamed by every second client.
fn text(daemon: &Daemon, seed: usize) -> String {
    if seed.is_multiple_of(2) {
        let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &chat(12, false, seed));
        assert_eq!(status, 200, "{answer}");
        return answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    }
    let stream = chunks(daemon.send("POST", "/v1/chat/completions", &chat(12, true, seed)));
    stream.filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect()
}

#[test]
fn who_stops_reading_stalls_nobody_and_who_vanishes_frees_its_memory() {
    let mut daemon = Daemon::start("[reuse]\nconversations = 0\n");
    // Their first chunk is never even looked at.
    let stalled: Vec<_> =
        (0..8).map(|seed| daemon.send("POST", "/v1/chat/completions", &chat(400, true, seed))).collect();
    for seed in 0..4 {
        let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &chat(20, false, seed));
        assert_eq!(status, 200, "{answer}");
    }
    drop(stalled);
    until_nothing_is_cached(&daemon);
    // Gone in the middle of an answer, parked, and before there was room at all.
    for budget in [256 << 20, 1 << 20] {
        daemon.set_budget(256 << 20);
        let mut leaving: Vec<_> =
            (0..8).map(|seed| chunks(daemon.send("POST", "/v1/chat/completions", &chat(400, true, seed)))).collect();
        assert!(leaving.iter_mut().all(|stream| stream.next().is_some()));
        daemon.set_budget(budget);
        drop(leaving);
        until_nothing_is_cached(&daemon);
    }
    daemon.set_budget(256 << 20);
    assert_eq!(daemon.ask("POST", "/v1/chat/completions", &chat(5, false, 1)).0, 200);
    assert!(daemon.alive());
}

#[test]
fn hostile_clients_get_an_error_and_nobody_else_suffers() {
    let mut daemon = Daemon::start("");
    let (_, victim) = daemon.ask("POST", "/v1/tenants", br#"{"name": "victim"}"#);
    let victim = victim["token"].as_str().unwrap().to_owned();
    // Heads that never end hold a place each, for a while.
    let mut slow: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = daemon.connect();
            stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ").unwrap();
            stream
        })
        .collect();
    // A body that is promised and does not come.
    let mut promised = daemon.connect();
    promised.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n{\"prompt\"").unwrap();
    // No HTTP at all, binary, and a head that is far too long.
    for noise in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], &[0xff; 300], &vec![b'a'; 1 << 20]] {
        let mut stream = daemon.connect();
        let _cut_off = stream.write_all(noise);
        let _closed = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _reset = stream.read_to_end(&mut answer);
        let said = String::from_utf8_lossy(&answer);
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{said}");
    }
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let huge = vec![b'x'; 32 << 20];
    for (body, status) in [(deep.as_bytes(), 400), (&huge, 413), (b"\x00\x01", 400), (b"", 400), (b"null", 400)] {
        let (found, answer) = daemon.ask("POST", "/v1/chat/completions", body);
        assert_eq!(found, status, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    // Guessing at tokens, and registering without end.
    for guess in ["molt-", "molt-00000000000000000000000000000000", &format!("{victim}0"), &victim[..20]] {
        let (status, answer) = daemon.ask_as(Some(guess), "POST", "/v1/chat/completions", &chat(3, false, 1));
        assert_eq!((status, &answer["error"]["code"]), (401, &json!("unknown_token")), "{guess}");
        assert_eq!(daemon.ask_as(Some(guess), "DELETE", "/v1/tenants/me", b"").0, 401, "{guess}");
    }
    let mut statuses = std::collections::BTreeMap::new();
    let mut flood = daemon.connect();
    let body = br#"{"name": "flood"}"#;
    let one = format!("POST /v1/tenants HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    for _ in 0..10_000 {
        flood.write_all(&[one.as_bytes(), body].concat()).unwrap();
        *statuses.entry(status_of_next(&mut flood)).or_insert(0) += 1;
    }
    assert_eq!(statuses, [(201, 15), (429, 9_985)].into(), "sixteen of a user, and one was there");
    // Everybody else is served all the while.
    for key in [None, Some(victim.as_str())] {
        assert_eq!(daemon.ask_as(key, "POST", "/v1/chat/completions", &chat(5, false, 1)).0, 200);
    }
    // Neither waits for ever: a head that does not end is cut off, and whoever owes a body is told.
    let mut left = Vec::new();
    slow.pop().unwrap().read_to_end(&mut left).expect("the connection ends before the test's patience does");
    let owing = Answer::read(promised);
    assert_eq!((owing.status, &owing.json()["error"]["code"]), (408, &json!("body")), "{owing:?}");
    assert!(daemon.alive());
}

/// Reads one answer of a connection that stays open.
fn status_of_next(stream: &mut std::os::unix::net::UnixStream) -> u16 {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    let _json: Value = serde_json::from_slice(&body).unwrap();
    head.split(' ').nth(1).unwrap().parse().unwrap()
}
