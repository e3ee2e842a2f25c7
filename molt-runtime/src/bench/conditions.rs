//! A spike in mid-answer, met in several ways: by a runtime that holds on, by one that always runs a smaller model, by one
//! that reads everything again on another model, and by Molt.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, LadderFile};
use molt_scheduler::LadderCost;
use molt_scheduler::units::{RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use super::results::{Claim, Section};
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
    /// Another rung, and everything is read again.
    SwitchAndReread,
    /// Another rung, and the cache comes along.
    Molt,
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hold(rung) => write!(f, "always {}", RungIdx::new(*rung)),
            Self::SwitchAndReread => f.write_str("switch and read again"),
            Self::Molt => f.write_str("Molt"),
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

/// Answers each prompt in each way. `done` hears of each answer.
pub fn measure(
    (claim, beside): (&LadderFile, Option<&Path>),
    models: &Path,
    (prompts, answer): (usize, Tokens),
    mut done: impl FnMut(&ConditionRow),
) -> Result<Section<ConditionRow>, DemoError> {
    let started = Instant::now();
    let trace = Trace::find(TRACE)?;
    let whole = Arc::new(Ladder::check(claim, beside, models)?);
    let cost = ladder_cost(&whole)?;
    let mut ways: Vec<(Condition, Arc<Ladder>, Regime)> = Vec::new();
    for (index, rung) in (0u8..).zip(&claim.rungs) {
        let alone = LadderFile { rungs: vec![rung.clone()], bridges: Vec::new(), ..claim.clone() };
        let ladder = Arc::new(Ladder::check(&alone, beside, models)?);
        ways.push((Condition::Hold(index), ladder, Regime::Held(cost.clone())));
    }
    let bare = LadderFile { bridges: Vec::new(), ..claim.clone() };
    ways.push((Condition::SwitchAndReread, Arc::new(Ladder::check(&bare, beside, models)?), Regime::Governed));
    ways.push((Condition::Molt, whole, Regime::Governed));
    let mut rows = Vec::new();
    for (prompt, text) in PROMPTS.iter().enumerate().take(prompts) {
        for (condition, ladder, regime) in &ways {
            let row = answer_once(*condition, ladder, regime.clone(), &trace, (prompt, text), answer)?;
            done(&row);
            rows.push(row);
        }
    }
    let claims = claims(&rows, &cost);
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

/// The pressure.
const TRACE: &str = "spike_mid_answer";

fn answer_once(
    condition: Condition,
    ladder: &Arc<Ladder>,
    regime: Regime,
    trace: &Trace,
    (prompt, text): (usize, &str),
    answer: Tokens,
) -> Result<ConditionRow, DemoError> {
    let engine = match condition {
        Condition::SwitchAndReread => EngineSettings { keepsakes: None, ..EngineSettings::default() },
        _ => EngineSettings::default(),
    };
    let sampling = SamplingSettings {
        temperature: 0.7,
        repetition_penalty: 1.1,
        seed: prompt as u64 + 1,
        ..SamplingSettings::default()
    };
    let held = matches!(regime, Regime::Held(_));
    let settings = DemoSettings { prompt: text.to_owned(), answer, sampling, engine, regime };
    let mut tokens_by_rung = BTreeMap::new();
    let summary = demo::run(ladder, trace, &settings, |event| {
        if let Event::Token { rung, .. } = event {
            // A rung of a ladder of one is the first of its own, and another of the whole.
            let rung = if let Condition::Hold(index) = condition { RungIdx::new(index) } else { *rung };
            *tokens_by_rung.entry(rung.to_string()).or_insert(0) += 1;
        }
        ControlFlow::Continue(())
    })?;
    let Some(summary) = summary else { unreachable!("nobody breaks the run off") };
    Ok(ConditionRow {
        condition,
        prompt,
        completed: !summary.killed,
        killed_simulated: held && summary.killed,
        tokens: summary.tokens,
        tokens_by_rung,
        switches: summary.switches,
        first_token_ms: summary.first_token_ms,
        stall_ms: summary.stall_ms_max,
        answer_tok_s: summary.tok_s,
        overshoot_bytes: summary.overshoot_bytes_max,
    })
}

fn claims(rows: &[ConditionRow], cost: &LadderCost) -> Vec<Claim> {
    let of = |condition: Condition| rows.iter().filter(move |row| row.condition == condition);
    let counted = |condition: Condition| (of(condition).filter(|row| row.completed).count(), of(condition).count());
    let (completed, all) = counted(Condition::Molt);
    let (held, held_all) = counted(Condition::Hold(0));
    let overshoot = of(Condition::Molt).map(|row| row.overshoot_bytes).max().unwrap_or(0);
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
