//! Many rounds of random budgets, arrivals, cancellations and tenants that come and go, with the invariants looked at in each.
//! One test in a process of its own, for what must not grow is the process's: resident set, open files, threads.
//!
//! `MOLT_SOAK_ROUNDS` makes it longer: 100,000 rounds stand for some six hours of a machine in use.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;

use molt_kv::carry::CarrySettings;
use molt_models::Ladder;
use molt_models::sampling::SamplingSettings;
use molt_runtime::engine::{AheadSettings, AnswerRequest, Effort, Engine, EngineSettings, Shadow};
use molt_runtime::event::Event;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, SequenceId, TenantId, TenantSpec};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Sequences at once.
const MOST: u64 = 12;

/// What a process holds that could grow.
#[derive(Debug, Clone, Copy)]
struct Held {
    anonymous_kib: u64,
    files: usize,
    threads: usize,
}

impl Held {
    fn now() -> Self {
        let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
        let count = |folder: &str| fs::read_dir(folder).unwrap().count();
        let anonymous_kib = line.trim().trim_end_matches(" kB").parse().unwrap();
        Self { anonymous_kib, files: count("/proc/self/fd"), threads: count("/proc/self/task") }
    }
}

struct Soak {
    engine: Engine,
    random: StdRng,
    text: Vec<u32>,
    now: Time,
    tenants: Vec<TenantId>,
    /// Tokens asked for, and written so far.
    live: BTreeMap<SequenceId, (u64, u64)>,
    finished: u64,
    cancelled: u64,
}

impl Soak {
    fn register(&mut self) {
        let class = if self.random.random() { Class::Foreground } else { Class::Batch };
        let spec = TenantSpec {
            class,
            weight: NonZeroU16::new(self.random.random_range(1..4)).unwrap(),
            floor: self.engine.cost().bottom(),
            ceiling: RungIdx::new(self.random.random_range(0..2)),
            context_limit: Tokens::new(400),
            quota: None,
        };
        let name = format!("tenant-{}", self.tenants.len());
        self.tenants.push(self.engine.register(&name, spec));
    }

    fn ask(&mut self) {
        let Some(tenant) = self.tenants.get(self.random.random_range(0..self.tenants.len().max(1))).copied() else {
            return;
        };
        let (prompt, answer) = (self.random.random_range(1..200), self.random.random_range(1..80u64));
        let from = self.random.random_range(0..self.text.len() - prompt);
        let request = AnswerRequest {
            user: Some(1),
            prompt: self.text[from..from + prompt].to_vec(),
            pinned: Tokens::ZERO,
            answer: Tokens::new(answer),
            sampling: SamplingSettings { temperature: 0.7, seed: from as u64, ..SamplingSettings::default() },
            stop: Vec::new(),
            grammar: None,
            likelihoods: None,
            reuse: self.random.random(),
            ignore_end: true,
        };
        // A queue may be full; then it is refused, and that is all.
        if let Ok(id) = self.engine.submit(tenant, request, self.now) {
            self.live.insert(id, (answer, 0));
        }
    }

    /// Somebody comes or goes.
    fn stir(&mut self) {
        match self.random.random_range(0..100) {
            0..30 if (self.live.len() as u64) < MOST => self.ask(),
            30..33 if !self.live.is_empty() => {
                let at = self.random.random_range(0..self.live.len());
                let id = *self.live.keys().nth(at).unwrap();
                self.engine.cancel(id);
                self.live.remove(&id);
                self.cancelled += 1;
            }
            33 if self.tenants.len() < 5 => self.register(),
            34 if self.tenants.len() > 1 => {
                let at = self.random.random_range(0..self.tenants.len());
                self.engine.deregister(self.tenants.swap_remove(at));
                let engine = &self.engine;
                self.live.retain(|id, _| engine.has(*id));
            }
            _ => {}
        }
    }

