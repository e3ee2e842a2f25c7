//! What outlives the daemon: streams go on after `kill -9` and after `SIGTERM`, word for word; what is torn is refused by name;
//! and a folder that cannot be written is in nobody's way.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use molt_tests::daemon::{Daemon, chunks};
use molt_tests::home::{Home, asked};
use molt_tests::{program, sum};
use serde_json::{Value, json};

/// What a client has of an answer.
#[derive(Debug, Default, Clone, PartialEq)]
struct Heard {
    id: String,
    text: String,
    tokens: u64,
    reason: Value,
    usage: Value,
    /// Tokens of the prompt that did not have to be read, the last time that it was begun.
    cached: u64,
}

impl Heard {
    /// Hears a chunk; whether it says how many tokens there are.
    fn hear(&mut self, chunk: &Value) {
        assert!(chunk["error"].is_null() || chunk["error"]["code"] == "stopped", "{chunk}");
        if let Some(id) = chunk["id"].as_str() {
            assert!(self.id.is_empty() || self.id == id, "{id} instead of {}", self.id);
            self.id = id.to_owned();
        }
        let choice = &chunk["choices"][0];
        self.text += choice["text"].as_str().unwrap_or_default();
        if let Some(token) = chunk["molt"]["token"].as_u64() {
            assert_eq!(token, self.tokens + 1, "a token is missing or told twice: {chunk}");
            self.tokens = token;
        }
        if !choice["finish_reason"].is_null() {
            self.reason = choice["finish_reason"].clone();
        }
        if !chunk["usage"].is_null() {
            let usage = &chunk["usage"];
            self.usage = json!([usage["prompt_tokens"], usage["completion_tokens"]]);
            self.cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        }
    }

    /// Hears until the stream ends or breaks off, or so many tokens are there.
    fn listen(&mut self, chunks: impl Iterator<Item = Value>, until: u64) {
        for chunk in chunks {
            self.hear(&chunk);
            if self.tokens >= until {
                return;
            }
        }
    }

    /// Where the rest of it is.
    fn rest(&self) -> String {
        format!("/v1/answers/{}?after={}", self.id, self.tokens)
    }

    /// What was said, and not how.
    fn said(&self) -> Self {
        Self { id: String::new(), cached: 0, ..self.clone() }
    }
}

/// The chunks of a stream, until it is broken off.
fn broken_off(stream: std::io::BufReader<std::os::unix::net::UnixStream>) -> impl Iterator<Item = Value> {
    use std::io::BufRead as _;
    let lines = stream.lines().map_while(Result::ok);
    let data = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned));
    // The last line may be half of one.
    data.take_while(|data| data != "[DONE]").map_while(|data| serde_json::from_str(&data).ok())
}

fn go_on(daemon: &Daemon, heard: &Heard) -> impl Iterator<Item = Value> + use<> {
    broken_off(daemon.send("GET", &heard.rest(), b""))
}

fn undisturbed(daemon: &Daemon, body: &Value) -> Heard {
    let mut heard = Heard::default();
    heard.listen(chunks(daemon.send("POST", "/v1/completions", body.to_string().as_bytes())), u64::MAX);
    assert!(!heard.reason.is_null(), "{heard:?}");
    heard
}

/// A number below `most`, other in every run and every call.
fn random(most: u64) -> u64 {
    u64::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos()) / 64 % most
}

