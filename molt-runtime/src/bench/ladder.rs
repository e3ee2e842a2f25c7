//! The rungs of a ladder and the maps between them, as they are: nothing is run.

use molt_kv::ledger::Ledger;
use molt_models::{Ladder, ModelError};
use molt_scheduler::units::RungIdx;
use serde::{Deserialize, Serialize};

use super::results::Section;

/// One rung.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RungRow {
    /// Which.
    pub rung: String,
    /// Its model file.
    pub file: String,
    /// Its precision.
    pub precision: String,
    /// Numbers in its matrices.
    pub parameters: u64,
    /// What its weights take.
    pub weights_bytes: u64,
    /// What a token takes in its cache.
    pub cache_bytes_per_token: u64,
    /// How a conversation comes from the rung above; nothing for the first.
    pub route: Option<String>,
}

/// What a layer's maps leave unexplained, on text that they have not seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResidualRow {
    /// Rungs, source first.
    pub pair: String,
    /// Destination layer.
    pub layer: usize,
    /// Of its keys before RoPE: root mean square of the error over that of the centred target.
    pub keys_ratio: f64,
    /// Of its values.
    pub values_ratio: f64,
}

/// The rungs.
pub fn rungs(ladder: &Ladder) -> Section<RungRow> {
    let cost: Vec<_> = ladder.cost().rungs().collect();
    let rows = ladder.rungs().iter().zip(cost).map(|(rung, (index, cost))| {
        let above = index.get().checked_sub(1).and_then(|above| ladder.rungs().get(above));
        let route = above.map(|above| if above.source() == rung.source() { "identity" } else { "bridge" });
        RungRow {
            rung: index.to_string(),
            file: rung.file().path().file_name().unwrap_or_default().to_string_lossy().into_owned(),
            precision: rung.precision().to_string(),
            parameters: rung.file().parameters(),
            weights_bytes: cost.weights.get(),
            cache_bytes_per_token: cost.cache_per_token.get(),
            route: route.map(str::to_owned),
        }
    });
    Section { rows: rows.collect(), claims: Vec::new(), took_s: 0.0 }
}

/// Every pair of rungs that a bridge joins, each pair of model files once.
pub fn bridged(ladder: &Ladder) -> Result<Vec<(RungIdx, RungIdx)>, ModelError> {
    let rungs: Vec<RungIdx> = ladder.cost().rungs().map(|(rung, _)| rung).collect();
    let mut pairs: Vec<(RungIdx, RungIdx)> = Vec::new();
    let source = |rung: RungIdx| ladder.rung(rung).map(molt_models::Rung::source);
    for (from, to) in rungs.iter().flat_map(|from| rungs.iter().map(|to| (*from, *to))) {
        let known = pairs.iter().any(|(a, b)| source(*a) == source(from) && source(*b) == source(to));
        if source(from) != source(to) && !known && ladder.bridge(from, to, &Ledger::new())?.is_some() {
            pairs.push((from, to));
        }
    }
    Ok(pairs)
}

/// Residuals of every bridge.
pub fn residuals(ladder: &Ladder) -> Result<Section<ResidualRow>, ModelError> {
    let mut rows = Vec::new();
    for (from, to) in bridged(ladder)? {
        let Some(bridge) = ladder.bridge(from, to, &Ledger::new())? else { continue };
        rows.extend(bridge.spec().residuals.iter().map(|residual| ResidualRow {
            pair: format!("{from}:{to}"),
            layer: residual.layer,
            keys_ratio: residual.keys,
            values_ratio: residual.values,
        }));
    }
    Ok(Section { rows, claims: Vec::new(), took_s: 0.0 })
}
