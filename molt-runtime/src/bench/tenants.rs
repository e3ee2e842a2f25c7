//! Three tenants under one budget: the real scheduler over its simulator, so that hours of pressure take no time.

use std::time::Instant;

use molt_scheduler::Policy;
use serde::{Deserialize, Serialize};

use super::results::{Claim, Section};
use crate::replay::{Costs, CostsError, Plot, PlotError, ReplayError, Setup, Tenants, TenantsError, run};
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
        let ms = |span: molt_scheduler::units::Span| span.micros() as f64 / 1e3;
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