/// How often the daemon is killed in the middle of an answer: some times in every test run, or as often as `MOLT_KILL_ROUNDS`
/// says.
fn rounds() -> u64 {
    std::env::var("MOLT_KILL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(6)
}

#[test]
fn an_answer_goes_on_word_for_word_after_kill_9() {
    const TOKENS: u64 = 160;
    let home = Home::new("");
    let (mut killed, mut late, mut restored, mut seed) = (0, 0, 0, 40);
    while killed < rounds() {
        seed += 1;
        let body = asked(seed, TOKENS);
        let mut daemon = home.start();
        let whole = undisturbed(&daemon, &body);
        let mut heard = Heard::default();
        let mut stream = broken_off(daemon.send("POST", "/v1/completions", body.to_string().as_bytes()));
        heard.listen(&mut stream, 1 + random(40));
        // Twice, so that what was taken up is taken up again.
        for _ in 0..2 {
            let (pid, pause) = (daemon.pid(), Duration::from_micros(random(250_000)));
            let killer = std::thread::spawn(move || {
                std::thread::sleep(pause);
                assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
            });
            heard.listen(&mut stream, u64::MAX);
            killer.join().unwrap();
            assert!(!daemon.ended_well());
            daemon = home.start();
            // One that was complete is asked for only once more, below.
            if !heard.usage.is_null() {
                late += 1;
            } else {
                killed += 1;
                stream = broken_off(daemon.send("GET", &heard.rest(), b""));
            }
        }
        heard.listen(&mut stream, u64::MAX);
        assert_eq!(heard.said(), whole.said(), "seed {seed}, {killed} kills");
        // All of it can be had once more.
        let mut again = Heard { id: heard.id.clone(), ..Heard::default() };
        again.listen(go_on(&daemon, &again), u64::MAX);
        assert_eq!(again.said(), heard.said());
        let said = daemon.said();
        assert!(!said.iter().any(|line| line.contains("\"kind\":\"state\"")), "{said:#?}");
        restored += u64::from(heard.cached > 0);
    }
    println!(
        "killed {killed} times in the middle of an answer, {late} times after it; {restored} answers began with what the disk had of their caches"
    );
}

/// Asks for a long answer, hears some of it, and leaves it to be taken up.
fn half(home: &Home, daemon: &Daemon, body: &Value, tokens: u64) -> (Heard, impl Iterator<Item = Value> + use<>) {
    let mut heard = Heard::default();
    let mut stream = broken_off(daemon.send("POST", "/v1/completions", body.to_string().as_bytes()));
    heard.listen(&mut stream, tokens);
    assert!(heard.reason.is_null() && !home.files("answer").is_empty(), "{heard:?}");
    (heard, stream)
}

#[test]
fn sigterm_keeps_the_cache_and_nothing_is_read_again() {
    let home = Home::new("");
    let mut daemon = home.start();
    let body = asked(7, 200);
    let whole = undisturbed(&daemon, &body);
    let (mut heard, stream) = half(&home, &daemon, &body, 20);
    daemon.signal("TERM");
    heard.listen(stream, u64::MAX);
    assert!(daemon.ended_well());
    assert!(heard.tokens < 200, "the answer ended before the daemon did");
    assert_eq!(home.files("cache").len(), 1);
    let daemon = home.start();
    // Nobody else's.
    let (_, mail) = daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#);
    let path = format!("/v1/answers/{}", heard.id);
    assert_eq!(daemon.ask_as(mail["token"].as_str(), "GET", &path, b"").0, 404);
    assert_eq!(daemon.ask("GET", "/v1/answers/../../secret", b"").0, 404);
    assert_eq!(daemon.ask("GET", &format!("{path}?from=1"), b"").0, 400);
    let stream = go_on(&daemon, &heard);
    let mut stream = stream.peekable();
    stream.peek();
    assert_eq!(daemon.ask("GET", &path, b"").0, 409, "somebody reads it");
    heard.listen(stream, u64::MAX);
    assert_eq!(heard.said(), whole.said());
    assert_eq!(json!(heard.cached), whole.usage[0], "the prompt was not read again");
    assert_eq!(home.files("cache").len(), 0, "a finished answer has no cache");
}

/// Half of an answer, from a daemon that was stopped in the middle of it.
fn stopped_half(home: &Home, body: &Value) -> Heard {
    let mut daemon = home.start();
    let (mut heard, stream) = half(home, &daemon, body, 20);
    daemon.signal("TERM");
    heard.listen(stream, u64::MAX);
    assert!(daemon.ended_well() && home.files("cache").len() == 1);
    heard
}

#[test]
fn a_record_that_is_torn_is_refused_by_name_and_read_again() {
    let (home, body) = (Home::new(""), asked(8, 200));
    let whole = undisturbed(&home.start(), &body);
    let check = |harm: fn(&mut Vec<u8>), named: &str| {
        let mut heard = stopped_half(&home, &body);
        let path = &home.files("cache")[0];
        let mut bytes = std::fs::read(path).unwrap();
        harm(&mut bytes);
        std::fs::write(path, bytes).unwrap();
        let daemon = home.start();
        heard.listen(go_on(&daemon, &heard), u64::MAX);
        assert_eq!(heard.said(), whole.said(), "{named}");
        let told = daemon.says("\"kind\":\"state\"");
        assert!(told.contains(named) && told.contains(&heard.id), "{told}");
    };
    check(|bytes| bytes.truncate(bytes.len() / 2), "not as long");
    check(|bytes| *bytes.last_mut().unwrap() ^= 1, "checksum");
    check(|bytes| bytes.clear(), "ends too soon");
    check(|bytes| bytes[0] = b'X', "no record of this version");
}

#[test]
fn a_record_of_another_precision_is_refused_by_name_and_read_again() {
    let home = Home::new("");
    let mut heard = stopped_half(&home, &asked(8, 200));
    let config = home.config();
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(config, format!("cache = \"f32\"\n{text}")).unwrap();
    let daemon = home.start();
    heard.listen(go_on(&daemon, &heard), u64::MAX);
    assert!(!heard.reason.is_null(), "{heard:?}");
    assert!(daemon.says("\"kind\":\"state\"").contains("of another shape"));
}

#[test]
fn a_parked_conversation_survives_kill_9() {
    let home = Home::new("");
    for seed in 60..80 {
        let mut daemon = home.start();
        let body = asked(seed, 250);
        let whole = undisturbed(&daemon, &body);
        let (mut heard, mut stream) = half(&home, &daemon, &body, 5);
        daemon.set_budget(1 << 20);
        let mut parked = false;
        for chunk in &mut stream {
            heard.hear(&chunk);
            parked |= chunk["molt"]["kind"] == "park";
            if parked {
                break;
            }
        }
        // The answer is short-lived and the budget comes over another connection: the cut may come too late, so try again.
        if !parked {
            continue;
        }
        let started = Instant::now();
        while home.files("cache").is_empty() {
            assert!(started.elapsed() < Duration::from_secs(60), "its cache is not written");
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.signal("KILL");
        heard.listen(stream, u64::MAX);
        assert!(!daemon.ended_well() && heard.reason.is_null());
        let daemon = home.start();
        heard.listen(go_on(&daemon, &heard), u64::MAX);
        assert_eq!(heard.said(), whole.said());
        assert_eq!(json!(heard.cached), whole.usage[0], "the prompt was not read again");
        return;
    }
    panic!("twenty answers ended before their budget could be cut");
}

#[test]
fn what_was_left_behind_on_a_bigger_model_survives() {
    let home = Home::new("");
    // The answer is short-lived and the budget comes over another connection: the cut may come too late, so try again.
    for seed in 20..40 {
        let mut daemon = home.start();
        let body = asked(seed, 250);
        let (mut heard, mut stream) = half(&home, &daemon, &body, 5);
        let figures = daemon.get("/metrics");
        // Enough for the other model, and too little for any precision of the first.
        let other = sum(&figures, "molt_rung_weights_bytes", &["rung=\"2\""]);
        let cut = sum(&figures, "molt_usage_kind_bytes", &["overhead"]) + other + 3e6;
        daemon.set_budget(format!("{cut:.0}").parse().unwrap());
        let mut switched = false;
        for chunk in &mut stream {
            heard.hear(&chunk);
            switched |= chunk["molt"]["event"] == "switch" && chunk["molt"]["route"] != "identity";
            if switched && chunk["molt"]["rung"].is_u64() {
                break;
            }
        }
        daemon.signal("TERM");
        heard.listen(stream, u64::MAX);
        assert!(daemon.ended_well());
        if !switched || !heard.reason.is_null() {
            continue;
        }
        assert_eq!(home.files("cache").len(), 2, "the cache, and the keepsake");
        let daemon = home.start();
        let first = heard.tokens;
        let mut rungs = Vec::new();
        for chunk in go_on(&daemon, &heard) {
            heard.hear(&chunk);
            rungs.extend(chunk["molt"]["rung"].as_u64());
        }
        assert!(!heard.reason.is_null() && heard.tokens > first, "{heard:?}");
        assert!(rungs.iter().all(|rung| *rung == 0), "{rungs:?}");
        assert_eq!(json!(heard.cached), heard.usage[0], "the bigger model's cache was there");
        assert!(!daemon.said().iter().any(|line| line.contains("trouble")), "{:?}", daemon.said());
        return;
    }
    panic!("twenty answers ended before their budget could be cut");
}

#[test]
fn a_torn_answer_is_dropped_by_name_and_the_rest_stays() {
    let home = Home::new("");
    let mut daemon = home.start();
    let (mut first, one) = half(&home, &daemon, &asked(9, 250), 5);
    let (mut second, two) = half(&home, &daemon, &asked(10, 250), 5);
    daemon.signal("KILL");
    first.listen(one, u64::MAX);
    second.listen(two, u64::MAX);
    assert!(!daemon.ended_well());
    let path = home.state().join("answers").join(format!("{}.answer", first.id));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let daemon = home.start();
    daemon.says(&format!("{}.answer is broken", first.id));
    assert_eq!(daemon.ask("GET", &format!("/v1/answers/{}", first.id), b"").0, 404);
    second.listen(go_on(&daemon, &second), u64::MAX);
    assert!(!second.reason.is_null(), "{second:?}");
}

/// A machine that loses power may lose what a reader has heard already: those tokens are chosen again and not told again.
#[test]
fn nobody_hears_twice_what_the_disk_had_lost() {
    let (home, body) = (Home::new(""), asked(15, 120));
    let whole = undisturbed(&home.start(), &body);
    for (lost, behind) in [(25, &[][..]), (40, &[0; 100]), (1, &[0xff; 7])] {
        let daemon = home.start();
        let (mut heard, stream) = half(&home, &daemon, &body, 40);
        daemon.signal("KILL");
        heard.listen(stream, u64::MAX);
        drop(daemon);
        assert!(heard.reason.is_null(), "it ended before it was killed");
        // A token takes 8 bytes at the end of the file; what was half written, or never, stands behind what is left.
        let path = home.state().join("answers").join(format!("{}.answer", heard.id));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&bytes[..bytes.len() - 8 * lost], behind].concat()).unwrap();
        let daemon = home.start();
        heard.listen(go_on(&daemon, &heard), u64::MAX);
        assert_eq!(heard.said(), whole.said(), "{lost} tokens lost");
    }
}

