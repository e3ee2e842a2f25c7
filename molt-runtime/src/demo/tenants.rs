//! `molt demo --tenants`: several tenants with the real engine under a pressure trace, told as events; the table at the
//! end is made from the events alone.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, ModelError};
use molt_scheduler::units::{RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, LeverKind, SequenceId, TenantSpec};
use serde::Serialize;

use super::{DemoError, STUCK, difference, start};
use crate::engine::{AnswerRequest, Engine, EngineSettings};
use crate::event::Event;
use crate::replay::Tenants;
use crate::texts;
use crate::trace::{Frame, Trace};

/// What a round stands for where the trace does not say. Time is counted in rounds, so that a trace means the same on a
/// fast and on a slow machine.
const ROUND: Span = Span::from_millis(25);

/// What became of one tenant. Counts are of its events; waits are what its readers really waited.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TenantRow {
    /// Its class; none until it asked.
    pub class: Option<Class>,
    /// Requests that were taken.
    pub asked: u64,
    /// Answers that came to their own end.
    pub answered: u64,
    /// Tokens written for it.
    pub tokens: u64,
    /// Of them, by the rung that wrote them.
    pub tokens_by_rung: BTreeMap<RungIdx, u64>,
    /// Changes of rung.
    pub switches: u64,
    /// Times that it had to wait to be let in.
    pub defers: u64,
    /// Times that it went down a rung.
    pub demotes: u64,
    /// Times that it was parked.
    pub parks: u64,
    /// Tokens of old context that it lost.
    pub shed_tokens: u64,
    /// The longest that a request waited to be let in.
    pub admission_wait_ms_max: f64,
    /// The longest that a reader waited for a token.
    pub token_wait_ms_max: f64,
}

/// What a run adds up to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantsSummary {
    /// Every tenant, by name.
    pub tenants: BTreeMap<String, TenantRow>,
    /// Rounds of the engine.
    pub rounds: u64,
    /// Largest usage minus budget after the levers of a round; zero or less: the budget was always kept.
    pub overshoot_bytes_max: i64,
    /// Largest resident set that the system reported.
    pub rss_bytes_max: u64,
    /// Requests that were taken and neither answered to their end nor left by their client.
    pub killed: u64,
}

impl TenantsSummary {
    fn new(tenants: &Tenants) -> Self {
        let rows = tenants.tenants.iter().map(|tenant| (tenant.name.clone(), TenantRow::default()));
        Self { tenants: rows.collect(), rounds: 0, overshoot_bytes_max: i64::MIN, rss_bytes_max: 0, killed: 0 }
    }

    fn row(&mut self, name: &str, class: Class) -> &mut TenantRow {
        let row = self.tenants.entry(name.to_owned()).or_default();
        row.class = Some(class);
        row
    }

    /// Counts an event.
    fn count(&mut self, event: &Event) {
        match event {
            Event::Asked { tenant, class, .. } => {
                self.row(tenant, *class).asked += 1;
                self.killed += 1;
            }
            Event::Admitted { tenant, class, wait_ms, .. } => {
                let row = self.row(tenant, *class);
                row.admission_wait_ms_max = row.admission_wait_ms_max.max(*wait_ms);
            }
            Event::Token { tenant, class, wait_ms, rung, .. } => {
                let row = self.row(tenant, *class);
                // Text that was left over when an answer ended is no token of its own.
                let Some(wait_ms) = wait_ms else { return };
                row.tokens += 1;
                *row.tokens_by_rung.entry(*rung).or_default() += 1;
                row.token_wait_ms_max = row.token_wait_ms_max.max(*wait_ms);
            }
            Event::Switch(switch) => self.row(&switch.tenant, switch.class).switches += 1,
            Event::Lever { kind, tenant, class, tokens, .. } => {
                let row = self.row(tenant, *class);
                match kind {
                    LeverKind::Defer => row.defers += 1,
                    LeverKind::Demote => row.demotes += 1,
                    LeverKind::Park => row.parks += 1,
                    LeverKind::Shed => row.shed_tokens += tokens.get(),
                }
            }
            Event::Finished { tenant, class, .. } => {
                self.row(tenant, *class).answered += 1;
                self.killed = self.killed.saturating_sub(1);
            }
            Event::Cancelled { .. } => self.killed = self.killed.saturating_sub(1),
            Event::Sample { usage_bytes, budget_bytes, rss_bytes, .. } => {
                self.rounds += 1;
                self.overshoot_bytes_max = self.overshoot_bytes_max.max(difference(*usage_bytes, *budget_bytes));
                self.rss_bytes_max = self.rss_bytes_max.max(rss_bytes.get());
            }
            _ => {}
        }
    }
}

/// What such a demonstration runs.
#[derive(Debug, Clone)]
pub struct TenantsSettings {
    /// Who asks for what, and when.
    pub tenants: Tenants,
    /// How tokens are chosen.
    pub sampling: SamplingSettings,
    /// Settings of the engine.
    pub engine: EngineSettings,
}

