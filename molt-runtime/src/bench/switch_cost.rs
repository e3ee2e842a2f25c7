//! What a switch costs: a carry against reading again, both rungs warm, in one run.

use std::time::Instant;

use molt_kv::bridge::Bridge;
use molt_kv::cache::KvCache;
use molt_kv::carry::{CarryError, CarryReport, CarrySettings, carry, reread};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model, ModelError};
use molt_scheduler::units::{RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use super::ladder::bridged;
use super::results::{Claim, Section};
use super::stats::Spread;
use crate::engine::{Effort, pace};

/// One pair, one length, one effort.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SwitchCostRow {
    /// Rungs, source first.
    pub pair: String,
    /// How much is read natively.
    pub setting: String,
    /// Tokens that are carried.
    pub context_tokens: usize,
    /// Each carry.
    pub carry_ms: Vec<f64>,
    /// Each reading again, in turn with the carries.
    pub reread_ms: Vec<f64>,
    /// Reading again over carrying, run by run.
    pub cost_ratio: f64,
    /// Operations of the carry over those of reading again.
    pub flops_ratio: f64,
    /// Loading the destination's weights, where they were not in memory: what a cold switch takes beside the carry.
    pub load_ms: f64,
}

/// Why it was not measured.
#[derive(Debug, thiserror::Error)]
pub enum SwitchCostError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A carry.
    #[error(transparent)]
    Carry(#[from] CarryError),
}

/// What is timed: little read natively, as much as the engine's reader waits for, and much.
pub const SETTINGS: [(&str, Option<CarrySettings>); 3] =
    [("fast", Some(CarrySettings::FAST)), ("default", None), ("faithful", Some(CarrySettings::FAITHFUL))];

/// Times carries of so many tokens over every bridge of a ladder. The tokens are arbitrary: cost does not depend on them.
pub fn measure(
    ladder: &Ladder,
    lengths: &[usize],
    runs: usize,
    mut done: impl FnMut(&SwitchCostRow),
) -> Result<Section<SwitchCostRow>, SwitchCostError> {
    let started = Instant::now();
    let mut rows = Vec::new();
    for (from, to) in bridged(ladder)? {
        let ledger = Ledger::new();
        let Some(source) = load(ladder, from, &ledger)? else { continue };
        let loading = Instant::now();
        let Some(destination) = load(ladder, to, &ledger)? else { continue };
        let load_ms = ms(loading);
        let Some(bridge) = ladder.bridge(from, to, &ledger)? else { continue };
        let pace = pace(&destination, &ledger)?;
        for length in lengths.iter().filter(|length| **length <= ladder.trained_context()) {
            let vocab = u32::try_from(source.config().vocab).unwrap_or(u32::MAX);
            let tokens: Vec<u32> = (1u32..).map(|i| i.wrapping_mul(7919) % vocab).take(*length).collect();
            let mut cache =
                KvCache::new(source.cache_shape(), Tokens::from(*length), &ledger).map_err(ModelError::from)?;
            source.read(&tokens, &mut cache, &StopFlag::new())?;
            for (setting, settings) in SETTINGS {
                let pair = (format!("{from}:{to}"), setting);
                let tokens = Tokens::from(*length);
                let engines = || Effort::default().settings(Some(pace), &bridge, &destination, tokens);
                let settings = settings.unwrap_or_else(engines);
                let models = (&bridge, &source, &destination);
                let row = SwitchCostRow { load_ms, ..time(pair, models, &cache, settings, runs, &ledger)? };
                done(&row);
                rows.push(row);
            }
        }
    }
    let claims = claims(&rows);
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

fn load(ladder: &Ladder, rung: RungIdx, ledger: &Ledger) -> Result<Option<Model>, ModelError> {
    ladder.rung(rung).map(|rung| rung.load(ledger, &StopFlag::new())).transpose()
}

fn time(
    (pair, setting): (String, &str),
    (bridge, source, destination): (&Bridge, &Model, &Model),
    cache: &KvCache,
    settings: CarrySettings,
    runs: usize,
    ledger: &Ledger,
) -> Result<SwitchCostRow, SwitchCostError> {
    let (mut carry_ms, mut reread_ms, stop) = (Vec::new(), Vec::new(), StopFlag::new());
    let mut report: Option<CarryReport> = None;
    // The first warms up: pages come into memory.
    for run in 0..=runs {
        let start = Instant::now();
        let (_, done) = carry(bridge, (cache, source.rope()), None, destination, settings, ledger, &stop)?;
        let carried = ms(start);
        let start = Instant::now();
        reread(cache.slots(), cache.limit(), destination, ledger, &stop)?;
        if run > 0 {
            carry_ms.push(carried);
            reread_ms.push(ms(start));
        }
        report = Some(done);
    }
    let ratios: Vec<f64> = reread_ms.iter().zip(&carry_ms).map(|(reread, carry)| reread / carry).collect();
    Ok(SwitchCostRow {
        pair,
        setting: setting.to_owned(),
        context_tokens: cache.len(),
        cost_ratio: Spread::of(&ratios).map_or(f64::NAN, |ratio| ratio.median),
        flops_ratio: report.map_or(f64::NAN, |report| report.flops / report.reread_flops),
        carry_ms,
        reread_ms,
        load_ms: 0.0,
    })
}

/// The prototype's carry was 4.0 times cheaper than reading again.
const PROTOTYPE: f64 = 4.0;

fn claims(rows: &[SwitchCostRow]) -> Vec<Claim> {
    let longest = rows.iter().map(|row| row.context_tokens).max();
    let at_longest = rows.iter().filter(|row| Some(row.context_tokens) == longest && row.setting == "default");
    at_longest
        .map(|row| {
            let claim = format!(
                "{}: carrying {} tokens is at least {PROTOTYPE} times cheaper than reading them again",
                row.pair, row.context_tokens
            );
            Claim::new(claim, row.cost_ratio >= PROTOTYPE, format!("{:.1} times", row.cost_ratio))
        })
        .collect()
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
