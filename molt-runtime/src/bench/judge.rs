//! What the biggest rung thinks of an answer: how likely it finds it, and how much of it is said over and over, for a model
//! finds its own repetitions very likely. No headline: an answer that only flatters its judge does well here.

use std::collections::BTreeSet;

use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::{Ladder, Model, ModelError};
use molt_scheduler::units::Tokens;
use serde::{Deserialize, Serialize};

use super::answering::losses;

/// What was found about an answer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judged {
    /// The mean log-probability of its tokens after the prompt, in nats.
    pub mean_logprob_nats: f64,
    /// The share of its runs of four tokens that were there before.
    pub repeated_ratio: f64,
}

/// The biggest rung of a ladder.
pub(super) struct Judge<'a> {
    ladder: &'a Ladder,
    model: Model,
    ledger: Ledger,
}

impl<'a> Judge<'a> {
    pub(super) fn load(ladder: &'a Ladder) -> Result<Self, ModelError> {
        let ledger = Ledger::new();
        // A checked ladder has at least one.
        let model = ladder.rungs()[0].load(&ledger, &StopFlag::new())?;
        Ok(Self { ladder, model, ledger })
    }

    /// An answer to a prompt; nothing about one of no words.
    pub(super) fn judge(&self, prompt: &[u32], answer: &str) -> Result<Option<Judged>, ModelError> {
        let answer = self.ladder.tokenizer().encode(answer)?;
        let Some((last, read)) = prompt.split_last().filter(|_| !answer.is_empty()) else { return Ok(None) };
        let limit = Tokens::from(prompt.len() + answer.len());
        let mut cache = KvCache::new(self.model.cache_shape(), limit, &self.ledger)?;
        if !read.is_empty() {
            self.model.read(read, &mut cache, &StopFlag::new())?;
        }
        let before = [&[*last], &answer[..answer.len() - 1]].concat();
        let losses = losses(&self.model, &mut cache, &before, &answer)?;
        let mean_logprob_nats = -losses.iter().sum::<f64>() / losses.len() as f64;
        Ok(Some(Judged { mean_logprob_nats, repeated_ratio: repeated(&answer) }))
    }
}

fn repeated(tokens: &[u32]) -> f64 {
    let runs = tokens.len().saturating_sub(3);
    let different = tokens.windows(4).collect::<BTreeSet<_>>().len();
    if runs == 0 { 0.0 } else { (runs - different) as f64 / runs as f64 }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_said_over_and_over() {
        let check = |tokens: &[u32], expected: f64| assert!((repeated(tokens) - expected).abs() < 1e-9, "{tokens:?}");
        check(&[], 0.0);
        check(&[1, 1, 1], 0.0);
        check(&[1, 2, 3, 4, 5], 0.0);
        check(&[1, 1, 1, 1, 1, 1], 2.0 / 3.0);
        check(&[1, 2, 3, 4, 1, 2, 3, 4], 1.0 / 5.0);
    }

    #[test]
    fn a_judge_likes_english_better_than_letters() {
        let ladder = Ladder::open("pocket", Path::new("unused")).unwrap();
        let judge = Judge::load(&ladder).unwrap();
        let prompt = ladder.tokenizer().encode("The people of the United States").unwrap();
        let of = |answer: &str| judge.judge(&prompt, answer).unwrap();
        let (english, letters) = (of(" have the right to be heard.").unwrap(), of(" qx zzkt vwp hjj.").unwrap());
        assert!(english.mean_logprob_nats > letters.mean_logprob_nats + 1.0, "{english:?} {letters:?}");
        assert_eq!(of(""), None);
    }
}
