//! What a conversation still knows when its oldest context has gone: facts of the part that was kept and of the part that
//! went, and how well the rest of a text is foretold. Against the whole context, and against a re-read of just what is
//! left, which is what a runtime does that truncates a prompt.

use std::ops::Range;
use std::time::Instant;

use molt_kv::cache::{CacheError, KvCache};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model, ModelError};
use molt_scheduler::Config;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use super::answering::{greedy, likelihoods, losses};
use super::facts::{Facts, says};
use super::results::{Claim, Section};
use super::stats::{interval, wilson};
use crate::eval::metrics::AFTER;
use crate::eval::{window_tokens, windows};
use crate::texts::Document;

/// What is left of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// All of it.
    Whole,
    /// What shedding leaves in the cache.
    Shed,
    /// The same tokens, read anew as if nothing had stood between them.
    Truncated,
    /// What is left where as many blocks go, but those to which the recent tokens pay least attention instead of the oldest.
    LeastSeen,
}

impl Left {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Whole, Self::Shed, Self::LeastSeen, Self::Truncated];
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Whole => "nothing shed",
            Self::Shed => "shed",
            Self::Truncated => "read again, truncated",
            Self::LeastSeen => "shed by attention",
        })
    }
}

/// Where a fact stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// In the part that was kept.
    Kept,
    /// In the part that went.
    Shed,
}

/// How many facts were known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecallRow {
    /// Of what was left.
    pub left: Left,
    /// Where the facts had stood.
    pub place: Place,
    /// Facts asked for.
    pub asked: usize,
    /// Of them, those whose value was the likeliest among the values of all facts of the context.
    pub likeliest: usize,
    /// Those whose value was said.
    pub said: usize,
}

/// The rest of one text, in nats a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestRow {
    /// The text.
    pub document: String,
    /// Loss after the whole context.
    pub loss_whole: f64,
    /// After shedding.
    pub loss_shed: f64,
    /// After a re-read of what shedding leaves.
    pub loss_truncated: f64,
    /// After shedding by attention; of reports that did not try it, nothing.
    #[serde(default)]
    pub loss_least_seen: Option<f64>,
}

impl RestRow {
    fn loss(&self, left: Left) -> f64 {
        match left {
            Left::Whole => self.loss_whole,
            Left::Shed => self.loss_shed,
            Left::Truncated => self.loss_truncated,
            Left::LeastSeen => self.loss_least_seen.unwrap_or(f64::NAN),
        }
    }
}

/// One rung, one amount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SheddingRun {
    /// The rung.
    pub rung: String,
    /// Tokens of a context, at most.
    pub context_tokens: usize,
    /// Of them, those that went.
    pub shed_tokens: usize,
    /// How often chance alone would find the value of a fact.
    pub chance_ratio: f64,
    /// Facts.
    pub recall: Vec<RecallRow>,
    /// Texts, whose 256 next tokens were judged.
    pub rest: Vec<RestRow>,
    /// Each shedding.
    pub shed_ms: Vec<f64>,
    /// Each re-read of what is left.
    pub truncated_ms: Vec<f64>,
    /// What a shedding gives back.
    pub freed_bytes: u64,
}

impl SheddingRun {
    /// Nothing measured yet.
    fn new(rung: String, context_tokens: usize, shed_tokens: usize) -> Self {
        Self {
            rung,
            context_tokens,
            shed_tokens,
            chance_ratio: 0.0,
            recall: Vec::new(),
            rest: Vec::new(),
            shed_ms: Vec::new(),
            truncated_ms: Vec::new(),
            freed_bytes: 0,
        }
    }

    /// Facts that are known of all that were asked for, wherever they stood.
    fn known(&self, left: Left) -> Option<(usize, usize)> {
        let rows = self.recall.iter().filter(|row| row.left == left);
        let sum = rows.fold((0, 0), |(known, asked), row| (known + row.likeliest, asked + row.asked));
        Some(sum).filter(|(_, asked)| *asked > 0)
    }

    /// What was found about facts of a place.
    pub fn recall_of(&self, left: Left, place: Place) -> Option<&RecallRow> {
        self.recall.iter().find(|row| row.left == left && row.place == place)
    }

