//! Answers that outlive the daemon: kept from their first token on, and taken up again by whoever asked.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use molt_models::Ladder;
use molt_scheduler::units::Tokens;
use tokio::sync::mpsc;

use crate::engine::{AnswerRequest, Begun, Said};
use crate::event::Event;
use crate::service::answer::{Frame, Sending, streamed};
use crate::service::engine_thread::Asked;
use crate::service::http::{Service, key, not_served, problem, refused};
use crate::service::serve::Peer;
use crate::service::tenants::{InFlight, User};
use crate::service::wire::{ChatRequest, Kind};
use crate::state::{AnswerHead, Keeping, NotTaken, Owner, State as KeptState, Taken};

/// How an answer that is kept begins.
pub(super) enum Begins {
    /// From its prompt; with what keeps it, where anything does.
    Anew(Option<Keeping>),
    /// Where it stood when the same request was sent before.
    Again(Box<Resumed>),
}

/// Begins to keep an answer, where answers are kept. One whose client has named the request may have been begun before.
///
/// # Errors
/// The response where it was begun and cannot be had.
pub(super) async fn begin(
    service: &Service,
    in_flight: &InFlight,
    frame: &Frame,
    wanted: &AnswerRequest,
    request: &ChatRequest,
    named: bool,
) -> Result<Begins, Response> {
    // Users whom nobody tells apart could take up each other's.
    let Some(state) = service.state.clone().filter(|_| wanted.reuse) else { return Ok(Begins::Anew(None)) };
    let head = AnswerHead {
        id: frame.id.clone(),
        created: frame.created,
        owner: in_flight.owner(wanted.user),
        sources: service.ladder.rungs().iter().map(|rung| rung.source().to_owned()).collect(),
        kind: frame.kind,
        include_usage: request.include_usage,
        tools: frame.tools,
        prompt: wanted.prompt.clone(),
        pinned: wanted.pinned,
        answer: wanted.answer,
        sampling: wanted.sampling,
        stop: wanted.stop.clone(),
        grammar: request.form.grammar.as_ref().map(|(_, spec)| spec.clone()),
        likelihoods: wanted.likelihoods,
    };
    let (ladder, user, any_seed) = (service.ladder.clone(), wanted.user, request.seed.is_none());
    // The disk may be slow, and the streams of others must not wait for it.
    let begun = tokio::task::spawn_blocking(move || {
        let same = |kept: &AnswerHead| kept.is_asked_by(&head, any_seed);
        let before = named.then(|| take(&state, &ladder, &head.id, &head.owner, user, same));
        match before {
            Some(Ok(resumed)) => Ok(Begins::Again(Box::new(resumed))),
            // What was kept is of no use, and the whole request is at hand.
            None | Some(Err(Lost::NotTaken(NotTaken::Unknown) | Lost::Unusable(_))) => {
                state.begin(&head).map(Begins::Anew).map_err(Lost::NotTaken)
            }
            Some(Err(lost)) => Err(lost),
        }
    });
    match begun.await {
        Ok(begun) => begun.map_err(|lost| lost.response(&frame.id)),
        // Nothing is kept of it, and it is answered all the same.
        Err(_) => Ok(Begins::Anew(None)),
    }
}

/// An answer that is gone on with.
pub(super) struct Going {
    /// What is new of it.
    pub(super) events: mpsc::Receiver<Event>,
    /// What is told of it on the wire.
    pub(super) frame: Frame,
    /// What it has said.
    pub(super) said: Said,
    /// Whether a stream of it ends with a chunk of usage.
    pub(super) include_usage: bool,
}

/// Goes on with an answer that was taken up.
///
/// # Errors
/// The response where the engine does not.
pub(super) async fn go_on(service: &Service, in_flight: &InFlight, resumed: Resumed) -> Result<Going, Response> {
    let Resumed { asked, said, head } = resumed;
    let frame = Frame {
        kind: head.kind,
        id: head.id,
        created: head.created,
        model: service.ladder.name().to_owned(),
        prompt: asked.request.prompt.len() as u64,
        likelihoods: head.likelihoods.is_some(),
        tools: head.tools,
    };
    let events = match said.finished {
        // Nothing more comes.
        Some(_) => mpsc::channel(1).1,
        None => match service.engine.submit(in_flight.tenant, asked).await {
            Ok(Ok(events)) => events,
            Ok(Err(refusal)) => return Err(refused(&refusal)),
            Err(gone) => return Err(problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string())),
        },
    };
    Ok(Going { events, frame, said, include_usage: head.include_usage })
}

