//! Tenants over the real socket: who registers, who is served, who leaves; and the plain completions route.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use molt_tests::daemon::{Daemon, chunks};
use molt_tests::program;
use serde_json::{Value, json};

fn body(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn completion(more: &Value) -> Vec<u8> {
    let mut request = json!({"model": "pocket", "prompt": "The people of the United States", "max_tokens": 30,
        "temperature": 0, "seed": 1});
    for (key, value) in more.as_object().unwrap() {
        request[key] = value.clone();
    }
    body(&request)
}

#[test]
fn tenants_register_ask_and_leave() {
    let daemon = Daemon::start(
        "[tenants]\nregistrations_per_user = 2\nrequests_in_flight = 1\n\
         [[profile]]\nname = \"mail\"\nclass = \"batch\"\nweight = 3\n",
    );
    let register = |claim: Value| daemon.ask("POST", "/v1/tenants", &body(&claim));
    let (status, mail) = register(json!({"profile": "mail"}));
    assert_eq!((status, &mail["tenant"]["weight"]), (201, &json!(3)), "{mail}");
    let (status, index) = register(json!({"name": "index", "class": "batch", "floor": 2, "ceiling": 2}));
    assert_eq!(status, 201, "{index}");
    let check_refused = |claim: Value, expected: u16, code: &str| {
        let (status, answer) = register(claim);
        assert_eq!((status, &answer["error"]["code"]), (expected, &json!(code)), "{answer}");
    };
    check_refused(json!({"name": "third"}), 429, "registrations");
    check_refused(json!({"name": "not plain"}), 400, "name");
    check_refused(json!({"profile": "none"}), 400, "profile");
    check_refused(json!({"name": "a", "floor": 0, "ceiling": 1}), 400, "floor");
    check_refused(json!({"name": "a", "colour": "red"}), 400, "body");

    let (mail, index) = (mail["token"].as_str().unwrap(), index["token"].as_str().unwrap());
    let ask = |key, more: Value| daemon.ask_as(Some(key), "POST", "/v1/completions", &completion(&more));
    // A ceiling holds: this tenant is never served by a bigger rung.
    let (status, answer) = ask(index, json!({}));
    assert_eq!((status, &answer["molt"]["rungs"]), (200, &json!([2])), "{answer}");
    assert_eq!(ask("sk-anything", json!({})).0, 200, "an API key that is none of ours is the default tenant's");
    let (status, answer) = ask("molt-0123", json!({}));
    assert_eq!((status, &answer["error"]["code"]), (401, &json!("unknown_token")));

    // One request at a time each: this one waits, for there is no memory, and is told so.
    daemon.set_budget(1 << 20);
    let long = completion(&json!({"stream": true, "max_tokens": 400}));
    let mut stream = chunks(daemon.send_as(Some(mail), "POST", "/v1/completions", &long));
    assert_eq!(stream.next().unwrap()["molt"]["kind"], "defer");
    let (status, answer) = ask(mail, json!({}));
    assert_eq!((status, &answer["error"]["code"]), (429, &json!("requests_in_flight")), "{answer}");
    daemon.set_budget(256 << 20);
    assert_eq!(ask(index, json!({})).0, 200, "another tenant is not held up by that");
    drop(stream);

    let (_, all) = daemon.ask("GET", "/v1/tenants", b"");
    let names: Vec<&str> =
        all["data"].as_array().unwrap().iter().map(|t| t["tenant"]["name"].as_str().unwrap()).collect();
    assert_eq!(names[0], "default");
    assert!(names.contains(&"mail") && names.contains(&"index") && !all.to_string().contains("molt-"), "{all}");
    // Whoever leaves takes its requests along, and they are told.
    daemon.set_budget(1 << 20);
    let mut waiting = chunks(daemon.send_as(Some(index), "POST", "/v1/completions", &long));
    assert_eq!(waiting.next().unwrap()["molt"]["kind"], "defer");
    assert_eq!(daemon.ask_as(Some(index), "DELETE", "/v1/tenants/me", b"").0, 200);
    let told = waiting.last().unwrap();
    assert!(told["error"]["message"].as_str().unwrap().contains("its tenant left"), "{told}");
    daemon.set_budget(256 << 20);
    assert_eq!(ask(index, json!({})).0, 401);
    assert_eq!(register(json!({"name": "third"})).0, 201, "there is room again");
}

#[test]
fn a_registration_that_nobody_uses_ends() {
    let daemon = Daemon::start("[tenants]\ngrace_s = 1\n");
    let (_, answer) = daemon.ask("POST", "/v1/tenants", &body(&json!({"name": "passing"})));
    let token = answer["token"].as_str().unwrap();
    let started = Instant::now();
    let ended = || daemon.ask("GET", "/v1/tenants", b"").1["data"].as_array().unwrap().len() == 1;
    while !ended() {
        assert!(started.elapsed() < Duration::from_secs(60), "the registration never ends");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(daemon.ask_as(Some(token), "POST", "/v1/completions", &completion(&json!({}))).0, 401);
}

#[test]
fn completions_whole_streamed_and_stopped() {
    let daemon = Daemon::start("");
    let ask = |more: Value| daemon.ask("POST", "/v1/completions", &completion(&more));
    let (status, whole) = ask(json!({}));
    assert_eq!((status, &whole["object"]), (200, &json!("text_completion")), "{whole}");
    let text = whole["choices"][0]["text"].as_str().unwrap();
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let streamed: Vec<Value> =
        chunks(daemon.send("POST", "/v1/completions", &completion(&json!({"stream": true})))).collect();
    let pieces: String = streamed.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces, text, "the same seed gives the same answer");

    // It ends before a text of its own middle, whole and streamed alike.
    let middle: String = text.chars().skip(text.chars().count() / 2).take(6).collect();
    let expected = &text[..text.find(&middle).unwrap()];
    let (_, stopped) = ask(json!({"stop": [middle, "never to be seen"]}));
    assert_eq!(stopped["choices"][0]["text"].as_str().unwrap(), expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let streamed = daemon.send("POST", "/v1/completions", &completion(&json!({"stop": middle, "stream": true})));
    let pieces: String =
        chunks(streamed).filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned())).collect();
    assert_eq!(pieces, expected);
    assert_eq!(ask(json!({"prompt": ["a", "b"]})).0, 400);
}

