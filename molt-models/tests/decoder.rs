//! The fast decoder against its differentiable twin, and against itself cut at layers and chunks.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use common::{PROSE, TIER0, TIER1, TIER2, load, log_softmax, pocket, read};
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::{Kind, Ledger};
use molt_models::autograd::AutogradDecoder;
use molt_models::kernels::Weights;
use molt_models::{Model, Rung};
use molt_scheduler::units::{Bytes, RungIdx, Tokens};

/// The same weights as candle tensors.
fn twin(rung: &Rung) -> AutogradDecoder {
    let file = rung.file();
    let weights: HashMap<String, Tensor> = file
        .tensors()
        .map(|(name, entry)| {
            let bytes = &file.region().bytes()[entry.range.clone()];
            let weights = Weights::new(entry.format, entry.rows, entry.columns, bytes).unwrap();
            let mut values = vec![0.0f32; entry.rows * entry.columns];
            for (row, out) in values.chunks_exact_mut(entry.columns).enumerate() {
                weights.dequantize_row(row, out);
            }
            let tensor = if name.ends_with("norm.weight") || name.ends_with("bias") {
                Tensor::from_vec(values, entry.columns, &Device::Cpu)
            } else {
                Tensor::from_vec(values, (entry.rows, entry.columns), &Device::Cpu)
            };
            (name.to_owned(), tensor.unwrap())
        })
        .collect();
    AutogradDecoder::new(rung.config().clone(), weights)
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |m: f64, (x, y)| m.max((x - y).abs()))
}

fn check_against_twin(rung: RungIdx, tolerance: f64) {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let input = Tensor::from_slice(&tokens, (1, tokens.len()), &Device::Cpu).unwrap();
    let logits = twin(ladder.rung(rung).unwrap()).forward(&input).unwrap();
    let last = logits.squeeze(0).unwrap().get(tokens.len() - 1).unwrap();
    let expected: Vec<f64> =
        candle_nn::ops::log_softmax(&last, 0).unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect();
    let model = load(&ladder, rung, &ledger);
    let (_, hidden) = read(&model, &tokens, &ledger);
    let found = log_softmax(&model, &hidden);
    let off = largest_difference(&found, &expected);
    assert!(off < tolerance, "{rung}: log-probabilities differ by up to {off}");
}

#[test]
fn the_fast_decoder_is_the_differentiable_one() {
    // The fast one keeps keys and values at f16 (11 bits), hence the tolerance; tier1 rounds weights to 8 bits as well.
    check_against_twin(TIER0, 0.03);
    check_against_twin(TIER2, 0.03);
    check_against_twin(TIER1, 0.3);
}

fn check_chunks(model: &Model, tokens: &[u32], whole: &[f64], sizes: &[usize], ledger: &Ledger) {
    let mut cache = KvCache::new(model.cache_shape(), Tokens::new(600), ledger).unwrap();
    let (mut at, mut hidden) = (0, Vec::new());
    for size in sizes.iter().cycle() {
        let end = (at + size).min(tokens.len());
        hidden = model.read(&tokens[at..end], &mut cache, &StopFlag::new()).unwrap();
        at = end;
        if at == tokens.len() {
            break;
        }
    }
    let off = largest_difference(&log_softmax(model, &hidden), whole);
    // Lone tokens take the integer product, which rounds inputs to 8 bits where weights are quantised.
    assert!(off < 0.1, "chunks of {sizes:?}: log-probabilities differ by up to {off}");
}

#[test]
fn chunks_make_no_difference() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    for rung in [TIER0, TIER1, TIER2] {
        let model = load(&ladder, rung, &ledger);
        let (_, hidden) = read(&model, &tokens, &ledger);
        let whole = log_softmax(&model, &hidden);
        for sizes in [&[1][..], &[7], &[64], &[3, 1, 50]] {
            check_chunks(&model, &tokens, &whole, sizes, &ledger);
        }
    }
}

#[test]
fn layers_run_one_by_one() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let model = load(&ladder, TIER0, &ledger);
    let (whole, expected) = read(&model, &tokens, &ledger);
    let mut cache = KvCache::new(model.cache_shape(), Tokens::new(600), &ledger).unwrap();
    let slots = cache.append(&tokens).unwrap();
    let mut hidden = Vec::new();
    model.embed(&tokens, &mut hidden);
    for layer in 0..model.config().layers {
        model.run_layers(layer..layer + 1, &mut hidden, &mut cache, slots.clone(), &StopFlag::new()).unwrap();
        assert_eq!(cache.keys(layer), whole.keys(layer));
        assert_eq!(cache.values(layer), whole.values(layer));
    }
    assert_eq!(hidden[hidden.len() - model.config().width..], expected);
}

#[test]
fn a_step_that_is_given_up_leaves_no_trace() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let model = load(&ladder, TIER0, &ledger);
    let (mut cache, _) = read(&model, &tokens[..40], &ledger);
    let (before, used) = (cache.slots().to_vec(), ledger.total());
    let stop = StopFlag::new();
    stop.raise();
    assert!(model.read(&tokens[40..], &mut cache, &stop).is_err());
    assert_eq!((cache.slots(), ledger.total()), (&before[..], used));
    stop.lower();
    let again = model.read(&tokens[40..], &mut cache, &stop).unwrap();
    let (_, expected) = read(&model, &tokens, &ledger);
    assert!(largest_difference(&log_softmax(&model, &again), &log_softmax(&model, &expected)) < 0.01);
}

#[test]
fn the_books_are_what_was_foretold() {
    let ladder = pocket();
    for (rung, cost) in ladder.cost().rungs() {
        let ledger = Ledger::new();
        let model = load(&ladder, rung, &ledger);
        assert_eq!((ledger.used(Kind::Weights), ledger.used(Kind::Scratch)), (cost.weights, cost.scratch), "{rung}");
        let (cache, _) = read(&model, &[1, 2, 3], &ledger);
        assert_eq!(ledger.used(Kind::Cache), cost.cache_per_token.times(Tokens::new(3)));
        drop((model, cache));
        assert_eq!(ledger.total(), Bytes::ZERO);
    }
}