    /// The perplexity after what is left, over that after a truncated re-read, with a 95 % interval over documents.
    pub fn perplexity_ratio(&self, left: Left) -> (f64, Option<(f64, f64)>) {
        let of = |row: &RestRow| row.loss(left) - row.loss_truncated;
        let each: Vec<(&str, f64)> = self.rest.iter().map(|row| (row.document.as_str(), of(row))).collect();
        let mean = each.iter().map(|(_, delta)| delta).sum::<f64>() / each.len() as f64;
        (mean.exp(), interval(&each).map(|(low, high)| (low.exp(), high.exp())))
    }

    /// What a shedding gives back.
    pub fn freed(&self) -> Bytes {
        Bytes::new(self.freed_bytes)
    }

    /// The perplexity of what comes after.
    pub fn perplexity(&self, left: Left) -> f64 {
        (self.rest.iter().map(|row| row.loss(left)).sum::<f64>() / self.rest.len() as f64).exp()
    }
}

/// How much is measured.
#[derive(Debug, Clone)]
pub struct SheddingSettings {
    /// The rung. Where shedding is the last lever, it is the smallest.
    pub rung: RungIdx,
    /// Tokens of a context.
    pub context_tokens: usize,
    /// Contexts of facts.
    pub facts: usize,
    /// Texts.
    pub windows: usize,
}

/// Why it was not measured.
#[derive(Debug, thiserror::Error)]
pub enum SheddingError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A rung that there is not.
    #[error("the ladder has no {0}")]
    NoRung(RungIdx),
    /// Too little is left between what shedding never touches.
    #[error(
        "of a context of {context} tokens nothing may be shed: {kept} are kept anyway; give more with --shed-context"
    )]
    Nothing {
        /// Tokens of the context.
        context: usize,
        /// Tokens that are never shed.
        kept: Tokens,
    },
    /// There are not so many facts.
    #[error("the facts that there are fill {found} tokens of a context of {context}; give less with --shed-context")]
    Facts {
        /// Tokens of all facts.
        found: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// The models do not hold the context and what comes after it.
    #[error("a context of {context} tokens and what comes after it need {needed}, the models hold {trained}")]
    Context {
        /// The context.
        context: usize,
        /// Tokens that are needed.
        needed: usize,
        /// Tokens that the models were trained for.
        trained: usize,
    },
}

/// What a context may lack because one more fact would not fit.
const SHORT: usize = 40;

/// Sheds half of what may be shed of a context, and all of it. `done` hears of every context and text.
pub fn measure(
    ladder: &Ladder,
    documents: &[Document],
    settings: &SheddingSettings,
    mut done: impl FnMut(&str),
) -> Result<Section<SheddingRun>, SheddingError> {
    let started = Instant::now();
    let (context, trained) = (settings.context_tokens, ladder.trained_context());
    let needed = window_tokens(context);
    if needed > trained {
        return Err(SheddingError::Context { context, needed, trained });
    }
    let config = Config::default();
    let (front, block) = (usize::from(config.sinks), usize::from(config.shed_block));
    let blocks = context.saturating_sub(front + usize::from(config.window)) / block;
    if blocks == 0 {
        return Err(SheddingError::Nothing { context, kept: config.sinks + config.window });
    }
    let mut amounts = vec![blocks.div_ceil(2) * block, blocks * block];
    amounts.dedup();
    let ledger = Ledger::new();
    let rung = ladder.rung(settings.rung).ok_or(SheddingError::NoRung(settings.rung))?;
    let bench = Bench {
        model: rung.load(&ledger, &StopFlag::new())?,
        ladder,
        ledger,
        front,
        recent: usize::from(config.window),
        block,
    };
    let mut runs: Vec<SheddingRun> =
        amounts.iter().map(|amount| SheddingRun::new(settings.rung.to_string(), context, *amount)).collect();
    for seed in (1..).take(settings.facts) {
        let facts = Facts::draw(ladder.tokenizer(), context, seed)?;
        // What is shed is counted from the front, so that a context that is a little shorter keeps a little less.
        if facts.tokens.len() + SHORT < context {
            return Err(SheddingError::Facts { found: facts.tokens.len(), context });
        }
        bench.ask(&facts, &mut runs)?;
        done(&format!("facts, context {seed}"));
    }
    let mut encoded = Vec::new();
    for document in documents {
        encoded.push((document.name.clone(), ladder.tokenizer().encode(&document.text)?));
    }
    for window in windows(&encoded, settings.windows, needed) {
        bench.foretell(&window.document, &window.tokens, &mut runs)?;
        done(&format!("text, {}", window.document));
    }
    let claims = runs.iter().flat_map(claims).collect();
    Ok(Section { rows: runs, claims, took_s: started.elapsed().as_secs_f64() })
}

