//! What a batch file asks for, and what an answers file holds already.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

/// A request of the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Job {
    /// Its name in the answers.
    pub(super) id: String,
    /// The route that it goes to.
    pub(super) path: &'static str,
    /// What is sent.
    pub(super) body: Value,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub(super) enum JobsError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} line {line}: {reason}", path.display())]
    Line { path: PathBuf, line: usize, reason: String },
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A line as OpenAI's batches write it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchLine {
    custom_id: String,
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    url: Option<String>,
    body: Map<String, Value>,
}

/// Reads the requests. Lines of `{"custom_id", "body"}` and plain ones of `{"prompt"}` or `{"messages"}` may alternate;
/// a plain one without an `id` is named after its line. All are read before the first is asked.
pub(super) fn read(path: &Path) -> Result<Vec<Job>, JobsError> {
    let text = std::fs::read_to_string(path).map_err(|source| JobsError::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    let (mut jobs, mut lines) = (Vec::new(), BTreeMap::new());
    for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        let wrong = |reason: String| JobsError::Line { path: path.to_owned(), line, reason };
        let job = job(line, text).map_err(wrong)?;
        if let Some(before) = lines.insert(job.id.clone(), line) {
            return Err(wrong(format!("the id {:?} is that of line {before}", job.id)));
        }
        jobs.push(job);
    }
    Ok(jobs)
}

fn job(line: usize, text: &str) -> Result<Job, String> {
    let mut fields: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("is no JSON object: {error}"))?;
    let (id, url, mut body) = match fields.contains_key("body") {
        true => {
            let line: BatchLine = serde_json::from_value(Value::Object(fields)).map_err(|error| error.to_string())?;
            if let Some(method) = line.method.filter(|method| method != "POST") {
                return Err(format!("method: {method} is not supported"));
            }
            (line.custom_id, line.url, line.body)
        }
        false => {
            let id = fields.remove("custom_id").or_else(|| fields.remove("id"));
            let id = match id {
                None => format!("line-{line}"),
                Some(Value::String(id)) => id,
                Some(Value::Number(id)) => id.to_string(),
                Some(other) => return Err(format!("id: {other} is no text and no number")),
            };
            (id, None, fields)
        }
    };
    let path = match (url.as_deref(), body.contains_key("messages"), body.contains_key("prompt")) {
        (Some(CHAT), ..) | (None, true, false) => CHAT,
        (Some(TEXT), ..) | (None, false, true) => TEXT,
        (Some(other), ..) => return Err(format!("url: {other} is not {CHAT} or {TEXT}")),
        (None, ..) => return Err("has neither prompt nor messages, or both".to_owned()),
    };
    if body.remove("stream").is_some_and(|stream| stream == true) {
        return Err("stream: a batch is not streamed".to_owned());
    }
    body.remove("stream_options");
    Ok(Job { id, path, body: Value::Object(body) })
}

/// The answers of a batch, appended to one at a time and never twice for one id.
#[derive(Debug)]
pub(super) struct Answers {
    path: PathBuf,
    file: std::fs::File,
    /// Ids that have been answered, by this run or one before.
    pub(super) done: BTreeSet<String>,
}

