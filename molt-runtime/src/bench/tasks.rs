//! Small questions that have a right answer, answered across a switch: always the big model, always the small one, and from
//! the one to the other in front of the answer or in the middle of it. Both models stay in memory, for what is asked here is
//! what an answer is worth and not how long it takes; caches go over the bridge as they do in the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use molt_kv::bridge::Bridge;
use molt_kv::cache::{CacheError, KvCache};
use molt_kv::carry::{CarryError, CarrySettings, carry};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Message, Model, ModelError};
use molt_scheduler::units::{RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use super::answering::greedy;
use super::ladder::bridged;
use super::results::{Claim, Section};
use super::stats::{sign_test, wilson};
use crate::engine::{Effort, pace};

/// The questions.
const QUESTIONS: &str = include_str!("../../../texts/questions.jsonl");
/// Tokens of an answer, at most: the longest right one has fewer.
const LONGEST: usize = 48;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    kind: String,
    ask: String,
    right: Vec<String>,
}

/// Who answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The bigger model, all the time.
    Big,
    /// The smaller one, all the time; it is also what a switch in front of the answer gives where everything is read again,
    /// to the last bit.
    Small,
    /// The bigger one writes half of the answer, the smaller one reads everything again and goes on.
    RereadWithin,
    /// The question is read by the bigger one, and the cache carried in front of the answer, hardly more than mapped.
    FastBefore,
    /// The same with the default carry.
    DefaultBefore,
    /// The same with the most faithful carry, which is what the engine takes where its reader's time allows.
    FaithfulBefore,
    /// The bigger one writes half of the answer, and the cache is carried by default.
    DefaultWithin,
    /// The same with the most faithful carry.
    FaithfulWithin,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Big,
        Self::Small,
        Self::RereadWithin,
        Self::FastBefore,
        Self::DefaultBefore,
        Self::FaithfulBefore,
        Self::DefaultWithin,
        Self::FaithfulWithin,
    ];

    /// How much is read natively when the cache comes over, and whether half of the answer is there by then.
    fn carried(self) -> Option<(Effort, bool)> {
        match self {
            Self::Big | Self::Small | Self::RereadWithin => None,
            Self::FastBefore => Some((Effort::Fixed(CarrySettings::FAST), false)),
            Self::DefaultBefore => Some((Effort::default(), false)),
            Self::FaithfulBefore => Some((Effort::Fixed(CarrySettings::FAITHFUL), false)),
            Self::DefaultWithin => Some((Effort::default(), true)),
            Self::FaithfulWithin => Some((Effort::Fixed(CarrySettings::FAITHFUL), true)),
        }
    }

    /// What it is to be compared with: the same switch where everything is read again.
    pub fn read_again(self) -> Option<Self> {
        self.carried().map(|(_, within)| if within { Self::RereadWithin } else { Self::Small })
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Big => "always the big one",
            Self::Small => "always the small one",
            Self::RereadWithin => "read again within the answer",
            Self::FastBefore => "Molt before the answer, fast",
            Self::DefaultBefore => "Molt before the answer, default",
            Self::FaithfulBefore => "Molt before the answer, faithful",
            Self::DefaultWithin => "Molt within the answer, default",
            Self::FaithfulWithin => "Molt within the answer, faithful",
        })
    }
}

/// One question and what was said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskRow {
    /// Rungs, the bigger first.
    pub pair: String,
    /// Its kind.
    pub kind: String,
    /// What was asked.
    pub ask: String,
    /// What is right.
    pub right: Vec<String>,
    /// Tokens that were in the cache when the question had been read.
    pub context_tokens: usize,
    /// What was said, each way.
    pub said: BTreeMap<Way, String>,
}

impl TaskRow {
    /// Whether an answer is right: the same as one that is, but for case, blanks and a mark at its end.
    pub fn is_right(&self, way: Way) -> bool {
        self.said.get(&way).is_some_and(|said| self.right.iter().any(|right| plain(right) == plain(said)))
    }

