//! The OpenAI wire: what a request may say, and what is refused by name.

use molt_models::TOOL_CALL;
use molt_models::sampling::SamplingSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::service::form::Form;
use crate::service::messages::{OneOrMany, Prompt, conversation, text};

/// A request for an answer, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The conversation or the text.
    pub prompt: Prompt,
    /// Most tokens of the answer, where the client limits them.
    pub max_tokens: Option<u64>,
    /// How tokens are chosen, but for the seed.
    pub sampling: SamplingSettings,
    /// The seed, where the client gives one.
    pub seed: Option<u64>,
    /// The answer ends before the first of these.
    pub stop: Vec<String>,
    /// Whether tokens are sent as they come.
    pub stream: bool,
    /// Whether a stream ends with a chunk of usage.
    pub include_usage: bool,
    /// Whether each token is told with its likelihood, and with how many of the likeliest.
    pub likelihoods: Option<usize>,
    /// What the answer must or may be.
    pub form: Form,
}

/// Which of the two answering routes a body came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

/// Most stop sequences, as in OpenAI's interface.
const STOPS: usize = 4;

/// Most likely tokens told with each, as in OpenAI's interface.
const TOP_OF_CHAT: usize = 20;
const TOP_OF_TEXT: usize = 5;

/// What is wrong with a request: the field, and a sentence about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct BadRequest {
    /// The field.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

#[derive(Deserialize, Default)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl ChatRequest {
    /// Reads a body. A field that changes nothing at its value is accepted; one that Molt cannot serve is refused.
    pub fn parse(kind: Kind, body: &[u8]) -> Result<Self, BadRequest> {
        let bad = |field: &str, reason: String| BadRequest { field: field.to_owned(), reason };
        let mut fields: Map<String, Value> =
            serde_json::from_slice(body).map_err(|e| bad("body", format!("is no JSON object: {e}")))?;
        let prompt = match kind {
            Kind::Chat => conversation(&mut fields)?,
            Kind::Text => text(&mut fields)?,
        };
        let stop: Option<OneOrMany> = take(&mut fields, "stop")?;
        let mut stop = stop.map(OneOrMany::into_vec).unwrap_or_default();
        if stop.len() > STOPS || stop.iter().any(String::is_empty) {
            return Err(bad("stop", format!("must be at most {STOPS} texts, none of them empty")));
        }
        let form = Form::take(&mut fields)?;
        if kind == Kind::Text && form.has_tools() {
            return Err(bad("tools", "are for conversations".to_owned()));
        }
        // A grammar ends by itself, and an argument may hold the mark.
        if form.one_call && form.grammar.is_none() {
            stop.push(TOOL_CALL.1.to_owned());
        }
        let mut request = Self {
            prompt,
            max_tokens: take(&mut fields, "max_completion_tokens")?.or(take(&mut fields, "max_tokens")?),
            sampling: SamplingSettings { temperature: 0.7, ..SamplingSettings::default() },
            seed: take(&mut fields, "seed")?,
            stop,
            stream: take(&mut fields, "stream")?.unwrap_or(false),
            include_usage: take::<StreamOptions>(&mut fields, "stream_options")?.unwrap_or_default().include_usage,
            likelihoods: likelihoods(kind, &mut fields)?,
            form,
        };
        let s = &mut request.sampling;
        s.temperature = in_range("temperature", take(&mut fields, "temperature")?.unwrap_or(s.temperature), 0.0, 2.0)?;
        s.top_p = in_range("top_p", take(&mut fields, "top_p")?.unwrap_or(s.top_p), 0.0, 1.0)?;
        s.top_k = take(&mut fields, "top_k")?.unwrap_or(s.top_k);
        let mut penalty = |field: &str| in_range(field, take(&mut fields, field)?.unwrap_or(0.0), -2.0, 2.0);
        (s.presence_penalty, s.frequency_penalty) = (penalty("presence_penalty")?, penalty("frequency_penalty")?);
        if request.max_tokens == Some(0) {
            return Err(bad("max_tokens", "is 0".to_owned()));
        }
        for field in ["model", "user", "metadata", "store"] {
            fields.remove(field);
        }
        match fields.iter().find(|(field, value)| !changes_nothing(field, value)) {
            Some((field, value)) => Err(bad(field, format!("{value} is not supported"))),
            None => Ok(request),
        }
    }
}

/// Takes a field out; `null` is as good as absent.
pub(super) fn take<T: serde::de::DeserializeOwned>(
    fields: &mut Map<String, Value>,
    field: &str,
) -> Result<Option<T>, BadRequest> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value)
            .map(Some)
            .map_err(|e| BadRequest { field: field.to_owned(), reason: e.to_string() }),
    }
}

/// How many of the likeliest tokens are told with each: in a chat `logprobs` says whether, in a completion how many.
fn likelihoods(kind: Kind, fields: &mut Map<String, Value>) -> Result<Option<usize>, BadRequest> {
    let bad = |field: &str, reason: String| BadRequest { field: field.to_owned(), reason };
    let (field, asked, most) = match kind {
        Kind::Chat => {
            let wanted: bool = take(fields, "logprobs")?.unwrap_or(false);
            let top: Option<usize> = take(fields, "top_logprobs")?;
            if !wanted && top.is_some_and(|top| top > 0) {
                return Err(bad("top_logprobs", "needs logprobs to be true".to_owned()));
            }
            ("top_logprobs", wanted.then_some(top.unwrap_or(0)), TOP_OF_CHAT)
        }
        Kind::Text if fields.get("logprobs") == Some(&Value::Bool(false)) => {
            fields.remove("logprobs");
            return Ok(None);
        }
        Kind::Text => ("logprobs", take(fields, "logprobs")?, TOP_OF_TEXT),
    };
    match asked {
        Some(asked) if asked > most => Err(bad(field, format!("{asked} is more than {most}"))),
        asked => Ok(asked),
    }
}