struct Bench<'a> {
    ladder: &'a Ladder,
    model: Model,
    ledger: Ledger,
    /// Tokens at the front that are never shed.
    front: usize,
    /// Tokens at the end that are not.
    recent: usize,
    /// Tokens that are shed together.
    block: usize,
}

/// What is left of a context, and what went.
struct Rest {
    left: Left,
    cache: KvCache,
    gone: Vec<Range<usize>>,
}

impl Bench<'_> {
    fn empty(&self, limit: usize) -> Result<KvCache, CacheError> {
        KvCache::new(self.model.cache_shape(), Tokens::from(limit), &self.ledger)
    }

    /// A context as it is.
    fn whole(&self, context: &[u32]) -> Result<KvCache, SheddingError> {
        let mut whole = self.empty(window_tokens(context.len()))?;
        self.model.read(context, &mut whole, &StopFlag::new())?;
        Ok(whole)
    }

    /// What shedding leaves of a context, the oldest or the least looked at, and what the former leaves read again.
    fn left(&self, whole: &KvCache, run: &mut SheddingRun) -> Result<[Rest; 3], SheddingError> {
        let mut shed = whole.prefix(whole.len(), whole.limit(), &self.ledger)?;
        let before = self.ledger.total();
        let start = Instant::now();
        shed.shed(self.gone(run))?;
        run.shed_ms.push(start.elapsed().as_secs_f64() * 1e3);
        run.freed_bytes = before.get().saturating_sub(self.ledger.total().get());
        let tokens: Vec<u32> = shed.slots().iter().map(|slot| slot.token).collect();
        let mut truncated = self.empty(usize::from(whole.limit()))?;
        let start = Instant::now();
        self.model.read(&tokens, &mut truncated, &StopFlag::new())?;
        run.truncated_ms.push(start.elapsed().as_secs_f64() * 1e3);
        let least = self.least_seen(whole, run.shed_tokens / self.block)?;
        let mut least_seen = whole.prefix(whole.len(), whole.limit(), &self.ledger)?;
        for block in least.iter().rev() {
            least_seen.shed(block.clone())?;
        }
        let oldest = vec![self.gone(run)];
        Ok([
            Rest { left: Left::Shed, cache: shed, gone: oldest.clone() },
            Rest { left: Left::LeastSeen, cache: least_seen, gone: least },
            Rest { left: Left::Truncated, cache: truncated, gone: oldest },
        ])
    }

    /// Which tokens go.
    fn gone(&self, run: &SheddingRun) -> Range<usize> {
        self.front..self.front + run.shed_tokens
    }

    /// The blocks to which the recent tokens pay least attention, in order.
    fn least_seen(&self, whole: &KvCache, count: usize) -> Result<Vec<Range<usize>>, SheddingError> {
        let mut cache = whole.prefix(whole.len(), whole.limit(), &self.ledger)?;
        let recent = whole.len() - self.recent.min(self.model.chunk_limit()).min(whole.len())..whole.len();
        let ids: Vec<u32> = whole.slots()[recent.clone()].iter().map(|slot| slot.token).collect();
        let (mut received, mut hidden) = (vec![0.0; whole.len()], vec![0.0; ids.len() * self.model.width()]);
        self.model.embed(&ids, &mut hidden);
        let (layers, looked) = (0..self.model.cache_shape().layers, std::slice::from_ref(&recent));
        let looking =
            self.model.run_slots(layers, &mut hidden, &mut cache, looked, Some(&mut received), &StopFlag::new());
        looking.map_err(ModelError::from)?;
        let blocks = (self.front..recent.start).step_by(self.block).map(|start| start..start + self.block);
        let mut blocks: Vec<_> = blocks.filter(|block| block.end <= recent.start).collect();
        let seen = |block: &Range<usize>| received[block.clone()].iter().sum::<f32>();
        blocks.sort_by(|one, other| seen(one).total_cmp(&seen(other)));
        blocks.truncate(count);
        blocks.sort_by_key(|block| block.start);
        Ok(blocks)
    }

    /// Asks for every fact, and counts those that lie in one of the two parts.
    fn ask(&self, facts: &Facts, runs: &mut [SheddingRun]) -> Result<(), SheddingError> {
        let mut whole = self.whole(&facts.tokens)?;
        let known = self.known(facts, &mut whole)?;
        for run in runs {
            run.chance_ratio = 1.0 / facts.candidates.len() as f64;
            run.count(facts, Left::Whole, &known, &[self.gone(run)]);
            for Rest { left, mut cache, gone } in self.left(&whole, run)? {
                let known = self.known(facts, &mut cache)?;
                run.count(facts, left, &known, &gone);
            }
        }
        Ok(())
    }

    /// Of every fact whether its value is the likeliest of all, and whether it is said.
    fn known(&self, facts: &Facts, cache: &mut KvCache) -> Result<Vec<(bool, bool)>, SheddingError> {
        let mut known = Vec::new();
        for (at, fact) in facts.facts.iter().enumerate() {
            let each = likelihoods(&self.model, cache, &fact.asked, &facts.candidates)?;
            let best = each.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let most = facts.candidates[at].len() + 1;
            let said = greedy(&self.model, cache, &fact.asked, most, |_| false)?;
            known.push((each[at] >= best, says(&self.ladder.tokenizer().decode(&said), fact.animal)));
        }
        Ok(known)
    }

    /// How well the rest of a text is foretold. Positions are judged once the first token after the context is read.
    fn foretell(&self, document: &str, tokens: &[u32], runs: &mut [SheddingRun]) -> Result<(), SheddingError> {
        let Some(context) = runs.first().map(|run| run.context_tokens) else { return Ok(()) };
        let (context, after) = tokens.split_at(context);
        let loss = |cache: &mut KvCache| -> Result<f64, ModelError> {
            let losses = losses(&self.model, cache, &after[..AFTER], &after[1..=AFTER])?;
            Ok(losses.iter().sum::<f64>() / losses.len() as f64)
        };
        let mut whole = self.whole(context)?;
        let loss_whole = loss(&mut whole)?;
        for run in runs {
            let [mut shed, mut least_seen, mut truncated] = self.left(&whole, run)?;
            let (loss_shed, loss_truncated) = (loss(&mut shed.cache)?, loss(&mut truncated.cache)?);
            let (document, loss_least_seen) = (document.to_owned(), Some(loss(&mut least_seen.cache)?));
            run.rest.push(RestRow { document, loss_whole, loss_shed, loss_truncated, loss_least_seen });
        }
        Ok(())
    }
}