    /// Whether a right answer stands anywhere in what was said, as words of its own: an answer in a whole sentence is not
    /// what was asked for, but not wrong either.
    pub fn is_named(&self, way: Way) -> bool {
        let words = |text: &str| format!(" {} ", plain(&text.replace(|c: char| !c.is_alphanumeric(), " ")));
        // What has no letters or digits can only be the whole answer.
        let named = |said: &str, right: &str| !words(right).trim().is_empty() && words(said).contains(&words(right));
        let said = self.said.get(&way);
        self.is_right(way) || said.is_some_and(|said| self.right.iter().any(|right| named(said, right)))
    }
}

/// How many of the rows' questions were answered rightly.
pub fn right<'a>(rows: impl IntoIterator<Item = &'a TaskRow>, way: Way) -> usize {
    rows.into_iter().filter(|row| row.is_right(way)).count()
}

/// How many of the right answers stand at least somewhere in what was said.
pub fn named<'a>(rows: impl IntoIterator<Item = &'a TaskRow>, way: Way) -> usize {
    rows.into_iter().filter(|row| row.is_named(way)).count()
}

/// Questions that only one of two ways answers rightly.
pub fn apart(rows: &[TaskRow], one: Way, other: Way) -> (usize, usize) {
    let only = |a: Way, b: Way| rows.iter().filter(|row| row.is_right(a) && !row.is_right(b)).count();
    (only(one, other), only(other, one))
}

fn plain(text: &str) -> String {
    let text = text.trim().trim_end_matches(['.', '!']).trim_matches(['"', '\'', '`']);
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// Why nothing was asked.
#[derive(Debug, thiserror::Error)]
pub enum TasksError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A carry.
    #[error(transparent)]
    Carry(#[from] CarryError),
    /// A cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The questions that ship are broken.
    #[error("texts/questions.jsonl, line {line}")]
    Question {
        /// Where.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A ladder without a way down between models.
    #[error("the ladder has no bridge from a bigger model to a smaller one")]
    NoBridge,
}

fn questions() -> Result<Vec<Question>, TasksError> {
    let parse = |(at, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|source| TasksError::Question { line: at + 1, source })
    };
    QUESTIONS.lines().enumerate().map(parse).collect()
}

/// Asks the first `count` questions; kinds take turns. `done` hears of each.
pub fn measure(ladder: &Ladder, count: usize, mut done: impl FnMut(&TaskRow)) -> Result<Section<TaskRow>, TasksError> {
    let started = Instant::now();
    let pair = bridged(ladder)?.into_iter().find(|(from, to)| from < to).ok_or(TasksError::NoBridge)?;
    let ledger = Ledger::new();
    let bench = Bench::load(ladder, pair, &ledger)?;
    let mut rows = Vec::new();
    for question in questions()?.into_iter().take(count) {
        let row = bench.ask(question)?;
        done(&row);
        rows.push(row);
    }
    let claims = claims(&rows);
    Ok(Section { rows, claims, took_s: started.elapsed().as_secs_f64() })
}

/// How many questions there are.
pub fn how_many() -> usize {
    QUESTIONS.lines().count()
}

/// What comes before every question, so that answers are short: none of them is asked.
const SHOWN: [(&str, &str); 5] = [
    ("Answer with the answer alone, as short as possible. What is 5 + 4?", "9"),
    ("What is the capital of Spain?", "Madrid"),
    ("Repeat this exactly: grey wool, 40 m", "grey wool, 40 m"),
    ("Tom is in the tower, Mia is in the library. Where is Mia?", "library"),
    ("Count from 1 to 4, separated by commas.", "1, 2, 3, 4"),
];

struct Bench<'a> {
    ladder: &'a Ladder,
    pair: String,
    big: Model,
    small: Model,
    bridge: Bridge,
    ledger: &'a Ledger,
    /// Of the small one, in operations a millisecond.
    pace: f64,
    /// What every prompt begins with, read by each.
    shown: Vec<u32>,
    big_shown: KvCache,
    small_shown: KvCache,
}

