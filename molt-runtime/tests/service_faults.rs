//! The service while things around it fail: a source of budgets vanishes, a client goes away, the disk refuses what is kept; each
//! after every event of a conversation that goes down over every rung and up again, and together with each other and with what
//! can fail inside (`faults.rs` has those alone). Whoever still listens is answered to the end, so is the next, and when the
//! service stops the books return to nothing and the folder holds what has ended, whole.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use molt_kv::faults::{Armed, Boundary, Fault, arm};
use molt_models::Ladder;
use molt_models::sampling::SamplingSettings;
use molt_runtime::budget::{BudgetSource, Strictest, Watched};
use molt_runtime::engine::{AnswerRequest, Engine};
use molt_runtime::event::Event;
use molt_runtime::metrics::Metrics;
use molt_runtime::service::{Asked, EngineClient, Kind, Log, LogLevel, Watch, feed::Feed};
use molt_runtime::state::{AnswerHead, Owner, State, StateSettings};
use molt_runtime::workers::Workers;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Config, TenantId};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const AMPLE: Bytes = Bytes::mib(512);
/// Tokens of the conversation's prompt and of its answer, and of the answer after it.
const PROMPT: usize = 200;
const ANSWER: u64 = 90;
const NEXT: u64 = 4;
/// For so many events of the conversation a source is gone.
const GONE: u64 = 12;
/// What a source that is gone says.
const NOTHING: u64 = u64::MAX;

/// Something that goes wrong.
#[derive(Debug, Clone, Copy)]
enum Failing {
    /// The source of budgets has no opinion, from that event of the conversation on.
    Source(u64),
    /// The client has gone after that event.
    Client(u64),
    /// At a boundary.
    Within(Fault),
}

/// A source that says what the test says, or nothing.
struct Source(Arc<AtomicU64>);

impl BudgetSource for Source {
    fn budget(&mut self, _now: Time) -> Option<Bytes> {
        Some(self.0.load(Ordering::SeqCst)).filter(|budget| *budget != NOTHING).map(Bytes::new)
    }

    fn name(&self) -> &'static str {
        "test"
    }

    fn reason(&self) -> String {
        "the test says so".to_owned()
    }
}

/// What became of a run.
struct Outcome {
    /// Events that the conversation's client heard, and whether the last was its end.
    heard: u64,
    ended: bool,
    rungs: Vec<RungIdx>,
    troubles: Vec<String>,
    passed: Vec<(Boundary, u64)>,
}

/// A service with a state folder.
struct Served {
    client: EngineClient,
    tenant: TenantId,
    prompt: Vec<u32>,
    sources: Vec<String>,
    state: Arc<State>,
    budget: Arc<AtomicU64>,
}

impl Served {
    /// Asks, under that name, and listens: until the end, or until so many events were heard.
    async fn answer(&self, id: &str, tokens: u64, leave: Option<u64>, hear: &mut dyn FnMut(u64, &Event)) -> bool {
        let request = AnswerRequest {
            user: Some(7),
            prompt: self.prompt.clone(),
            pinned: Tokens::ZERO,
            answer: Tokens::new(tokens),
            sampling: SamplingSettings { temperature: 0.7, ..SamplingSettings::default() },
            stop: Vec::new(),
            grammar: None,
            likelihoods: None,
            reuse: true,
            ignore_end: true,
        };
        let head = AnswerHead {
            id: id.to_owned(),
            created: 1,
            owner: Owner { token: None, user: Some(7) },
            sources: self.sources.clone(),
            kind: Kind::Text,
            include_usage: false,
            tools: false,
            prompt: request.prompt.clone(),
            pinned: request.pinned,
            answer: request.answer,
            sampling: request.sampling,
            stop: Vec::new(),
            grammar: None,
            likelihoods: None,
        };
        let keeping = self.state.begin(&head).unwrap();
        let asked = Asked { request, begun: None, keeping };
        let mut events = self.client.submit(self.tenant, asked).await.unwrap().unwrap();
        let (mut count, mut heard) = (0, 0);
        while leave.is_none_or(|leave| count < leave) {
            let event = tokio::time::timeout(Duration::from_secs(60), events.recv()).await.expect("it goes on");
            let event = event.unwrap_or_else(|| panic!("{id} was cut off after {heard} tokens"));
            count += 1;
            hear(count, &event);
            match event {
                Event::Token { .. } => heard += 1,
                Event::Finished { tokens: told, .. } => {
                    assert_eq!((heard, told), (tokens, Tokens::new(tokens)), "{id}");
                    return true;
                }
                _ => {}
            }
        }
        false
    }
}

/// What a rung and a conversation on it take, with some room.
fn holds(engine: &Engine, rung: RungIdx) -> Bytes {
    let cost = engine.cost().get(rung).unwrap();
    let cache = cost.cache_per_token.times(Tokens::new(500));
    engine.overhead() + cost.weights + cost.scratch + cache + Bytes::new(512 << 10)
}