fn in_range(field: &str, value: f32, from: f32, to: f32) -> Result<f32, BadRequest> {
    match (from..=to).contains(&value) {
        true => Ok(value),
        false => Err(BadRequest { field: field.to_owned(), reason: format!("{value} is not between {from} and {to}") }),
    }
}

/// Defaults that clients send although they ask for nothing.
fn changes_nothing(field: &str, value: &Value) -> bool {
    let empty = value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    match field {
        _ if value.is_null() || empty => true,
        "n" => value == 1,
        "best_of" => value == 1,
        "echo" => value == false,
        "suffix" => value == "",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, refused: Option<&str>) {
        check_of(Kind::Chat, body, refused);
    }

    fn check_of(kind: Kind, body: &str, refused: Option<&str>) {
        match (ChatRequest::parse(kind, body.as_bytes()), refused) {
            (Ok(_), None) => {}
            (Err(bad), Some(field)) => assert_eq!(bad.field, field, "{bad}"),
            (got, _) => panic!("{body}: {got:?}, expected {refused:?}"),
        }
    }

    #[test]
    fn fields_are_served_accepted_or_refused_by_name() {
        let with = |more: &str| format!(r#"{{"model":"x","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
        check(&with(""), None);
        check(&with(r#","temperature":0,"top_p":0.9,"top_k":5,"seed":7,"max_tokens":3,"stream":true"#), None);
        check(&with(r#","tools":[],"response_format":{"type":"text"},"n":1,"presence_penalty":0,"stop":null"#), None);
        check(&with(r#","stream_options":{"include_usage":true}"#), None);
        check(&with(r#","n":2"#), Some("n"));
        check(&with(r#","tools":[{"type":"function"}]"#), Some("tools[0]"));
        check(&with(r#","stop":"\n","presence_penalty":1,"frequency_penalty":-0.5"#), None);
        check(&with(r#","stop":["a","b","c","d"]"#), None);
        check(&with(r#","stop":["a","b","c","d","e"]"#), Some("stop"));
        check(&with(r#","stop":[""]"#), Some("stop"));
        check(&with(r#","stop":7"#), Some("stop"));
        check(&with(r#","presence_penalty":3"#), Some("presence_penalty"));
        check(&with(r#","logprobs":true,"top_logprobs":20"#), None);
        check(&with(r#","logprobs":true,"top_logprobs":21"#), Some("top_logprobs"));
        check(&with(r#","logprobs":false,"top_logprobs":0"#), None);
        check(&with(r#","top_logprobs":2"#), Some("top_logprobs"));
        check(&with(r#","logprobs":3"#), Some("logprobs"));
        check(&with(r#","response_format":{"type":"json_schema","json_schema":{"schema":{}}}"#), None);
        let call = r#"{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}"#;
        let told =
            |call: &str| format!(r#"{{"messages":[{{"role":"assistant","content":null,"tool_calls":[{call}]}}]}}"#);
        check(&told(call), None);
        check(&told(&call.replace("{}", "{")), Some("messages[0].tool_calls"));
        check(r#"{"messages":[{"role":"assistant","content":null}]}"#, Some("messages[0].content"));
        check(r#"{"messages":[{"role":"user","content":"x","mood":"good"}]}"#, Some("messages[0]"));
        for (role, good) in
            [("developer", true), ("ipython-2_x", true), ("", false), ("user\\n", false), ("<|x|>", false)]
        {
            let body = format!(r#"{{"messages":[{{"role":"{role}","content":"x"}}]}}"#);
            check(&body, (!good).then_some("messages[0].role"));
        }
        check(&with(r#","frobnicate":1"#), Some("frobnicate"));
        check(&with(r#","temperature":9"#), Some("temperature"));
        check(&with(r#","max_tokens":0"#), Some("max_tokens"));
        check(&with(r#","max_tokens":-1"#), Some("max_tokens"));
        check(r#"{"messages":[]}"#, Some("messages"));
        check(r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#, Some("messages[0].content"));
        check("{}", Some("messages"));
        check("[", Some("body"));
        let parts =
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
        let Prompt::Messages(messages) = ChatRequest::parse(Kind::Chat, parts.as_bytes()).unwrap().prompt else {
            panic!("a conversation")
        };
        assert_eq!(messages[0].content, "ab");
        check_of(Kind::Text, r#"{"prompt":"The people of","max_tokens":5,"echo":false,"best_of":1,"n":1}"#, None);
        check_of(Kind::Text, r#"{"prompt":["one"]}"#, None);
        check_of(Kind::Text, r#"{"prompt":["one","two"]}"#, Some("prompt"));
        check_of(Kind::Text, r#"{"prompt":""}"#, Some("prompt"));
        check_of(Kind::Text, r#"{"prompt":"x","echo":true}"#, Some("echo"));
        check_of(Kind::Text, r#"{"prompt":"x","messages":[{"role":"user","content":"hi"}]}"#, Some("messages"));
        check_of(Kind::Text, r#"{"prompt":"x","logprobs":5}"#, None);
        check_of(Kind::Text, r#"{"prompt":"x","logprobs":6}"#, Some("logprobs"));
        let tool = r#"[{"type":"function","function":{"name":"f"}}]"#;
        check_of(Kind::Text, &format!(r#"{{"prompt":"x","tools":{tool}}}"#), Some("tools"));
        check_of(Kind::Text, "{}", Some("prompt"));
    }
}
