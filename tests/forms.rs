//! What an answer is held to and told with, over the real socket: JSON and its schemas across a switch, likelihoods, tools.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::path::Path;

use molt_tests::daemon::{Daemon, chunks};
use molt_tests::{sha256, sum};
use serde_json::{Value, json};

const FULL: u64 = 256 << 20;

/// A request of a chat with these fields.
fn chat(more: &Value) -> Vec<u8> {
    let mut request = json!({"model": "pocket", "messages": [{"role": "user", "content": "The state of the Union"}],
        "max_tokens": 400, "temperature": 1.0, "seed": 5});
    more.as_object().unwrap().iter().for_each(|(key, value)| request[key] = value.clone());
    request.to_string().into_bytes()
}

/// Long enough for a budget to be cut in the middle of it, and small enough for the context.
fn census() -> Value {
    let state = json!({"type": "object", "additionalProperties": false, "required": ["state", "people"],
        "properties": {"state": {"type": "string", "pattern": "^[a-z]{3,8}$"}, "people": {"$ref": "#/$defs/count"}}});
    json!({"type": "object", "additionalProperties": false, "required": ["states", "approved"],
        "properties": {"states": {"type": "array", "items": state, "minItems": 4, "maxItems": 4},
            "approved": {"enum": [true, null]}},
        "$defs": {"count": {"type": "integer", "minimum": 100, "maximum": 999}}})
}

fn check_census(text: &str) {
    let found: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let states = found["states"].as_array().unwrap();
    assert_eq!((states.len(), found.as_object().unwrap().len()), (4, 2), "{text}");
    for state in states {
        let name = state["state"].as_str().unwrap();
        assert!((3..=8).contains(&name.len()) && name.chars().all(|c| c.is_ascii_lowercase()), "{text}");
        assert!((100..=999).contains(&state["people"].as_u64().unwrap()), "{text}");
    }
    assert!(found["approved"] == true || found["approved"].is_null(), "{text}");
}

#[test]
fn a_schema_is_obeyed_across_a_switch() {
    let daemon = Daemon::start("");
    let format = json!({"type": "json_schema", "json_schema": {"name": "census", "strict": true, "schema": census()}});
    let (status, whole) = daemon.ask("POST", "/v1/chat/completions", &chat(&json!({"response_format": format})));
    assert_eq!((status, &whole["choices"][0]["finish_reason"]), (200, &json!("stop")), "{whole}");
    check_census(whole["choices"][0]["message"]["content"].as_str().unwrap());
    // The cut comes over another connection and may be too late for an answer as short-lived as this: try again.
    for _ in 0..20 {
        daemon.set_budget(FULL);
        let asked = chat(&json!({"response_format": format, "stream": true}));
        let mut stream = chunks(daemon.send("POST", "/v1/chat/completions", &asked));
        let mut text = String::new();
        let mut hear = |chunk: &Value| text += chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        hear(&stream.next().unwrap());
        let figures = daemon.get("/metrics");
        let top = sum(&figures, "molt_rung_weights_bytes", &["rung=\"0\""]);
        let cut = sum(&figures, "molt_usage_kind_bytes", &["overhead"]) + top;
        daemon.set_budget(format!("{cut:.0}").parse().unwrap());
        let mut switches = 0;
        for chunk in stream {
            switches += u32::from(chunk["molt"]["event"] == "switch" && chunk["molt"]["to"] != 0);
            hear(&chunk);
        }
        check_census(&text);
        if switches > 0 {
            return;
        }
    }
    panic!("twenty answers ended before their budget could be cut");
}

#[test]
fn any_object_is_json_and_what_is_no_schema_is_refused() {
    let daemon = Daemon::start("");
    let asked = chat(&json!({"response_format": {"type": "json_object"}}));
    let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &asked);
    assert_eq!(status, 200, "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    // A tiny model may write a longer object than there is room for; it is an object all the same.
    match answer["choices"][0]["finish_reason"].as_str().unwrap() {
        "stop" => assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}"),
        _ => assert!(text.starts_with('{'), "{text}"),
    }
    let check_refused = |format: Value| {
        let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &chat(&json!({"response_format": format})));
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("response_format")), "{answer}");
    };
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    check_refused(json!({"type": "yaml"}));
    check_refused(schema(json!(7)));
    check_refused(schema(json!({"type": "nothing"})));
    check_refused(schema(json!({"$ref": "#/$defs/nowhere"})));
    check_refused(schema(json!({"type": "string", "pattern": "("})));
    let mut nested = json!({"type": "string"});
    for _ in 0..60 {
        nested = json!({"type": "array", "items": nested, "minItems": 1});
    }
    let (status, answer) =
        daemon.ask("POST", "/v1/chat/completions", &chat(&json!({"response_format": schema(nested)})));
    assert!(status == 200 || status == 400, "{answer}");
    assert_eq!(daemon.ask("GET", "/health", b"").0, 200);
}