/// Runs tenants under a trace until everybody is served and the trace is over; every round's events go to `tell`, which
/// may break the run off. Returns the summary, or `None` where it was broken off.
pub fn run(
    ladder: &Arc<Ladder>,
    trace: &Trace,
    settings: &TenantsSettings,
    mut tell: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<Option<TenantsSummary>, DemoError> {
    let (context, limit) = (settings.tenants.context(), Tokens::from(ladder.trained_context()));
    if context > limit {
        return Err(DemoError::TooLong { asked: context, limit });
    }
    let mut engine = Engine::new(ladder.clone(), trace.settings().over(Config::default()), settings.engine.clone())?;
    let (cost, overhead) = (engine.cost().clone(), engine.overhead());
    let mut cast = Cast::new(&mut engine, ladder, settings)?;
    let mut summary = TenantsSummary::new(&settings.tenants);
    if tell(&Event::Start(start(ladder, &engine, 0))).is_break() {
        return Ok(None);
    }
    let span = trace.per_token().unwrap_or(ROUND);
    let (mut events, mut now, mut last_run) = (Vec::new(), Time::START, Time::START);
    while !cast.is_done(&engine) || now < trace.last_step() {
        cast.arrive(&mut engine, now)?;
        let frame = Frame { ladder: &cost, overhead, context };
        engine.round(now, trace.budget_at(now, &frame), &mut events);
        let mut ran = engine.has_read();
        for (_, event) in events.drain(..) {
            ran |= matches!(event, Event::Token { .. });
            summary.count(&event);
            if tell(&event).is_break() {
                return Ok(None);
            }
        }
        now = now + span;
        if ran || now < trace.last_step() || cast.is_expected() {
            last_run = now;
        }
        if now.since(last_run) > STUCK {
            return Err(DemoError::Stuck { waited_ms: now.since(last_run).micros() / 1_000 });
        }
    }
    Ok(Some(summary))
}

/// Who asks for what.
struct Cast {
    /// Requests to come, the latest first.
    coming: Vec<(Time, molt_scheduler::TenantId, AnswerRequest)>,
    asked: Vec<SequenceId>,
}

impl Cast {
    fn new(engine: &mut Engine, ladder: &Ladder, settings: &TenantsSettings) -> Result<Self, DemoError> {
        let mut words = Words::new(ladder)?;
        let (bottom, trained) = (engine.cost().bottom(), Tokens::from(ladder.trained_context()));
        let mut coming = Vec::new();
        for tenant in &settings.tenants.tenants {
            let TenantSpec { floor, ceiling, context_limit, .. } = tenant.spec;
            let spec = TenantSpec {
                floor: floor.min(bottom),
                ceiling: ceiling.min(bottom),
                context_limit: context_limit.min(trained),
                ..tenant.spec.clone()
            };
            let id = engine.register(&tenant.name, spec);
            for request in &tenant.requests {
                let seed = settings.sampling.seed.wrapping_add(coming.len() as u64);
                let wanted = AnswerRequest {
                    user: None,
                    prompt: words.take(usize::from(request.prompt)),
                    pinned: request.pinned,
                    answer: request.answer,
                    sampling: SamplingSettings { seed, ..settings.sampling },
                    stop: Vec::new(),
                    grammar: None,
                    likelihoods: None,
                    reuse: true,
                    // An answer is as long as its profile says, so that runs can be compared.
                    ignore_end: true,
                };
                coming.push((request.at, id, wanted));
            }
        }
        coming.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
        Ok(Self { coming, asked: Vec::new() })
    }

    /// Submits what has come by now.
    fn arrive(&mut self, engine: &mut Engine, now: Time) -> Result<(), DemoError> {
        while let Some((_, tenant, request)) = self.coming.pop_if(|(at, ..)| *at <= now) {
            self.asked.push(engine.submit(tenant, request, now)?);
        }
        Ok(())
    }

    /// Whether somebody is still to ask.
    fn is_expected(&self) -> bool {
        !self.coming.is_empty()
    }

    fn is_done(&mut self, engine: &Engine) -> bool {
        self.asked.retain(|sequence| engine.has(*sequence));
        self.asked.is_empty() && self.coming.is_empty()
    }
}

/// Prompts out of the texts that ship, one piece after the other.
struct Words {
    tokens: Vec<u32>,
    at: usize,
}

impl Words {
    fn new(ladder: &Ladder) -> Result<Self, ModelError> {
        let texts = texts::held_out(None)?;
        let prose = texts.iter().filter(|text| text.name.starts_with("address-"));
        let text = prose.map(|text| text.text.as_str()).collect::<Vec<_>>().join("\n\n");
        Ok(Self { tokens: ladder.tokenizer().encode(&text)?, at: 0 })
    }

    /// The next so many tokens; the texts begin anew where they end.
    fn take(&mut self, count: usize) -> Vec<u32> {
        let taken: Vec<u32> = self.tokens.iter().cycle().skip(self.at).take(count).copied().collect();
        self.at = (self.at + count) % self.tokens.len().max(1);
        taken
    }
}
