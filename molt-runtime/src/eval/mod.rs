//! `molt eval`: how well caches come over, on text that no map has seen. The reference is always the destination after
//! a native read of its own. Nothing here is used to decide anything while Molt serves.

mod claims;
mod error;
mod gates;
mod journal;
pub mod metrics;
mod pair;
mod rows;
mod setting;
mod windows;

use molt_models::Ladder;
use molt_scheduler::units::RungIdx;
use sha2::{Digest as _, Sha256};

use crate::texts::Document;
pub use claims::claims;
pub use error::EvalError;
pub use gates::{Control, Gates};
pub use journal::Journal;
use journal::{Place, Record};
use pair::Pair;
pub use rows::{Direction, Row};
pub use setting::Setting;
use windows::{Window, windows_for};
pub(crate) use windows::{window_tokens, windows};

/// What is judged.
#[derive(Debug, Clone)]
pub struct EvalSettings {
    /// Pairs of rungs, source first; none for all.
    pub pairs: Option<Vec<(RungIdx, RungIdx)>>,
    /// Tokens before a seam; none for what suits the ladder.
    pub contexts: Option<Vec<usize>>,
    /// Seams of each row, rounded up to whole windows of four: for each context in turn, and the last number for all
    /// that follow. What is exact by construction is judged at [`EXACT_SEAMS`] of them.
    pub seams: Vec<usize>,
    /// Ways to the destination.
    pub ways: Vec<Setting>,
}

/// Contexts of a full evaluation, as far as the models hold them.
const CONTEXTS: [usize; 2] = [512, 2_048];
/// Seams at which a way that is exact by construction is judged, at most: one that differs is as good as two hundred.
pub const EXACT_SEAMS: usize = 20;
/// The context of the quick subset.
const QUICK_CONTEXT: usize = 128;

impl EvalSettings {
    /// As a headline needs it.
    pub fn full() -> Self {
        Self { pairs: None, contexts: None, seams: vec![200], ways: Setting::ALL.to_vec() }
    }

    /// Few seams after a short context: whether things work, and roughly how well.
    pub fn quick() -> Self {
        Self { contexts: Some(vec![QUICK_CONTEXT]), seams: vec![8], ..Self::full() }
    }

    /// One pair over its bridge, at the shortest usual context.
    pub fn brief(ladder: &Ladder, pair: (RungIdx, RungIdx), seams: usize) -> Result<Self, EvalError> {
        let mut settings =
            Self { pairs: Some(vec![pair]), seams: vec![seams], ways: vec![Setting::Balanced], ..Self::full() };
        let mut contexts = settings.contexts_for(ladder.trained_context())?;
        contexts.truncate(1);
        settings.contexts = Some(contexts);
        Ok(settings)
    }

    fn contexts_for(&self, trained: usize) -> Result<Vec<usize>, EvalError> {
        let fits = |context: &usize| window_tokens(*context) <= trained;
        let Some(contexts) = &self.contexts else {
            let usual: Vec<usize> = CONTEXTS.into_iter().filter(fits).collect();
            if !usual.is_empty() {
                return Ok(usual);
            }
            let largest = trained.saturating_sub(window_tokens(0)) / 16 * 16;
            return self.with_contexts(vec![largest]).contexts_for(trained);
        };
        // Less could not be cut into four different prefixes.
        match contexts.iter().find(|context| **context < 16 || !fits(context)) {
            Some(context) => Err(EvalError::Context { context: *context, needed: window_tokens(*context), trained }),
            None => Ok(contexts.clone()),
        }
    }

    fn seams_at(&self, context: usize) -> usize {
        self.seams.get(context).or(self.seams.last()).map_or(1, |seams| (*seams).max(1))
    }

    fn with_contexts(&self, contexts: Vec<usize>) -> Self {
        Self { contexts: Some(contexts), ..self.clone() }
    }
}

/// What was found about a pair.
#[derive(Debug)]
pub struct PairReport {
    /// Rungs, source first: `tier0:tier1`.
    pub pair: String,
    /// Whether the ladder has a bridge; without one only a keepsake can be judged.
    pub bridged: bool,
    /// What the gates found; all hold.
    pub gates: Gates,
    /// One row for each context and setting.
    pub rows: Vec<Row>,
}

/// How far an evaluation has come.
#[derive(Debug, Clone)]
pub struct Progress {
    /// The pair at hand.
    pub pair: String,
    /// Its windows that are done.
    pub done: usize,
    /// All of its windows.
    pub total: usize,
}

