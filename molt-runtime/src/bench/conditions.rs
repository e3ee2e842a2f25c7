//! A spike in mid-answer, met in several ways: by a runtime that holds on, by one that always runs a smaller model, by one
//! that reads everything again on another model, by Molt, and by Molt without one of its means.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use molt_kv::decoder::StopFlag;
use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, LadderFile, Precision, RungEntry};
use molt_scheduler::LadderCost;
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use serde::{Deserialize, Serialize};

use super::judge::{Judge, Judged};
use super::results::{Claim, Section};
use super::seams::{self, SeamRow};
use super::stats::Spread;
use crate::demo::{self, DemoError, DemoSettings, Regime};
use crate::engine::{EngineSettings, ladder_cost};
use crate::event::Event;
use crate::trace::Trace;

/// A way to meet the spike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// Always this rung, whatever the budget; killed where it does not fit.
    Hold(u8),
    /// Always the biggest model as its file stores it, where the ladder's first rung is made from that.
    AsStored,
    /// Another rung, and everything is read again.
    SwitchAndReread,
    /// Another rung, and the cache comes along.
    Molt,
    /// The same without one of its means.
    Without(Mean),
}

/// What Molt does about a switch, and may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mean {
    /// Maps between models: without them everything is read again on the way down.
    Bridges,
    /// The cache left behind: without it the way up has nothing to begin with.
    Keepsakes,
    /// The bigger model reading along before the conversation goes up.
    ReadingAhead,
    /// Mapped tokens read natively between steps.
    Healing,
}

impl Mean {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Bridges, Self::Keepsakes, Self::ReadingAhead, Self::Healing];
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hold(rung) => write!(f, "always {}", RungIdx::new(*rung)),
            Self::AsStored => f.write_str("always the biggest, as stored"),
            Self::SwitchAndReread => f.write_str("switch and read again"),
            Self::Molt => f.write_str("Molt"),
            Self::Without(Mean::Bridges) => f.write_str("Molt without bridges"),
            Self::Without(Mean::Keepsakes) => f.write_str("Molt without keepsakes"),
            Self::Without(Mean::ReadingAhead) => f.write_str("Molt without reading ahead"),
            Self::Without(Mean::Healing) => f.write_str("Molt without healing"),
        }
    }
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConditionRow {
    /// How the spike was met.
    pub condition: Condition,
    /// Which prompt.
    pub prompt: usize,
    /// The seed of the answer's tokens.
    pub seed: u64,
    /// Whether the answer came to its end.
    pub completed: bool,
    /// Whether a system without memory to spare would have killed it: it used more than the budget and did not react. No
    /// process was really killed.
    pub killed_simulated: bool,
    /// Tokens of the answer.
    pub tokens: u64,
    /// Tokens that each rung wrote.
    pub tokens_by_rung: BTreeMap<String, u64>,
    /// Changes of rung.
    pub switches: u64,
    /// Time to the first token.
    pub first_token_ms: f64,
    /// The longest time between two tokens.
    pub stall_ms: f64,
    /// Tokens a second over the whole answer.
    pub answer_tok_s: f64,
    /// Largest usage minus budget after the levers of a round; zero or less: the budget was kept.
    pub overshoot_bytes: i64,
    /// The most that was in use at any moment of a round, minus the more of the budget and what was in use when the round
    /// began; zero or less: a transition never took more than there was.
    pub transition_overshoot_bytes: i64,
    /// What was written.
    pub answer: String,
    /// How it reads to the biggest rung.
    pub judged: Option<Judged>,
    /// Its changes of rung, those of Molt compared with a native read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub seams: Vec<SeamRow>,
}

/// What is asked. Each suits a chat model and a model that only continues text.
const PROMPTS: [&str; 8] = [
    "Explain what an operating system does when memory runs low.",
    "Describe how bread is made, from the grain to the loaf.",
    "Write a function that reverses a linked list, and say how it works.",
    "Give the history of the lighthouse in a few paragraphs.",
    "Explain to a child why the sky is blue.",
    "Compare a bicycle with a horse as a means of transport.",
    "Describe the duties of a ship's captain in a storm.",
    "Explain how a hash table finds a key.",
];

/// A way to answer, ready to be used.
struct Way {
    condition: Condition,
    ladder: Arc<Ladder>,
    regime: Regime,
    engine: EngineSettings,
}

/// The ladder of a claim, and what it costs.
struct Ground<'a> {
    claim: &'a LadderFile,
    beside: Option<&'a Path>,
    models: &'a Path,
    whole: Arc<Ladder>,
    cost: LadderCost,
}

