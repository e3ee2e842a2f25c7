//! A conversation's next turn over the real socket: what was read once is not read again, by nobody else, and only while
//! there is memory to spare.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::time::{Duration, Instant};

use molt_tests::daemon::Daemon;
use molt_tests::home::Home;
use molt_tests::sum;
use serde_json::{Value, json};

const OPENING: &str = "Fellow-citizens of the Senate and House of Representatives: The past year has been one of peace \
    and of plenty, and the people of every State have good reason to be content with what it has brought to them.";

/// Asks and returns the text, the tokens of the prompt, and how many of them were there already.
fn ask(daemon: &Daemon, key: Option<&str>, prompt: &str) -> (String, u64, u64) {
    let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0.7, "seed": 11}).to_string();
    let (status, answer) = daemon.ask_as(key, "POST", "/v1/completions", body.as_bytes());
    assert_eq!(status, 200, "{answer}");
    let number = |value: &Value| value.as_u64().unwrap();
    let usage = &answer["usage"];
    let cached = number(&usage["prompt_tokens_details"]["cached_tokens"]);
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), number(&usage["prompt_tokens"]), cached)
}

fn register(daemon: &Daemon, name: &str) -> String {
    let (status, answer) = daemon.ask("POST", "/v1/tenants", json!({"name": name}).to_string().as_bytes());
    assert_eq!(status, 201, "{answer}");
    answer["token"].as_str().unwrap().to_owned()
}

#[test]
fn the_next_turn_reads_what_is_new_and_says_the_same() {
    let (daemon, afresh) = (Daemon::start(""), Daemon::start("[reuse]\nconversations = 0\n"));
    let (first, length, cached) = ask(&daemon, None, OPENING);
    assert_eq!(cached, 0, "nobody has said anything yet");
    let next = format!("{OPENING}{first} The next year");
    let (text, longer, cached) = ask(&daemon, None, &next);
    assert!(cached + 2 >= length && cached < longer, "{cached} of {longer} tokens, {length} of them read before");
    // To the last bit what reading everything makes.
    assert_eq!(ask(&afresh, None, OPENING).0, first);
    assert_eq!(ask(&afresh, None, &next), (text.clone(), longer, 0));
    let (same, _, whole) = ask(&daemon, None, &next);
    assert_eq!(same, text, "nor does reading the last token alone change anything");
    // Others have conversations of their own.
    let (mail, notes) = (register(&daemon, "mail"), register(&daemon, "notes"));
    assert_eq!(ask(&daemon, Some(&mail), &next), (text.clone(), longer, 0));
    assert_eq!(ask(&daemon, Some(&notes), &next), (text, longer, 0));
    let again = ask(&daemon, Some(&mail), &next).2;
    assert!(again > 0, "but they have them");
    // What was told to clients is what is counted.
    let total = cached + whole + again;
    assert_eq!(sum(&daemon.get("/metrics"), "molt_reused_tokens_total", &[]), f64::from(u32::try_from(total).unwrap()));
}

