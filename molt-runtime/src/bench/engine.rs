//! Prefill and decode of rungs: tokens per second, against llama.cpp and against the bandwidth of memory.

use std::path::{Path, PathBuf};
use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::{Kind, Ledger};
use molt_models::sampling::argmax;
use molt_models::{Ladder, Model, ModelError, Part, Rung, Stored};
use molt_scheduler::units::{RungIdx, Tokens};
use serde::{Deserialize, Serialize};

use super::bandwidth::Bandwidth;
use super::stats::Spread;
use super::{LlamaCpp, LlamaCppError};
use crate::memory;

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

/// What `molt bench --only engine` measures.
#[derive(Debug, Clone)]
pub struct EngineSettings {
    /// Rungs; all where there are none.
    pub rungs: Vec<RungIdx>,
    /// Lengths of prompts, in tokens.
    pub prompts: Vec<usize>,
    /// Tokens decoded after each.
    pub decode_tokens: usize,
    /// Sequences that are decoded together.
    pub together: usize,
    /// Runs that count; one before them warms up.
    pub runs: usize,
    /// A Python interpreter with llama-cpp-python, to compare with.
    pub llama_cpp: Option<PathBuf>,
}

/// Why the engine was not measured.
#[derive(Debug, thiserror::Error)]
pub enum EngineBenchError {
    /// A model cannot be loaded or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// llama.cpp cannot be run.
    #[error(transparent)]
    LlamaCpp(#[from] LlamaCppError),
}

/// How rows name the precision of a model file as it is.
const AS_STORED: &str = "as stored";

/// One rung after prompts of one length: every run's figures, in the order in which they were measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineRow {
    /// The rung.
    pub rung: String,
    /// Its file.
    pub file: String,
    /// Its precision.
    pub precision: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Threads that computed.
    pub threads: usize,
    /// Prefill.
    pub prefill_tok_s: Vec<f64>,
    /// Decode.
    pub decode_tok_s: Vec<f64>,
    /// llama.cpp's prefill, after each run of ours; empty where it was not compared.
    pub llama_cpp_prefill_tok_s: Vec<f64>,
    /// llama.cpp's decode.
    pub llama_cpp_decode_tok_s: Vec<f64>,
    /// The bandwidth of memory, measured before each run.
    pub bandwidth_bytes_s: Vec<f64>,
    /// Bytes of weights that a token reads.
    pub weights_per_token_bytes: usize,
    /// Several sequences at once, of all together.
    pub together_tok_s: f64,
    /// One sequence alone, right before and after.
    pub alone_tok_s: f64,
    /// How many sequences.
    pub together: usize,
    /// What the model takes in the resident set, its scratch apart.
    pub resident_bytes: u64,
    /// What it takes in the books.
    pub weights_bytes: u64,
}

impl EngineRow {
    /// Prefill against llama.cpp's, run by run.
    pub fn prefill_ratio(&self) -> Option<Spread> {
        ratio(&self.prefill_tok_s, &self.llama_cpp_prefill_tok_s)
    }

    /// Decode against llama.cpp's, run by run.
    pub fn decode_ratio(&self) -> Option<Spread> {
        ratio(&self.decode_tok_s, &self.llama_cpp_decode_tok_s)
    }

    /// The part of the bandwidth that decoding used, run by run.
    pub fn bandwidth_ratio(&self) -> Option<Spread> {
        self.of_bandwidth(&self.decode_tok_s)
    }

    /// The part of it that llama.cpp used, where it reads the same bytes.
    pub fn llama_cpp_bandwidth_ratio(&self) -> Option<Spread> {
        if self.precision == AS_STORED { self.of_bandwidth(&self.llama_cpp_decode_tok_s) } else { None }
    }

    fn of_bandwidth(&self, tok_s: &[f64]) -> Option<Spread> {
        let bytes = self.weights_per_token_bytes as f64;
        let limit: Vec<f64> = self.bandwidth_bytes_s.iter().map(|bandwidth| bandwidth / bytes).collect();
        ratio(tok_s, &limit)
    }
}