impl<'a> Ground<'a> {
    fn new((claim, beside): (&'a LadderFile, Option<&'a Path>), models: &'a Path) -> Result<Self, DemoError> {
        let whole = Arc::new(Ladder::check(claim, beside, models)?);
        let cost = ladder_cost(&whole)?;
        Ok(Self { claim, beside, models, whole, cost })
    }

    fn ladder(&self, rungs: &[RungEntry], bridges: bool) -> Result<Arc<Ladder>, DemoError> {
        let bridges = if bridges { self.claim.bridges.clone() } else { Vec::new() };
        let claim = LadderFile { rungs: rungs.to_vec(), bridges, ..self.claim.clone() };
        Ok(Arc::new(Ladder::check(&claim, self.beside, self.models)?))
    }

    fn hold(&self, condition: Condition, rung: RungEntry) -> Result<Way, DemoError> {
        let (ladder, regime) = (self.ladder(&[rung], false)?, Regime::Held(self.cost.clone()));
        Ok(Way { condition, ladder, regime, engine: EngineSettings::default() })
    }

    fn molt(&self) -> Way {
        let (ladder, engine) = (self.whole.clone(), EngineSettings::default());
        Way { condition: Condition::Molt, ladder, regime: Regime::Governed, engine }
    }

    /// Molt beside those who do something else.
    fn against_others(&self) -> Result<Vec<Way>, DemoError> {
        let mut ways = Vec::new();
        for (index, rung) in (0u8..).zip(&self.claim.rungs) {
            ways.push(self.hold(Condition::Hold(index), rung.clone())?);
        }
        let first = self.claim.rungs.first().filter(|rung| rung.precision != Precision::AS_STORED);
        if let Some(first) = first {
            let rung = RungEntry { precision: Precision::AS_STORED, ..first.clone() };
            ways.push(self.hold(Condition::AsStored, rung)?);
        }
        ways.push(Way {
            condition: Condition::SwitchAndReread,
            ladder: self.ladder(&self.claim.rungs, false)?,
            engine: EngineSettings { keepsakes: None, ..EngineSettings::default() },
            ..self.molt()
        });
        ways.push(self.molt());
        Ok(ways)
    }

    /// Molt beside itself without one of its means.
    fn without_each(&self) -> Result<Vec<Way>, DemoError> {
        let mut ways = vec![self.molt()];
        for mean in Mean::ALL {
            let mut way = Way { condition: Condition::Without(mean), ..self.molt() };
            match mean {
                Mean::Bridges => way.ladder = self.ladder(&self.claim.rungs, false)?,
                Mean::Keepsakes => way.engine.keepsakes = None,
                Mean::ReadingAhead => way.engine.ahead.catch_up = Span::ZERO,
                Mean::Healing => way.engine.heal.every = 0,
            }
            ways.push(way);
        }
        Ok(ways)
    }

    /// Every prompt in every way, in turn, and then what the biggest rung thinks of what was written.
    fn answer(
        &self,
        ways: &[Way],
        (prompts, answer): (usize, Tokens),
        mut done: impl FnMut(&ConditionRow),
    ) -> Result<Vec<ConditionRow>, DemoError> {
        let trace = Trace::find(TRACE)?;
        let mut rows = Vec::new();
        for (prompt, text) in PROMPTS.iter().enumerate().take(prompts) {
            for way in ways {
                let row = answer_once(way, &trace, (prompt, text), answer)?;
                done(&row);
                rows.push(row);
            }
        }
        let mut prompts: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for row in &rows {
            prompts.insert(row.prompt, demo::prompt_tokens(&self.whole, PROMPTS[row.prompt])?);
        }
        let of_molt = rows.iter_mut().filter(|row| row.condition == Condition::Molt);
        seams::compare(
            &self.whole,
            of_molt.map(|row| (&prompts[&row.prompt][..], row.answer.as_str(), &mut row.seams[..])),
        )?;
        let judge = Judge::load(&self.whole)?;
        for row in &mut rows {
            row.judged = judge.judge(&prompts[&row.prompt], &row.answer)?;
        }
        Ok(rows)
    }
}

/// In how many ways a prompt is answered, so that one can foretell how long that takes.
pub fn ways(claim: &LadderFile) -> usize {
    let made = claim.rungs.first().is_some_and(|rung| rung.precision != Precision::AS_STORED);
    claim.rungs.len() + usize::from(made) + 2
}

