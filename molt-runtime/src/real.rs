//! `molt demo --real`: conversations, one after another, beside a program that takes memory which the two of them do not have to spare,
//! inside a control group with a limit. Nothing is simulated: the budget is what the group has left.

mod group;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use molt_models::Ladder;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, TenantSpec};
use serde::Serialize;

pub use group::{Group, GroupError};

use crate::budget::{CgroupBudget, Strictest, Watched};
use crate::demo::{DemoError, DemoSettings, Tally, prompt_tokens, start};
use crate::engine::{AnswerRequest, Engine};
use crate::event::{Event, Summary};
use crate::hog::Schedule;

/// What runs beside the conversation.
#[derive(Debug, Clone)]
pub struct RealSettings {
    /// How the other program wants memory.
    pub schedule: Schedule,
    /// `molt`, which is also the other program.
    pub program: PathBuf,
}

/// Why there was no real demonstration.
#[derive(Debug, thiserror::Error)]
pub enum RealError {
    /// No limited group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The conversation.
    #[error(transparent)]
    Demo(#[from] DemoError),
    /// The other program or a thread could not be started.
    #[error("cannot start {what}")]
    Start {
        /// What.
        what: String,
        /// The reason.
        source: std::io::Error,
    },
}

/// What really happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RealSummary {
    /// The group's limit.
    pub limit_bytes: Bytes,
    /// What the other program wanted at the most.
    pub hog_bytes: Bytes,
    /// What the biggest rung and the conversation take.
    pub biggest_bytes: Bytes,
    /// Answers that were completed, one after another, until the other program ended.
    pub answers: u64,
    /// Processes that the kernel killed in the group; none where it does not count them.
    pub oom_kills: Option<u64>,
    /// How the other program ended.
    pub hog: String,
    /// The conversation.
    pub summary: Summary,
}

/// The part of the limit that is nobody's: what the other program can take before the next look at the group.
const RESERVE: u64 = 8;
/// Pause after a round in which nothing ran.
const IDLE: Duration = Duration::from_millis(20);

/// Memory of the group: the biggest rung fits while it is alone, and does not beside the other program.
#[derive(Debug, Clone, Copy)]
struct Shares {
    limit: Bytes,
    hog: Bytes,
    biggest: Bytes,
}

impl Shares {
    fn of(engine: &Engine, context: Tokens) -> Self {
        let takes = |rung| engine.overhead() + engine.cost().alone(rung, context).unwrap_or(Bytes::ZERO);
        let (biggest, smallest) = (takes(RungIdx::TOP), takes(engine.cost().bottom()));
        // Free of the reserve there are seven eighths.
        let room = |bytes: Bytes| Bytes::new(bytes.get() / (RESERVE - 1) * RESERVE) + Bytes::mib(16);
        let limit = room(biggest);
        Self { limit, hog: limit - room(smallest), biggest }
    }
}

/// Runs one conversation after another beside the other program, until that has ended.
pub fn run(
    ladder: &Arc<Ladder>,
    demo: &DemoSettings,
    real: &RealSettings,
    mut tell: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<Option<RealSummary>, RealError> {
    let prompt = prompt_tokens(ladder, &demo.prompt).map_err(DemoError::from)?;
    let context = Tokens::from(prompt.len()) + demo.answer;
    let trained = Tokens::from(ladder.trained_context());
    if context > trained {
        return Err(DemoError::TooLong { asked: context, limit: trained }.into());
    }
    let config =
        Config { patience: Span::from_millis(1_000), residence: Span::from_millis(1_000), ..Config::default() };
    let mut engine = Engine::new(ladder.clone(), config, demo.engine.clone()).map_err(DemoError::from)?;
    let shares = Shares::of(&engine, context);
    let group = Group::enter(shares.limit)?;
    let source = CgroupBudget::new(Path::new("/proc"), Path::new("/sys/fs/cgroup")).ok_or(GroupError::NoController)?;
    let source = source.reserving(Bytes::new(shares.limit.get() / RESERVE));
    let alarm = engine.alarm().clone();
    let watched = Watched::start(Strictest::new(Vec::new(), vec![Box::new(source)]), alarm)
        .map_err(|source| RealError::Start { what: "the watcher".to_owned(), source })?;
    let spec = TenantSpec {
        class: Class::Foreground,
        weight: std::num::NonZeroU16::MIN,
        floor: engine.cost().bottom(),
        ceiling: RungIdx::TOP,
        context_limit: context,
        quota: None,
    };
    let tenant = engine.register("chat", spec);
    if tell(&Event::Start(start(ladder, &engine, prompt.len()))).is_break() {
        return Ok(None);
    }
    let mut request = AnswerRequest {
        user: None,
        pinned: Tokens::ZERO,
        answer: demo.answer,
        sampling: demo.sampling,
        stop: Vec::new(),
        grammar: None,
        likelihoods: None,
        reuse: true,
        ignore_end: true,
        prompt,
    };
    let mut sequence = engine.submit(tenant, request.clone(), Time::START).map_err(DemoError::from)?;
    let mut answers = 1;
    let mut hog = Hog::start(real, shares.hog)?;
    let (mut tally, started) = (Tally::new(), Instant::now());
    let mut events = Vec::new();
    loop {
        let now = Time::from_micros(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX));
        // Small models are done before the other program has begun: they answer again, with other words.
        if !engine.has(sequence) {
            if hog.has_ended() {
                break;
            }
            request.sampling.seed = request.sampling.seed.wrapping_add(1);
            sequence = engine.submit(tenant, request.clone(), now).map_err(DemoError::from)?;
            answers += 1;
        }
        engine.alarm().forget();
        let budget = watched.budget();
        engine.round(now, budget, &mut events);
        let before = tally.tokens();
        for (_, event) in events.drain(..) {
            tally.count(&event, budget);
            if tell(&event).is_break() {
                return Ok(None);
            }
        }
        if tally.tokens() == before && !engine.has_read() {
            std::thread::sleep(IDLE);
        }
    }
    let summary = tally.summary();
    let _last = tell(&Event::Summary(summary.clone()));
    let hog = hog.end();
    Ok(Some(RealSummary {
        limit_bytes: shares.limit,
        hog_bytes: shares.hog,
        biggest_bytes: shares.biggest,
        answers,
        oom_kills: group.oom_kills(),
        hog,
        summary,
    }))
}

/// The other program. It is ended with this value.
struct Hog(Child);

impl Hog {
    fn start(real: &RealSettings, bytes: Bytes) -> Result<Self, RealError> {
        let name = clap::ValueEnum::to_possible_value(&real.schedule);
        let child = Command::new(&real.program)
            .args(["hog", name.as_ref().map_or("", |name| name.get_name()), "--mib"])
            .arg((bytes.get() >> 20).to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        child.map(Self).map_err(|source| RealError::Start { what: format!("{} hog", real.program.display()), source })
    }

    fn has_ended(&mut self) -> bool {
        // One that cannot be waited for is not worth waiting for.
        !matches!(self.0.try_wait(), Ok(None))
    }

    /// How it ended, or that it had to be ended because the answer was complete before its schedule.
    fn end(&mut self) -> String {
        match self.0.try_wait() {
            Ok(Some(status)) => describe(status),
            Ok(None) => "was still running".to_owned(),
            Err(error) => format!("cannot be waited for: {error}"),
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match status.success() {
        true => "came to its own end".to_owned(),
        false => format!("ended by itself: {status}"),
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
