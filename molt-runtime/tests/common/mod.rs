//! An engine on `pocket` with one conversation in it, and time as data.
#![allow(dead_code, reason = "each test file uses its part")]

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;

use molt_kv::carry::CarrySettings;
use molt_models::Ladder;
use molt_models::sampling::SamplingSettings;
use molt_runtime::engine::{AnswerRequest, Effort, Engine, EngineSettings};
use molt_runtime::event::Event;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, SequenceId, TenantId, TenantSpec};

/// Tokens of a conversation's prompt: more than a pass reads at once.
pub(crate) const PROMPT: usize = 400;

/// Somebody in the foreground who takes whatever rung there is.
pub(crate) fn spec(engine: &Engine) -> TenantSpec {
    TenantSpec {
        class: Class::Foreground,
        weight: NonZeroU16::MIN,
        floor: engine.cost().bottom(),
        ceiling: RungIdx::TOP,
        context_limit: Tokens::new(1_000),
        quota: None,
    }
}

/// Carries always map: `pocket` would read everything again, for that takes it no time.
pub(crate) fn over_the_bridge() -> EngineSettings {
    EngineSettings { carry: Effort::Fixed(CarrySettings::FAITHFUL), ..EngineSettings::default() }
}

pub(crate) struct Run {
    pub(crate) engine: Engine,
    pub(crate) ladder: Arc<Ladder>,
    tenant: TenantId,
    prompt: Vec<u32>,
    now: Time,
}

impl Run {
    pub(crate) fn new() -> Self {
        Self::with(over_the_bridge())
    }

    pub(crate) fn with(settings: EngineSettings) -> Self {
        let ladder = Arc::new(Ladder::open("pocket", Path::new("/nowhere")).unwrap());
        let text = include_str!("../../../texts/held-out/address-1909.txt");
        let mut prompt = ladder.tokenizer().encode(text).unwrap();
        prompt.truncate(PROMPT);
        // Up again as soon as there is room: time is not what is tested.
        let config =
            Config { patience: Span::from_millis(100), residence: Span::from_millis(100), ..Config::default() };
        let mut engine = Engine::new(ladder.clone(), config, settings).unwrap();
        let tenant = engine.register("chat", spec(&engine));
        Self { engine, ladder, tenant, prompt, now: Time::START }
    }

    pub(crate) fn ask(&mut self, answer: u64) -> SequenceId {
        let request = AnswerRequest {
            user: None,
            prompt: self.prompt.clone(),
            pinned: Tokens::ZERO,
            answer: Tokens::new(answer),
            sampling: SamplingSettings { temperature: 0.7, ..SamplingSettings::default() },
            stop: Vec::new(),
            grammar: None,
            likelihoods: None,
            reuse: true,
            ignore_end: true,
        };
        self.engine.submit(self.tenant, request, self.now).unwrap()
    }

    /// A round at that budget; what happened.
    pub(crate) fn round(&mut self, budget: Bytes) -> Vec<Event> {
        let mut told = Vec::new();
        assert!(self.guarded(budget, &mut told), "rounds fail again and again: {told:?}");
        told
    }

    /// The same; whether the engine can go on.
    pub(crate) fn guarded(&mut self, budget: Bytes, told: &mut Vec<Event>) -> bool {
        self.now = self.now + Span::from_millis(20);
        let mut all = Vec::new();
        let went_on = self.engine.guarded_round(self.now, budget, &mut all);
        told.extend(all.into_iter().map(|(_, event)| event));
        went_on
    }

    /// Rounds until something has happened; panics where it does not.
    pub(crate) fn until(&mut self, budget: Bytes, what: &str, happened: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut all = Vec::new();
        for _ in 0..2_000 {
            all.extend(self.round(budget));
            if all.iter().any(&happened) {
                return all;
            }
        }
        panic!("{what} does not happen at {budget}: {all:?}");
    }

    /// What a rung and a conversation on it take, with some room.
    pub(crate) fn holds(&self, rung: RungIdx) -> Bytes {
        let cost = self.engine.cost().get(rung).unwrap();
        self.engine.overhead()
            + cost.weights
            + cost.scratch
            + cost.cache_per_token.times(Tokens::new(900))
            + Bytes::new(512 << 10)
    }
}
