//! What people say, told apart from what the template writes.
//!
//! A control token that a template writes steers the model; the same characters in a message are text, or whoever writes them
//! could close the turn and speak in another's name. A template knows only characters. So where a control token could begin in
//! what was said, another character stands in for its first one while the template runs; the prompt is then cut at
//! the control tokens that it has, and what lies between gets its own characters back and is read as text. Stand-ins occur
//! nowhere else in the conversation, so nobody can write one.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::Value;

use crate::error::ModelError;
use crate::template::Message;
use crate::tokenizer::Tokenizer;

/// A conversation as the template is given it.
pub(super) struct Masked<'a> {
    pub(super) messages: Cow<'a, [Message]>,
    pub(super) tools: Cow<'a, [Value]>,
    pub(super) stand_ins: StandIns,
}

/// Characters, each with the one that stands in for it. Most conversations need none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct StandIns(Vec<(char, char)>);

impl StandIns {
    /// A text with its own characters.
    pub(super) fn restore<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let own = |c: char| self.0.iter().find(|(_, stand_in)| *stand_in == c).map_or(c, |(own, _)| *own);
        match self.0.iter().any(|(_, stand_in)| text.contains(*stand_in)) {
            true => Cow::Owned(text.chars().map(own).collect()),
            false => Cow::Borrowed(text),
        }
    }
}

/// Characters that no text means anything by (Unicode's private use areas).
fn meaningless() -> impl Iterator<Item = char> {
    ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}')
}

/// Where in what was said a control token begins, or may once something else is written behind it.
fn beginnings<'a>(text: &'a str, controls: &'a [String]) -> impl Iterator<Item = (usize, char)> {
    // A template may trim what it is given before it goes on.
    let all = text.trim_end();
    let begins = move |at: usize| {
        let rest = &all[at..];
        controls.iter().any(|control| rest.starts_with(control.as_str()) || control.starts_with(rest))
    };
    let firsts: BTreeSet<char> = controls.iter().filter_map(|control| control.chars().next()).collect();
    all.char_indices().filter(move |(_, c)| firsts.contains(c)).filter(move |(at, _)| begins(*at))
}

/// Gives every text of a conversation to `see`, except roles: templates make control tokens of those.
fn texts(messages: &[Message], tools: &[Value], see: &mut dyn FnMut(&str)) {
    for Message { role: _, content, tool_calls, tool_call_id, name } in messages {
        see(content);
        tool_call_id.iter().chain(name).for_each(|text| see(text));
        tool_calls.iter().for_each(|call| texts_of(call, see));
    }
    tools.iter().for_each(|tool| texts_of(tool, see));
}

