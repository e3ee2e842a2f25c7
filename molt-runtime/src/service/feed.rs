//! The live feed: what the engine does, as server-sent events for whoever looks on (`GET /v1/events`).
//!
//! Every line is made from the one [`Event`], without what anybody said or was answered. Looking on never holds the
//! engine up: a reader that is too slow misses events and is told how many.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;
use tokio::sync::broadcast::{self, error::RecvError};

use crate::event::Event;

/// Events that may wait for a reader; an older one is missed.
const BUFFER: usize = 4_096;
/// Between two samples of memory that are told: every round has one, and there are thousands of rounds in a second.
const SAMPLES: Duration = Duration::from_millis(100);
/// A comment goes out when nothing else did for so long.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// An event of the feed.
#[derive(Debug, Clone, Serialize)]
struct Told {
    /// Its number since the service began; a gap is what the feed leaves out or what a reader missed.
    number: u64,
    /// Milliseconds since the service began.
    at_ms: u64,
    #[serde(flatten)]
    event: Event,
}

/// What a reader that joins is told first: how the run began and how things stand.
#[derive(Debug, Default)]
struct Standing {
    start: Option<Arc<Told>>,
    budget: Option<Arc<Told>>,
    sample: Option<Arc<Told>>,
}

impl Standing {
    fn note(&mut self, told: &Arc<Told>) {
        let place = match told.event {
            Event::Start(_) => &mut self.start,
            Event::Budget { .. } => &mut self.budget,
            Event::Sample { .. } => &mut self.sample,
            _ => return,
        };
        *place = Some(told.clone());
    }

    fn all(&self) -> Vec<Arc<Told>> {
        let mut all: Vec<_> = [&self.start, &self.budget, &self.sample].into_iter().flatten().cloned().collect();
        all.sort_by_key(|told| told.number);
        all
    }
}

/// The engine's end of the feed. Once it is dropped, every reader's stream ends.
#[derive(Debug)]
pub struct Feed {
    readers: broadcast::Sender<Arc<Told>>,
    standing: Arc<Mutex<Standing>>,
    started: Instant,
    number: u64,
    last_sample: Option<Instant>,
}

/// The readers' end.
#[derive(Debug, Clone)]
pub struct FeedRoutes {
    /// Weak, so that streams end with the engine and do not hold the service up when it stops.
    readers: broadcast::WeakSender<Arc<Told>>,
    standing: Arc<Mutex<Standing>>,
}

impl Feed {
    /// A feed that nobody reads yet, and the end that serves it.
    pub fn new() -> (Self, FeedRoutes) {
        let (readers, _nobody) = broadcast::channel(BUFFER);
        let standing = Arc::<Mutex<Standing>>::default();
        let routes = FeedRoutes { readers: readers.downgrade(), standing: standing.clone() };
        (Self { readers, standing, started: Instant::now(), number: 0, last_sample: None }, routes)
    }

    /// Something happened. Costs next to nothing where nobody reads.
    pub fn tell(&mut self, event: &Event) {
        self.number += 1;
        if matches!(event, Event::Sample { .. }) {
            let now = Instant::now();
            if self.last_sample.is_some_and(|last| now.duration_since(last) < SAMPLES) {
                return;
            }
            self.last_sample = Some(now);
        }
        let lasting = matches!(event, Event::Start(_) | Event::Budget { .. } | Event::Sample { .. });
        if !lasting && self.readers.receiver_count() == 0 {
            return;
        }
        let at_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let told = Arc::new(Told { number: self.number, at_ms, event: wordless(event) });
        let mut standing = self.standing.lock();
        standing.note(&told);
        // Sent under the lock: a reader that joins gets each event either as standing or as news. Where nobody reads, the
        // send fails, and that is no loss.
        let _nobody = self.readers.send(told);
    }
}

