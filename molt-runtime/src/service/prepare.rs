//! From a request to what the engine is asked: tokens, what shedding never touches, and the grammar of the answer.

use molt_models::{Grammar, Ladder, Message, ModelError};
use molt_scheduler::units::Tokens;
use serde_json::Value;

use crate::service::messages::Prompt;
use crate::service::wire::{BadRequest, ChatRequest};

/// What a request comes to with a ladder.
pub(super) struct Prepared {
    /// The tokens of the prompt.
    pub(super) prompt: Vec<u32>,
    /// How many of them are its system prompt, which shedding never touches.
    pub(super) pinned: Tokens,
    /// What the answer must be.
    pub(super) grammar: Option<Grammar>,
}

/// Prepares a request. It may take a while.
pub(super) fn prepare(ladder: &Ladder, request: &ChatRequest, context: Tokens) -> Result<Prepared, BadRequest> {
    let bad = |field: &str, reason: String| BadRequest { field: field.to_owned(), reason };
    let form = &request.form;
    if form.has_tools() && !ladder.template().is_some_and(molt_models::ChatTemplate::knows_tools) {
        return Err(bad("tools", format!("the chat template of {} knows no tools", ladder.name())));
    }
    let start = |(field, spec): &(&str, _)| {
        let begun = ladder.grammars().and_then(|grammars| grammars.start(spec));
        begun.map_err(|error| bad(field, format!("this schema cannot be held to: {error}")))
    };
    let grammar = form.grammar.as_ref().map(start).transpose()?;
    let field = match request.prompt {
        Prompt::Messages(_) => "messages",
        Prompt::Text(_) => "prompt",
    };
    let unusable = |error: ModelError| bad(field, error.to_string());
    let text = match &request.prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Messages(messages) => rendered(ladder, messages, &form.tools).map_err(unusable)?,
    };
    // Cutting text into tokens takes many times its size; what cannot fit however it is cut is not tried.
    if text.len() > ladder.tokenizer().longest_token().saturating_mul(usize::from(context)) {
        let reason = format!("{} bytes are more than {context} can be", text.len());
        return Err(bad("context_length_exceeded", reason));
    }
    let prompt = ladder.tokenizer().encode(&text).map_err(unusable)?;
    let pinned = match &request.prompt {
        Prompt::Text(_) => 0,
        Prompt::Messages(messages) => pinned(ladder, messages, &form.tools, &prompt).map_err(unusable)?,
    };
    Ok(Prepared { prompt, pinned: Tokens::from(pinned), grammar })
}

/// The messages as the models' own template writes them.
fn rendered(ladder: &Ladder, messages: &[Message], tools: &[Value]) -> Result<String, ModelError> {
    match ladder.template() {
        Some(template) => template.render(messages, tools),
        None => Ok(messages.iter().map(|m| m.content.as_str()).collect::<Vec<_>>().join("\n\n")),
    }
}

/// How many tokens of a prompt are its system messages.
fn pinned(ladder: &Ladder, messages: &[Message], tools: &[Value], prompt: &[u32]) -> Result<usize, ModelError> {
    let system: Vec<Message> = messages.iter().take_while(|m| m.role == "system").cloned().collect();
    if system.is_empty() {
        return Ok(0);
    }
    let alone = ladder.tokenizer().encode(&rendered(ladder, &system, tools)?)?;
    Ok(alone.iter().zip(prompt).take_while(|(a, b)| a == b).count())
}
