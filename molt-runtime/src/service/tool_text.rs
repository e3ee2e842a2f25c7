//! Calls of tools, found in text that comes in pieces. Text that may still become one is held back; what looked like a
//! call and is none stays text.

use molt_models::TOOL_CALL;
use serde_json::Value;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    /// What is said.
    Text(String),
    /// A tool is called.
    Call {
        /// Which.
        name: String,
        /// With what, as JSON.
        arguments: String,
    },
}

/// Looks for calls.
#[derive(Debug, Default)]
pub(super) struct ToolText {
    held: String,
}

impl ToolText {
    /// Takes a piece of the answer; returns what is certain by now.
    pub(super) fn push(&mut self, text: &str) -> Vec<Piece> {
        let (open, close) = TOOL_CALL;
        self.held.push_str(text);
        let mut pieces = Vec::new();
        loop {
            let Some(at) = self.held.find(open) else {
                // The end of the text may be the beginning of a call.
                let begins = |at: &usize| open.starts_with(&self.held[*at..]);
                let keep = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
                let rest = self.held.split_off(keep);
                say(&mut pieces, std::mem::replace(&mut self.held, rest));
                return pieces;
            };
            // The mark may stand in an argument too, so that the first one need not be the end.
            let inside = &self.held[at + open.len()..];
            let call = inside.match_indices(close).find_map(|(end, _)| Some((call(&inside[..end])?, end)));
            let Some((call, end)) = call else {
                let rest = self.held.split_off(at);
                say(&mut pieces, std::mem::replace(&mut self.held, rest));
                return pieces;
            };
            let rest = self.held.split_off(at + open.len() + end + close.len());
            self.held.truncate(at);
            say(&mut pieces, std::mem::replace(&mut self.held, rest));
            pieces.push(call);
        }
    }

    /// The answer is over: what is left of it.
    pub(super) fn finish(&mut self) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        // An answer may end with the call itself, without its closing mark.
        let mut pieces = Vec::new();
        match held.strip_prefix(TOOL_CALL.0).and_then(call) {
            Some(call) => pieces.push(call),
            None => say(&mut pieces, held),
        }
        pieces
    }
}

fn say(pieces: &mut Vec<Piece>, text: String) {
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
}

fn call(text: &str) -> Option<Piece> {
    let call: Value = serde_json::from_str(text).ok()?;
    let name = call["name"].as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None => "{}".to_owned(),
        Some(arguments) => arguments.to_string(),
    };
    Some(Piece::Call { name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_however_the_text_is_cut() {
        let check = |text: &str, said: &str, called: &[(&str, &str)]| {
            for size in [1, 2, 3, 7, 1_000] {
                let (mut tools, mut pieces) = (ToolText::default(), Vec::new());
                let characters: Vec<char> = text.chars().collect();
                for piece in characters.chunks(size) {
                    pieces.extend(tools.push(&piece.iter().collect::<String>()));
                }
                pieces.extend(tools.finish());
                let (mut text, mut calls) = (String::new(), Vec::new());
                for piece in pieces {
                    match piece {
                        Piece::Text(more) => text += &more,
                        Piece::Call { name, arguments } => calls.push((name, arguments)),
                    }
                }
                let calls: Vec<(&str, &str)> = calls.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
                assert_eq!((text.as_str(), calls.as_slice()), (said, called), "in pieces of {size}");
            }
        };
        check("", "", &[]);
        check("plain <b>text</b> < <tool", "plain <b>text</b> < <tool", &[]);
        let one = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"b\": 1, \"a\": \"ü\"}}\n</tool_call>";
        let found = ("look", "{\"b\":1,\"a\":\"ü\"}");
        check(one, "", &[found]);
        check(&format!("I look. {one} and{one}"), "I look.  and", &[found, found]);
        check(one.strip_suffix("</tool_call>").unwrap(), "", &[found]);
        check("<tool_call>{\"name\": \"now\"}</tool_call>", "", &[("now", "{}")]);
        let mark = "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>\"}}</tool_call>";
        check(mark, "", &[("f", "{\"x\":\"</tool_call>\"}")]);
        check("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", &[]);
        check("<tool_call>{\"name\": 3}", "<tool_call>{\"name\": 3}", &[]);
    }
}
