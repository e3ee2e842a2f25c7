//! Answers on the wire: whole, or as server-sent events in which official clients find nothing that harms them.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Json, Response};
use futures_util::stream;
use molt_scheduler::units::Tokens;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::event::{Event, FinishReason};
use crate::service::http::problem;
use crate::service::tenants::InFlight;
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

    /// The choice of a chunk of a stream.
    fn piece(&self, text: Option<&str>, finish_reason: Option<&str>) -> Value {
        match (self.kind, text) {
            (Kind::Text, text) => {
                json!([{"index": 0, "text": text.unwrap_or(""), "logprobs": null, "finish_reason": finish_reason}])
            }
            (Kind::Chat, Some(text)) => {
                let delta = json!({"role": "assistant", "content": text});
                json!([{"index": 0, "delta": delta, "finish_reason": finish_reason}])
            }
            (Kind::Chat, None) => json!([{"index": 0, "delta": {}, "finish_reason": finish_reason}]),
        }
    }

    fn usage(&self, tokens: u64) -> Value {
        json!({"prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens})
    }
}

fn finish(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// The chunk that tells of an event; what moves the model has no choices, so that clients go on unharmed.
fn chunk(frame: &Frame, event: &Event) -> Option<Value> {
    Some(match event {
        Event::Token { text, rung, .. } => frame.chunk(frame.piece(Some(text), None), json!({"rung": rung})),
        Event::Finished { reason, .. } => frame.chunk(frame.piece(None, Some(finish(*reason))), json!({})),
        Event::Switch(_) | Event::Lever { .. } | Event::Unpark { .. } | Event::Healed { .. } => {
            frame.chunk(json!([]), serde_json::to_value(event).ok()?)
        }
        _ => return None,
    })
}

/// Sends an answer as it comes. The request is in flight until the stream is dropped.
pub(super) fn streamed(
    events: mpsc::Receiver<Event>,
    frame: Frame,
    include_usage: bool,
    in_flight: InFlight,
) -> Response {
    /// What is still to be sent.
    enum Left {
        Events(mpsc::Receiver<Event>),
        Usage(Tokens),
        Done,
        Nothing,
    }
    let chunks = stream::unfold((frame, Left::Events(events), in_flight), move |(frame, mut left, own)| async move {
        loop {
            match left {
                Left::Events(mut events) => {
                    let Some(event) = events.recv().await else {
                        // Cut off before its end: the service stops, or the client read too slowly.
                        let data = json!({"error": {"code": "stopped", "message": CUT_OFF, "type": "server_error"}});
                        return Some((Ok(Sse::default().data(data.to_string())), (frame, Left::Nothing, own)));
                    };
                    let data = chunk(&frame, &event);
                    left = match event {
                        Event::Finished { tokens, .. } if include_usage => Left::Usage(tokens),
                        Event::Finished { .. } => Left::Done,
                        _ => Left::Events(events),
                    };
                    if let Some(data) = data {
                        return Some((Ok::<_, Infallible>(Sse::default().data(data.to_string())), (frame, left, own)));
                    }
                }
                Left::Usage(tokens) => {
                    let mut data = frame.chunk(json!([]), json!({}));
                    data["usage"] = frame.usage(tokens.get());
                    return Some((Ok(Sse::default().data(data.to_string())), (frame, Left::Done, own)));
                }
                Left::Done => return Some((Ok(Sse::default().data("[DONE]")), (frame, Left::Nothing, own))),
                Left::Nothing => return None,
            }
        }
    });
    axum::response::Sse::new(chunks).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// Sends an answer once it is complete.
pub(super) async fn whole(mut events: mpsc::Receiver<Event>, frame: &Frame) -> Response {
    let (mut text, mut rungs, mut switches) = (String::new(), Vec::new(), Vec::new());
    let mut end = None;
    while let Some(event) = events.recv().await {
        match event {
            Event::Token { text: more, rung, .. } => {
                text += &more;
                if rungs.last() != Some(&rung) {
                    rungs.push(rung);
                }
            }
            Event::Switch(switch) => switches.push(switch),
            Event::Finished { reason, tokens, .. } => {
                end = Some((finish(reason), tokens));
                break;
            }
            _ => {}
        }
    }
    let Some((reason, tokens)) = end else {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "stopped", CUT_OFF);
    };
    let (object, choice) = match frame.kind {
        Kind::Chat => {
            let message = json!({"role": "assistant", "content": text});
            ("chat.completion", json!({"index": 0, "message": message, "finish_reason": reason}))
        }
        Kind::Text => ("text_completion", json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})),
    };
    Json(json!({
        "id": frame.id, "object": object, "created": frame.created, "model": frame.model, "choices": [choice],
        "usage": frame.usage(tokens.get()), "molt": {"rungs": rungs, "switches": switches},
    }))
    .into_response()
}
