//! `molt demo`: one conversation under a pressure trace, told as events.

pub mod tenants;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use molt_kv::carry::CarryError;
use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, Message, ModelError, kernels};
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, LadderCost, Refusal, TenantSpec};

use crate::engine::{AnswerRequest, Engine, EngineError, EngineSettings};
use crate::event::{Event, RungInfo, Start, Summary};
use crate::memory::{resident_files, resident_set};
use crate::trace::{Frame, Trace, TraceError};

/// What a demonstration runs.
#[derive(Debug, Clone)]
pub struct DemoSettings {
    /// What the user says.
    pub prompt: String,
    /// Tokens of the answer.
    pub answer: Tokens,
    /// How tokens are chosen.
    pub sampling: SamplingSettings,
    /// Settings of the engine.
    pub engine: EngineSettings,
    /// What the budget does.
    pub regime: Regime,
}

/// What the trace's budget does to a run.
#[derive(Debug, Clone, Default)]
pub enum Regime {
    /// The engine follows it.
    #[default]
    Governed,
    /// The engine never hears of it, as a runtime that does not react; the run is over, as if it had been killed, after the
    /// first round that uses more. The trace's amounts are those of this ladder.
    Held(LadderCost),
}

impl Regime {
    /// What the engine hears of the budget.
    fn heard(&self, budget: Bytes) -> Bytes {
        match self {
            Self::Governed => budget,
            Self::Held(_) => Bytes::new(u64::MAX / 4),
        }
    }
}