/// Goes on with an answer: `GET /v1/answers/{id}?after=N`.
pub(super) async fn resume(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let in_flight = match service.tenants.enter(key(&headers), peer.user) {
        Ok(in_flight) => in_flight,
        Err(why) => return not_served(&why),
    };
    let after = match uri.query().map_or(Ok(0), after) {
        Ok(after) => after,
        Err(reason) => return problem(StatusCode::BAD_REQUEST, "after", &format!("after: {reason}")),
    };
    let Some(state) = service.state.clone() else {
        return Lost::NotTaken(NotTaken::Unknown).response(&id);
    };
    let (ladder, owner, name) = (service.ladder.clone(), in_flight.owner(peer.user), id.clone());
    let taken = tokio::task::spawn_blocking(move || take(&state, &ladder, &name, &owner, peer.user, |_| true)).await;
    let resumed = match taken {
        Ok(Ok(resumed)) => resumed,
        Ok(Err(lost)) => return lost.response(&id),
        Err(error) => return problem(StatusCode::INTERNAL_SERVER_ERROR, "trouble", &error.to_string()),
    };
    match go_on(&service, &in_flight, resumed).await {
        Ok(Going { events, frame, said, include_usage }) => {
            let mut sending = Sending::new(events, frame, include_usage, in_flight);
            sending.again(said, after);
            streamed(sending)
        }
        Err(response) => response,
    }
}

/// How many tokens whoever asks has already.
fn after(query: &str) -> Result<u64, String> {
    let mut after = 0;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("after", count)) => after = count.parse().map_err(|_| format!("{count:?} is no count of tokens"))?,
            _ => return Err(format!("{pair:?} is not supported")),
        }
    }
    Ok(after)
}

/// What is needed to go on.
pub(super) struct Resumed {
    asked: Asked,
    said: Said,
    head: Head,
}

/// What is told of it on the wire.
struct Head {
    id: String,
    created: u64,
    kind: Kind,
    include_usage: bool,
    tools: bool,
    likelihoods: Option<usize>,
}

/// Why there is nothing to go on with.
enum Lost {
    NotTaken(NotTaken),
    Unusable(String),
    /// It answers something else.
    OtherRequest,
}

impl Lost {
    fn response(&self, id: &str) -> Response {
        match self {
            Self::NotTaken(NotTaken::Unknown) => {
                problem(StatusCode::NOT_FOUND, "not_found", &format!("there is no answer {id} of yours"))
            }
            Self::NotTaken(NotTaken::InUse) => {
                problem(StatusCode::CONFLICT, "in_use", &format!("somebody reads the answer {id}"))
            }
            Self::Unusable(reason) => problem(StatusCode::GONE, "lost", reason),
            Self::OtherRequest => {
                let message = "this key was another request's: a key is for sending the same one again";
                problem(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key", message)
            }
        }
    }
}

/// Takes an answer up, if it is one that is meant, and says again what it has said. It may take a while.
fn take(
    state: &Arc<KeptState>,
    ladder: &Ladder,
    id: &str,
    owner: &Owner,
    user: User,
    meant: impl Fn(&AnswerHead) -> bool,
) -> Result<Resumed, Lost> {
    let models: Vec<_> = ladder.rungs().iter().map(|rung| (rung.source(), rung.cache_shape())).collect();
    let taken = state.take(id, owner, &models).map_err(Lost::NotTaken)?;
    let Taken { head, tokens, ended, caches, keeping } = taken.map_err(|error| Lost::Unusable(error.to_string()))?;
    if !meant(&head) {
        // What keeps it goes out of scope, and it waits on.
        return Err(Lost::OtherRequest);
    }
    let lost = |keeping: Keeping, reason: String| {
        let reason = format!("the answer {id} cannot go on: {reason}");
        state.tell(reason.clone());
        keeping.forget();
        Lost::Unusable(reason)
    };
    let started = head.grammar.as_ref().map(|spec| ladder.grammars().and_then(|grammars| grammars.start(spec)));
    let grammar = match started.transpose() {
        Ok(grammar) => grammar,
        Err(error) => return Err(lost(keeping, error.to_string())),
    };
    let request = AnswerRequest {
        user,
        prompt: head.prompt,
        pinned: head.pinned,
        answer: head.answer,
        sampling: head.sampling,
        stop: head.stop,
        grammar,
        likelihoods: head.likelihoods,
        reuse: true,
        ignore_end: false,
    };
    let known = |token: &u32| usize::try_from(*token).is_ok_and(|token| token < ladder.tokenizer().vocab());
    if request.prompt.is_empty() || !request.prompt.iter().chain(&tokens).all(known) || request.answer == Tokens::ZERO {
        return Err(lost(keeping, "its tokens are not of this ladder".to_owned()));
    }
    let (begun, said) = match Begun::again(&request, &tokens, ended, ladder.tokenizer()) {
        Ok(again) => again,
        Err(error) => return Err(lost(keeping, error.to_string())),
    };
    let begun = Some(begun.with_caches(caches));
    let (id, created, kind) = (head.id, head.created, head.kind);
    let head =
        Head { id, created, kind, include_usage: head.include_usage, tools: head.tools, likelihoods: head.likelihoods };
    Ok(Resumed { asked: Asked { request, begun, keeping: Some(keeping) }, said, head })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_after_is_a_count() {
        let check = |query: &str, expected: Option<u64>| assert_eq!(after(query).ok(), expected, "{query}");
        check("", Some(0));
        check("after=17", Some(17));
        check("after=", None);
        check("after=-1", None);
        check("from=3", None);
    }
}
