//! Routes and their answers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes as Body;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post, put};
use futures_util::stream;
use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, Message, ModelError};
use molt_scheduler::Refusal;
use molt_scheduler::units::{Bytes, Tokens};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::budget::OperatorBudget;
use crate::engine::AnswerRequest;
use crate::event::{Event, FinishReason};
use crate::service::engine_thread::EngineClient;
use crate::service::wire::ChatRequest;

/// Most bytes of a request's body.
const BODY_LIMIT: usize = 4 << 20;
/// A comment goes out when nothing else did for so long, so that a client knows a waiting stream from a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// What a client is told whose answer has no proper end.
const CUT_OFF: &str = "the answer was cut off: the service stops, or the stream was read too slowly";
/// Most tokens of an answer where the client sets no limit.
const ANSWER: u64 = 512;

/// What the routes share.
#[derive(Debug)]
pub struct Service {
    /// The ladder that is served.
    pub ladder: Arc<Ladder>,
    /// The engine.
    pub engine: EngineClient,
    /// The budget, for the operator.
    pub budget: OperatorBudget,
    /// Most tokens of a sequence.
    pub context: Tokens,
}

/// All routes.
pub fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/budget", put(set_budget).get(get_budget))
        .method_not_allowed_fallback(|| async {
            problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "the route does not take this method")
        })
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "not_found", "there is no such route") })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(service)
}

/// An error in OpenAI's shape.
fn problem(status: StatusCode, code: &str, message: &str) -> Response {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    let mut response =
        (status, Json(json!({"error": {"code": code, "message": message, "type": kind}}))).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    }
    response
}

async fn models(State(service): State<Arc<Service>>) -> Json<Value> {
    let rungs = service.ladder.rungs().iter().zip(service.ladder.cost().rungs());
    let rungs: Vec<Value> = rungs
        .map(|(rung, (index, cost))| {
            json!({"rung": index, "precision": rung.precision().to_string(), "weights_bytes": cost.weights})
        })
        .collect();
    let name = service.ladder.name();
    Json(
        json!({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "molt", "molt": {"rungs": rungs}}]}),
    )
}

async fn get_budget(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!({"budget_bytes": service.budget.get()}))
}

async fn set_budget(State(service): State<Arc<Service>>, body: Body) -> Response {
    let wanted = serde_json::from_slice::<Value>(&body).ok().and_then(|v| v["budget_bytes"].as_u64());
    match wanted {
        Some(bytes) => {
            service.budget.set(Bytes::new(bytes));
            get_budget(State(service)).await.into_response()
        }
        None => problem(StatusCode::BAD_REQUEST, "budget_bytes", "budget_bytes: must be a count of bytes"),
    }
}

async fn chat(State(service): State<Arc<Service>>, body: Result<Body, BytesRejection>) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return problem(rejection.status(), "body", &rejection.body_text()),
    };
    let request = match ChatRequest::parse(&body) {
        Ok(request) => request,
        Err(bad) => return problem(StatusCode::BAD_REQUEST, &bad.field, &bad.to_string()),
    };
    // A long text takes a while; the streams of others must not wait for it.
    let (ladder, messages) = (service.ladder.clone(), request.messages);
    let (prompt, pinned) = match tokio::task::spawn_blocking(move || prompt(&ladder, &messages)).await {
        Ok(Ok(prompt)) => prompt,
        Ok(Err(error)) => return problem(StatusCode::BAD_REQUEST, "messages", &error.to_string()),
        Err(error) => return problem(StatusCode::INTERNAL_SERVER_ERROR, "messages", &error.to_string()),
    };
    let (length, context) = (prompt.len() as u64, service.context.get());
    if length >= context {
        let message = format!("the prompt is {length} tokens, the context holds {context}");
        return problem(StatusCode::BAD_REQUEST, "context_length_exceeded", &message);
    }
    let answer = request.max_tokens.unwrap_or(ANSWER.min(context - length));
    let wanted = AnswerRequest {
        prompt,
        pinned,
        answer: Tokens::new(answer),
        sampling: SamplingSettings { seed: request.seed.unwrap_or_else(rand::random), ..request.sampling },
        ignore_end: false,
    };
    let events = match service.engine.submit(wanted).await {
        Ok(Ok(events)) => events,
        Ok(Err(refusal)) => return refused(&refusal),
        Err(gone) => return problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string()),
    };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let frame = Frame {
        id: format!("chatcmpl-{}", since.as_nanos()),
        created: since.as_secs(),
        model: service.ladder.name().to_owned(),
        prompt: length,
    };
    match request.stream {
        true => streamed(events, frame, request.include_usage),
        false => whole(events, &frame).await,
    }
}