/// Why a demonstration could not run.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The models.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The request.
    #[error("the request was refused")]
    Refused(#[from] Refusal),
    /// A carry that was to be compared.
    #[error(transparent)]
    Carry(#[from] CarryError),
    /// A seam between rungs that this ladder does not have.
    #[error("the ladder has no way from {from} to {to}")]
    NoWay {
        /// The rung before the seam.
        from: RungIdx,
        /// The rung after it.
        to: RungIdx,
    },
    /// The models' context is too short.
    #[error("prompt and answer are {asked}, the ladder's models were trained for {limit}")]
    TooLong {
        /// Tokens asked for.
        asked: Tokens,
        /// Tokens that the models can hold.
        limit: Tokens,
    },
    /// The answer cannot go on under this trace.
    #[error("nothing has run for {waited_ms} ms of the trace's last budget: it holds no rung of this ladder")]
    Stuck {
        /// Time without a step, as the trace counts it.
        waited_ms: u64,
    },
}

/// Time of the trace after its last step in which nothing runs, before a run is called stuck: many times what the
/// scheduler waits before it brings a parked sequence back.
const STUCK: Span = Span::from_millis(120_000);
/// Pause after a round in which nothing ran, where time is the clock's.
const IDLE: std::time::Duration = std::time::Duration::from_millis(20);

/// Runs one conversation under a trace; every round's events go to `tell`, which may break the run off. Returns the
/// summary, which is also the last event, or `None` where it was broken off.
pub fn run(
    ladder: &Arc<Ladder>,
    trace: &Trace,
    settings: &DemoSettings,
    mut tell: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<Option<Summary>, DemoError> {
    let prompt = prompt_tokens(ladder, &settings.prompt)?;
    let context = Tokens::from(prompt.len()) + settings.answer;
    let limit = Tokens::from(ladder.trained_context());
    if context > limit {
        return Err(DemoError::TooLong { asked: context, limit });
    }
    let config = trace.settings().over(Config::default());
    let mut engine = Engine::new(ladder.clone(), config, settings.engine.clone())?;
    let cost = engine.cost().clone();
    let spec = TenantSpec {
        class: Class::Foreground,
        weight: std::num::NonZeroU16::MIN,
        floor: cost.bottom(),
        ceiling: RungIdx::TOP,
        context_limit: context,
        quota: None,
    };
    let tenant = engine.register("chat", spec);
    if tell(&Event::Start(start(ladder, &engine, prompt.len()))).is_break() {
        return Ok(None);
    }
    let request = AnswerRequest {
        user: None,
        pinned: Tokens::ZERO,
        answer: settings.answer,
        sampling: settings.sampling,
        stop: Vec::new(),
        grammar: None,
        likelihoods: None,
        reuse: true,
        ignore_end: true,
        prompt,
    };
    let sequence = engine.submit(tenant, request, Time::START)?;
    let mut tally = Tally::new();
    let (mut events, mut now, mut last_run) = (Vec::new(), Time::START, Time::START);
    let started = Instant::now();
    while engine.has(sequence) {
        let reckoned = match &settings.regime {
            Regime::Governed => &cost,
            Regime::Held(ladder) => ladder,
        };
        let budget = trace.budget_at(now, &Frame { ladder: reckoned, overhead: engine.overhead(), context });
        let (books, used) = (engine.books(), engine.usage());
        books.take_peak();
        engine.round(now, settings.regime.heard(budget), &mut events);
        tally.passed(books.take_peak(), used.max(budget));
        let before = tally.tokens;
        for (_, event) in events.drain(..) {
            tally.count(&event, budget);
            if tell(&event).is_break() {
                return Ok(None);
            }
        }
        if matches!(settings.regime, Regime::Held(_)) && engine.usage() > budget {
            break;
        }
        let ran = tally.tokens > before || engine.has_read();
        now = match trace.per_token() {
            // Reading the prompt takes no time of the trace; where nothing runs, time passes all the same.
            Some(_) if ran && tally.tokens == before => now,
            Some(span) => now + span,
            None => {
                if !ran {
                    std::thread::sleep(IDLE);
                }
                Time::from_micros(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX))
            }
        };
        if ran || now < trace.last_step() {
            last_run = now;
        }
        if now.since(last_run) > STUCK {
            return Err(DemoError::Stuck { waited_ms: now.since(last_run).micros() / 1_000 });
        }
    }
    let summary = tally.summary();
    // The last word; whether it is heard changes nothing.
    let _last = tell(&Event::Summary(summary.clone()));
    Ok(Some(summary))
}

/// The prompt as the models' own template writes it.
pub fn prompt_tokens(ladder: &Ladder, prompt: &str) -> Result<Vec<u32>, ModelError> {
    let tokenizer = ladder.tokenizer();
    match ladder.template() {
        Some(template) => template.prompt(&[Message::new("user", prompt)], &[], tokenizer)?.encode(tokenizer),
        None => tokenizer.encode(prompt),
    }
}

/// How a run of that ladder begins.
pub fn start(ladder: &Ladder, engine: &Engine, prompt: usize) -> Start {
    let rungs = ladder.rungs().iter().zip(engine.cost().rungs());
    Start {
        ladder: ladder.name().to_owned(),
        rungs: rungs
            .map(|(rung, (index, cost))| RungInfo {
                rung: index,
                file: rung.file().path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
                precision: rung.precision().to_string(),
                weights_bytes: cost.weights,
            })
            .collect(),
        prompt_tokens: Tokens::from(prompt),
        overhead_bytes: engine.overhead(),
        overhead_file_bytes: resident_files(),
        isa: kernels::isa_name(),
    }
}

/// What a run adds up to.
#[derive(Debug)]
pub(crate) struct Tally {
    started: Instant,
    last_token: Option<Instant>,
    tokens: u64,
    rungs: Vec<RungIdx>,
    switches: u64,
    switch_ms_max: f64,
    stall_ms_max: f64,
    first_token_ms: f64,
    overshoot_bytes_max: i64,
    transition_overshoot_bytes_max: i64,
    rss_bytes_max: u64,
    rss_minus_usage_bytes_max: i64,
    /// Whether the answer came to its own end.
    finished: bool,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            last_token: None,
            tokens: 0,
            rungs: Vec::new(),
            switches: 0,
            switch_ms_max: 0.0,
            stall_ms_max: 0.0,
            first_token_ms: 0.0,
            overshoot_bytes_max: i64::MIN,
            transition_overshoot_bytes_max: i64::MIN,
            rss_bytes_max: 0,
            rss_minus_usage_bytes_max: i64::MIN,
            finished: false,
        }
    }

    pub(crate) fn count(&mut self, event: &Event, budget: Bytes) {
        match event {
            Event::Token { rung, .. } => {
                let now = Instant::now();
                match self.last_token.replace(now) {
                    Some(last) => self.stall_ms_max = self.stall_ms_max.max((now - last).as_secs_f64() * 1e3),
                    None => self.first_token_ms = (now - self.started).as_secs_f64() * 1e3,
                }
                self.tokens += 1;
                if !self.rungs.contains(rung) {
                    self.rungs.push(*rung);
                }
            }
            Event::Switch(switch) => {
                self.switches += 1;
                self.switch_ms_max = self.switch_ms_max.max(switch.switch_ms);
            }
            Event::Sample { usage_bytes, rss_bytes, .. } => {
                self.overshoot_bytes_max = self.overshoot_bytes_max.max(difference(*usage_bytes, budget));
                self.rss_bytes_max = self.rss_bytes_max.max(rss_bytes.get());
                self.rss_minus_usage_bytes_max =
                    self.rss_minus_usage_bytes_max.max(difference(*rss_bytes, *usage_bytes));
            }
            Event::Finished { .. } => self.finished = true,
            _ => {}
        }
    }

    /// The most that was in use in a round, and what it might use.
    fn passed(&mut self, peak: Bytes, allowed: Bytes) {
        self.transition_overshoot_bytes_max = self.transition_overshoot_bytes_max.max(difference(peak, allowed));
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn summary(self) -> Summary {
        let seconds = self.started.elapsed().as_secs_f64();
        Summary {
            tokens: self.tokens,
            rungs: self.rungs,
            switches: self.switches,
            switch_ms_max: self.switch_ms_max,
            stall_ms_max: self.stall_ms_max,
            first_token_ms: self.first_token_ms,
            overshoot_bytes_max: self.overshoot_bytes_max,
            transition_overshoot_bytes_max: self.transition_overshoot_bytes_max,
            rss_bytes_max: self.rss_bytes_max.max(resident_set().get()),
            rss_minus_usage_bytes_max: self.rss_minus_usage_bytes_max,
            tok_s: self.tokens as f64 / seconds.max(1e-9),
            killed: !self.finished,
        }
    }
}

fn difference(a: Bytes, b: Bytes) -> i64 {
    let wide = |bytes: Bytes| i64::try_from(bytes.get()).unwrap_or(i64::MAX);
    wide(a).saturating_sub(wide(b))
}
