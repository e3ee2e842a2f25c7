//! What an answer must or may be: `response_format`, `tools` and `tool_choice`.

use std::collections::BTreeSet;

use molt_models::{GrammarSpec, TOOL_CALL};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::service::wire::{BadRequest, take};

/// Most tools of a request, as in OpenAI's interface.
const TOOLS: usize = 128;
/// Longest name of a tool.
const NAME: usize = 64;

/// What an answer must or may be.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Form {
    /// Tools that the model is told of.
    pub tools: Vec<Value>,
    /// What holds the answer to it while it is written, and the field that asked for it.
    pub grammar: Option<(&'static str, GrammarSpec)>,
    /// Whether the answer ends with its first call.
    pub one_call: bool,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

/// The name and description are for the client, and whatever `strict` says, a schema is held to.
#[derive(Deserialize)]
struct NamedSchema {
    #[serde(default = "anything")]
    schema: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool {
    r#type: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default = "anything")]
    parameters: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolChoice {
    Word(String),
    Named { function: Named },
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

fn anything() -> Value {
    json!({"type": "object"})
}

fn bad(field: &str, reason: impl Into<String>) -> BadRequest {
    BadRequest { field: field.to_owned(), reason: reason.into() }
}

impl Form {
    /// Takes it out of a body.
    pub(super) fn take(fields: &mut Map<String, Value>) -> Result<Self, BadRequest> {
        let format = match take(fields, "response_format")? {
            None | Some(ResponseFormat::Text) => None,
            Some(ResponseFormat::JsonObject) => Some(GrammarSpec::JsonObject),
            Some(ResponseFormat::JsonSchema { json_schema }) => Some(GrammarSpec::JsonSchema(json_schema.schema)),
        };
        let told: Vec<Value> = take(fields, "tools")?.unwrap_or_default();
        let tools = functions(&told)?;
        let choice = take(fields, "tool_choice")?.unwrap_or(ToolChoice::Word("auto".to_owned()));
        let parallel: bool = take(fields, "parallel_tool_calls")?.unwrap_or(true);
        let called: Vec<&Function> = match &choice {
            ToolChoice::Word(word) if word == "none" => {
                return Ok(Self { grammar: format.map(|spec| ("response_format", spec)), ..Self::default() });
            }
            ToolChoice::Word(word) if word == "auto" => Vec::new(),
            ToolChoice::Word(word) if word == "required" => tools.iter().collect(),
            ToolChoice::Word(word) => {
                return Err(bad("tool_choice", format!("{word:?} is not none, auto, required or a function")));
            }
            ToolChoice::Named { function: Named { name } } => match tools.iter().find(|tool| &tool.name == name) {
                Some(tool) => vec![tool],
                None => return Err(bad("tool_choice", format!("there is no tool {name}"))),
            },
        };
        if tools.is_empty() {
            return match choice {
                ToolChoice::Word(word) if word == "auto" => {
                    Ok(Self { grammar: format.map(|spec| ("response_format", spec)), ..Self::default() })
                }
                _ => Err(bad("tool_choice", "there are no tools")),
            };
        }
        if format.is_some() {
            return Err(bad("response_format", "cannot be held together with tools; set tool_choice to none"));
        }
        let call = if called.is_empty() { None } else { Some(call_of(&called)?) };
        let grammar = call.map(|call| ("tools", call));
        Ok(Self { tools: told, one_call: grammar.is_some() || !parallel, grammar })
    }

    /// Whether calls are looked for in the answer.
    pub fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }
}

fn functions(tools: &[Value]) -> Result<Vec<Function>, BadRequest> {
    if tools.len() > TOOLS {
        return Err(bad("tools", format!("there are {} of them, at most {TOOLS} are taken", tools.len())));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let (mut names, mut functions) = (BTreeSet::new(), Vec::new());
    for (at, tool) in tools.iter().enumerate() {
        let field = format!("tools[{at}]");
        let Tool { r#type, function } = Tool::deserialize(tool).map_err(|error| bad(&field, error.to_string()))?;
        if r#type != "function" {
            return Err(bad(&field, format!("of type {} is not supported", r#type)));
        }
        if function.name.is_empty() || function.name.len() > NAME || !function.name.chars().all(plain) {
            return Err(bad(&field, format!("its name must be 1 to {NAME} letters, digits, dashes or underscores")));
        }
        if !names.insert(function.name.clone()) {
            return Err(bad(&field, format!("there are two tools {}", function.name)));
        }
        functions.push(function);
    }
    Ok(functions)
}

/// A call of one of these functions, and nothing else.
fn call_of(functions: &[&Function]) -> Result<GrammarSpec, BadRequest> {
    let mut shared = Map::new();
    let mut calls = Vec::new();
    for function in functions {
        let mut parameters = function.parameters.clone();
        // A reference counts from the root of the whole schema, so definitions go there.
        for key in ["$defs", "definitions"] {
            let Some(Value::Object(own)) = parameters.as_object_mut().and_then(|fields| fields.remove(key)) else {
                continue;
            };
            let Some(all) = shared.entry(key).or_insert_with(|| json!({})).as_object_mut() else { continue };
            for (name, schema) in own {
                if all.get(&name).is_some_and(|other| *other != schema) {
                    return Err(bad("tools", format!("two of them define {name} differently")));
                }
                all.insert(name, schema);
            }
        }
        calls.push(json!({"type": "object", "additionalProperties": false, "required": ["name", "arguments"],
            "properties": {"name": {"const": function.name}, "arguments": parameters}}));
    }
    let mut schema = match calls.as_slice() {
        [one] => one.clone(),
        _ => json!({"anyOf": calls}),
    };
    schema.as_object_mut().into_iter().for_each(|schema| schema.extend(shared.clone()));
    let (open, close) = (format!("{}\n", TOOL_CALL.0), format!("\n{}", TOOL_CALL.1));
    Ok(GrammarSpec::Between { open, schema, close })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: Value, expected: Result<(usize, bool), &str>) {
        let mut fields = body.as_object().unwrap().clone();
        match (Form::take(&mut fields), expected) {
            (Ok(form), Ok(expected)) => {
                assert_eq!((form.tools.len(), form.grammar.is_some()), expected, "{body}");
                assert!(fields.is_empty(), "{fields:?} is left of {body}");
            }
            (Err(error), Err(field)) => assert_eq!(error.field, field, "{body}: {error}"),
            (found, expected) => panic!("{body}: {found:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn forms_are_taken_or_refused_by_name() {
        let tool =
            |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        check(json!({}), Ok((0, false)));
        check(json!({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}), Ok((0, false)));
        check(json!({"response_format": {"type": "json_object"}}), Ok((0, true)));
        check(
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
            Ok((0, true)),
        );
        check(json!({"response_format": {"type": "xml"}}), Err("response_format"));
        check(json!({"response_format": {"type": "json_schema"}}), Err("response_format"));
        check(json!({"tools": [tool("a"), tool("b")]}), Ok((2, false)));
        check(json!({"tools": [tool("a")], "tool_choice": "none"}), Ok((0, false)));
        let defines = |name: &str, item: &str| {
            let parameters = json!({"type": "object", "$defs": {"Item": {"type": item}}});
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
        };
        let both =
            |item: &str| json!({"tools": [defines("a", "string"), defines("b", item)], "tool_choice": "required"});
        check(both("string"), Ok((2, true)));
        check(both("integer"), Err("tools"));
        check(json!({"tools": [tool("a")], "tool_choice": "required", "parallel_tool_calls": false}), Ok((1, true)));
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        check(json!({"tools": [tool("a"), tool("b")], "tool_choice": named("b")}), Ok((2, true)));
        check(json!({"tools": [tool("a")], "tool_choice": named("c")}), Err("tool_choice"));
        check(json!({"tools": [tool("a")], "tool_choice": "any"}), Err("tool_choice"));
        check(json!({"tool_choice": "required"}), Err("tool_choice"));
        check(json!({"tools": [tool("a"), tool("a")]}), Err("tools[1]"));
        check(json!({"tools": [tool("a b")]}), Err("tools[0]"));
        check(json!({"tools": [{"type": "retrieval"}]}), Err("tools[0]"));
        check(json!({"tools": 3}), Err("tools"));
        check(json!({"tools": [tool("a")], "response_format": {"type": "json_object"}}), Err("response_format"));
    }
}
