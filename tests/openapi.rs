//! The OpenAPI document against the daemon that serves it: every route answers, with what the document says.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use molt_tests::daemon::{Answer, Daemon, chunks};
use serde_json::{Value, json};

/// Follows references.
fn resolve<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(reference) => resolve(document, document.pointer(reference.strip_prefix('#').unwrap()).unwrap()),
        None => schema,
    }
}

/// What of a value a schema forbids, in the part of JSON Schema that the document uses; a keyword of another part is an
/// error.
fn violations(document: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let schema = resolve(document, schema);
    let mut found = Vec::new();
    for (keyword, says) in schema.as_object().unwrap() {
        let holds = match keyword.as_str() {
            "type" => match says.as_str().unwrap() {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "integer" => value.is_u64() || value.is_i64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                other => panic!("{at}: the type {other} is new to this test"),
            },
            "const" => value == says,
            "enum" => says.as_array().unwrap().contains(value),
            "required" => says.as_array().unwrap().iter().all(|key| !value[key.as_str().unwrap()].is_null()),
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= says.as_u64().unwrap()),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= says.as_u64().unwrap()),
            "minimum" => value.as_f64().is_none_or(|number| number >= says.as_f64().unwrap()),
            "pattern" if says == "^molt-" => value.as_str().is_some_and(|text| text.starts_with("molt-")),
            "properties" => {
                for (key, inner) in says.as_object().unwrap() {
                    if !value[key].is_null() {
                        found.extend(violations(document, inner, &value[key], &format!("{at}.{key}")));
                    }
                }
                true
            }
            "items" => {
                for (nth, item) in value.as_array().into_iter().flatten().enumerate() {
                    found.extend(violations(document, says, item, &format!("{at}[{nth}]")));
                }
                true
            }
            "description" => true,
            other => panic!("{at}: the keyword {other} is new to this test"),
        };
        if !holds {
            found.push(format!("{at}: {keyword} {says} does not hold for {value}"));
        }
    }
    found
}

/// Whether the document allows that answer of an operation.
fn check(document: &Value, operation: &Value, answer: &Answer) {
    let response = resolve(document, &operation["responses"][answer.status.to_string()]);
    assert!(response.is_object(), "the document has no answer {} here: {answer:?}", answer.status);
    let kind = answer.header("content-type").unwrap().split(';').next().unwrap();
    let content = &response["content"][kind];
    assert!(content.is_object(), "the document has no {kind} here");
    let found = violations(document, &content["schema"], &answer.json(), "");
    assert!(found.is_empty(), "{found:#?}");
    for (name, header) in response["headers"].as_object().into_iter().flatten() {
        let value = answer.header(&name.to_ascii_lowercase());
        assert!(value.is_some_and(|value| value.parse::<u64>().is_ok()), "{name} {header} is missing: {answer:?}");
    }
}

#[test]
fn every_route_answers_as_the_document_says() {
    let state = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&format!("[state]\nfolder = {:?}\n", state.path().display().to_string()));
    let streamed = json!({"prompt": "The people of", "max_tokens": 4, "stream": true}).to_string();
    let kept = chunks(daemon.send("POST", "/v1/completions", streamed.as_bytes())).last().unwrap()["id"].clone();
    let kept = kept.as_str().unwrap().to_owned();
    let document: Value = serde_json::from_str(&daemon.get("/v1/openapi.json")).unwrap();
    let mut operations = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let method = method.to_ascii_uppercase();
            let example = &operation["requestBody"]["content"]["application/json"]["example"];
            let path = &path.replace("{id}", &kept);
            let ask = |key: Option<&str>, body: &[u8]| daemon.answer_as(key, &method, path, body);
            let feed = &operation["responses"]["200"]["content"]["text/event-stream"];
            if method == "GET" && !feed.is_null() {
                // It has no end; its first event says how things stand.
                let first = chunks(daemon.send("GET", path, b"")).next().unwrap();
                assert_eq!(violations(&document, &feed["schema"], &first, ""), Vec::<String>::new());
            } else if method == "DELETE" {
                let (_, registered) = daemon.ask("POST", "/v1/tenants", br#"{"name": "leaving"}"#);
                let answer = ask(registered["token"].as_str(), b"");
                assert_eq!(answer.status, 200, "{method} {path}");
                check(&document, operation, &answer);
            } else {
                let body = if example.is_null() { String::new() } else { example.to_string() };
                let answer = ask(None, body.as_bytes());
                assert!((200..300).contains(&answer.status), "{method} {path}: {answer:?}");
                check(&document, operation, &answer);
            }
            // Errors that anybody can bring about.
            let responses = &operation["responses"];
            if !responses["400"].is_null() {
                let answer = match method.as_str() {
                    "GET" => daemon.answer_as(None, &method, &format!("{path}?after=some"), b""),
                    _ => ask(None, b"[]"),
                };
                assert_eq!(answer.status, 400, "{method} {path}");
                check(&document, operation, &answer);
            }
            if !responses["401"].is_null() {
                let answer = ask(Some("molt-nobody"), example.to_string().as_bytes());
                assert_eq!(answer.status, 401, "{method} {path}");
                check(&document, operation, &answer);
            }
            if !responses["404"].is_null() {
                let answer = daemon.answer_as(None, &method, &format!("{path}0"), b"");
                assert_eq!(answer.status, 404, "{method} {path}");
                check(&document, operation, &answer);
            }
            if !responses["413"].is_null() {
                let answer = ask(None, &vec![b' '; 5 << 20]);
                assert_eq!(answer.status, 413, "{method} {path}");
                check(&document, operation, &answer);
            }
            operations += 1;
        }
    }
    assert!(operations >= 12, "the document has {operations} operations");
    // What the daemon answers elsewhere is no secret route.
    assert_eq!(daemon.ask("GET", "/v1/everything", b"").0, 404);
}

#[test]
fn limits_are_told_as_the_document_says() {
    let daemon = Daemon::start("[tenants]\nregistrations = 0\nrequests_in_flight = 0\n");
    let document: Value = serde_json::from_str(&daemon.get("/v1/openapi.json")).unwrap();
    let limited = [
        ("/v1/tenants", json!({"name": "a"})),
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
    ];
    for (path, body) in limited {
        let answer = daemon.answer_as(None, "POST", path, body.to_string().as_bytes());
        assert_eq!(answer.status, 429, "{path}");
        check(&document, &document["paths"][path]["post"], &answer);
    }
}
