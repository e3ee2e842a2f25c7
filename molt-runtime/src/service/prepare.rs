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
pub(super) fn prepare(ladder: &Ladder, request: &ChatRequest) -> Result<Prepared, BadRequest> {
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
    let (prompt, pinned) =
        prompt(ladder, &request.prompt, &form.tools).map_err(|error| bad(field, error.to_string()))?;
    Ok(Prepared { prompt, pinned, grammar })
}

fn prompt(ladder: &Ladder, prompt: &Prompt, tools: &[Value]) -> Result<(Vec<u32>, Tokens), ModelError> {
    let messages = match prompt {
        Prompt::Text(text) => return Ok((ladder.tokenizer().encode(text)?, Tokens::ZERO)),
        Prompt::Messages(messages) => messages,
    };
    let encode = |messages: &[Message]| {
        let text = match ladder.template() {
            Some(template) => template.render(messages, tools)?,
            None => messages.iter().map(|m| m.content.as_str()).collect::<Vec<_>>().join("\n\n"),
        };
        ladder.tokenizer().encode(&text)
    };
    let tokens = encode(messages)?;
    let system: Vec<Message> = messages.iter().take_while(|m| m.role == "system").cloned().collect();
    let pinned = match system.is_empty() {
        true => 0,
        false => encode(&system)?.iter().zip(&tokens).take_while(|(a, b)| a == b).count(),
    };
    Ok((tokens, Tokens::from(pinned)))
}