/// Judges a ladder on held-out documents. Finished seams of the journal are not done again. Gates come first; one that
/// fails is an error, and nothing is reported.
pub fn evaluate(
    ladder: &Ladder,
    documents: &[Document],
    settings: &EvalSettings,
    mut journal: Option<&mut Journal>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Vec<PairReport>, EvalError> {
    let contexts = settings.contexts_for(ladder.trained_context())?;
    let all = pair::all(ladder);
    let chosen = settings.pairs.as_ref().unwrap_or(&all);
    let names =
        |pairs: &[(RungIdx, RungIdx)]| pairs.iter().map(|(f, t)| pair::name(*f, *t)).collect::<Vec<_>>().join(", ");
    if let Some(stranger) = chosen.iter().find(|pair| !all.contains(pair)) {
        return Err(EvalError::NoPair { pair: names(&[*stranger]), known: names(&all) });
    }
    let mut encoded = Vec::new();
    for document in documents {
        encoded.push((document.name.clone(), ladder.tokenizer().encode(&document.text)?));
    }
    let mut plan: Vec<(usize, Vec<Window>)> = Vec::new();
    for (at, context) in contexts.into_iter().enumerate() {
        let needed = window_tokens(context);
        let windows = windows(&encoded, windows_for(settings.seams_at(at)), needed);
        if windows.is_empty() {
            let found = encoded.iter().map(|(_, tokens)| tokens.len()).max().unwrap_or(0);
            return Err(EvalError::TooShort { documents: encoded.len(), found, context, needed });
        }
        plan.push((context, windows));
    }
    let mut reports = Vec::new();
    for (from, to) in chosen {
        let pair = Pair::load(ladder, *from, *to)?;
        let shortest = plan.iter().map(|(context, _)| *context).min().unwrap_or(0);
        let gates = Gates::try_on(&pair, &encoded, shortest)?;
        let records = judge_pair(ladder, &pair, &plan, settings, journal.as_deref_mut(), progress)?;
        let direction = if from < to { Direction::Down } else { Direction::Up };
        let mut rows = Vec::new();
        for (context, _) in &plan {
            for setting in &settings.ways {
                let place = |r: &&Record| r.place.context_tokens == *context && r.place.setting == *setting;
                rows.extend(Row::of(&records.iter().filter(place).collect::<Vec<_>>(), direction));
            }
        }
        reports.push(PairReport { pair: pair.name(), bridged: pair.bridge.is_some(), gates, rows });
    }
    Ok(reports)
}

fn judge_pair(
    ladder: &Ladder,
    pair: &Pair,
    plan: &[(usize, Vec<Window>)],
    settings: &EvalSettings,
    mut journal: Option<&mut Journal>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Vec<Record>, EvalError> {
    let mut at = Progress { pair: pair.name(), done: 0, total: plan.iter().map(|(_, windows)| windows.len()).sum() };
    let mut records: Vec<Record> = Vec::new();
    progress(&at);
    for (context, windows) in plan {
        for (at_window, window) in windows.iter().enumerate() {
            let text = digest(&window.tokens);
            let place = |prefix: usize, setting: Setting| {
                let side = |rung: RungIdx, source: &str| {
                    let precision = ladder.rung(rung).map(|r| r.precision().to_string()).unwrap_or_default();
                    format!("{source} {precision}")
                };
                let carry = setting.carry_settings(pair, prefix);
                let bridge = pair.bridge.as_ref().filter(|_| setting.is_bridged());
                Place {
                    pair: pair.name(),
                    source: side(pair.from, molt_kv::decoder::Decoder::source(&pair.source)),
                    destination: side(pair.to, molt_kv::decoder::Decoder::source(&pair.destination)),
                    bridge: bridge.map(|bridge| bridge.digest().to_owned()),
                    carry,
                    setting,
                    context_tokens: *context,
                    document: window.document.clone(),
                    text: text.clone(),
                    prefix_tokens: prefix,
                }
            };
            let known: Vec<Record> = journal.as_ref().map(|journal| journal.records.clone()).unwrap_or_default();
            let finished = |place: &Place| known.iter().find(|record| record.place == *place);
            let enough = at_window >= windows_for(EXACT_SEAMS);
            let ways = || {
                let ways = settings.ways.iter().copied().filter(|setting| pair.allows(*setting));
                ways.filter(|setting| !(enough && setting.is_exact()))
            };
            for prefix in windows::prefixes(*context) {
                records.extend(ways().filter_map(|setting| finished(&place(prefix, setting)).cloned()));
            }
            let wanted = |prefix| ways().filter(|setting| finished(&place(prefix, *setting)).is_none()).collect();
            pair.judge(window, *context, wanted, |seam| {
                let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
                let record = Record {
                    place: place(seam.prefix, seam.setting),
                    figures: seam.figures,
                    carry_ms: ms(seam.carry),
                    reread_ms: ms(seam.reread),
                };
                if let Some(journal) = &mut journal {
                    journal.write(&record)?;
                }
                records.push(record);
                Ok(())
            })?;
            at.done += 1;
            progress(&at);
        }
    }
    Ok(records)
}

fn digest(tokens: &[u32]) -> String {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hex::encode(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_suit_what_models_were_trained_for() {
        let check = |contexts: Option<&[usize]>, trained: usize, expected: Option<&[usize]>| {
            let settings = EvalSettings { contexts: contexts.map(<[usize]>::to_vec), ..EvalSettings::full() };
            assert_eq!(settings.contexts_for(trained).ok().as_deref(), expected);
        };
        check(None, 32_768, Some(&[512, 2_048]));
        check(None, 2_048, Some(&[512]));
        check(None, 512, Some(&[240]));
        check(None, 260, None);
        check(Some(&[128]), 512, Some(&[128]));
        check(Some(&[128, 512]), 512, None);
        check(Some(&[8]), 512, None);
    }
}