#[test]
fn a_registration_survives_and_its_answers_are_its_own() {
    let home = Home::new("");
    let daemon = home.start();
    let (status, mail) = daemon.ask("POST", "/v1/tenants", br#"{"name": "mail", "class": "foreground"}"#);
    assert_eq!(status, 201);
    let token = mail["token"].as_str().unwrap();
    let mut heard = Heard::default();
    let body = asked(11, 200).to_string();
    let mut stream = broken_off(daemon.send_as(Some(token), "POST", "/v1/completions", body.as_bytes()));
    heard.listen(&mut stream, 5);
    daemon.signal("KILL");
    heard.listen(stream, u64::MAX);
    drop(daemon);
    let daemon = home.start();
    let path = heard.rest();
    assert_eq!(daemon.ask("GET", &path, b"").0, 404, "the default tenant has no such answer");
    heard.listen(broken_off(daemon.send_as(Some(token), "GET", &path, b"")), u64::MAX);
    assert!(!heard.reason.is_null(), "{heard:?}");
    let kept = std::fs::read_to_string(home.state().join("tenants.json")).unwrap();
    assert!(kept.contains("mail") && !kept.contains(token.trim_start_matches("molt-")));
    assert_eq!(daemon.ask_as(Some(token), "DELETE", "/v1/tenants/me", b"").0, 200);
    drop(daemon);
    assert_eq!(home.start().ask_as(Some(token), "POST", "/v1/completions", br#"{"prompt": "a"}"#).0, 401);
}

#[test]
fn a_folder_that_cannot_be_written_is_in_nobodys_way() {
    // No folder at all: something else stands there.
    let home = Home::new("");
    std::fs::write(home.state(), b"in the way").unwrap();
    let daemon = home.start();
    daemon.says("nothing will outlive this daemon");
    let whole = undisturbed(&daemon, &asked(12, 30));
    assert_eq!(daemon.ask("GET", &format!("/v1/answers/{}", whole.id), b"").0, 404);
    drop(daemon);
    // Full: no file takes more than a block.
    let home = Home::new("");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""]).arg(program("moltd"));
    home.arguments(&mut command);
    let daemon = home.run(&mut command);
    let found = undisturbed(&daemon, &asked(12, 30));
    assert_eq!(found.said(), whole.said());
    let told = daemon.says("\"kind\":\"state\"");
    assert!(told.contains("cannot be written, and the service goes on without"), "{told}");
    assert_eq!(home.files("answer").len(), 0, "half of an answer is not kept");
    drop(daemon);
    // Taken away while it runs, and given back.
    let home = Home::new("");
    let daemon = home.start();
    std::fs::remove_dir_all(home.state().join("answers")).unwrap();
    assert_eq!(undisturbed(&daemon, &asked(12, 30)).said(), whole.said());
    daemon.says("cannot be written, and the service goes on without");
    std::fs::create_dir(home.state().join("answers")).unwrap();
    let found = undisturbed(&daemon, &asked(12, 30));
    let mut again = Heard { id: found.id.clone(), ..Heard::default() };
    again.listen(go_on(&daemon, &again), u64::MAX);
    assert_eq!(again.said(), found.said(), "what can be kept again is");
    // Two daemons do not write over each other.
    let other = Home::new("");
    let config = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(other.config(), config).unwrap();
    other.start().says("in use by another daemon");
}

#[test]
fn what_nobody_asks_for_is_dropped() {
    let home = Home::new("");
    let config = home.config();
    let text = std::fs::read_to_string(&config).unwrap();
    let daemon = home.start();
    let (mut heard, stream) = half(&home, &daemon, &asked(13, 250), 5);
    daemon.signal("KILL");
    heard.listen(stream, u64::MAX);
    drop(daemon);
    std::fs::write(config, format!("{text}grace_s = 1\n")).unwrap();
    let daemon = home.start();
    let started = Instant::now();
    while !home.files("answer").is_empty() {
        assert!(started.elapsed() < Duration::from_secs(60), "it is still there");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(daemon.ask("GET", &format!("/v1/answers/{}", heard.id), b"").0, 404);
    // A client that leaves takes its answer along.
    let (heard, stream) = half(&home, &daemon, &asked(14, 250), 5);
    drop(stream);
    while !home.files("answer").is_empty() {
        assert!(started.elapsed() < Duration::from_secs(120), "{} is still there", heard.id);
        std::thread::sleep(Duration::from_millis(20));
    }
}
