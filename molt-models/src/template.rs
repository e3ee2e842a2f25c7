//! Chat templates: the Jinja text inside a model file turns messages into a prompt.
//!
//! A template comes from whoever made the file. It runs with a bounded number of steps (`filters.rs`), with memory in
//! proportion to what it is given (`meter.rs`, `program.rs`), and without access to files.

mod filters;
mod meter;
mod program;
mod said;

use std::collections::BTreeMap;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::value::Value as Jinja;
use minijinja::{AutoEscape, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::ModelError;
use crate::tokenizer::Tokenizer;
use meter::Meter;
pub use said::ChatPrompt;

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

/// A chat template that can be run.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    knows_tools: bool,
}

impl ChatTemplate {
    /// Checks a template.
    pub fn new(source: &str, bos: Option<&str>) -> Result<Self, ModelError> {
        program::compile(source).map_err(ModelError::Template)?;
        let error = |e: minijinja::Error| ModelError::Template(format!("{e:#}"));
        let nothing = Meter::of_input(&[]).map_err(error)?;
        let environment = filters::environment(&nothing);
        let parsed = environment.template_from_named_str("chat", source).map_err(error)?;
        let knows_tools = parsed.undeclared_variables(false).contains("tools") && source.contains(TOOL_CALL.0);
        Ok(Self { source: source.to_owned(), bos: bos.unwrap_or_default().to_owned(), knows_tools })
    }

    /// Whether it tells a model of tools and has it call them in the form of [`TOOL_CALL`].
    pub fn knows_tools(&self) -> bool {
        self.knows_tools
    }

    /// The prompt for these messages and tools, open for the assistant's answer: control tokens are what the template writes,
    /// and what was said is text, whatever it looks like.
    ///
    /// A template that looks for control tokens in what was said does not find them.
    pub fn prompt(
        &self,
        messages: &[Message],
        tools: &[Value],
        tokenizer: &Tokenizer,
    ) -> Result<ChatPrompt, ModelError> {
        let masked = said::mask(messages, tools, tokenizer.controls(), &self.source)?;
        let text = self.render(&masked.messages, &masked.tools)?;
        Ok(ChatPrompt::written(text, masked.stand_ins))
    }

    /// What the template writes for these messages and tools, where nobody asks who wrote what.
    pub fn render(&self, messages: &[Message], tools: &[Value]) -> Result<String, ModelError> {
        let error = |e: minijinja::Error| ModelError::Template(format!("{e:#}"));
        // Templates ask whether there is such a variable.
        let tools = (!tools.is_empty()).then_some(tools);
        let (messages, tools) = (Jinja::from_serialize(messages), Jinja::from_serialize(tools));
        let meter = Meter::of_input(&[&messages, &tools]).map_err(error)?;
        let environment = filters::environment(&meter);
        let program = program::compile(&self.source).map_err(ModelError::Template)?;
        let variables = context! { messages, tools, add_generation_prompt => true, bos_token => self.bos };
        let (mut prompt, no_blocks) = (String::new(), BTreeMap::new());
        let mut out = make_string_output(&mut prompt);
        Vm::new(&environment).eval(&program, variables, &no_blocks, &mut out, AutoEscape::None).map_err(error)?;
        drop(out);
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests;