#[test]
fn a_configuration_is_checked_without_serving() {
    let check = |config: &str, ok: bool, says: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("moltd.toml");
        std::fs::write(&file, config).unwrap();
        let run = Command::new(program("moltd")).args(["check", "--config"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.success(), ok, "{said}");
        assert!(said.contains(says), "{said}");
    };
    check(include_str!("../deploy/moltd.toml"), true, "the configuration is good: pocket");
    check("sokcet = \"/tmp/x\"", false, "sokcet");
    check("ladder = \"nowhere\"", false, "nowhere");
    check("context = 1000000", false, "trained for");
    check("[default_tenant]\nname = \"a\"\ncontext_limit = 1000000", false, "context_limit");
}

#[test]
fn molt_is_a_client() {
    let daemon = Daemon::start("");
    let run = |args: &[&str], input: &str| {
        let mut child = Command::new(program("molt"))
            .args(args)
            .args(["--socket".as_ref(), daemon.socket.as_os_str()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (ok, out, err) = run(&["complete", "The people of", "--max-tokens", "12", "--temperature", "0"], "");
    assert!(ok && out.trim().len() > 10, "{out} {err}");
    let again = run(&["complete", "-", "--max-tokens", "12", "--temperature", "0"], "The people of");
    assert_eq!(again.1, out, "from standard input");
    let (ok, out, err) = run(&["chat", "--max-tokens", "5", "--system", "Be brief."], "The year\n\nThe people\n");
    assert!(ok && out.lines().count() >= 2, "two answers: {out} {err}");
    let budget =
        |args: &[&str]| run(&[&["budget"], args].concat(), "").1.lines().map(str::to_owned).collect::<Vec<_>>();
    let said = budget(&[]);
    assert_eq!(said[0], "256.0 MiB set by the operator");
    assert!(said[1].contains(" may be used now; "), "{said:?}");
    assert!(said[2].contains(" in use: weights ") && said[2].contains(", the process "), "{said:?}");
    assert_eq!(budget(&["300"])[0], "300.0 MiB set by the operator");
    // No machine of ours is that small: the operator is the strictest.
    assert!(budget(&["20"])[1].starts_with("20.0 MiB may be used now; operator: "));
    budget(&["300"]);
    assert!(run(&["tenants"], "").1.contains("default"));
    let (ok, _, err) = run(&["complete", "x", "--token", "molt-none"], "");
    assert!(!ok && err.contains("registered"), "{err}");
    let gone = Command::new(program("molt")).args(["budget", "--socket", "/nowhere.sock"]).output().unwrap();
    assert!(!gone.status.success() && String::from_utf8_lossy(&gone.stderr).contains("/nowhere.sock"));
}
