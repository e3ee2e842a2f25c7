//! The OpenAI wire: what a request may say, and what is refused by name.

use molt_models::Message;
use molt_models::sampling::SamplingSettings;
use serde::Deserialize;
use serde_json::{Map, Value};

/// A request for an answer, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Most tokens of the answer, where the client limits them.
    pub max_tokens: Option<u64>,
    /// How tokens are chosen, but for the seed.
    pub sampling: SamplingSettings,
    /// The seed, where the client gives one.
    pub seed: Option<u64>,
    /// Whether tokens are sent as they come.
    pub stream: bool,
    /// Whether a stream ends with a chunk of usage.
    pub include_usage: bool,
}

/// What is wrong with a request: the field, and a sentence about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct BadRequest {
    /// The field.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireMessage {
    role: String,
    content: Content,
    /// Clients send it; no template of ours reads it.
    #[serde(default, rename = "name")]
    _name: Option<String>,
}

#[derive(Deserialize, Default)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl ChatRequest {
    /// Reads a body. A field that changes nothing at its value is accepted; one that Molt cannot serve is refused.
    pub fn parse(body: &[u8]) -> Result<Self, BadRequest> {
        let bad = |field: &str, reason: String| BadRequest { field: field.to_owned(), reason };
        let mut fields: Map<String, Value> =
            serde_json::from_slice(body).map_err(|e| bad("body", format!("is no JSON object: {e}")))?;
        let messages: Vec<WireMessage> =
            take(&mut fields, "messages")?.ok_or_else(|| bad("messages", "is missing".to_owned()))?;
        if messages.is_empty() {
            return Err(bad("messages", "is empty".to_owned()));
        }
        let mut request = Self {
            messages: messages.into_iter().map(message).collect::<Result<_, _>>()?,
            max_tokens: take(&mut fields, "max_completion_tokens")?.or(take(&mut fields, "max_tokens")?),
            sampling: SamplingSettings { temperature: 0.7, ..SamplingSettings::default() },
            seed: take(&mut fields, "seed")?,
            stream: take(&mut fields, "stream")?.unwrap_or(false),
            include_usage: take::<StreamOptions>(&mut fields, "stream_options")?.unwrap_or_default().include_usage,
        };
        let s = &mut request.sampling;
        s.temperature = in_range("temperature", take(&mut fields, "temperature")?.unwrap_or(s.temperature), 0.0, 2.0)?;
        s.top_p = in_range("top_p", take(&mut fields, "top_p")?.unwrap_or(s.top_p), 0.0, 1.0)?;
        s.top_k = take(&mut fields, "top_k")?.unwrap_or(s.top_k);
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

fn message(wire: WireMessage) -> Result<Message, BadRequest> {
    let content = match wire.content {
        Content::Text(text) => text,
        Content::Parts(parts) => match parts.iter().find(|p| p.r#type != "text") {
            Some(other) => {
                let reason = format!("content of type {} is not supported", other.r#type);
                return Err(BadRequest { field: "messages".to_owned(), reason });
            }
            None => parts.into_iter().map(|p| p.text).collect(),
        },
    };
    Ok(Message { role: wire.role, content })
}

/// Takes a field out; `null` is as good as absent.
fn take<T: serde::de::DeserializeOwned>(fields: &mut Map<String, Value>, field: &str) -> Result<Option<T>, BadRequest> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value)
            .map(Some)
            .map_err(|e| BadRequest { field: field.to_owned(), reason: e.to_string() }),
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
        "presence_penalty" | "frequency_penalty" => value.as_f64() == Some(0.0),
        "logprobs" => value == false,
        "response_format" => value["type"] == "text",
        "tool_choice" => value == "none" || value == "auto",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, refused: Option<&str>) {
        match (ChatRequest::parse(body.as_bytes()), refused) {
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
        check(&with(r#","tools":[{"type":"function"}]"#), Some("tools"));
        check(&with(r#","stop":"\n""#), Some("stop"));
        check(&with(r#","frobnicate":1"#), Some("frobnicate"));
        check(&with(r#","temperature":9"#), Some("temperature"));
        check(&with(r#","max_tokens":0"#), Some("max_tokens"));
        check(&with(r#","max_tokens":-1"#), Some("max_tokens"));
        check(r#"{"messages":[]}"#, Some("messages"));
        check(r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#, Some("messages"));
        check("{}", Some("messages"));
        check("[", Some("body"));
        let parts =
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
        assert_eq!(ChatRequest::parse(parts.as_bytes()).unwrap().messages[0].content, "ab");
    }
}
