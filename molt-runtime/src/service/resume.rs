//! Answers that outlive the daemon: kept from their first token on, and taken up again by whoever asked.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use molt_models::Ladder;
use molt_scheduler::units::Tokens;
use tokio::sync::mpsc;

use crate::engine::{AnswerRequest, Begun, Said};
use crate::service::answer::{Frame, Sending, streamed};
use crate::service::engine_thread::Asked;
use crate::service::http::{Service, key, not_served, problem, refused};
use crate::service::serve::Peer;
use crate::service::tenants::InFlight;
use crate::service::wire::ChatRequest;
use crate::state::{AnswerHead, Keeping, NotTaken, Owner, State as KeptState, Taken};

/// Begins to keep an answer, where answers are kept.
pub(super) async fn begin(
    service: &Service,
    in_flight: &InFlight,
    frame: &Frame,
    wanted: &AnswerRequest,
    request: &ChatRequest,
) -> Option<Keeping> {
    // Users whom nobody tells apart could take up each other's.
    let state = service.state.clone().filter(|_| wanted.reuse)?;
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
    // The disk may be slow, and the streams of others must not wait for it.
    tokio::task::spawn_blocking(move || state.begin(&head)).await.ok().flatten()
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
    let unknown = || problem(StatusCode::NOT_FOUND, "not_found", &format!("there is no answer {id} of yours"));
    let Some(state) = service.state.clone() else { return unknown() };
    let (ladder, owner, name) = (service.ladder.clone(), in_flight.owner(peer.user), id.clone());
    let taken = tokio::task::spawn_blocking(move || take(&state, &ladder, &name, &owner, peer)).await;
    let resumed = match taken {
        Ok(Ok(resumed)) => resumed,
        Ok(Err(Lost::NotTaken(NotTaken::Unknown))) => return unknown(),
        Ok(Err(Lost::NotTaken(NotTaken::InUse))) => {
            return problem(StatusCode::CONFLICT, "in_use", &format!("somebody reads the answer {id}"));
        }
        Ok(Err(Lost::Unusable(reason))) => return problem(StatusCode::GONE, "lost", &reason),
        Err(error) => return problem(StatusCode::INTERNAL_SERVER_ERROR, "trouble", &error.to_string()),
    };
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
            Ok(Err(refusal)) => return refused(&refusal),
            Err(gone) => return problem(StatusCode::SERVICE_UNAVAILABLE, "stopping", &gone.to_string()),
        },
    };
    let mut sending = Sending::new(events, frame, head.include_usage, in_flight);
    sending.again(said, after);
    streamed(sending)
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
struct Resumed {
    asked: Asked,
    said: Said,
    head: Head,
}

/// What is told of it on the wire.
struct Head {
    id: String,
    created: u64,
    kind: crate::service::wire::Kind,
    include_usage: bool,
    tools: bool,
    likelihoods: Option<usize>,
}

/// Why there is nothing to go on with.
enum Lost {
    NotTaken(NotTaken),
    Unusable(String),
}

/// Takes an answer up and says again what it has said. It may take a while.
fn take(state: &Arc<KeptState>, ladder: &Ladder, id: &str, owner: &Owner, peer: Peer) -> Result<Resumed, Lost> {
    let models: Vec<_> = ladder.rungs().iter().map(|rung| (rung.source(), rung.cache_shape())).collect();
    let taken = state.take(id, owner, &models).map_err(Lost::NotTaken)?;
    let Taken { head, tokens, ended, caches, keeping } = taken.map_err(|error| Lost::Unusable(error.to_string()))?;
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
        user: peer.user,
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
