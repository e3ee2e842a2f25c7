//! Three tenants under one budget: the real scheduler over its simulator, so that hours of pressure take no time.

use std::collections::BTreeMap;
use std::time::Instant;

use molt_scheduler::Policy;
use molt_scheduler::units::{Span, Time};
use serde::{Deserialize, Serialize};

use super::results::{Claim, Section};
use crate::replay::{
    Costs, CostsError, Peer, Plot, PlotError, ReplayError, Round, Setup, Tenants, TenantsError, run, run_peer,
};
use crate::trace::{Trace, TraceError};

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TenantsRun {
    /// Who bears the levers.
    pub policy: String,
    /// The pressure.
    pub trace: String,
    /// Largest usage minus budget after a round; zero or less: the budget was kept.
    pub overshoot_bytes: i64,
    /// Uses of the levers.
    pub defers: u64,
    /// Downward changes of rung.
    pub demotes: u64,
    /// Stops.
    pub parks: u64,
    /// Times that old context went.
    pub sheds: u64,
    /// Tenant by tenant.
    pub tenants: Vec<TenantRow>,
    /// Budget, usage, levers and rungs over time.
    pub picture_svg: String,
}

/// What became of a tenant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TenantRow {
    /// Who.
    pub tenant: String,
    /// Requests.
    pub requests: u64,
    /// Answers that came to their end.
    pub finished: u64,
    /// Tokens, prompts included.
    pub tokens: u64,
    /// The mean time before a request was let in.
    pub wait_mean_ms: f64,
    /// The longest time that a sequence stood still.
    pub parked_max_ms: f64,
}

/// What a policy comes to under the same trace, beside those of runtimes without elastic models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyRow {
    /// The policy.
    pub policy: String,
    /// Requests.
    pub requests: u64,
    /// Of them, answered to the end.
    pub finished: u64,
    /// Times that the process was killed (reckoned, like everything here).
    pub kills: u64,
    /// Requests that lost everything and began again.
    pub restarts: u64,
    /// Tokens read or written for nothing.
    pub wasted_tokens: u64,
    /// Largest usage minus budget.
    pub overshoot_bytes: i64,
    /// From asking to the end of an answer, on average.
    pub answer_mean_ms: f64,
    /// Until the last answer.
    pub lasted_ms: f64,
}

/// When requests came and when their answers ended, of a replay's rounds.
#[derive(Default)]
struct Answers {
    asked: BTreeMap<String, Time>,
    waited: Vec<Span>,
    last: Time,
}

impl Answers {
    fn see(&mut self, round: &Round) {
        for asked in &round.asked {
            self.asked.insert(asked.sequence.clone(), round.at_us);
        }
        for ended in &round.ended {
            self.waited.extend(self.asked.get(ended).map(|asked| round.at_us.since(*asked)));
            self.last = round.at_us;
        }
    }

    fn mean_ms(&self) -> f64 {
        let all: u64 = self.waited.iter().map(|span| span.micros()).sum();
        all as f64 / 1e3 / self.waited.len().max(1) as f64
    }
}

