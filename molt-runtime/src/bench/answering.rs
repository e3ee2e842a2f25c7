//! Going on from a cache: what a model would say next, and how likely it finds what is put before it. The cache is left as
//! it was.

use molt_kv::cache::KvCache;
use molt_kv::decoder::StopFlag;
use molt_models::sampling::argmax;
use molt_models::{Model, ModelError};

use crate::eval::metrics::LogProbs;

/// Reads `tokens` after the cache and goes on greedily with at most `most` more, until `ends` says that one is the end.
/// Without tokens to read nothing is said.
pub(super) fn greedy(
    model: &Model,
    cache: &mut KvCache,
    tokens: &[u32],
    most: usize,
    ends: impl Fn(u32) -> bool,
) -> Result<Vec<u32>, ModelError> {
    let (before, stop) = (cache.len(), StopFlag::new());
    let mut said = Vec::new();
    let mut next = tokens.to_vec();
    while said.len() < most && !next.is_empty() {
        let hidden = model.read(&next, cache, &stop)?;
        let token = model.with_logits(&hidden, |logits| argmax(logits));
        next.clear();
        if !ends(token) {
            said.push(token);
            next.push(token);
        }
    }
    cache.truncate(before);
    Ok(said)
}

/// The log-likelihood of each continuation after the cache and `tokens`, which are not empty.
pub(super) fn likelihoods(
    model: &Model,
    cache: &mut KvCache,
    tokens: &[u32],
    continuations: &[Vec<u32>],
) -> Result<Vec<f64>, ModelError> {
    let (before, stop) = (cache.len(), StopFlag::new());
    let hidden = model.read(tokens, cache, &stop)?;
    let first = model.with_logits(&hidden, |logits| LogProbs::of(logits));
    let asked = cache.len();
    let mut found = Vec::new();
    for continuation in continuations {
        let [head, rest @ ..] = &continuation[..] else {
            found.push(0.0);
            continue;
        };
        let mut sum = -first.loss(*head);
        if !rest.is_empty() {
            let hidden = model.read_all(&continuation[..rest.len()], cache, &stop)?;
            let each = LogProbs::of_each(model, &hidden);
            sum -= each.iter().zip(rest).map(|(position, token)| position.loss(*token)).sum::<f64>();
            cache.truncate(asked);
        }
        found.push(sum);
    }
    cache.truncate(before);
    Ok(found)
}

/// The loss of each token of `truth`, in nats, where the tokens before it are `tokens` after the cache.
pub(super) fn losses(
    model: &Model,
    cache: &mut KvCache,
    tokens: &[u32],
    truth: &[u32],
) -> Result<Vec<f64>, ModelError> {
    let before = cache.len();
    let hidden = model.read_all(tokens, cache, &StopFlag::new())?;
    cache.truncate(before);
    let mut losses = Vec::with_capacity(truth.len());
    // Distributions over a large vocabulary are not all held at once.
    for (hidden, truth) in hidden.chunks(HELD * model.config().width).zip(truth.chunks(HELD)) {
        let each = LogProbs::of_each(model, hidden);
        losses.extend(each.iter().zip(truth).map(|(position, token)| position.loss(*token)));
    }
    Ok(losses)
}

/// Distributions that are held at once.
const HELD: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    use std::path::Path;

    use molt_kv::decoder::Decoder as _;
    use molt_kv::ledger::Ledger;
    use molt_models::Ladder;
    use molt_scheduler::units::{RungIdx, Tokens};

    #[test]
    fn what_is_likely_is_said_and_the_cache_stays_as_it_was() {
        let ladder = Ladder::open("pocket", Path::new("unused")).unwrap();
        let ledger = Ledger::new();
        let model = ladder.rung(RungIdx::new(2)).unwrap().load(&ledger, &StopFlag::new()).unwrap();
        let text = ladder.tokenizer().encode("The people of the United States are a great").unwrap();
        let mut cache = KvCache::new(model.cache_shape(), Tokens::new(64), &ledger).unwrap();
        let (old, asked) = text.split_at(text.len() - 2);
        model.read(old, &mut cache, &StopFlag::new()).unwrap();
        let said = greedy(&model, &mut cache, asked, 3, |_| false).unwrap();
        assert_eq!((said.len(), cache.len()), (3, old.len()));
        // An end is not part of what is said, and what was said before it stays.
        assert!(greedy(&model, &mut cache, asked, 3, |token| token == said[0]).unwrap().is_empty());
        assert!(greedy(&model, &mut cache, &[], 3, |_| false).unwrap().is_empty());
        // Of all single tokens the one that is said is the likeliest, and a likelihood is the sum of the losses.
        let every: Vec<Vec<u32>> = (0u32..).take(model.config().vocab).map(|token| vec![token]).collect();
        let singles = likelihoods(&model, &mut cache, asked, &every).unwrap();
        let best = singles.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(singles[said[0] as usize], best);
        assert!((singles.iter().map(|log| log.exp()).sum::<f64>() - 1.0).abs() < 1e-6, "they are probabilities");
        let whole = likelihoods(&model, &mut cache, asked, &[said.clone(), Vec::new()]).unwrap();
        let mut read = asked.to_vec();
        read.extend(&said[..2]);
        let losses = losses(&model, &mut cache, &read[1..], &said).unwrap();
        assert_eq!((losses.len(), whole[1], cache.len()), (3, 0.0, old.len()));
        let direct = {
            let mut cache = cache.prefix(old.len(), Tokens::new(64), &ledger).unwrap();
            model.read(&asked[..1], &mut cache, &StopFlag::new()).unwrap();
            super::losses(&model, &mut cache, &read[1..], &said).unwrap()
        };
        assert!((whole[0] + direct.iter().sum::<f64>()).abs() < 1e-9, "{} and {direct:?}", whole[0]);
    }
}