#[test]
fn likelihoods_are_those_of_the_model() {
    let daemon = Daemon::start("");
    let (status, whole) = daemon.ask(
        "POST",
        "/v1/chat/completions",
        &chat(&json!({"logprobs": true, "top_logprobs": 4, "temperature": 0, "max_tokens": 20})),
    );
    assert_eq!(status, 200, "{whole}");
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(told.len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    let mut bytes = Vec::new();
    for token in told {
        bytes.extend(token["bytes"].as_array().unwrap().iter().map(|b| u8::try_from(b.as_u64().unwrap()).unwrap()));
        let top: Vec<f64> =
            token["top_logprobs"].as_array().unwrap().iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert_eq!(token["logprob"].as_f64(), top.first().copied(), "the likeliest is taken: {token}");
        assert!(top.len() == 4 && top.is_sorted_by(|a, b| a >= b), "{token}");
        assert!(top.iter().map(|logprob| logprob.exp()).sum::<f64>() <= 1.0 + 1e-9, "{token}");
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), whole["choices"][0]["message"]["content"].as_str().unwrap());
    let ask = json!({"logprobs": true, "top_logprobs": 4, "temperature": 0, "max_tokens": 20, "stream": true});
    let stream = chunks(daemon.send("POST", "/v1/chat/completions", &chat(&ask)));
    let streamed: Vec<Value> =
        stream.filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array().cloned()).flatten().collect();
    assert_eq!(&streamed, told);
    // What a grammar leaves is another matter than what the model thinks: sampling is held, likelihoods are told as they are.
    let held =
        json!({"logprobs": true, "top_logprobs": 1, "max_tokens": 3, "response_format": {"type": "json_object"}});
    let (_, held) = daemon.ask("POST", "/v1/chat/completions", &chat(&held));
    let first = &held["choices"][0]["logprobs"]["content"][0];
    assert!(first["token"].as_str().unwrap().starts_with('{'), "{held}");
    assert!(first["logprob"].as_f64() < first["top_logprobs"][0]["logprob"].as_f64(), "{held}");

    let asked = json!({"prompt": "The people of the", "max_tokens": 12, "temperature": 0, "logprobs": 2});
    let (status, text) = daemon.ask("POST", "/v1/completions", asked.to_string().as_bytes());
    assert_eq!(status, 200, "{text}");
    let (choice, told) = (&text["choices"][0], &text["choices"][0]["logprobs"]);
    let tokens: Vec<&str> = told["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), choice["text"].as_str().unwrap());
    let mut at = 0;
    for (nth, token) in tokens.iter().enumerate() {
        assert_eq!(told["text_offset"][nth], at, "{told}");
        at += token.chars().count();
        assert_eq!(told["top_logprobs"][nth][token], told["token_logprobs"][nth], "{told}");
        assert_eq!(told["top_logprobs"][nth].as_object().unwrap().len(), 2, "{told}");
    }
}

/// The embedded model with a template that knows tools, and a ladder of it alone: the paths of both.
fn ladder_with_tools(folder: &Path) -> std::path::PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let model = std::fs::read(root.join("molt-models/ladders/pocket/pocket-tier0.gguf")).unwrap();
    let mut template = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}\
        {% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>\
        {% endfor %}\n{% endfor %}"
        .to_owned();
    let key = "tokenizer.chat_template";
    // One more entry in front of the others. Tensors begin at a multiple of 32 bytes after them, and still do.
    let entry = |template: &str| {
        let length = |text: &str| (text.len() as u64).to_le_bytes();
        [&length(key)[..], key.as_bytes(), &8u32.to_le_bytes(), &length(template), template.as_bytes()].concat()
    };
    while !entry(&template).len().is_multiple_of(32) {
        template.push(' ');
    }
    let entries = u64::from_le_bytes(model[16..24].try_into().unwrap()) + 1;
    let old = model.windows(key.len()).position(|part| part == key.as_bytes()).unwrap();
    let mut rest = model[24..].to_vec();
    // The model's own template gets a name that nobody reads.
    rest[old - 24] = b'T';
    let made = [&model[..16], &entries.to_le_bytes(), &entry(&template), &rest].concat();
    let (file, ladder) = (folder.join("tools.gguf"), folder.join("tools.toml"));
    std::fs::write(&file, &made).unwrap();
    let text = format!(
        "name = \"tools\"\ndescription = \"x\"\n[[rung]]\nfile = \"tools.gguf\"\nprecision = \"f32\"\n\
         [[file]]\nname = \"tools.gguf\"\npath = {:?}\nsha256 = {:?}\nbytes = {}\n",
        file.to_str().unwrap(),
        sha256(&made),
        made.len()
    );
    std::fs::write(&ladder, text).unwrap();
    ladder
}