/// A daemon that is told to stop leaves the last conversation of each owner to the next one; one that is killed leaves none.
#[test]
fn the_next_turn_after_a_planned_restart_reads_what_is_new() {
    let home = Home::new("");
    let kept = || home.state().join("conversations");
    let mut daemon = home.start();
    let mail = register(&daemon, "mail");
    let (first, length, _) = ask(&daemon, None, OPENING);
    let next = format!("{OPENING}{first} The next year");
    let (text, longer, _) = ask(&Daemon::start("[reuse]\nconversations = 0\n"), None, &next);
    let stop = |mut daemon: Daemon, signal: &str| {
        daemon.signal(signal);
        assert_eq!(daemon.ended_well(), signal == "TERM");
    };
    daemon.signal("TERM");
    assert!(daemon.ended_well());
    // Nobody goes on with it, and it is left to the next.
    for _ in 0..2 {
        assert!(kept().join("0.cache").exists());
        let daemon = home.start();
        assert!(!kept().exists(), "it is for one daemon alone");
        stop(daemon, "TERM");
    }
    let daemon = home.start();
    assert_eq!(ask(&daemon, Some(&mail), &next), (text.clone(), longer, 0), "it is another tenant's");
    let (found, _, cached) = ask(&daemon, None, &next);
    assert_eq!(found, text, "to the last bit what reading everything makes");
    assert!(cached + 2 >= length && cached < longer, "{cached} of {longer} tokens, {length} of them read before");
    assert!(ask(&daemon, Some(&mail), &next).2 > 0, "the other tenant has its own");
    assert!(!daemon.said().iter().any(|line| line.contains("\"kind\":\"state\"")), "{:?}", daemon.said());
    stop(daemon, "TERM");
    // What is not sound is refused by name, and read again.
    let broken = |harm: fn(&mut Vec<u8>), file: &str, named: &str| {
        let path = kept().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        harm(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let daemon = home.start();
        for key in [None, Some(mail.as_str())] {
            assert_eq!(ask(&daemon, key, &next).0, text, "{named}");
        }
        assert!(daemon.says("\"kind\":\"state\"").contains(named), "{:?}", daemon.said());
        stop(daemon, "TERM");
    };
    broken(|bytes| *bytes.last_mut().unwrap() ^= 1, "0.cache", "0.cache");
    broken(|bytes| bytes.truncate(bytes.len() / 2), "1.cache", "1.cache");
    broken(|bytes| bytes[5] ^= 1, "index", "conversations/index");
    // Nor is what another configuration has made.
    let config = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(home.config(), format!("cache = \"f32\"\n{config}")).unwrap();
    let daemon = home.start();
    assert!(daemon.says("\"kind\":\"state\"").contains("no rung makes such a cache"), "{:?}", daemon.said());
    assert_eq!(ask(&daemon, None, &next).2, 0);
    stop(daemon, "KILL");
    std::fs::write(home.config(), config).unwrap();
    // A daemon that is killed leaves nothing, and nothing is missing.
    let daemon = home.start();
    ask(&daemon, None, &next);
    stop(daemon, "KILL");
    assert_eq!(ask(&home.start(), None, &next), (text, longer, 0));
}

#[test]
fn what_is_kept_goes_first_and_harms_nobody() {
    let daemon = Daemon::start("");
    let cache = || sum(&daemon.get("/metrics"), "molt_usage_kind_bytes", &["cache"]);
    let until = |wanted: fn(f64) -> bool, what: &str| {
        let started = Instant::now();
        while !wanted(cache()) {
            assert!(started.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    // More than what a rung's reckoning sets aside for the buffers of a carry, which nobody uses now.
    let long = OPENING.repeat(8);
    let (text, ..) = ask(&daemon, None, &long);
    until(|bytes| bytes > 0.0, "the conversation is kept and in the books");
    // All that is used now, less one byte: only what is kept can go without harm.
    let used = sum(&daemon.get("/metrics"), "molt_usage_bytes", &[]);
    daemon.set_budget(format!("{:.0}", used - 1.0).parse().unwrap());
    until(|bytes| bytes == 0.0, "what is kept is given back");
    let figures = daemon.get("/metrics");
    assert_eq!(sum(&figures, "molt_levers_total", &[]), 0.0, "without a lever");
    assert!(sum(&figures, "molt_usage_kind_bytes", &["weights"]) > 0.0, "weights stay");
    daemon.set_budget(256 << 20);
    let (again, _, cached) = ask(&daemon, None, &long);
    assert_eq!((again, cached), (text, 0), "read again, and the same");
    // A tenant that leaves takes along what it left.
    let mail = register(&daemon, "mail");
    ask(&daemon, Some(&mail), OPENING);
    let before = cache();
    assert_eq!(daemon.ask_as(Some(&mail), "DELETE", "/v1/tenants/me", b"").0, 200);
    let started = Instant::now();
    while cache() >= before {
        assert!(started.elapsed() < Duration::from_secs(60), "its conversation is still there");
        std::thread::sleep(Duration::from_millis(50));
    }
}