/// Molt and two policies of others on the same trace, tenants and costs.
pub fn compare() -> Result<Section<PolicyRow>, TenantsBenchError> {
    let started = Instant::now();
    let (trace, tenants, costs) = (Trace::find(TRACE)?, Tenants::find(TENANTS)?, Costs::find(COSTS)?);
    let policy = Policy::LeverFirst;
    let setup = Setup { trace: &trace, tenants: &tenants, costs: &costs, policy };
    let mut answers = Answers::default();
    let summary = run(&setup, |round| answers.see(round))?;
    let mut rows = vec![PolicyRow {
        policy: "Molt".to_owned(),
        requests: summary.tenants.iter().map(|tenant| tenant.requests).sum(),
        finished: summary.tenants.iter().map(|tenant| tenant.finished).sum(),
        kills: 0,
        restarts: 0,
        wasted_tokens: 0,
        overshoot_bytes: summary.overshoot_bytes_max,
        answer_mean_ms: answers.mean_ms(),
        lasted_ms: answers.last.micros() as f64 / 1e3,
    }];
    for (peer, name) in [
        (Peer::UnloadWhenIdle, "hold the big model, unload when idle"),
        (Peer::EvictLeastRecent, "hold the big model, evict and begin again"),
    ] {
        let found = run_peer(&setup, peer);
        rows.push(PolicyRow {
            policy: name.to_owned(),
            requests: found.requests,
            finished: found.finished,
            kills: found.kills,
            restarts: found.restarts,
            wasted_tokens: found.wasted_tokens,
            overshoot_bytes: found.overshoot_bytes_max,
            answer_mean_ms: found.answer_mean_ms,
            lasted_ms: found.lasted_ms,
        });
    }
    let [ours, others @ ..] = &rows[..] else { unreachable!("the first row is ours") };
    let best = others.iter().map(|row| row.answer_mean_ms).fold(f64::INFINITY, f64::min);
    let claims = vec![
        Claim::new(
            "Molt answers everybody and wastes nothing",
            ours.finished == ours.requests && ours.wasted_tokens == 0,
            format!("{} of {}", ours.finished, ours.requests),
        ),
        Claim::new(
            "an answer takes no longer with Molt than with either of the others",
            ours.answer_mean_ms <= best,
            format!("{:.1} s against {:.1} s on average", ours.answer_mean_ms / 1e3, best / 1e3),
        ),
    ];
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

/// Why it was not run.
#[derive(Debug, thiserror::Error)]
pub enum TenantsBenchError {
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The tenants.
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    /// The costs.
    #[error(transparent)]
    Costs(#[from] CostsError),
    /// The run.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The picture.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

const TRACE: &str = "slow_squeeze";
const TENANTS: &str = "phone";
const COSTS: &str = "phone";

/// Runs the built-in tenants under a long squeeze, under both policies.
pub fn measure() -> Result<Section<TenantsRun>, TenantsBenchError> {
    let started = Instant::now();
    let (trace, tenants, costs) = (Trace::find(TRACE)?, Tenants::find(TENANTS)?, Costs::find(COSTS)?);
    let mut rows = Vec::new();
    for (policy, name) in [(Policy::LeverFirst, "lever first"), (Policy::ProtectForeground, "protect foreground")] {
        let setup = Setup { trace: &trace, tenants: &tenants, costs: &costs, policy };
        let mut plot = Plot::new();
        let summary = run(&setup, |round| plot.round(round))?;
        let ms = |span: Span| span.micros() as f64 / 1e3;
        rows.push(TenantsRun {
            policy: name.to_owned(),
            trace: TRACE.to_owned(),
            overshoot_bytes: summary.overshoot_bytes_max,
            defers: summary.levers.defer,
            demotes: summary.levers.demote,
            parks: summary.levers.park,
            sheds: summary.levers.shed,
            tenants: summary
                .tenants
                .iter()
                .map(|tenant| TenantRow {
                    tenant: tenant.name.clone(),
                    requests: tenant.requests,
                    finished: tenant.finished,
                    tokens: tenant.served_tokens.get(),
                    wait_mean_ms: ms(tenant.wait_mean()),
                    parked_max_ms: ms(tenant.parked_us_max),
                })
                .collect(),
            picture_svg: plot.draw(&format!("{TENANTS} under {TRACE}, {name}"))?,
        });
    }
    let tenants = || rows.iter().flat_map(|run| &run.tenants);
    let (asked, finished) = tenants().fold((0, 0), |sum, row| (sum.0 + row.requests, sum.1 + row.finished));
    let overshoot = rows.iter().map(|run| run.overshoot_bytes).max().unwrap_or(0);
    let claims = vec![
        Claim::new("every request is answered; nobody is killed", asked == finished, format!("{finished} of {asked}")),
        Claim::new("the budget is kept in every round", overshoot <= 0, format!("{overshoot} bytes over at most")),
    ];
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}