/// Answers each prompt in each way. `done` hears of each answer.
pub fn measure(
    ladder: (&LadderFile, Option<&Path>),
    models: &Path,
    size: (usize, Tokens),
    done: impl FnMut(&ConditionRow),
) -> Result<Section<ConditionRow>, DemoError> {
    let started = Instant::now();
    let ground = Ground::new(ladder, models)?;
    let rows = ground.answer(&ground.against_others()?, size, done)?;
    let claims = claims(&rows, &ground.cost);
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

/// Answers each prompt with each of Molt's means taken away.
pub fn ablate(
    ladder: (&LadderFile, Option<&Path>),
    models: &Path,
    size: (usize, Tokens),
    done: impl FnMut(&ConditionRow),
) -> Result<Vec<ConditionRow>, DemoError> {
    let ground = Ground::new(ladder, models)?;
    ground.answer(&ground.without_each()?, size, done)
}

/// The pressure.
const TRACE: &str = "spike_mid_answer";

fn answer_once(
    way: &Way,
    trace: &Trace,
    (prompt, text): (usize, &str),
    answer: Tokens,
) -> Result<ConditionRow, DemoError> {
    let seed = prompt as u64 + 1;
    let sampling = SamplingSettings { temperature: 0.7, repetition_penalty: 1.1, seed, ..SamplingSettings::default() };
    let held = matches!(way.regime, Regime::Held(_));
    let (engine, regime) = (way.engine.clone(), way.regime.clone());
    let settings = DemoSettings { prompt: text.to_owned(), answer, sampling, engine, regime };
    let (mut tokens_by_rung, mut written, mut seams) = (BTreeMap::new(), String::new(), Vec::new());
    // Whatever the run before has given back: no way begins with waiting for the disk.
    way.ladder.rung(RungIdx::TOP).into_iter().for_each(|rung| rung.fetch(Bytes::new(u64::MAX), &StopFlag::new()));
    let summary = demo::run(&way.ladder, trace, &settings, |event| {
        if let Event::Token { rung, text, .. } = event {
            // A rung of a ladder of one is the first of its own, and another of the whole.
            let rung = match way.condition {
                Condition::Hold(index) => RungIdx::new(index).to_string(),
                Condition::AsStored => "as stored".to_owned(),
                _ => rung.to_string(),
            };
            *tokens_by_rung.entry(rung).or_insert(0) += 1;
            written.push_str(text);
        }
        if let Event::Switch(switch) = event {
            seams.push(SeamRow::new((switch.from, switch.to), switch.route, written.len()));
        }
        ControlFlow::Continue(())
    })?;
    let Some(summary) = summary else { unreachable!("nobody breaks the run off") };
    Ok(ConditionRow {
        condition: way.condition,
        prompt,
        seed,
        completed: !summary.killed,
        killed_simulated: held && summary.killed,
        tokens: summary.tokens,
        tokens_by_rung,
        switches: summary.switches,
        first_token_ms: summary.first_token_ms,
        stall_ms: summary.stall_ms_max,
        answer_tok_s: summary.tok_s,
        overshoot_bytes: summary.overshoot_bytes_max,
        transition_overshoot_bytes: summary.transition_overshoot_bytes_max,
        answer: written,
        judged: None,
        seams,
    })
}

fn claims(rows: &[ConditionRow], cost: &LadderCost) -> Vec<Claim> {
    let of = |condition: Condition| rows.iter().filter(move |row| row.condition == condition);
    let counted = |condition: Condition| (of(condition).filter(|row| row.completed).count(), of(condition).count());
    let (completed, all) = counted(Condition::Molt);
    let (held, held_all) = counted(Condition::Hold(0));
    let overshoot = of(Condition::Molt).map(|row| row.overshoot_bytes).max().unwrap_or(0);
    let through = of(Condition::Molt).map(|row| row.transition_overshoot_bytes).max().unwrap_or(0);
    let stall = |condition| Spread::of(&of(condition).map(|row| row.stall_ms).collect::<Vec<_>>());
    let mut claims = vec![
        Claim::new("Molt completes every answer", completed == all, format!("{completed} of {all}")),
        Claim::new(
            "holding the biggest rung is (by simulation) killed in every run",
            held == 0,
            format!("{} of {held_all} killed", held_all - held),
        ),
        Claim::new(
            "after its levers Molt is never over the budget",
            overshoot <= 0,
            format!("{:.1} MiB at most", overshoot as f64 / 1_048_576.0),
        ),
        Claim::new(
            "on its way to another rung Molt never takes more than it had",
            through <= 0,
            format!("{:.1} MiB at most", through as f64 / 1_048_576.0),
        ),
    ];
    if let (Some(molt), Some(reread), true) =
        (stall(Condition::Molt), stall(Condition::SwitchAndReread), cost.rungs().count() > 1)
    {
        claims.push(Claim::new(
            "the longest stall with Molt is shorter than when everything is read again",
            molt.median < reread.median,
            format!("{:.0} ms against {:.0} ms (medians)", molt.median, reread.median),
        ));
    }
    claims
}