/// The tokens of a conversation, and how many of them are its system prompt, which shedding never touches.
fn prompt(ladder: &Ladder, messages: &[Message]) -> Result<(Vec<u32>, Tokens), ModelError> {
    let encode = |messages: &[Message]| {
        let text = match ladder.template() {
            Some(template) => template.render(messages)?,
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

fn refused(refusal: &Refusal) -> Response {
    let (status, code) = match refusal {
        Refusal::OverContext { .. } => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
        Refusal::EmptyPrompt => (StatusCode::BAD_REQUEST, "messages"),
        Refusal::OverQuota { .. } => (StatusCode::BAD_REQUEST, "over_quota"),
        Refusal::NeverFits { .. } => (StatusCode::BAD_REQUEST, "never_fits"),
        Refusal::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
        Refusal::TenantQueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "tenant_queue_full"),
        Refusal::UnknownTenant { .. } => (StatusCode::UNAUTHORIZED, "unknown_tenant"),
    };
    problem(status, code, &refusal.to_string())
}

/// What every chunk of an answer repeats.
struct Frame {
    id: String,
    created: u64,
    model: String,
    prompt: u64,
}

impl Frame {
    fn chunk(&self, choices: Value, molt: Value) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": choices, "molt": molt,
        })
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
        Event::Token { text, rung, .. } => {
            let delta = json!([{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": null}]);
            frame.chunk(delta, json!({"rung": rung}))
        }
        Event::Finished { reason, .. } => {
            frame.chunk(json!([{"index": 0, "delta": {}, "finish_reason": finish(*reason)}]), json!({}))
        }
        Event::Switch(_) | Event::Lever { .. } | Event::Unpark { .. } | Event::Healed { .. } => {
            frame.chunk(json!([]), serde_json::to_value(event).ok()?)
        }
        _ => return None,
    })
}

fn streamed(events: mpsc::Receiver<Event>, frame: Frame, include_usage: bool) -> Response {
    /// What is still to be sent.
    enum Left {
        Events(mpsc::Receiver<Event>),
        Usage(Tokens),
        Done,
        Nothing,
    }
    let chunks = stream::unfold((frame, Left::Events(events)), move |(frame, mut left)| async move {
        loop {
            match left {
                Left::Events(mut events) => {
                    let Some(event) = events.recv().await else {
                        // Cut off before its end: the service stops, or the client read too slowly.
                        let data = json!({"error": {"code": "stopped", "message": CUT_OFF, "type": "server_error"}});
                        return Some((Ok(Sse::default().data(data.to_string())), (frame, Left::Nothing)));
                    };
                    let data = chunk(&frame, &event);
                    left = match event {
                        Event::Finished { tokens, .. } if include_usage => Left::Usage(tokens),
                        Event::Finished { .. } => Left::Done,
                        _ => Left::Events(events),
                    };
                    if let Some(data) = data {
                        return Some((Ok::<_, Infallible>(Sse::default().data(data.to_string())), (frame, left)));
                    }
                }
                Left::Usage(tokens) => {
                    let mut data = frame.chunk(json!([]), json!({}));
                    data["usage"] = frame.usage(tokens.get());
                    return Some((Ok(Sse::default().data(data.to_string())), (frame, Left::Done)));
                }
                Left::Done => return Some((Ok(Sse::default().data("[DONE]")), (frame, Left::Nothing))),
                Left::Nothing => return None,
            }
        }
    });
    axum::response::Sse::new(chunks).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

async fn whole(mut events: mpsc::Receiver<Event>, frame: &Frame) -> Response {
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
    let message = json!({"role": "assistant", "content": text});
    Json(json!({
        "id": frame.id, "object": "chat.completion", "created": frame.created, "model": frame.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": frame.usage(tokens.get()), "molt": {"rungs": rungs, "switches": switches},
    }))
    .into_response()
}