impl SheddingRun {
    /// Counts what is known of the facts of each part; one that was cut in two is in neither.
    fn count(&mut self, facts: &Facts, left: Left, known: &[(bool, bool)], gone: &[Range<usize>]) {
        for place in [Place::Kept, Place::Shed] {
            if self.recall_of(left, place).is_none() {
                self.recall.push(RecallRow { left, place, asked: 0, likeliest: 0, said: 0 });
            }
        }
        for (fact, (likeliest, said)) in facts.facts.iter().zip(known) {
            let place = match fact.place.clone().filter(|at| gone.iter().any(|gone| gone.contains(at))).count() {
                0 => Place::Kept,
                lost if lost == fact.place.len() => Place::Shed,
                _ => continue,
            };
            let row = self.recall.iter_mut().find(|row| row.left == left && row.place == place);
            if let Some(row) = row {
                row.asked += 1;
                row.likeliest += usize::from(*likeliest);
                row.said += usize::from(*said);
            }
        }
    }
}

fn claims(run: &SheddingRun) -> Vec<Claim> {
    let tokens = format!("{} of {} tokens shed", run.shed_tokens, run.context_tokens);
    let mut claims = Vec::new();
    let known = |left| run.recall_of(left, Place::Kept).filter(|row| row.asked > 0);
    for (other, name) in [(Left::Whole, "while nothing was shed"), (Left::Truncated, "after a truncated re-read")] {
        let Some((shed, other)) = known(Left::Shed).zip(known(other)) else { continue };
        let high = wilson(shed.likeliest, shed.asked).map_or(1.0, |(_, high)| high);
        claims.push(Claim::new(
            format!("{tokens}: facts of the part that was kept are known as well as {name}"),
            high >= other.likeliest as f64 / other.asked as f64,
            format!("{} against {} of {}", shed.likeliest, other.likeliest, shed.asked),
        ));
    }
    if let Some(((oldest, asked), (least_seen, other_asked))) = run.known(Left::Shed).zip(run.known(Left::LeastSeen)) {
        let high = wilson(oldest, asked).map_or(1.0, |(_, high)| high);
        claims.push(Claim::new(
            format!("{tokens}: of all facts as many are known as where the blocks that are least looked at go"),
            high >= least_seen as f64 / other_asked as f64,
            format!("{oldest} of {asked} against {least_seen} of {other_asked}"),
        ));
    }
    if !run.rest.is_empty() {
        let (ratio, interval) = run.perplexity_ratio(Left::Shed);
        let range = interval.map_or(String::new(), |(low, high)| format!(", 95 % {low:.3} to {high:.3}"));
        claims.push(Claim::new(
            format!("{tokens}: what comes next is foretold no worse than after a truncated re-read"),
            interval.map_or(ratio, |(low, _)| low) <= 1.0,
            format!("perplexity {ratio:.3} times that{range}"),
        ));
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::super::facts::Fact;
    use super::*;

    fn run() -> SheddingRun {
        SheddingRun::new("tier1".to_owned(), 40, 20)
    }

    #[test]
    fn a_fact_counts_where_all_of_it_stood() {
        let check = |place: Range<usize>, kept: usize, shed: usize| {
            let fact = Fact { place, asked: vec![1], animal: "cat" };
            let facts = Facts { tokens: vec![0; 40], facts: vec![fact], candidates: vec![vec![2]] };
            let mut run = run();
            let gone = 4..24;
            run.count(&facts, Left::Shed, &[(true, false)], std::slice::from_ref(&gone));
            let asked = |place| run.recall_of(Left::Shed, place).map(|row| (row.asked, row.likeliest, row.said));
            assert_eq!(asked(Place::Kept), Some((kept, kept, 0)));
            assert_eq!(asked(Place::Shed), Some((shed, shed, 0)));
        };
        check(4..10, 0, 1);
        check(18..24, 0, 1);
        check(24..30, 1, 0);
        // Cut at either end.
        check(20..26, 0, 0);
        check(2..6, 0, 0);
    }

    #[test]
    fn claims_say_what_was_found() {
        let check = |known: [usize; 3], losses: [f64; 3], expected: [bool; 3]| {
            let mut run = run();
            for (left, likeliest) in [Left::Whole, Left::Shed, Left::Truncated].into_iter().zip(known) {
                run.recall.push(RecallRow { left, place: Place::Kept, asked: 20, likeliest, said: likeliest });
            }
            for document in ["a", "b", "c"] {
                let [loss_whole, loss_shed, loss_truncated] = losses;
                let (document, loss_least_seen) = (document.to_owned(), None);
                run.rest.push(RestRow { document, loss_whole, loss_shed, loss_truncated, loss_least_seen });
            }
            let holds: Vec<bool> = claims(&run).iter().map(|claim| claim.holds).collect();
            assert_eq!(holds, expected);
            let (ratio, _) = run.perplexity_ratio(Left::Shed);
            assert!((ratio - (losses[1] - losses[2]).exp()).abs() < 1e-9);
        };
        check([18, 18, 18], [2.0, 2.0, 2.0], [true, true, true]);
        check([18, 4, 18], [2.0, 2.1, 2.0], [false, false, false]);
        check([4, 4, 18], [2.0, 1.9, 2.0], [true, false, true]);
    }
}