    fn round(&mut self, budget: Bytes) {
        self.now = self.now + Span::from_millis(20);
        let mut told = Vec::new();
        self.engine.round(self.now, budget, &mut told);
        for (id, event) in told {
            match event {
                Event::Token { .. } => {
                    let (asked, written) = self.live.get_mut(&id.unwrap()).unwrap();
                    *written += 1;
                    assert!(*written <= *asked, "{id:?}: {written} of {asked}");
                }
                Event::Finished { tokens, .. } => {
                    let (asked, written) = self.live.remove(&id.unwrap()).unwrap();
                    assert_eq!((asked, tokens.get()), (written, written), "an answer is whole");
                    self.finished += 1;
                }
                Event::Sample { usage_bytes, budget_bytes, .. } => {
                    assert!(usage_bytes <= budget_bytes, "{usage_bytes} of {budget_bytes} at {:?}", self.now);
                }
                Event::Trouble { message, .. } => panic!("{message}"),
                _ => {}
            }
        }
    }
}

#[test]
fn nothing_grows_and_every_answer_is_whole() {
    let rounds: u64 = std::env::var("MOLT_SOAK_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4_000);
    let ladder = Arc::new(Ladder::open("pocket", Path::new("/nowhere")).unwrap());
    let text = ladder.tokenizer().encode(include_str!("../../texts/held-out/address-1909.txt")).unwrap();
    let config = Config { patience: Span::from_millis(200), residence: Span::from_millis(200), ..Config::default() };
    let ahead = AheadSettings { shadow: Shadow::On, ..AheadSettings::default() };
    let carry = Effort::Fixed(CarrySettings::FAITHFUL);
    let engine = Engine::new(ladder, config, EngineSettings { ahead, carry, ..EngineSettings::default() }).unwrap();
    let overhead = engine.overhead();
    // What all of them keep when nobody runs and everything is shed that may be: sinks, window, and less than a block; and
    // with each the ends of its pages.
    let dearest = engine.cost().rungs().map(|(_, cost)| cost.cache_per_token).max().unwrap();
    let kept = dearest.times(Tokens::new(MOST * (4 + 64 + 64))) + Bytes::mib(MOST / 2);
    let (least, most) = (overhead + kept, overhead + kept + Bytes::mib(40));
    let mut soak = Soak {
        engine,
        random: StdRng::seed_from_u64(5),
        text,
        now: Time::START,
        tenants: Vec::new(),
        live: BTreeMap::new(),
        finished: 0,
        cancelled: 0,
    };
    (0..3).for_each(|_| soak.register());
    let (mut budget, mut warm) = (most, None);
    for round in 0..rounds {
        if soak.random.random_range(0..25) == 0 {
            budget = Bytes::new(soak.random.random_range(least.get()..most.get()));
        }
        soak.stir();
        soak.round(budget);
        // By then everything that is made once has been made.
        if round == rounds / 4 {
            warm = Some(Held::now());
        }
    }
    for _ in 0..20_000 {
        if soak.live.is_empty() {
            break;
        }
        soak.round(most);
    }
    assert!(soak.live.is_empty(), "everybody finishes once there is memory: {:?}", soak.live);
    assert!(soak.finished > rounds / 200 && soak.cancelled > rounds / 200, "{} {}", soak.finished, soak.cancelled);
    soak.tenants.drain(..).collect::<Vec<_>>().into_iter().for_each(|tenant| soak.engine.deregister(tenant));
    (0..2).for_each(|_| soak.round(overhead));
    assert_eq!(soak.engine.usage(), overhead, "nobody is left");
    let (warm, end) = (warm.unwrap(), Held::now());
    assert!(end.anonymous_kib <= warm.anonymous_kib + 4_096, "{warm:?}, then {end:?}");
    assert!(end.files <= warm.files && end.threads <= warm.threads, "{warm:?}, then {end:?}");
    println!("{rounds} rounds: {} answers, {} cancelled; {warm:?}, then {end:?}", soak.finished, soak.cancelled);
}