impl Answers {
    /// Opens the file, or makes it. A last line that was torn when a run was killed goes, as do the lines of requests
    /// that failed, which are asked again; every line that stays is an answer. Locked against a second run.
    pub(super) fn open(path: &Path) -> Result<Self, JobsError> {
        let io = |doing: &'static str| {
            let path = path.to_owned();
            move |source: std::io::Error| JobsError::Io { doing, path, source }
        };
        let old = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(io("read")(error)),
        };
        let open = || std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(io("open"));
        let file = open()?;
        file.try_lock().map_err(|error| io("lock, another run may write to,")(error.into()))?;
        let (mut done, mut kept) = (BTreeSet::new(), String::new());
        let whole = old.rfind('\n').map_or("", |end| &old[..=end]);
        for (line, text) in (1..).zip(whole.lines()) {
            let answer: Value = serde_json::from_str(text).map_err(|error| JobsError::Line {
                path: path.to_owned(),
                line,
                reason: format!("is no answer of a batch: {error}"),
            })?;
            let id = answer["custom_id"].as_str().ok_or_else(|| JobsError::Line {
                path: path.to_owned(),
                line,
                reason: "has no custom_id".to_owned(),
            })?;
            if answer["error"].is_null() && done.insert(id.to_owned()) {
                kept += text;
                kept.push('\n');
            }
        }
        if kept == old {
            return Ok(Self { path: path.to_owned(), file, done });
        }
        // Beside it and then in its place, so that a run that is killed here loses nothing.
        let beside = path.with_extension("partial");
        std::fs::write(&beside, &kept).map_err(io("write beside"))?;
        std::fs::rename(&beside, path).map_err(io("replace"))?;
        let file = open()?;
        file.try_lock().map_err(|error| io("lock, another run may write to,")(error.into()))?;
        Ok(Self { path: path.to_owned(), file, done })
    }

    /// Appends a line.
    pub(super) fn write(&mut self, line: &Value) -> Result<(), JobsError> {
        let io = |source| JobsError::Io { doing: "write", path: self.path.clone(), source };
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_kinds_and_what_is_wrong_with_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.jsonl");
        let check = |text: &str, expected: Result<&[(&str, &str)], &str>| {
            std::fs::write(&path, text).unwrap();
            match (read(&path), expected) {
                (Ok(jobs), Ok(expected)) => {
                    let found: Vec<(&str, &str)> = jobs.iter().map(|job| (job.id.as_str(), job.path)).collect();
                    assert_eq!(found, expected);
                }
                (Err(error), Err(part)) => {
                    let error = error.to_string();
                    assert!(error.contains(part) && error.contains("jobs.jsonl"), "{error}");
                }
                (found, expected) => panic!("{text}: {found:?} instead of {expected:?}"),
            }
        };
        let chat = r#"{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}"#;
        check(chat, Ok(&[("a", CHAT)]));
        check(&format!("{chat}\n\n{{\"prompt\": \"x\"}}\n"), Ok(&[("a", CHAT), ("line-3", TEXT)]));
        check(r#"{"messages": [], "id": 7}"#, Ok(&[("7", CHAT)]));
        check(r#"{"custom_id": "a", "body": {"prompt": "x", "stream": false}}"#, Ok(&[("a", TEXT)]));
        check(&format!("{chat}\n{chat}"), Err("line 2: the id \"a\" is that of line 1"));
        check("{\"prompt\": \"x\"}\n{", Err("line 2: is no JSON object"));
        check(r#"{"text": "x"}"#, Err("line 1: has neither"));
        check(r#"{"prompt": "x", "stream": true}"#, Err("stream"));
        check(r#"{"custom_id": "a", "body": {}, "colour": 1}"#, Err("colour"));
        check(r#"{"custom_id": "a", "url": "/v1/embeddings", "body": {}}"#, Err("/v1/embeddings"));
        check(r#"{"custom_id": "a", "method": "GET", "body": {}}"#, Err("GET"));
    }

    #[test]
    fn what_is_answered_stays_and_what_is_torn_or_failed_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers.jsonl");
        let line = |id: &str, error: &str| format!("{{\"custom_id\":\"{id}\",\"error\":{error}}}\n");
        let (a, b, c) = (line("a", "null"), line("b", "{}"), line("c", "null"));
        std::fs::write(&path, format!("{a}{b}{c}{{\"custom_id\":\"d\",\"er")).unwrap();
        let mut answers = Answers::open(&path).unwrap();
        assert_eq!(answers.done.iter().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{a}{c}"));
        assert!(Answers::open(&path).unwrap_err().to_string().contains("another run"));
        answers.write(&serde_json::json!({"custom_id": "d", "error": null})).unwrap();
        drop(answers);
        assert_eq!(Answers::open(&path).unwrap().done.len(), 3);
        std::fs::write(&path, "a letter\n").unwrap();
        assert!(Answers::open(&path).unwrap_err().to_string().contains("line 1"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a letter\n", "what is not ours is not touched");
    }
}