impl<'a> Bench<'a> {
    fn load(ladder: &'a Ladder, (from, to): (RungIdx, RungIdx), ledger: &'a Ledger) -> Result<Self, TasksError> {
        let load = |rung: RungIdx| {
            let rung = ladder.rung(rung).ok_or(TasksError::NoBridge)?;
            Ok::<_, TasksError>(rung.load(ledger, &StopFlag::new())?)
        };
        let (big, small) = (load(from)?, load(to)?);
        let bridge = ladder.bridge(from, to, ledger)?.ok_or(TasksError::NoBridge)?;
        // As far as two prompts are the same.
        let (one, other) = (prompt(ladder, "1")?, prompt(ladder, "Who?")?);
        let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        let shown = one[..same].to_vec();
        let read = |model: &Model| {
            let mut cache = KvCache::new(model.cache_shape(), Tokens::from(same), ledger)?;
            model.read(&shown, &mut cache, &StopFlag::new())?;
            Ok::<_, TasksError>(cache)
        };
        let (big_shown, small_shown) = (read(&big)?, read(&small)?);
        let (pair, pace) = (format!("{from}:{to}"), pace(&small, ledger)?);
        Ok(Self { ladder, pair, big, small, bridge, ledger, pace, shown, big_shown, small_shown })
    }

    fn ask(&self, question: Question) -> Result<TaskRow, TasksError> {
        let prompt = prompt(self.ladder, &question.ask)?;
        let (last, read) =
            prompt.split_last().map_or((&[][..], &[][..]), |(last, read)| (std::slice::from_ref(last), read));
        let mut big = self.begun(&self.big, &self.big_shown, read)?;
        let mut small = self.begun(&self.small, &self.small_shown, read)?;
        let tokenizer = self.ladder.tokenizer();
        let ends = |token: u32| tokenizer.is_end(token) || tokenizer.token_bytes(token).contains(&b'\n');
        let whole = greedy(&self.big, &mut big, last, LONGEST, ends)?;
        // Half of the answer, and at least its first token, is there when the switch comes in its middle; the last of them
        // has not been read yet.
        let half = &whole[..whole.len().div_ceil(2)];
        let seam = half.split_last().map(|(unread, before)| ([last, before].concat(), std::slice::from_ref(unread)));
        let mut said = BTreeMap::new();
        for way in Way::ALL {
            let tokens = match (way, way.carried()) {
                (Way::Big, _) => whole.clone(),
                (Way::Small, _) => greedy(&self.small, &mut small, last, LONGEST, ends)?,
                (_, None) => match &seam {
                    Some((within, unread)) => {
                        let rest = greedy(&self.small, &mut small, &[within, *unread].concat(), LONGEST, ends)?;
                        [half, &rest].concat()
                    }
                    None => Vec::new(),
                },
                (_, Some((effort, true))) => match &seam {
                    Some((within, unread)) => {
                        let kept = big.len();
                        self.big.read(within, &mut big, &StopFlag::new())?;
                        let mut cache = self.carried(&big, effort)?;
                        big.truncate(kept);
                        [half, &greedy(&self.small, &mut cache, unread, LONGEST, ends)?].concat()
                    }
                    None => Vec::new(),
                },
                (_, Some((effort, false))) => {
                    let mut cache = self.carried(&big, effort)?;
                    greedy(&self.small, &mut cache, last, LONGEST, ends)?
                }
            };
            said.insert(way, tokenizer.decode(&tokens).trim().to_owned());
        }
        let Question { kind, ask, right } = question;
        Ok(TaskRow { pair: self.pair.clone(), kind, ask, right, context_tokens: read.len(), said })
    }

    /// A cache in which a prompt has been read up to its last token.
    fn begun(&self, model: &Model, shown: &KvCache, read: &[u32]) -> Result<KvCache, TasksError> {
        let same = if read.starts_with(&self.shown) { shown.len() } else { 0 };
        let mut cache = shown.prefix(same, Tokens::from(read.len() + 2 * LONGEST + 2), self.ledger)?;
        model.read(&read[same..], &mut cache, &StopFlag::new())?;
        Ok(cache)
    }

    fn carried(&self, source: &KvCache, effort: Effort) -> Result<KvCache, TasksError> {
        let settings = effort.settings(Some(self.pace), &self.bridge, &self.small, Tokens::from(source.len()));
        let ends = (source, self.big.rope());
        Ok(carry(&self.bridge, ends, None, &self.small, settings, self.ledger, &StopFlag::new())?.0)
    }
}

