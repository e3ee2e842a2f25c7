//! Routes and their answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post, put};
use molt_models::Ladder;
use molt_models::sampling::SamplingSettings;
use molt_scheduler::Refusal;
use molt_scheduler::units::{Bytes as Budget, Tokens};
use parking_lot::RwLock;
use serde_json::{Value, json};

use crate::budget::{Holds, OperatorBudget, Watched};
use crate::engine::AnswerRequest;
use crate::sampler::Books;
use crate::service::answer::{Frame, Sending, streamed, whole};
use crate::service::engine_thread::{Asked, EngineClient};
use crate::service::prepare::{Prepared, prepare};
use crate::service::request_key::RequestKey;
use crate::service::resume::{Begins, Going, begin, go_on, resume};
use crate::service::serve::Peer;
use crate::service::tenants::{NotServed, TenantClaim, Tenants};
use crate::service::wire::{ChatRequest, Kind};
use crate::state::State as KeptState;

/// Most bytes of a request's body.
const BODY_LIMIT: usize = 4 << 20;
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
    /// The budget that holds, of this and of all other sources.
    pub watched: Watched,
    /// What is used.
    pub books: Books,
    /// Most tokens of a sequence.
    pub context: Tokens,
    /// Who may ask.
    pub tenants: Arc<Tenants>,
    /// Tenants that a registration may name instead of saying everything itself.
    pub profiles: RwLock<Vec<TenantClaim>>,
    /// What outlives the daemon, if anything does.
    pub state: Option<Arc<KeptState>>,
}

/// Prompts that are cut into tokens at a time: it takes many times their size, which is in no books.
static PREPARING: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(2);

/// Most bytes of a body that is no prompt.
const SMALL_BODY: usize = 64 << 10;

/// How long the body of a request may take to come.
const BODY_TIME: Duration = Duration::from_secs(30);

/// The body of a request, or what is answered where none comes.
struct Body(Bytes);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        match tokio::time::timeout(BODY_TIME, Bytes::from_request(request, state)).await {
            Ok(Ok(body)) => Ok(Self(body)),
            Ok(Err(rejection)) => Err(problem(rejection.status(), "body", &rejection.body_text())),
            Err(_) => Err(problem(StatusCode::REQUEST_TIMEOUT, "body", "the body did not come in time")),
        }
    }
}

/// All routes.
pub fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/v1/openapi.json", get(openapi))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(|a, b, c, d| answer(Kind::Chat, a, b, c, d)))
        .route("/v1/completions", post(|a, b, c, d| answer(Kind::Text, a, b, c, d)))
        .route("/v1/answers/{id}", get(resume))
        .route("/v1/tenants", post(register).get(list_tenants).layer(DefaultBodyLimit::max(SMALL_BODY)))
        .route("/v1/tenants/me", axum::routing::delete(leave))
        .route("/v1/budget", put(set_budget).get(get_budget).layer(DefaultBodyLimit::max(SMALL_BODY)))
        .method_not_allowed_fallback(|| async {
            problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "the route does not take this method")
        })
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "not_found", "there is no such route") })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(service)
}

/// An error in OpenAI's shape.
pub(super) fn problem(status: StatusCode, code: &str, message: &str) -> Response {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    let mut response =
        (status, Json(json!({"error": {"code": code, "message": message, "type": kind}}))).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    }
    response
}

/// What the service says of itself; a test holds it to that.
async fn openapi() -> Response {
    let document = include_str!("openapi.json").replacen("VERSION", env!("CARGO_PKG_VERSION"), 1);
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], document).into_response()
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
    let by_kind = service.books.by_kind();
    let mut told =
        json!({"budget_bytes": service.budget.get(), "usage_bytes": by_kind.total(), "usage_by_kind": by_kind});
    if let Some(Holds { bytes, source, reason }) = service.watched.holds() {
        told["usable_bytes"] = json!(bytes);
        told["strictest"] = json!({"source": source, "reason": reason});
    }
    Json(told)
}

