//! Chat templates: the Jinja text inside a model file turns messages into a prompt.
//!
//! A template comes from whoever made the file. It runs with a bounded number of steps and without access to files; the
//! memory that its steps take is not bounded.

use std::io;

use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{Environment, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::error::ModelError;

/// Steps that a template may take: some thousand times what a long conversation needs.
const FUEL: u64 = 5_000_000;

/// What opens and closes a call of a tool, in the form of Hermes and Qwen, which is the one that Molt reads.
pub const TOOL_CALL: (&str, &str) = ("<tool_call>", "</tool_call>");

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    pub content: String,
    /// Tools that the assistant called, each `{"type": "function", "function": {"name": .., "arguments": {..}}}`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// Which call a tool answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Who speaks, where there are several of a role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of that role.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned(), ..Self::default() }
    }
}

/// A chat template, parsed.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    knows_tools: bool,
}

impl ChatTemplate {
    /// Parses a template.
    pub fn new(source: &str, bos: Option<&str>) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned("chat", source.to_owned())
            .map_err(|e| ModelError::Template(format!("{e:#}")))?;
        let reads_tools =
            environment.get_template("chat").is_ok_and(|chat| chat.undeclared_variables(false).contains("tools"));
        let knows_tools = reads_tools && source.contains(TOOL_CALL.0);
        Ok(Self { environment, bos: bos.unwrap_or_default().to_owned(), knows_tools })
    }

    /// Whether it tells a model of tools and has it call them in the form of [`TOOL_CALL`].
    pub fn knows_tools(&self) -> bool {
        self.knows_tools
    }

    /// The prompt for these messages and tools, open for the assistant's answer.
    pub fn render(&self, messages: &[Message], tools: &[Value]) -> Result<String, ModelError> {
        let error = |e: minijinja::Error| ModelError::Template(format!("{e:#}"));
        let template = self.environment.get_template("chat").map_err(error)?;
        // Templates ask whether there is such a variable.
        let tools = (!tools.is_empty()).then_some(tools);
        template
            .render(context! { messages, tools, add_generation_prompt => true, bos_token => self.bos })
            .map_err(error)
    }
}

/// JSON as Python writes it, which is what models have read: a space after each comma and colon, nothing escaped that need
/// not be.
fn to_json(value: &Jinja, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    let wrong =
        |e: &dyn std::fmt::Display| minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, e.to_string());
    let indent: Option<usize> = options.get("indent")?;
    // Python has more options; none of them changes what a model is told.
    let _ignored: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut written = Vec::new();
    let done = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let style = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut written, style))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut written, Python)),
    };
    done.map_err(|e| wrong(&e))?;
    String::from_utf8(written).map(Jinja::from_safe_string).map_err(|e| wrong(&e))
}

struct Python;

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_become_a_prompt() {
        let source = "{{ bos_token }}{% for m in messages %}[{{ m['role'].upper() }}]{{ m.content }}{% endfor %}\
                      {% if add_generation_prompt %}[A]{% endif %}";
        let template = ChatTemplate::new(source, Some("<s>")).unwrap();
        let prompt = template.render(&[Message::new("system", "Be brief."), Message::new("user", "Hi")], &[]).unwrap();
        assert_eq!(prompt, "<s>[SYSTEM]Be brief.[USER]Hi[A]");
        assert!(!template.knows_tools());
    }

    #[test]
    fn tools_and_their_calls_are_told_as_in_python() {
        let source = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}\
                      {% for m in messages %}[{{ m.role }}]{{ m.content }}\
                      {% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}\
                      {% endfor %}";
        let template = ChatTemplate::new(source, None).unwrap();
        assert!(template.knows_tools());
        let call = json!({"type": "function", "function": {"name": "look", "arguments": {"b": [1, 2], "a": "é<"}}});
        let asked = Message { tool_calls: vec![call], ..Message::new("assistant", "") };
        let answered = Message { tool_call_id: Some("1".to_owned()), ..Message::new("tool", "rain") };
        let tool = json!({"type": "function", "function": {"name": "look"}});
        let prompt = template.render(&[asked, answered], &[tool]).unwrap();
        assert_eq!(
            prompt,
            "{\"type\": \"function\", \"function\": {\"name\": \"look\"}}\n\
             [assistant]<tool_call>{\"b\": [1, 2], \"a\": \"é<\"}</tool_call>[tool]rain"
        );
        let indented = ChatTemplate::new("{{ messages[0].role | tojson(indent=4) }}", None).unwrap();
        assert_eq!(indented.render(&[Message::new("user", "")], &[]).unwrap(), "\"user\"");
    }

    #[test]
    fn a_bad_template_is_refused_and_an_endless_one_ends() {
        let reason = ChatTemplate::new("{% for %}", None).unwrap_err().to_string();
        assert!(reason.contains("chat"), "{reason}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        let reason = ChatTemplate::new(endless, None).unwrap().render(&[], &[]).unwrap_err().to_string();
        assert!(reason.contains("fuel"), "{reason}");
        let refusing = "{{ raise_exception('roles must alternate') }}";
        let reason = ChatTemplate::new(refusing, None).unwrap().render(&[], &[]).unwrap_err().to_string();
        assert!(reason.contains("roles must alternate"), "{reason}");
    }
}