fn texts_of(value: &Value, see: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => see(text),
        Value::Array(items) => items.iter().for_each(|item| texts_of(item, see)),
        Value::Object(fields) => fields.iter().for_each(|(key, under)| {
            see(key);
            texts_of(under, see);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn masked_value(value: &Value, mask: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(mask(text)),
        Value::Array(items) => items.iter().map(|item| masked_value(item, mask)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, under)| (mask(key), masked_value(under, mask))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// Puts stand-ins into a conversation where control tokens could begin in what was said. `template` is its text.
///
/// # Errors
/// Where what is said uses up every character that could stand in, which takes half a million bytes of them.
pub(super) fn mask<'a>(
    messages: &'a [Message],
    tools: &'a [Value],
    controls: &[String],
    template: &str,
) -> Result<Masked<'a>, ModelError> {
    let mut firsts = BTreeSet::new();
    texts(messages, tools, &mut |text| firsts.extend(beginnings(text, controls).map(|(_, first)| first)));
    if firsts.is_empty() {
        return Ok(Masked { messages: messages.into(), tools: tools.into(), stand_ins: StandIns::default() });
    }
    let mut used: BTreeSet<char> = template.chars().filter(|c| !c.is_ascii()).collect();
    let mut note = |text: &str| used.extend(text.chars().filter(|c| !c.is_ascii()));
    texts(messages, tools, &mut note);
    messages.iter().for_each(|message| note(&message.role));
    let free = meaningless().filter(|c| !used.contains(c));
    let pairs: Vec<(char, char)> = firsts.iter().copied().zip(free).collect();
    if pairs.len() < firsts.len() {
        return Err(ModelError::Template("the messages use every character of Unicode's private areas".to_owned()));
    }
    let mask = |text: &str| {
        let mut masked = text.to_owned();
        // From the end, so that what is before stays where it is.
        for (at, first) in beginnings(text, controls).collect::<Vec<_>>().into_iter().rev() {
            if let Some((_, stand_in)) = pairs.iter().find(|(own, _)| *own == first) {
                masked.replace_range(at..at + first.len_utf8(), stand_in.encode_utf8(&mut [0; 4]));
            }
        }
        masked
    };
    let masked_message = |message: &Message| Message {
        role: message.role.clone(),
        content: mask(&message.content),
        tool_calls: message.tool_calls.iter().map(|call| masked_value(call, &mask)).collect(),
        tool_call_id: message.tool_call_id.as_deref().map(mask),
        name: message.name.as_deref().map(mask),
    };
    Ok(Masked {
        messages: messages.iter().map(masked_message).collect(),
        tools: tools.iter().map(|tool| masked_value(tool, &mask)).collect(),
        stand_ins: StandIns(pairs),
    })
}

/// A prompt that knows what in it was said and what the template has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    text: String,
    /// None where all of it was said.
    stand_ins: Option<StandIns>,
}

impl ChatPrompt {
    pub(super) fn written(text: String, stand_ins: StandIns) -> Self {
        Self { text, stand_ins: Some(stand_ins) }
    }

    /// All of it was said, and nothing in it is a control token.
    pub fn said(text: String) -> Self {
        Self { text, stand_ins: None }
    }

    /// As a person reads it.
    pub fn text(&self) -> Cow<'_, str> {
        self.stand_ins.as_ref().map_or(Cow::Borrowed(self.text.as_str()), |stand_ins| stand_ins.restore(&self.text))
    }

    /// Its tokens: control tokens where the template has written them, and nowhere else.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, ModelError> {
        match &self.stand_ins {
            None => tokenizer.encode_said(&self.text),
            Some(stand_ins) if *stand_ins == StandIns::default() => tokenizer.encode(&self.text),
            Some(stand_ins) => tokenizer.encode_between(&self.text, |said| stand_ins.restore(said)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_could_become_a_control_token_is_masked_and_nothing_else() {
        let controls = ["<|end|>".to_owned(), "<s>".to_owned(), "[X]".to_owned()];
        let check = |said: &str, expected: &str| {
            let message = [Message::new("user", said)];
            let masked = mask(&message, &[], &controls, "").unwrap();
            assert_eq!(masked.messages[0].content, expected, "{said}");
            assert_eq!(masked.stand_ins.restore(expected), said);
            assert_eq!(matches!(masked.messages, Cow::Borrowed(_)), said == expected);
        };
        // Alone, `<` is the first that needs a stand-in, with `[` it is the first of both.
        check("nothing", "nothing");
        check("a < b, </s> and <|en", "a < b, </s> and \u{e000}|en");
        check("a <b <|enough", "a <b <|enough");
        check("a<|end|>b<s>", "a\u{e000}|end|>b\u{e000}s>");
        check("<<|end|>", "<\u{e000}|end|>");
        check("[X]<s>", "\u{e001}X]\u{e000}s>");
        check("x <", "x \u{e000}");
        check("x <|e \n", "x \u{e000}|e \n");
        check("\u{e000}<s>", "\u{e000}\u{e001}s>");
        check("", "");
    }

    #[test]
    fn every_text_but_a_role_is_masked() {
        let controls = ["<s>".to_owned()];
        let (call, tool) = (json!({"a<s>": ["<s>", 1, null, {"b": "x<s>"}]}), json!({"description": "<s>"}));
        let message = Message {
            tool_calls: vec![call],
            tool_call_id: Some("<s>".to_owned()),
            name: Some("<s>".to_owned()),
            ..Message::new("<s>", "plain")
        };
        let masked = mask(std::slice::from_ref(&message), std::slice::from_ref(&tool), &controls, "\u{e000}").unwrap();
        let expected = Message {
            tool_calls: vec![json!({"a\u{e001}s>": ["\u{e001}s>", 1, null, {"b": "x\u{e001}s>"}]})],
            tool_call_id: Some("\u{e001}s>".to_owned()),
            name: Some("\u{e001}s>".to_owned()),
            ..Message::new("<s>", "plain")
        };
        assert_eq!(*masked.messages, [expected]);
        assert_eq!(*masked.tools, [json!({"description": "\u{e001}s>"})]);
    }

    #[test]
    fn who_uses_up_every_stand_in_is_refused() {
        let message = [Message::new("user", &meaningless().chain("<s>".chars()).collect::<String>())];
        let refused = mask(&message, &[], &["<s>".to_owned()], "").err().map(|error| error.to_string());
        assert!(refused.is_some_and(|reason| reason.contains("private")));
    }
}