fn tools() -> Value {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}});
    json!([
        tool(
            "weather",
            json!({"type": "object", "additionalProperties": false, "required": ["city", "days"],
            "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"$ref": "#/$defs/days"}},
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}})
        ),
        tool("time", json!({"type": "object", "additionalProperties": false, "properties": {}})),
    ])
}

fn check_call(call: &Value, expected: Option<&str>) {
    assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    let name = call["function"]["name"].as_str().unwrap();
    assert!(expected.is_none_or(|expected| expected == name), "{call}");
    match name {
        "weather" => {
            assert!(["Rome", "Paris"].contains(&arguments["city"].as_str().unwrap()), "{call}");
            assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{call}");
        }
        "time" => assert_eq!(arguments, json!({}), "{call}"),
        other => panic!("nobody offered {other}"),
    }
}

#[test]
fn tools_are_called_as_their_schemas_say() {
    let folder = tempfile::tempdir().unwrap();
    let ladder = ladder_with_tools(folder.path());
    let daemon = Daemon::start_with("", &["--ladder", ladder.to_str().unwrap()]);
    let ask = |more: &Value| {
        let mut asked = json!({"max_tokens": 150});
        more.as_object().unwrap().iter().for_each(|(key, value)| asked[key] = value.clone());
        let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &chat(&asked));
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    };
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (choice, expected) in [(json!("required"), None), (named, Some("weather"))] {
        for seed in 0..4 {
            let asked = json!({"tools": tools(), "tool_choice": choice, "seed": seed});
            let answer = ask(&asked);
            assert_eq!((&answer["finish_reason"], &answer["message"]["content"]), (&json!("tool_calls"), &Value::Null));
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{answer}");
            check_call(&calls[0], expected);
        }
    }
    let asked = chat(&json!({"tools": tools(), "tool_choice": "required", "stream": true, "max_tokens": 150}));
    let streamed: Vec<Value> = chunks(daemon.send("POST", "/v1/chat/completions", &asked)).collect();
    let calls: Vec<&Value> =
        streamed.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls.len(), 1, "{streamed:?}");
    assert_eq!(calls[0]["index"], 0);
    check_call(calls[0], None);
    assert_eq!(streamed.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    assert!(streamed.iter().all(|c| !c["choices"][0]["delta"]["content"].is_string()), "nothing is said beside it");

    // Told of tools and free to say anything, it says something; the conversation goes on with a call and its result.
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}});
    let messages = json!([{"role": "user", "content": "What time?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]);
    let free = ask(&json!({"tools": tools(), "messages": messages, "max_tokens": 8}));
    assert!(free["message"]["content"].is_string(), "{free}");
    let none = ask(&json!({"tools": tools(), "tool_choice": "none", "max_tokens": 8}));
    assert!(none["message"]["content"].is_string() && none["message"]["tool_calls"].is_null(), "{none}");
}

#[test]
fn tools_that_a_ladder_cannot_serve_are_refused_by_name() {
    let daemon = Daemon::start("");
    let asked = chat(&json!({"tools": tools(), "max_tokens": 9}));
    let (status, answer) = daemon.ask("POST", "/v1/chat/completions", &asked);
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("tools")), "{answer}");
    assert!(answer.to_string().contains("knows no tools"), "{answer}");
    let none = json!({"tools": tools(), "tool_choice": "none", "max_tokens": 3});
    assert_eq!(daemon.ask("POST", "/v1/chat/completions", &chat(&none)).0, 200);
}
