//! What a request begins with: a conversation, or a text to be gone on with.

use molt_models::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::service::wire::{BadRequest, take};

/// What a request begins with.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A conversation, for the chat template.
    Messages(Vec<Message>),
    /// Text, to be gone on with.
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// One text, or several.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(super) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
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
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<WireCall>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    /// Clients send an answer back as it came; an empty one says nothing.
    #[serde(default, rename = "refusal")]
    _refusal: Option<()>,
    #[serde(default, rename = "audio")]
    _audio: Option<()>,
    #[serde(default, rename = "function_call")]
    _function_call: Option<()>,
    #[serde(default)]
    annotations: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct WireCall {
    #[serde(default)]
    id: String,
    r#type: String,
    function: WireFunction,
}

#[derive(Deserialize)]
struct WireFunction {
    name: String,
    arguments: String,
}

fn bad(field: String, reason: impl Into<String>) -> BadRequest {
    BadRequest { field, reason: reason.into() }
}

/// Takes the conversation out of a body.
pub(super) fn conversation(fields: &mut Map<String, Value>) -> Result<Prompt, BadRequest> {
    let whole = |reason: &str| bad("messages".to_owned(), reason);
    let messages: Vec<Value> = take(fields, "messages")?.ok_or_else(|| whole("is missing"))?;
    if messages.is_empty() {
        return Err(whole("is empty"));
    }
    let each = messages.into_iter().enumerate();
    let read = each.map(|(at, value)| {
        let field = format!("messages[{at}]");
        let wire = serde_json::from_value(value).map_err(|error| bad(field.clone(), error.to_string()))?;
        message(wire, &field)
    });
    Ok(Prompt::Messages(read.collect::<Result<_, _>>()?))
}

/// Takes the text out of a body.
pub(super) fn text(fields: &mut Map<String, Value>) -> Result<Prompt, BadRequest> {
    let bad = |reason: &str| bad("prompt".to_owned(), reason);
    let prompt: Option<OneOrMany> = take(fields, "prompt")?;
    match prompt.map(OneOrMany::into_vec).as_deref() {
        None => Err(bad("is missing")),
        Some([one]) if !one.is_empty() => Ok(Prompt::Text(one.clone())),
        Some([_]) => Err(bad("is empty")),
        Some(_) => Err(bad("must be one text; send several as requests of their own")),
    }
}

/// A role is a word: templates write it into what steers the model, and make control tokens of it.
fn is_role(role: &str) -> bool {
    !role.is_empty() && role.len() <= 32 && role.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

fn message(wire: WireMessage, field: &str) -> Result<Message, BadRequest> {
    if !is_role(&wire.role) {
        return Err(bad(format!("{field}.role"), "is no role: those are letters, digits, _ and -, at most 32"));
    }
    if wire.annotations.is_some_and(|annotations| !annotations.is_empty()) {
        return Err(bad(format!("{field}.annotations"), "are not supported"));
    }
    let tool_calls = wire
        .tool_calls
        .unwrap_or_default()
        .into_iter()
        .map(|call| tool_call(call, field))
        .collect::<Result<Vec<_>, _>>()?;
    let content = match wire.content {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => match parts.iter().find(|p| p.r#type != "text") {
            Some(other) => {
                return Err(bad(format!("{field}.content"), format!("of type {} is not supported", other.r#type)));
            }
            None => parts.into_iter().map(|p| p.text).collect(),
        },
        None if tool_calls.is_empty() => return Err(bad(format!("{field}.content"), "is missing")),
        None => String::new(),
    };
    Ok(Message { role: wire.role, content, tool_calls, tool_call_id: wire.tool_call_id, name: wire.name })
}

/// A call as templates read it: its arguments are JSON, not text that holds JSON.
fn tool_call(call: WireCall, field: &str) -> Result<Value, BadRequest> {
    let field = format!("{field}.tool_calls");
    if call.r#type != "function" {
        return Err(bad(field, format!("of type {} are not supported", call.r#type)));
    }
    let WireFunction { name, arguments } = call.function;
    let arguments: Value = serde_json::from_str(&arguments)
        .map_err(|error| bad(field, format!("the arguments of {name} are no JSON: {error}")))?;
    let function = serde_json::json!({"name": name, "arguments": arguments});
    Ok(serde_json::json!({"id": call.id, "type": "function", "function": function}))
}