/// Ratios of figures that were measured side by side; `None` where there are none.
fn ratio(ours: &[f64], theirs: &[f64]) -> Option<Spread> {
    Spread::of(&ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>())
}

/// Measures the rungs of a ladder; `done` is handed each row as soon as it stands. Runs of what is compared alternate, so
/// that the noise of a shared machine falls on both.
///
/// # Errors
/// Where a rung cannot be loaded or llama.cpp cannot be run.
pub fn measure(
    ladder: &Ladder,
    settings: &EngineSettings,
    mut done: impl FnMut(&EngineRow),
) -> Result<Vec<EngineRow>, EngineBenchError> {
    let bandwidth = Bandwidth::new();
    let mut rows = Vec::new();
    for (rung, index) in ladder.rungs().iter().zip(0u8..) {
        let index = RungIdx::new(index);
        if !settings.rungs.is_empty() && !settings.rungs.contains(&index) {
            continue;
        }
        let ledger = Ledger::new();
        let before = memory::resident_set();
        let model = rung.load(&ledger, &StopFlag::new())?;
        for prompt_tokens in &settings.prompts {
            let load = Workload { prompt_tokens: *prompt_tokens, decode_tokens: settings.decode_tokens };
            let mut row = compare((rung, &model), load, settings, &bandwidth, &ledger)?;
            row.rung = index.to_string();
            row.resident_bytes = (memory::resident_set() - before - ledger.used(Kind::Scratch)).get();
            done(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

fn compare(
    (rung, model): (&Rung, &Model),
    load: Workload,
    settings: &EngineSettings,
    bandwidth: &Bandwidth,
    ledger: &Ledger,
) -> Result<EngineRow, EngineBenchError> {
    let threads = rayon::current_num_threads();
    let widened = rung.precision().linear == Stored::F32;
    // llama.cpp runs the file as it is, or widened to 2-byte floats: there is nothing to compare other rungs with.
    let comparable = widened || rung.precision().to_string() == AS_STORED;
    let start = |python: &Path| LlamaCpp::start(python, rung.file().path(), widened, threads, load);
    let mut other = settings.llama_cpp.as_deref().filter(|_| comparable).map(start).transpose()?;
    let mut row = EngineRow {
        rung: String::new(),
        file: rung.file().path().file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        precision: rung.precision().to_string(),
        prompt_tokens: load.prompt_tokens,
        threads,
        prefill_tok_s: Vec::new(),
        decode_tok_s: Vec::new(),
        llama_cpp_prefill_tok_s: Vec::new(),
        llama_cpp_decode_tok_s: Vec::new(),
        bandwidth_bytes_s: Vec::new(),
        weights_per_token_bytes: model.bytes_per_token(),
        together_tok_s: 0.0,
        alone_tok_s: 0.0,
        together: settings.together,
        resident_bytes: 0,
        weights_bytes: ledger.used(Kind::Weights).get(),
    };
    run(model, load, ledger)?;
    for _ in 0..settings.runs {
        row.bandwidth_bytes_s.push(bandwidth.measure());
        let ours = run(model, load, ledger)?;
        row.prefill_tok_s.push(ours.prefill_tok_s);
        row.decode_tok_s.push(ours.decode_tok_s);
        if let Some(theirs) = other.as_mut().map(LlamaCpp::run).transpose()? {
            row.llama_cpp_prefill_tok_s.push(theirs.prefill_tok_s);
            row.llama_cpp_decode_tok_s.push(theirs.decode_tok_s);
        }
    }
    let short = Workload { prompt_tokens: 32, ..load };
    let alone = [run_together(model, 1, short, ledger)?];
    row.together_tok_s = run_together(model, settings.together, short, ledger)?;
    let alone = [alone[0], run_together(model, 1, short, ledger)?];
    row.alone_tok_s = alone.iter().sum::<f64>() / 2.0;
    Ok(row)
}
