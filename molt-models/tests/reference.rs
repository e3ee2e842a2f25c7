//! The decoder against an independent implementation: greedy tokens and logits of llama.cpp on the same files, stored by
//! `fixtures/make.py`.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::pulled;
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_models::file::ModelFile;
use molt_models::sampling::argmax;
use molt_models::{Embedding, Model, Precision, Stored, Tokenizer};
use molt_scheduler::units::Tokens;
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    made_by: String,
    sha256: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    tokens: Vec<u32>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    /// The most likely tokens, best first.
    top: Vec<u32>,
    logits: Vec<f32>,
    mean: f32,
}

/// Both round inputs of every product to 8 bits, but not at the same places; two roundings of that kind move a logit by
/// some tenths. A choice may differ only where llama.cpp itself saw the two tokens closer than this.
const NEAR_TIE: f32 = 0.5;
/// How far a single logit of llama.cpp's favourites may be off, relative to the mean of all logits.
const CLOSE: f32 = 1.5;
/// And how far all of them may be off, as root mean square. A wrong rotation or a missing bias is off by whole units.
const CLOSE_RMS: f64 = 0.3;

fn check(name: &str, ladder: &str, text: &str) {
    let Some(path) = pulled(name, ladder) else { return };
    let reference: Reference = serde_json::from_str(text).unwrap();
    let file = ModelFile::open(&path).unwrap();
    let tokenizer = Tokenizer::new(file.vocabulary(), &path).unwrap();
    let (ledger, stop) = (Ledger::new(), StopFlag::new());
    let stored = Precision { linear: Stored::AsStored, table: Stored::AsStored };
    let model = Model::load(&file, &reference.sha256, stored, Embedding::OfFile, &ledger, &stop).unwrap();
    let (mut same, mut ties, mut squares, mut count, mut largest) = (0, 0, 0.0f64, 0u32, 0.0f32);
    for case in &reference.cases {
        assert_eq!(tokenizer.encode(&case.text).unwrap(), case.tokens, "{name}: {:?} in tokens", case.text);
        let mut cache = KvCache::new(model.cache_shape(), Tokens::new(300), &ledger).unwrap();
        let mut hidden = model.read(&case.tokens, &mut cache, &stop).unwrap();
        for (index, step) in case.steps.iter().enumerate() {
            model.with_logits(&hidden, |logits| {
                let mean = logits.iter().sum::<f32>() / logits.len() as f32;
                for (id, expected) in step.top.iter().zip(&step.logits) {
                    let off = (logits[usize::try_from(*id).unwrap()] - mean) - (expected - step.mean);
                    assert!(off.abs() < CLOSE, "{name}: {:?}, step {index}: token {id} is off by {off}", case.text);
                    largest = largest.max(off.abs());
                    squares += f64::from(off).powi(2);
                    count += 1;
                }
                let choice = argmax(logits);
                if choice == step.top[0] {
                    same += 1;
                } else {
                    let place = step.top.iter().position(|id| *id == choice);
                    let gap = place.map(|place| step.logits[0] - step.logits[place]);
                    let shown = gap.is_some_and(|gap| gap < NEAR_TIE);
                    assert!(
                        shown,
                        "{name}: {:?}, step {index}: chose {choice}, {gap:?} below {}",
                        case.text, step.top[0]
                    );
                    ties += 1;
                }
            });
            // Both go on with llama.cpp's choice, so that one near tie does not end the comparison.
            hidden = model.read(&step.top[..1], &mut cache, &stop).unwrap();
        }
    }
    let rms = (squares / f64::from(count)).sqrt();
    println!(
        "{name}: {same} greedy tokens as {}, {ties} near ties, logits off by {rms:.3} (rms), {largest:.2} at most",
        reference.made_by
    );
    assert!(rms < CLOSE_RMS, "{name}: logits are off by {rms} (rms)");
    assert!(ties * 10 <= same, "{name}: {ties} near ties against {same} equal tokens");
}

#[test]
fn smollm2_llama_family() {
    let text = include_str!("fixtures/smollm2-135m.json");
    check("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2", text);
}

#[test]
fn qwen_half_a_billion() {
    let text = include_str!("fixtures/qwen2.5-coder-0.5b.json");
    check("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder", text);
}

#[test]
fn qwen_one_and_a_half_billion() {
    let text = include_str!("fixtures/qwen2.5-coder-1.5b.json");
    check("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder", text);
}