async fn set_budget(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(body): Body,
) -> Response {
    if peer.user.is_none() {
        // Anybody on this machine reaches the port; who may use the socket, its mode says.
        return problem(StatusCode::FORBIDDEN, "socket_only", "the budget is set over the socket");
    }
    let wanted = serde_json::from_slice::<Value>(&body).ok().and_then(|v| v["budget_bytes"].as_u64());
    match wanted {
        Some(bytes) => {
            service.budget.set(Budget::new(bytes));
            get_budget(State(service)).await.into_response()
        }
        None => problem(StatusCode::BAD_REQUEST, "budget_bytes", "budget_bytes: must be a count of bytes"),
    }
}

/// The API key of a request.
pub(super) fn key(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ").map(str::trim)
}

pub(super) fn not_served(why: &NotServed) -> Response {
    let (status, code) = match why {
        NotServed::UnknownToken => (StatusCode::UNAUTHORIZED, "unknown_token"),
        NotServed::OtherUser => (StatusCode::UNAUTHORIZED, "token_of_another_user"),
        NotServed::InFlight { .. } => (StatusCode::TOO_MANY_REQUESTS, "requests_in_flight"),
        NotServed::Rate { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
        NotServed::Registrations { .. } => (StatusCode::TOO_MANY_REQUESTS, "registrations"),
    };
    let mut response = problem(status, code, &why.to_string());
    if let NotServed::Rate { retry_after_s, .. } = why {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(*retry_after_s));
    }
    response
}

/// What a registration says: everything, or the name of a profile.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct OfProfile {
    profile: String,
}

/// Work of several halves goes on to its end where its client leaves between them.
async fn to_the_end(work: impl Future<Output = Response> + Send + 'static) -> Response {
    match tokio::spawn(work).await {
        Ok(response) => response,
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "failed", &error.to_string()),
    }
}

async fn register(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(body): Body,
) -> Response {
    let bad = |field: &str, message: &str| problem(StatusCode::BAD_REQUEST, field, &format!("{field}: {message}"));
    let claim = match serde_json::from_slice::<OfProfile>(&body) {
        Ok(OfProfile { profile }) => match service.profiles.read().iter().find(|claim| claim.name == profile) {
            Some(claim) => claim.clone(),
            None => return bad("profile", "there is no such profile"),
        },
        Err(_) => match serde_json::from_slice::<TenantClaim>(&body) {
            Ok(claim) => claim,
            Err(error) => return bad("body", &error.to_string()),
        },
    };
    let spec = match claim.check(service.context) {
        Ok(spec) => spec,
        Err((field, reason)) => return bad(field, &reason),
    };
    to_the_end(async move {
        let id = match service.engine.register(claim.name.clone(), spec).await {
            Ok(id) => id,
            Err(gone) => return problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string()),
        };
        match service.tenants.register(id, claim.clone(), peer.user) {
            Ok(token) => {
                let told = json!({"object": "tenant", "tenant": claim, "token": token});
                (StatusCode::CREATED, Json(told)).into_response()
            }
            Err(why) => {
                // Where the engine is gone, so is the tenant.
                let _gone = service.engine.deregister(id).await;
                not_served(&why)
            }
        }
    })
    .await
}

async fn list_tenants(State(service): State<Arc<Service>>) -> Json<Value> {
    let all = service.tenants.list().into_iter();
    let all: Vec<Value> =
        all.map(|(claim, in_flight)| json!({"object": "tenant", "tenant": claim, "in_flight": in_flight})).collect();
    Json(json!({"object": "list", "data": all}))
}

async fn leave(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> Response {
    to_the_end(async move {
        let left = match service.tenants.leave(key(&headers), peer.user) {
            Ok(tenant) => service.engine.deregister(tenant).await,
            Err(why) => return not_served(&why),
        };
        match left {
            Ok(()) => Json(json!({"object": "tenant", "deleted": true})).into_response(),
            Err(gone) => problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string()),
        }
    })
    .await
}

