//! Prefill and decode of one rung: tokens per second, against llama.cpp and against the bandwidth of memory.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::sampling::argmax;
use molt_models::{Model, ModelError, Part};
use molt_scheduler::units::Tokens;
use rayon::prelude::*;
use serde::Serialize;

/// What is read and written in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens decoded after it.
    pub decode_tokens: usize,
}

/// Tokens per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// Of the prompt.
    pub prefill_tok_s: f64,
    /// Of the answer.
    pub decode_tok_s: f64,
}

/// Reads a prompt and decodes greedily, once. The tokens are arbitrary: speed does not depend on them.
pub fn run(model: &Model, load: Workload, ledger: &Ledger) -> Result<Speed, ModelError> {
    let stop = StopFlag::new();
    let limit = Tokens::from(load.prompt_tokens + load.decode_tokens + 1);
    let mut cache = KvCache::new(model.cache_shape(), limit, ledger)?;
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let prompt: Vec<u32> = (0u32..).map(|i| i.wrapping_mul(7919) % 100_000 % vocab).take(load.prompt_tokens).collect();
    let start = Instant::now();
    let mut hidden = model.read(&prompt, &mut cache, &stop)?;
    // The first token of the answer belongs to the prompt's time, as a person waits for it.
    let mut next = model.with_logits(&hidden, |logits| argmax(logits));
    let middle = Instant::now();
    for _ in 0..load.decode_tokens {
        hidden = model.read(&[next], &mut cache, &stop)?;
        next = model.with_logits(&hidden, |logits| argmax(logits));
    }
    let end = Instant::now();
    Ok(Speed {
        prefill_tok_s: load.prompt_tokens as f64 / (middle - start).as_secs_f64(),
        decode_tok_s: load.decode_tokens as f64 / (end - middle).as_secs_f64(),
    })
}

/// Decodes greedily for several sequences at a time, each after a prompt of its own: tokens per second of all together.
pub fn run_together(model: &Model, tenants: usize, load: Workload, ledger: &Ledger) -> Result<f64, ModelError> {
    let stop = StopFlag::new();
    let limit = Tokens::from(load.prompt_tokens + load.decode_tokens + 1);
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let (mut caches, mut next) = (Vec::new(), Vec::new());
    for tenant in (0u32..).take(tenants) {
        let mut cache = KvCache::new(model.cache_shape(), limit, ledger)?;
        let prompt = (1u32..).map(|i| (i.wrapping_mul(7919) ^ tenant) % 100_000 % vocab);
        let hidden = model.read(&prompt.take(load.prompt_tokens).collect::<Vec<_>>(), &mut cache, &stop)?;
        next.push([model.with_logits(&hidden, |logits| argmax(logits))]);
        caches.push(cache);
    }
    let start = Instant::now();
    for _ in 0..load.decode_tokens {
        let parts = caches.iter_mut().zip(&next).map(|(cache, tokens)| Part { tokens, cache });
        let hidden = model.read_together(&mut parts.collect::<Vec<_>>(), &stop)?;
        model.with_each_logits(&hidden, |tenant, logits| next[tenant] = [argmax(logits)]);
    }
    Ok((tenants * load.decode_tokens) as f64 / start.elapsed().as_secs_f64())
}

/// Bytes per second at which all threads of the pool together read memory, the best of some runs.
pub fn read_bandwidth() -> f64 {
    const WORDS: usize = 1 << 26;
    let memory = vec![1u64; WORDS];
    let share = WORDS / rayon::current_num_threads().max(1);
    let once = || {
        let start = Instant::now();
        let sums = memory.par_chunks(share).map(|part| part.iter().fold(0u64, |sum, word| sum ^ word));
        std::hint::black_box(sums.reduce(|| 0, |a, b| a ^ b));
        (WORDS * size_of::<u64>()) as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(|_| once()).fold(0.0, f64::max)
}
