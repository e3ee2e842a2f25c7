//! The texts that ship with the program: what bridges are fitted on and what they are judged on, kept apart. What they
//! are and where they are from stands in `texts/README.md`.

use molt_models::{ChatTemplate, Message, ModelError};

/// A text by name; what is judged is bootstrapped by these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its file's name.
    pub name: String,
    /// Its content.
    pub text: String,
}

macro_rules! texts {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../texts/", $folder, "/", $name)))),+]
    };
}

/// To be fitted on.
const CALIBRATION: &[(&str, &str)] = texts!("calibration":
    "address-1905.txt", "address-1912.txt", "address-1926.txt", "address-1938.txt", "address-1946.txt",
    "address-1954.txt", "address-1962.txt", "address-1968.txt", "address-1975.txt", "address-1982.txt",
    "address-1990.txt", "cache.rs.txt", "chat.txt", "levers.rs.txt", "model.rs.txt", "moby-dick-part-1.txt", "tokenizer.rs.txt",
);

/// To be judged on: kinds of text alternate, so that the first few are a mix.
const HELD_OUT: &[(&str, &str)] = texts!("held-out":
    "address-1936.txt", "replay_text.rs.txt", "moby-dick-part-2.txt", "chat.txt", "address-1998.txt", "tenants.rs.txt",
    "address-1909.txt", "address-2016.txt", "execute.rs.txt", "address-1961.txt", "address-1980.txt", "address-2005.txt",
    "address-1948.txt", "address-1993.txt", "address-2011.txt",
);

/// What to fit on; chats as the models' own template writes them.
pub fn calibration(template: Option<&ChatTemplate>) -> Result<Vec<Document>, ModelError> {
    read(CALIBRATION, template)
}

/// What to judge on, never to be fitted on.
pub fn held_out(template: Option<&ChatTemplate>) -> Result<Vec<Document>, ModelError> {
    read(HELD_OUT, template)
}

fn read(texts: &[(&str, &str)], template: Option<&ChatTemplate>) -> Result<Vec<Document>, ModelError> {
    let document = |(name, text): &(&str, &str)| {
        let text = match template.filter(|_| *name == CHAT) {
            Some(template) => template.render(&messages(text), &[])?,
            None => (*text).to_owned(),
        };
        Ok(Document { name: (*name).to_owned(), text })
    };
    texts.iter().map(document).collect()
}

/// The text that is a conversation.
const CHAT: &str = "chat.txt";

/// The messages of a chat file: each begins with its role at the start of a line.
fn messages(text: &str) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::new();
    for line in text.lines() {
        let opened = ["user", "assistant"].into_iter().find_map(|role| Some((role, line.strip_prefix(role)?)));
        match opened.and_then(|(role, rest)| Some((role, rest.strip_prefix(": ")?))) {
            Some((role, rest)) => messages.push(Message::new(role, rest)),
            None => {
                if let Some(last) = messages.last_mut() {
                    last.content.push('\n');
                    last.content.push_str(line);
                }
            }
        }
    }
    for message in &mut messages {
        message.content.truncate(message.content.trim_end().len());
    }
    messages
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn messages_begin_with_their_role() {
        let check = |text: &str, expected: &[(&str, &str)]| {
            let expected: Vec<Message> = expected.iter().map(|(role, content)| Message::new(role, content)).collect();
            assert_eq!(messages(text), expected);
        };
        check("user: a\n\nassistant: b\n\nc\nuser d\n", &[("user", "a"), ("assistant", "b\n\nc\nuser d")]);
        check("nobody said this\n", &[]);
    }

    #[test]
    fn the_shipped_chats_take_turns() {
        for texts in [CALIBRATION, HELD_OUT] {
            let (_, chat) = texts.iter().find(|(name, _)| *name == CHAT).unwrap();
            let messages = messages(chat);
            assert!(messages.len() >= 16);
            for (at, message) in messages.iter().enumerate() {
                assert_eq!(message.role, ["user", "assistant"][at % 2], "{message:?}");
            }
        }
    }

    #[test]
    fn nothing_of_what_is_judged_is_fitted_on() {
        // Phrases are shared by any two addresses, and idioms by any two sources; twenty words in a row are not.
        let runs = |texts: &[(&str, &'static str)]| -> BTreeSet<Vec<&'static str>> {
            let words = |text: &'static str| text.split_whitespace().collect::<Vec<_>>();
            texts.iter().flat_map(|(_, text)| words(text).windows(20).map(<[_]>::to_vec).collect::<Vec<_>>()).collect()
        };
        let (fitted, judged) = (runs(CALIBRATION), runs(HELD_OUT));
        assert!(fitted.len() > 40_000 && judged.len() > 30_000, "{} and {}", fitted.len(), judged.len());
        assert_eq!(fitted.intersection(&judged).next(), None);
    }

    #[test]
    fn every_text_in_the_folders_is_part_of_the_program() {
        let check = |folder: &str, texts: &[(&str, &str)]| {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../texts").join(folder);
            let lies = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
            let lying: BTreeSet<String> = std::fs::read_dir(path).unwrap().map(lies).collect();
            assert_eq!(lying, texts.iter().map(|(name, _)| (*name).to_owned()).collect());
        };
        check("calibration", CALIBRATION);
        check("held-out", HELD_OUT);
    }
}
