//! The seams of answers: how far what came over was, there and then, from a native read of the same words.

use molt_kv::cache::KvCache;
use molt_kv::carry::{CarrySettings, Route, carry};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model, ModelError};
use molt_scheduler::units::{RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use crate::demo::DemoError;
use crate::engine::{Effort, pace};
use crate::eval::metrics::LogProbs;

/// Tokens of the answer after a seam that are compared, the one at the seam included.
const COMPARED: usize = 8;

/// A change of rung within an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeamRow {
    /// The rung before.
    pub from: RungIdx,
    /// The rung after.
    pub to: RungIdx,
    /// How the cache came.
    pub route: Route,
    /// Bytes of the answer that had been written.
    pub after_bytes: usize,
    /// KL(native || carried) of the first token after it, in nats; of ways that are exact, nothing.
    pub kl_seam: Option<f64>,
    /// The mean over the first eight.
    pub kl_8: Option<f64>,
}

impl SeamRow {
    /// Nothing compared yet.
    pub(super) fn new((from, to): (RungIdx, RungIdx), route: Route, after_bytes: usize) -> Self {
        Self { from, to, route, after_bytes, kl_seam: None, kl_8: None }
    }

    /// Whether something may have been lost.
    fn is_inexact(&self) -> bool {
        matches!(self.route, Route::Bridge | Route::Identity)
    }
}

/// Compares the seams of answers, each with its prompt and its words: the words up to a seam are read natively by both rungs,
/// what the first has read comes over as it would in the engine, and what the second then expects of the words that followed
/// is held against what it expects after its own reading.
pub(super) fn compare<'a>(
    ladder: &Ladder,
    answers: impl Iterator<Item = (&'a [u32], &'a str, &'a mut [SeamRow])>,
) -> Result<(), DemoError> {
    let mut all: Vec<(&[u32], &str, &mut SeamRow)> =
        answers.flat_map(|(prompt, said, seams)| seams.iter_mut().map(move |seam| (prompt, said, seam))).collect();
    all.retain(|(_, _, seam)| seam.is_inexact());
    // Both models of a pair are loaded once.
    all.sort_by_key(|(_, _, seam)| (seam.from, seam.to));
    for group in all.chunk_by_mut(|(_, _, a), (_, _, b)| (a.from, a.to) == (b.from, b.to)) {
        let Some((_, _, first)) = group.first() else { continue };
        let bench = Bench::load(ladder, first.from, first.to)?;
        for (prompt, said, seam) in group {
            let Some((before, after)) = said.split_at_checked(seam.after_bytes) else { continue };
            let context = [*prompt, &ladder.tokenizer().encode(before)?[..]].concat();
            let mut next = ladder.tokenizer().encode(after)?;
            next.truncate(COMPARED);
            let each = bench.divergences(&context, &next, seam.route)?;
            seam.kl_seam = each.first().copied();
            seam.kl_8 = (!each.is_empty()).then(|| each.iter().sum::<f64>() / each.len() as f64);
        }
    }
    Ok(())
}

struct Bench<'a> {
    ladder: &'a Ladder,
    ledger: Ledger,
    rungs: (RungIdx, RungIdx),
    from: Model,
    to: Model,
    pace: f64,
}

impl<'a> Bench<'a> {
    fn load(ladder: &'a Ladder, from: RungIdx, to: RungIdx) -> Result<Self, DemoError> {
        let ledger = Ledger::new();
        let load = |rung: RungIdx| {
            let rung = ladder.rung(rung).ok_or(DemoError::NoWay { from, to })?;
            Ok::<_, DemoError>(rung.load(&ledger, &StopFlag::new())?)
        };
        let (source, destination) = (load(from)?, load(to)?);
        let pace = pace(&destination, &ledger)?;
        Ok(Self { ladder, rungs: (from, to), from: source, to: destination, pace, ledger })
    }

    /// KL(native || carried) at the last token of the context, which is read on the destination, and at what came next.
    fn divergences(&self, context: &[u32], next: &[u32], route: Route) -> Result<Vec<f64>, DemoError> {
        let Some((last, before)) = context.split_last() else { return Ok(Vec::new()) };
        let (stop, limit) = (StopFlag::new(), Tokens::from(context.len() + COMPARED));
        let mut source = KvCache::new(self.from.cache_shape(), limit, &self.ledger).map_err(ModelError::from)?;
        self.from.read(before, &mut source, &stop)?;
        let mut native = KvCache::new(self.to.cache_shape(), limit, &self.ledger).map_err(ModelError::from)?;
        self.to.read(before, &mut native, &stop)?;
        let mut carried = match route {
            Route::Identity => source,
            _ => {
                let bridge = self.ladder.bridge(self.rungs.0, self.rungs.1, &self.ledger)?;
                let (from, to) = self.rungs;
                let bridge = bridge.ok_or(DemoError::NoWay { from, to })?;
                let tokens = Tokens::from(before.len());
                let settings = match Effort::default().settings(Some(self.pace), &bridge, &self.to, tokens) {
                    // Something was mapped: the engine did not know yet how fast this machine is.
                    CarrySettings::EXACT => CarrySettings::BALANCED,
                    settings => settings,
                };
                let ends = (&source, self.from.rope());
                carry(&bridge, ends, None, &self.to, settings, &self.ledger, &stop)?.0
            }
        };
        let read: Vec<u32> = std::iter::once(*last).chain(next.iter().copied().take(COMPARED - 1)).collect();
        let expects = |cache: &mut KvCache| -> Result<Vec<LogProbs>, ModelError> {
            Ok(LogProbs::of_each(&self.to, &self.to.read_all(&read, cache, &stop)?))
        };
        let (native, carried) = (expects(&mut native)?, expects(&mut carried)?);
        Ok(native.iter().zip(&carried).map(|(native, carried)| native.kl(carried)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn seams_are_compared_where_something_may_have_been_lost() {
        let ladder = Ladder::open("pocket", Path::new("unused")).unwrap();
        let said = "The people of the United States are a great and free people, and the Government is theirs to keep.";
        let prompt = ladder.tokenizer().encode("To the Senate and House of Representatives: ").unwrap();
        let (top, middle, bottom) = (RungIdx::TOP, RungIdx::new(1), RungIdx::new(2));
        let mut seams = [
            SeamRow::new((top, bottom), Route::Bridge, 40),
            SeamRow::new((top, middle), Route::Identity, 40),
            SeamRow::new((bottom, top), Route::Keepsake, 60),
            SeamRow::new((top, bottom), Route::Bridge, 20),
        ];
        compare(&ladder, std::iter::once((&prompt[..], said, &mut seams[..]))).unwrap();
        let [bridged, identity, exact, early] = &seams;
        for seam in [bridged, identity, early] {
            let kl = seam.kl_8.unwrap();
            assert!(kl > 0.0 && kl < 0.5 && seam.kl_seam.is_some(), "{seam:?}");
        }
        assert_eq!((exact.kl_seam, exact.kl_8), (None, None));
    }
}
