//! From a request to what the engine is asked: tokens, what shedding never touches, and the grammar of the answer.

use molt_models::{ChatPrompt, Grammar, Ladder, Message, ModelError};
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
    // Cutting text into tokens takes many times its size; what cannot fit however it is cut is not tried.
    let fits = |text: &str| match text.len() <= ladder.tokenizer().longest_token().saturating_mul(usize::from(context))
    {
        true => Ok(()),
        false => Err(bad("context_length_exceeded", format!("{} bytes are more than {context} can be", text.len()))),
    };
    let (prompt, pinned) = match &request.prompt {
        // Whoever sends a text has written the control tokens in it, too.
        Prompt::Text(text) => {
            fits(text)?;
            (ladder.tokenizer().encode(text).map_err(unusable)?, 0)
        }
        Prompt::Messages(messages) => {
            let written = rendered(ladder, messages, &form.tools).map_err(unusable)?;
            fits(&written.text())?;
            let prompt = written.encode(ladder.tokenizer()).map_err(unusable)?;
            let pinned = pinned(ladder, messages, &form.tools, &prompt).map_err(unusable)?;
            (prompt, pinned)
        }
    };
    Ok(Prepared { prompt, pinned: Tokens::from(pinned), grammar })
}

/// The messages as the models' own template writes them.
fn rendered(ladder: &Ladder, messages: &[Message], tools: &[Value]) -> Result<ChatPrompt, ModelError> {
    match ladder.template() {
        Some(template) => template.prompt(messages, tools, ladder.tokenizer()),
        None => Ok(ChatPrompt::said(messages.iter().map(|m| m.content.as_str()).collect::<Vec<_>>().join("\n\n"))),
    }
}

/// How many tokens of a prompt are its system messages.
fn pinned(ladder: &Ladder, messages: &[Message], tools: &[Value], prompt: &[u32]) -> Result<usize, ModelError> {
    let system: Vec<Message> = messages.iter().take_while(|m| m.role == "system").cloned().collect();
    if system.is_empty() {
        return Ok(0);
    }
    let alone = rendered(ladder, &system, tools)?.encode(ladder.tokenizer())?;
    Ok(alone.iter().zip(prompt).take_while(|(a, b)| a == b).count())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::service::wire::Kind;

    /// What is said may look like a control token: in a conversation it is text, and in a text that is gone on with it is one.
    #[test]
    fn nobody_speaks_in_control_tokens() {
        let ladder = Ladder::open("pocket", Path::new("/nowhere")).unwrap();
        let tokenizer = ladder.tokenizer();
        let prepared = |kind: Kind, body: Value| {
            let request = ChatRequest::parse(kind, body.to_string().as_bytes()).unwrap();
            prepare(&ladder, &request, Tokens::new(200)).unwrap().prompt
        };
        let controls = |prompt: &[u32]| prompt.iter().filter(|token| tokenizer.is_special(**token)).count();
        let said = "One.<|endoftext|>Two. <|endof";
        let user = json!({"role": "user", "content": said});
        let of_messages = prepared(Kind::Chat, json!({"messages": [user, user]}));
        assert_eq!(controls(&of_messages), 1, "the template's own");
        assert_eq!(tokenizer.decode(&of_messages), format!("{said}\n{said}"), "all of it is text");
        let plain = prepared(Kind::Chat, json!({"messages": [{"role": "user", "content": "One. Two."}]}));
        assert_eq!(plain, tokenizer.encode("<|endoftext|>One. Two.").unwrap());
        let of_text = prepared(Kind::Text, json!({"prompt": said}));
        assert_eq!((controls(&of_text), tokenizer.decode(&of_text).as_str()), (1, "One.Two. <|endof"));
    }
}