/// The question after the shown ones, as the models' own template writes it.
fn prompt(ladder: &Ladder, ask: &str) -> Result<Vec<u32>, ModelError> {
    let text = match ladder.template() {
        Some(template) => {
            let shown =
                SHOWN.iter().flat_map(|(ask, said)| [Message::new("user", ask), Message::new("assistant", said)]);
            template.render(&shown.chain([Message::new("user", ask)]).collect::<Vec<_>>(), &[])?
        }
        None => {
            let shown = SHOWN.iter().map(|(ask, said)| format!("Question: {ask}\nAnswer: {said}\n"));
            format!("{}Question: {ask}\nAnswer:", shown.collect::<String>())
        }
    };
    ladder.tokenizer().encode(&text)
}

fn claims(rows: &[TaskRow]) -> Vec<Claim> {
    let claim = |way: Way| {
        let again = way.read_again()?;
        let (gained, lost) = apart(rows, way, again);
        let chance = sign_test(gained, lost);
        let likely = if chance < 0.01 { "p < 0.01".to_owned() } else { format!("p = {chance:.2}") };
        let range = |way| {
            let (low, high) = wilson(right(rows, way), rows.len())?;
            Some(format!("{} of {} ({:.0} to {:.0} %)", right(rows, way), rows.len(), low * 100.0, high * 100.0))
        };
        let (found, beside) = (range(way)?, range(again)?);
        Some(Claim::new(
            format!("{way}: no fewer right answers than where everything is read again"),
            gained >= lost || chance >= 0.05,
            format!("{found} against {beside}; {gained} gained, {lost} lost, {likely}"),
        ))
    };
    Way::ALL.into_iter().filter_map(claim).collect()
}

/// The kinds of questions, in order.
pub fn kinds(rows: &[TaskRow]) -> BTreeSet<&str> {
    rows.iter().map(|row| row.kind.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn there_are_enough_questions_and_each_is_asked_once() {
        let questions = questions().unwrap();
        assert!(questions.len() >= 100 && questions.len() == how_many());
        let asked: BTreeSet<&str> = questions.iter().map(|question| question.ask.as_str()).collect();
        assert_eq!(asked.len(), questions.len());
        assert!(SHOWN.iter().all(|(ask, _)| !asked.contains(ask)), "what is shown is not asked");
        for question in &questions {
            assert!(!question.right.is_empty() && question.right.iter().all(|right| !plain(right).is_empty()));
        }
        let first: BTreeSet<&str> = questions.iter().take(16).map(|question| question.kind.as_str()).collect();
        assert_eq!(first.len(), questions.iter().map(|q| &q.kind).collect::<BTreeSet<_>>().len(), "kinds take turns");
    }

    #[test]
    fn what_is_right() {
        let check = |said: &str, right: &[&str], expected: bool, named: bool| {
            let row = TaskRow {
                pair: String::new(),
                kind: String::new(),
                ask: String::new(),
                right: right.iter().map(|right| (*right).to_owned()).collect(),
                context_tokens: 0,
                said: BTreeMap::from([(Way::Big, said.to_owned())]),
            };
            assert_eq!((row.is_right(Way::Big), row.is_named(Way::Big)), (expected, named), "{said:?}");
            assert!(!row.is_right(Way::Small) && !row.is_named(Way::Small), "what was not said is not right");
        };
        check("Paris", &["Paris"], true, true);
        check(" paris. ", &["Paris"], true, true);
        check("`append()`", &["append", "append()"], true, true);
        check("The capital is Paris.", &["Paris"], false, true);
        check("17 + 26 = 43", &["43"], false, true);
        check("43", &["4"], false, false);
        check("3,  4", &["3, 4"], true, true);
        check("3,4", &["3, 4"], false, true);
        check("&", &["&"], true, true);
        check("the & operator", &["&"], false, false);
        check("", &["Paris"], false, false);
    }

    #[test]
    fn a_switch_where_everything_is_read_again_is_the_small_model_and_halves_are_of_the_big_one() {
        let ladder = Ladder::open("pocket", Path::new("unused")).unwrap();
        let mut asked = 0;
        let section = measure(&ladder, 2, |_| asked += 1).unwrap();
        assert_eq!((section.rows.len(), asked), (2, 2));
        for row in &section.rows {
            assert_eq!(row.said.len(), Way::ALL.len());
            let begins = |way: Way| row.said[&way].chars().next() == row.said[&Way::Big].chars().next();
            assert!(begins(Way::RereadWithin) && begins(Way::DefaultWithin) && begins(Way::FaithfulWithin), "{row:?}");
        }
    }
}