fn conversation(failing: &[Failing]) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let state = State::open(folder.path(), StateSettings { every_tokens: 20, grace: Duration::from_secs(60) }).unwrap();
    let ladder = Arc::new(Ladder::open("pocket", Path::new("/nowhere")).unwrap());
    let mut prompt = ladder.tokenizer().encode(include_str!("../../texts/held-out/address-1909.txt")).unwrap();
    prompt.truncate(PROMPT);
    let sources = ladder.rungs().iter().map(|rung| rung.source().to_owned()).collect();
    let config = Config { patience: Span::from_millis(30), residence: Span::from_millis(30), ..Config::default() };
    let mut engine = Engine::new(ladder, config, common::over_the_bridge()).unwrap();
    let tenant = engine.register("chat", common::spec(&engine));
    let budgets = [AMPLE, holds(&engine, RungIdx::new(1)), holds(&engine, RungIdx::new(2)), AMPLE];
    let (books, overhead, metrics) = (engine.books(), engine.overhead(), Metrics::new());
    let budget = Arc::new(AtomicU64::new(AMPLE.get()));
    let sources_of_budget = Strictest::new(vec![Box::new(Source(budget.clone()))], Vec::new());
    let watched = Watched::start(sources_of_budget, engine.alarm().clone()).unwrap();
    let within: Vec<Fault> =
        failing.iter().filter_map(|f| if let Failing::Within(f) = f { Some(*f) } else { None }).collect();
    let of = |find: fn(&Failing) -> Option<u64>| failing.iter().find_map(find);
    let gone = of(|failing| if let Failing::Source(after) = failing { Some(*after) } else { None });
    let leave = of(|failing| if let Failing::Client(after) = failing { Some(*after) } else { None });
    // Only now: what is broken when the service starts is an error of the start.
    let armed: Armed = arm(&within);
    let mut outcome = Outcome { heard: 0, ended: false, rungs: Vec::new(), troubles: Vec::new(), passed: Vec::new() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let watch = Watch::new(metrics.clone(), Feed::new().0);
        let log = Log::new(LogLevel::Nothing);
        let started = EngineClient::start(engine, watched, Workers::default(), watch, log, Some(state.clone()));
        let (client, ended) = started.unwrap();
        let served = Served { client, tenant, prompt, sources, state: state.clone(), budget };
        let mut tokens = 0;
        let mut hear = |count: u64, event: &Event| {
            outcome.heard = count;
            match event {
                Event::Token { rung, .. } => {
                    tokens += 1;
                    if outcome.rungs.last() != Some(rung) {
                        outcome.rungs.push(*rung);
                    }
                }
                Event::Trouble { message, .. } => outcome.troubles.push(message.clone()),
                _ => {}
            }
            // Some tokens at each budget, and most of them on the way up.
            let stage = [10, 20, 35].into_iter().filter(|so_many| tokens >= *so_many).count();
            let vanished = gone.is_some_and(|from| (from..from + GONE).contains(&count));
            served.budget.store(if vanished { NOTHING } else { budgets[stage].get() }, Ordering::SeqCst);
        };
        outcome.ended = served.answer("first", ANSWER, leave, &mut hear).await;
        assert!(outcome.ended || leave.is_some(), "{failing:?}");
        served.budget.store(AMPLE.get(), Ordering::SeqCst);
        assert!(served.answer("next", NEXT, None, &mut |_, _| {}).await, "{failing:?}");
        served.client.stop();
        ended.await.expect("the engine stops when it is told to, and not before");
    });
    assert_eq!(books.usage(), overhead, "{failing:?}: {:?}", outcome.troubles);
    let text = metrics.render();
    let overshoot = text.lines().find_map(|line| line.strip_prefix("molt_overshoot_max_bytes ")).unwrap();
    assert!(overshoot.parse::<f64>().unwrap() <= 0.0, "{failing:?}: over the budget by {overshoot}");
    // What is left is what has ended, with nothing half written beside it. What could not be written is told.
    let refused = within.iter().any(|fault| fault.boundary == Boundary::WriteState) && armed.hit() > 0;
    let told = state.troubles();
    let names = std::fs::read_dir(folder.path().join("answers")).unwrap();
    let names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for name in &names {
        assert!(["first.answer", "next.answer"].contains(&name.as_str()), "{failing:?}: {name} is left");
    }
    assert!(refused || names.len() == 1 + usize::from(outcome.ended), "{failing:?}: {names:?} {told:?}");
    outcome.passed = Boundary::ALL.map(|boundary| (boundary, armed.passed(boundary))).to_vec();
    outcome
}

/// So many points of each kind are tried one by one, spread over all that there are.
fn tried() -> u64 {
    std::env::var("MOLT_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

#[test]
fn whatever_fails_around_it_the_service_goes_on() {
    let undisturbed = conversation(&[]);
    assert!(undisturbed.rungs.len() >= 3 && undisturbed.troubles.is_empty(), "{:?}", undisturbed.troubles);
    let (heard, passed) = (undisturbed.heard, undisturbed.passed);
    let reached: Vec<(Boundary, u64)> = passed.into_iter().filter(|(_, count)| *count > 0).collect();
    assert!(reached.len() + 2 >= Boundary::ALL.len(), "{reached:?}");
    let points = |count: u64| (0..tried().min(count)).map(move |at| at * count / tried().min(count));
    let mut all = 0;
    let mut check = |failing: &[Failing]| {
        conversation(failing);
        all += 1;
    };
    for after in points(heard) {
        check(&[Failing::Source(after)]);
        check(&[Failing::Client(after)]);
        check(&[Failing::Source(after), Failing::Client(after + GONE / 2)]);
    }
    let count_of =
        |boundary: Boundary| reached.iter().find(|(other, _)| *other == boundary).map_or(1, |(_, count)| *count);
    for after in points(count_of(Boundary::WriteState)) {
        check(&[Failing::Within(Fault { boundary: Boundary::WriteState, after, panics: false })]);
    }
    // Each kind with each, at random points.
    let mut random = StdRng::seed_from_u64(5);
    for _ in 0..tried() {
        for (boundary, count) in &reached {
            // What writes state is not within a round, whose faults are put in order.
            let panics = *boundary != Boundary::WriteState && random.random();
            let within = Failing::Within(Fault { boundary: *boundary, after: random.random_range(0..*count), panics });
            let around = match random.random() {
                true => Failing::Source(random.random_range(0..heard)),
                false => Failing::Client(random.random_range(0..heard)),
            };
            check(&[around, within]);
        }
    }
    println!("{all} runs of the service with faults around it");
}
