//! What the integration tests of this crate share.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model};
use molt_scheduler::units::{RungIdx, Tokens};

pub const TIER0: RungIdx = RungIdx::new(0);
pub const TIER1: RungIdx = RungIdx::new(1);
pub const TIER2: RungIdx = RungIdx::new(2);

/// Prose in the manner of what `pocket` was trained on.
pub const PROSE: &str = "It is said that the times are hard, and that the people look to the Government for relief. \
    There is no royal road to prosperity. The way is plain: honest labor, just laws, and a currency that every man can \
    trust. I recommend that the Congress consider with care the report of the Secretary of the Treasury, and that it \
    provide by law for the improvement of our harbors and rivers, for the support of the schools, and for the payment of \
    the public debt. The relations of the United States with all foreign powers continue to be friendly, and nothing has \
    occurred within the year to disturb the peace of this hemisphere.";

pub fn pocket() -> Arc<Ladder> {
    Arc::new(Ladder::open("pocket", Path::new("/nowhere")).unwrap())
}

pub fn load(ladder: &Ladder, rung: RungIdx, ledger: &Ledger) -> Model {
    ladder.rung(rung).unwrap().load(ledger, &StopFlag::new()).unwrap()
}

/// The folder that `molt pull` fills.
pub fn models_folder() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("MOLT_MODELS")
        .or_else(|| from("XDG_DATA_HOME").map(|home| home.join("molt/models")))
        .or_else(|| from("HOME").map(|home| home.join(".local/share/molt/models")))
        .unwrap_or_default()
}

/// The path of a pulled file, or `None` after saying plainly that the test is skipped.
pub fn pulled(file: &str, ladder: &str) -> Option<PathBuf> {
    let path = models_folder().join(file);
    if !path.exists() {
        // Past the test harness, which would keep it to itself.
        let text = format!("SKIPPED: {} is not there; `molt pull {ladder}` fetches it\n", path.display());
        std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes()).unwrap();
        return None;
    }
    Some(path)
}

/// A cache with these tokens read natively, and the last hidden state.
pub fn read(model: &Model, tokens: &[u32], ledger: &Ledger) -> (KvCache, Vec<f32>) {
    let mut cache = KvCache::new(model.cache_shape(), Tokens::new(600), ledger).unwrap();
    let hidden = model.read(tokens, &mut cache, &StopFlag::new()).unwrap();
    (cache, hidden)
}

/// Log-probabilities of the token after this hidden state.
pub fn log_softmax(model: &Model, hidden: &[f32]) -> Vec<f64> {
    model.with_logits(hidden, |logits| {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
        logits.iter().map(|l| f64::from(l - top) - sum.ln()).collect()
    })
}

/// Kullback-Leibler divergence of `other` from `reference`, in nats.
pub fn kl(reference: &[f64], other: &[f64]) -> f64 {
    reference.iter().zip(other).map(|(p, q)| p.exp() * (p - q)).sum()
}
