//! The loopback port, limits on tenants, and a configuration that is read again, with the real daemon.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::daemon::{Daemon, over_tcp, request};
use serde_json::json;

fn completion() -> Vec<u8> {
    json!({"prompt": "The people of the United States", "max_tokens": 8, "temperature": 0}).to_string().into_bytes()
}

#[test]
fn a_loopback_port_serves_programs_of_this_machine() {
    let daemon = Daemon::start("listen = \"127.0.0.1:0\"\n");
    let said = daemon.says("moltd: listening on http://");
    let address = said.split("http://").nth(1).unwrap();
    let ask = |key: Option<&str>, method: &str, path: &str, host: &str, body: &[u8]| {
        let answer = over_tcp(address, &request(key, method, path, host, body));
        (answer.status, answer.json())
    };
    assert_eq!(ask(None, "GET", "/v1/models", address, b"").1["data"][0]["id"], "pocket");
    let (status, answer) = ask(None, "POST", "/v1/completions", address, &completion());
    assert_eq!((status, &answer), (200, &answer));
    let over_socket = daemon.ask("POST", "/v1/completions", &completion()).1;
    assert_eq!(answer["choices"][0]["text"], over_socket["choices"][0]["text"]);
    // A token that was registered over the socket speaks for itself here.
    let (_, tenant) = daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#);
    let token = tenant["token"].as_str().unwrap();
    assert_eq!(ask(Some(token), "POST", "/v1/completions", address, &completion()).0, 200);
    assert_eq!(ask(Some("molt-0"), "POST", "/v1/completions", address, &completion()).0, 401);
    // What a page in a browser would send, and what belongs to the operator.
    let (status, answer) = ask(None, "POST", "/v1/completions", "evil.example", &completion());
    assert_eq!((status, &answer["error"]["code"]), (403, &json!("not_local")));
    let page = String::from_utf8(request(None, "GET", "/v1/models", address, b"")).unwrap();
    let page = page.replace("\r\nconnection", "\r\norigin: https://evil.example\r\nconnection");
    assert_eq!(over_tcp(address, page.as_bytes()).status, 403);
    let (status, answer) = ask(None, "PUT", "/v1/budget", address, br#"{"budget_bytes": 1}"#);
    assert_eq!((status, &answer["error"]["code"]), (403, &json!("socket_only")));
    assert_eq!(daemon.ask("GET", "/v1/budget", b"").1["budget_bytes"], 256 << 20);
}

#[test]
fn what_a_tenant_may_use_in_a_minute_is_limited_and_told() {
    let daemon = Daemon::start("[tenants]\nrequests_per_minute = 2\n");
    let ask = |key| daemon.answer_as(key, "POST", "/v1/completions", &completion());
    assert_eq!((ask(None).status, ask(None).status), (200, 200));
    let refused = ask(None);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=31).contains(&wait), "{wait} s");
    let (_, tenant) = daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#);
    assert_eq!(ask(tenant["token"].as_str()).status, 200, "another tenant has its own");

    let daemon = Daemon::start("[tenants]\ntokens_per_minute = 20\n");
    let ask = || daemon.answer_as(None, "POST", "/v1/completions", &completion());
    // A first request may be longer than what is left; whoever has used more waits for longer.
    let statuses: Vec<u16> = std::iter::repeat_with(|| ask().status).take(4).collect();
    assert!(statuses[0] == 200 && statuses[3] == 429, "{statuses:?}");
    let refused = ask();
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("20 tokens"), "{refused:?}");
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
}

#[test]
fn a_configuration_is_read_again_without_a_restart() {
    let daemon = Daemon::start("budget_mib = 256\n");
    let reload = |config: &str, says: &str| {
        std::fs::write(daemon.config(), config).unwrap();
        daemon.signal("HUP");
        daemon.says(says);
    };
    let register = |claim: &[u8]| daemon.ask("POST", "/v1/tenants", claim).0;
    assert_eq!(register(br#"{"profile": "mail"}"#), 400);
    reload("sokcet = 3", "not reloaded, everything stays as it was");
    assert_eq!(daemon.ask("POST", "/v1/completions", &completion()).0, 200);
    reload(
        "ladder = \"smollm2\"\nlog = \"nothing\"\n[heal]\ntokens = 9\n[tenants]\nregistrations = 1\n\
         [[profile]]\nname = \"mail\"\n",
        "needs a restart: ladder, heal",
    );
    assert_eq!(register(br#"{"profile": "mail"}"#), 201);
    assert_eq!(register(br#"{"profile": "mail"}"#), 429, "the new limit holds");
    assert_eq!(daemon.ask("GET", "/v1/models", b"").1["data"][0]["id"], "pocket");
}

#[test]
fn a_budget_says_what_holds_and_what_is_used() {
    let daemon = Daemon::start("");
    assert_eq!(daemon.ask("POST", "/v1/completions", &completion()).0, 200);
    let told = daemon.ask("GET", "/v1/budget", b"").1;
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    let kinds = told["usage_by_kind"].as_object().unwrap();
    assert_eq!(kinds.values().map(number).sum::<u64>(), number(&told["usage_bytes"]), "{told}");
    assert!(number(&kinds["weights_bytes"]) > 0 && number(&kinds["overhead_bytes"]) > 0, "{told}");
    // Whatever the machine allows, the least holds, and less than that is the operator's word.
    let usable = number(&told["usable_bytes"]);
    assert!(usable <= number(&told["budget_bytes"]), "{told}");
    let less = json!({"budget_bytes": usable / 2}).to_string();
    let told = daemon.ask("PUT", "/v1/budget", less.as_bytes()).1;
    assert_eq!(
        (number(&told["usable_bytes"]), &told["strictest"]["source"]),
        (usable / 2, &json!("operator")),
        "{told}"
    );
}
