//! Answers on the wire: whole, or as server-sent events in which official clients find nothing that harms them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Json, Response};
use futures_util::stream;
use molt_scheduler::Class;
use molt_scheduler::units::{RungIdx, Tokens};
use rand::Rng as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::engine::Said;
use crate::event::{Event, FinishReason, Likelihood, Switch};
use crate::service::http::problem;
use crate::service::likelihood;
use crate::service::tenants::InFlight;
use crate::service::tool_text::{Piece, ToolText};
use crate::service::wire::Kind;

/// A comment goes out when nothing else did for so long, so that a client knows a waiting stream from a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// What a client is told whose answer has no proper end.
const CUT_OFF: &str = "the answer was cut off: the service stops, its tenant left, or the stream was read too slowly";

/// What every chunk of an answer repeats.
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) prompt: u64,
    /// Whether each token comes with its likelihood.
    pub(super) likelihoods: bool,
    /// Whether calls of tools are looked for.
    pub(super) tools: bool,
}

impl Frame {
    fn chunk(&self, choices: Value, molt: Value) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Text => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "molt": molt,
        })
    }

    /// With how many tokens of the prompt were in memory already.
    fn usage(&self, tokens: Tokens, cached: Tokens) -> Value {
        let tokens = tokens.get();
        json!({
            "prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    fn pieces(&self) -> Pieces {
        Pieces(self.tools.then(ToolText::default))
    }
}

/// Text and calls, where calls are looked for.
struct Pieces(Option<ToolText>);

impl Pieces {
    fn push(&mut self, text: String) -> Vec<Piece> {
        match &mut self.0 {
            Some(tools) => tools.push(&text),
            None => vec![Piece::Text(text)],
        }
    }

    fn finish(&mut self) -> Vec<Piece> {
        self.0.as_mut().map(ToolText::finish).unwrap_or_default()
    }
}

fn call(name: &str, arguments: &str) -> Value {
    let id = format!("call_{:024x}", rand::rng().random::<u128>() >> 32);
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn finish(reason: FinishReason, calls: usize) -> &'static str {
    match (reason, calls) {
        (FinishReason::Length, _) => "length",
        (FinishReason::Stop, 0) => "stop",
        (FinishReason::Stop, _) => "tool_calls",
    }
}

fn error(code: &str, message: &str) -> Value {
    json!({"error": {"code": code, "message": message, "type": "server_error"}})
}

/// Makes the chunks of a stream.
struct Chunks {
    frame: Frame,
    include_usage: bool,
    pieces: Pieces,
    begun: bool,
    calls: usize,
    cached: Tokens,
    /// Characters of the answer so far.
    offset: usize,
    /// Tokens told so far, what was left over at the end counted as one.
    told: u64,
}

impl Chunks {
    fn new(frame: Frame, include_usage: bool) -> Self {
        let pieces = frame.pieces();
        Self { pieces, frame, include_usage, begun: false, calls: 0, cached: Tokens::ZERO, offset: 0, told: 0 }
    }

    /// The chunks of a token that was written before the daemon was started again; on which rung, nobody knows any more.
    fn again(&mut self, text: String) -> Vec<Value> {
        self.told += 1;
        let pieces = self.pieces.push(text);
        self.tokens(pieces, json!({"token": self.told}), None)
    }

    /// What is to be sent after an event, and whether that is the end.
    fn hear(&mut self, event: &Event) -> (Vec<Value>, bool) {
        match event {
            Event::Token { text, rung, likelihood, .. } => {
                self.told += 1;
                let pieces = self.pieces.push(text.clone());
                (self.tokens(pieces, json!({"rung": rung, "token": self.told}), likelihood.as_ref()), false)
            }
            Event::Finished { reason, tokens, .. } => {
                let left = self.pieces.finish();
                let mut chunks = self.tokens(left, json!({}), None);
                let reason = finish(*reason, self.calls);
                let choice = match self.frame.kind {
                    Kind::Chat => json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": reason}),
                    Kind::Text => json!({"index": 0, "text": "", "logprobs": null, "finish_reason": reason}),
                };
                chunks.push(self.frame.chunk(json!([choice]), json!({})));
                if self.include_usage {
                    let mut chunk = self.frame.chunk(json!([]), json!({}));
                    chunk["usage"] = self.frame.usage(*tokens, self.cached);
                    chunks.push(chunk);
                }
                (chunks, true)
            }
            // What moves the model has no choices, so that clients go on unharmed.
            Event::Switch(_) | Event::Lever { .. } | Event::Unpark { .. } | Event::Healed { .. } => {
                (serde_json::to_value(event).map(|told| self.frame.chunk(json!([]), told)).into_iter().collect(), false)
            }
            Event::Admitted { cached_tokens, .. } => {
                // Of an answer that was begun before, more than the prompt may have been there.
                self.cached = Tokens::new(cached_tokens.get().min(self.frame.prompt));
                (Vec::new(), false)
            }
            Event::Trouble { message, .. } => (vec![error("trouble", message)], true),
            _ => (Vec::new(), false),
        }
    }

    /// A chunk for each piece; the token's likelihood goes with the first, and where there is none, alone.
    fn tokens(&mut self, pieces: Vec<Piece>, molt: Value, likelihood: Option<&Likelihood>) -> Vec<Value> {
        let mut told = likelihood.map(|likelihood| match self.frame.kind {
            Kind::Chat => likelihood::of_chat(&[likelihood]),
            Kind::Text => likelihood::of_text(&[likelihood], self.offset),
        });
        let pieces = if pieces.is_empty() && told.is_some() { vec![Piece::Text(String::new())] } else { pieces };
        let mut chunks = Vec::new();
        for piece in pieces {
            let logprobs = told.take().unwrap_or(Value::Null);
            let choice = match (self.frame.kind, piece) {
                (Kind::Text, Piece::Text(text)) => {
                    self.offset += text.chars().count();
                    json!({"index": 0, "text": text, "logprobs": logprobs, "finish_reason": null})
                }
                (_, piece) => {
                    let mut delta = match piece {
                        Piece::Text(text) => json!({"content": text}),
                        Piece::Call { name, arguments } => {
                            let mut call = call(&name, &arguments);
                            call["index"] = self.calls.into();
                            self.calls += 1;
                            json!({"tool_calls": [call]})
                        }
                    };
                    if !std::mem::replace(&mut self.begun, true) {
                        delta["role"] = "assistant".into();
                    }
                    json!({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": null})
                }
            };
            chunks.push(self.frame.chunk(json!([choice]), molt.clone()));
        }
        chunks
    }
}

/// An answer on its way.
pub(super) struct Sending {
    events: mpsc::Receiver<Event>,
    chunks: Chunks,
    /// Made and not yet sent.
    ready: VecDeque<String>,
    /// How many tokens whoever reads has already.
    after: u64,
    over: bool,
    in_flight: InFlight,
}

impl Sending {
    pub(super) fn new(events: mpsc::Receiver<Event>, frame: Frame, include_usage: bool, in_flight: InFlight) -> Self {
        let chunks = Chunks::new(frame, include_usage);
        Self { events, chunks, ready: VecDeque::new(), after: 0, over: false, in_flight }
    }

    /// Begins with what had been said before the daemon was started again, but for its first tokens.
    pub(super) fn again(&mut self, said: Said, after: u64) {
        self.after = after;
        for text in said.texts {
            let chunks = self.chunks.again(text);
            if self.chunks.told > after {
                self.ready.extend(chunks.iter().map(Value::to_string));
            }
        }
        if let Some(reason) = said.finished {
            let (tenant, class) = (String::new(), Class::Batch);
            self.hear(&Event::Finished { tenant, class, tokens: said.tokens, reason, total_ms: 0.0 });
        }
    }

    fn hear(&mut self, event: &Event) {
        let (chunks, over) = self.chunks.hear(event);
        // Where a machine lost power the journal may have lost tokens that somebody has heard: they are chosen again, and not
        // told twice.
        let has_it = matches!(event, Event::Token { .. }) && self.chunks.told <= self.after;
        if !has_it {
            self.ready.extend(chunks.iter().map(Value::to_string));
        }
        self.over = over;
        if over && matches!(event, Event::Finished { .. }) {
            self.ready.push_back("[DONE]".to_owned());
        }
    }
}

/// Sends an answer as it comes. The request is in flight until the stream is dropped.
pub(super) fn streamed(sending: Sending) -> Response {
    let sent = stream::unfold(sending, |mut own| async move {
        loop {
            if let Some(data) = own.ready.pop_front() {
                return Some((Ok::<_, Infallible>(Sse::default().data(data)), own));
            }
            if own.over {
                return None;
            }
            let Some(event) = own.events.recv().await else {
                // Cut off before its end: the service stops, or the client read too slowly.
                own.ready.push_back(error("stopped", CUT_OFF).to_string());
                own.over = true;
                continue;
            };
            if matches!(event, Event::Token { .. }) {
                own.in_flight.charge(1);
            }
            own.hear(&event);
        }
    });
    axum::response::Sse::new(sent).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// What a whole answer is made of.
#[derive(Default)]
struct Whole {
    text: String,
    calls: Vec<Value>,
    rungs: Vec<RungIdx>,
    switches: Vec<Switch>,
    cached: Tokens,
    likelihoods: Vec<Likelihood>,
}

impl Whole {
    fn take(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.text += &text,
                Piece::Call { name, arguments } => self.calls.push(call(&name, &arguments)),
            }
        }
    }

    fn choice(self, frame: &Frame, reason: FinishReason) -> Value {
        let reason = finish(reason, self.calls.len());
        let told: Vec<&Likelihood> = self.likelihoods.iter().collect();
        let logprobs = frame.likelihoods.then(|| match frame.kind {
            Kind::Chat => likelihood::of_chat(&told),
            Kind::Text => likelihood::of_text(&told, 0),
        });
        match frame.kind {
            Kind::Chat => {
                let mut message = json!({"role": "assistant", "content": self.text});
                if !self.calls.is_empty() {
                    // White space around calls is layout, and an answer that only calls says nothing.
                    let said = self.text.trim();
                    message["content"] = if said.is_empty() { Value::Null } else { said.into() };
                    message["tool_calls"] = self.calls.into();
                }
                json!({"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason})
            }
            Kind::Text => json!({"index": 0, "text": self.text, "logprobs": logprobs, "finish_reason": reason}),
        }
    }
}

/// Sends an answer once it is complete; `said` is what of it was said before.
pub(super) async fn whole(
    mut events: mpsc::Receiver<Event>,
    mut frame: Frame,
    said: Option<Said>,
    in_flight: &InFlight,
) -> Response {
    let (mut whole, mut pieces) = (Whole::default(), frame.pieces());
    if let Some(Said { texts, finished, tokens }) = said {
        // How likely they were, nobody knows any more, and likelihoods of a part would be taken for those of the whole.
        frame.likelihoods &= texts.is_empty();
        texts.into_iter().for_each(|text| whole.take(pieces.push(text)));
        if let Some(reason) = finished {
            return complete(whole, pieces, &frame, reason, tokens);
        }
    }
    while let Some(event) = events.recv().await {
        match event {
            Event::Token { text, rung, likelihood, .. } => {
                in_flight.charge(1);
                whole.take(pieces.push(text));
                whole.likelihoods.extend(likelihood);
                if whole.rungs.last() != Some(&rung) {
                    whole.rungs.push(rung);
                }
            }
            // Of an answer that was begun before, more than the prompt may have been there.
            Event::Admitted { cached_tokens, .. } => {
                whole.cached = Tokens::new(cached_tokens.get().min(frame.prompt));
            }
            Event::Switch(switch) => whole.switches.push(switch),
            Event::Trouble { message, .. } => {
                return problem(StatusCode::INTERNAL_SERVER_ERROR, "trouble", &message);
            }
            Event::Finished { reason, tokens, .. } => return complete(whole, pieces, &frame, reason, tokens),
            _ => {}
        }
    }
    problem(StatusCode::SERVICE_UNAVAILABLE, "stopped", CUT_OFF)
}

/// The response of an answer that has ended.
fn complete(mut whole: Whole, mut pieces: Pieces, frame: &Frame, reason: FinishReason, tokens: Tokens) -> Response {
    whole.take(pieces.finish());
    let usage = frame.usage(tokens, whole.cached);
    let molt = json!({"rungs": whole.rungs, "switches": whole.switches});
    let object = match frame.kind {
        Kind::Chat => "chat.completion",
        Kind::Text => "text_completion",
    };
    Json(json!({
        "id": frame.id, "object": object, "created": frame.created, "model": frame.model,
        "choices": [whole.choice(frame, reason)], "usage": usage, "molt": molt,
    }))
    .into_response()
}