async fn answer(
    kind: Kind,
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    request: Request,
) -> Response {
    let in_flight = match service.tenants.enter(key(&headers), peer.user) {
        Ok(in_flight) => in_flight,
        Err(why) => return not_served(&why),
    };
    let request_key = match RequestKey::of(&headers) {
        Ok(key) => key,
        Err(wrong) => return problem(StatusCode::BAD_REQUEST, "idempotency_key", &wrong),
    };
    // Only now: what nobody may ask is not kept in memory.
    let Body(body) = match Body::from_request(request, &()).await {
        Ok(body) => body,
        Err(refused) => return refused,
    };
    let request = match ChatRequest::parse(kind, &body) {
        Ok(request) => request,
        Err(bad) => return problem(StatusCode::BAD_REQUEST, &bad.field, &bad.to_string()),
    };
    // A long text or a large schema takes a while; the streams of others must not wait for it.
    let (ladder, context) = (service.ladder.clone(), service.context);
    let Ok(place) = PREPARING.acquire().await else { unreachable!("it is never closed") };
    let work = move || {
        let _place = place;
        (prepare(&ladder, &request, context), request, in_flight)
    };
    // The work cannot be broken off where the client leaves, and counts against its tenant until it has ended.
    let (request, prepared, in_flight) = match tokio::task::spawn_blocking(work).await {
        Ok((Ok(prepared), request, in_flight)) => (request, prepared, in_flight),
        Ok((Err(bad), ..)) => return problem(StatusCode::BAD_REQUEST, &bad.field, &bad.to_string()),
        Err(error) => return problem(StatusCode::INTERNAL_SERVER_ERROR, "body", &error.to_string()),
    };
    let Prepared { prompt, pinned, grammar } = prepared;
    let (length, context) = (prompt.len() as u64, service.context.get());
    if length >= context {
        let message = format!("the prompt is {length} tokens, the context holds {context}");
        return problem(StatusCode::BAD_REQUEST, "context_length_exceeded", &message);
    }
    let room = (service.context.min(in_flight.longest) - Tokens::new(length)).get().max(1);
    let answer = request.max_tokens.unwrap_or(ANSWER.min(room));
    let wanted = AnswerRequest {
        user: peer.user,
        prompt,
        pinned,
        answer: Tokens::new(answer),
        sampling: SamplingSettings { seed: request.seed.unwrap_or_else(rand::random), ..request.sampling },
        stop: request.stop.clone(),
        grammar,
        likelihoods: request.likelihoods,
        // Users whom nobody tells apart must not learn what another has asked.
        reuse: peer.user.is_some() || in_flight.has_token(),
        ignore_end: false,
    };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Where nothing is kept, a key says nothing.
    let named = request_key.zip(service.state.as_ref()).filter(|_| wanted.reuse);
    let name = named.as_ref().map(|(key, state)| key.name(&in_flight.owner(peer.user), &state.secret()));
    let frame = Frame {
        kind,
        id: format!(
            "{}-{}",
            if kind == Kind::Chat { "chatcmpl" } else { "cmpl" },
            name.unwrap_or_else(|| since.as_nanos().to_string())
        ),
        created: since.as_secs(),
        model: service.ladder.name().to_owned(),
        prompt: length,
        likelihoods: request.likelihoods.is_some(),
        tools: request.form.has_tools(),
    };
    // Who waits for a whole answer and has not named it could not ask for it again.
    let keeping = if request.stream || named.is_some() {
        match begin(&service, &in_flight, &frame, &wanted, &request, named.is_some()).await {
            Ok(Begins::Anew(keeping)) => keeping,
            Ok(Begins::Again(resumed)) => {
                return match go_on(&service, &in_flight, *resumed).await {
                    Ok(Going { events, frame, said, .. }) if request.stream => {
                        let mut sending = Sending::new(events, frame, request.include_usage, in_flight);
                        sending.again(said, 0);
                        streamed(sending)
                    }
                    Ok(Going { events, frame, said, .. }) => whole(events, frame, Some(said), &in_flight).await,
                    Err(response) => response,
                };
            }
            Err(response) => return response,
        }
    } else {
        None
    };
    let asked = Asked { request: wanted, begun: None, keeping };
    let events = match service.engine.submit(in_flight.tenant, asked).await {
        Ok(Ok(events)) => events,
        Ok(Err(refusal)) => return refused(&refusal),
        Err(gone) => return problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string()),
    };
    in_flight.charge(length);
    match request.stream {
        true => streamed(Sending::new(events, frame, request.include_usage, in_flight)),
        false => whole(events, frame, None, &in_flight).await,
    }
}

pub(super) fn refused(refusal: &Refusal) -> Response {
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