/// The event without the words of an answer.
fn wordless(event: &Event) -> Event {
    match event {
        Event::Token { tenant, class, nth, wait_ms, rung, .. } => Event::Token {
            tenant: tenant.clone(),
            class: *class,
            nth: *nth,
            wait_ms: *wait_ms,
            text: String::new(),
            rung: *rung,
            likelihood: None,
        },
        other => other.clone(),
    }
}

/// `GET /v1/events`.
pub fn routes(feed: FeedRoutes) -> Router {
    Router::new().route("/v1/events", get(events)).with_state(feed)
}

async fn events(State(feed): State<FeedRoutes>) -> Response {
    let (standing, readers) = {
        let standing = feed.standing.lock();
        let readers = feed.readers.upgrade().map(|sender| sender.subscribe());
        (standing.all(), readers)
    };
    let first = stream::iter(standing).map(|told| line(&told));
    let news = stream::unfold(readers, |readers| async move {
        let mut readers = readers?;
        let told = match readers.recv().await {
            Ok(told) => line(&told),
            Err(RecvError::Lagged(events)) => {
                Sse::default().event("missed").data(json!({"event": "missed", "events": events}).to_string())
            }
            Err(RecvError::Closed) => return None,
        };
        Some((told, Some(readers)))
    });
    let lines = first.chain(news).map(Ok::<_, Infallible>);
    axum::response::Sse::new(lines).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

fn line(told: &Told) -> Sse {
    // The types are ours and have string keys; should one not be writable, its reader sees the number that is missing.
    let data = serde_json::to_string(told).unwrap_or_default();
    Sse::default().id(told.number.to_string()).data(data)
}

#[cfg(test)]
mod tests {
    use molt_scheduler::Class;
    use molt_scheduler::units::{Bytes, RungIdx, Tokens};

    use super::*;

    fn token(nth: u64) -> Event {
        let (tenant, class) = ("mail".to_owned(), Class::Batch);
        Event::Token {
            tenant,
            class,
            nth: Tokens::new(nth),
            wait_ms: None,
            text: "secret".into(),
            rung: RungIdx::TOP,
            likelihood: None,
        }
    }

    /// The data lines that a reader gets until the feed ends.
    fn read(routes_of: FeedRoutes, then: impl FnOnce()) -> Vec<serde_json::Value> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let body = runtime.block_on(async {
            let answer = events(State(routes_of)).await;
            then();
            axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap()
        });
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(!text.contains("secret"), "words of an answer are in the feed: {text}");
        text.lines().filter_map(|l| l.strip_prefix("data: ")).map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    #[test]
    fn a_reader_is_told_how_things_stand_and_then_what_happens() {
        let (mut feed, routes) = Feed::new();
        let budget = |bytes| Event::Budget { budget_bytes: Bytes::new(bytes), usage_bytes: Bytes::ZERO };
        for event in [budget(7), token(1), budget(8)] {
            feed.tell(&event);
        }
        let told = read(routes.clone(), move || {
            feed.tell(&token(2));
            drop(feed);
        });
        assert_eq!((told[0]["event"].as_str(), told[0]["budget_bytes"].as_u64()), (Some("budget"), Some(8)));
        assert_eq!((told[1]["event"].as_str(), told[1]["nth"].as_u64()), (Some("token"), Some(2)), "{told:?}");
        assert_eq!(told.len(), 2, "what came before is not told: {told:?}");
        assert_eq!(read(routes, || {}).len(), 1, "of a feed that has ended only what stands");
    }

    #[test]
    fn a_slow_reader_is_told_how_much_it_missed() {
        let (mut feed, routes) = Feed::new();
        let more = 100;
        let told = read(routes, move || {
            (0..BUFFER as u64 + more).for_each(|nth| feed.tell(&token(nth)));
            drop(feed);
        });
        assert_eq!(told[0], json!({"event": "missed", "events": more}));
        assert_eq!(told.len(), BUFFER + 1);
    }
}
