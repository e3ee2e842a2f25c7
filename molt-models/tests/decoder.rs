//! The fast decoder against its differentiable twin, and against itself cut at layers and chunks.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use candle_core::{Device, Tensor};
use common::{PROSE, TIER0, TIER1, TIER2, load, log_softmax, pocket, read};
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::{Kind, Ledger};
use molt_kv::numbers::CachePrecision;
use molt_kv::region::page_size;
use molt_models::autograd::AutogradDecoder;
use molt_models::sampling::argmax;
use molt_models::{Model, Part, Rung};
use molt_scheduler::units::{Bytes, RungIdx, Tokens};

/// The same weights as candle tensors.
fn twin(rung: &Rung) -> AutogradDecoder {
    AutogradDecoder::of_file(rung.file()).unwrap()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |m: f64, (x, y)| m.max((x - y).abs()))
}

fn check_against_twin(rung: RungIdx, cache: CachePrecision, tolerance: f64) {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let input = Tensor::from_slice(&tokens, (1, tokens.len()), &Device::Cpu).unwrap();
    let logits = twin(ladder.rung(rung).unwrap()).forward(&input).unwrap();
    let last = logits.squeeze(0).unwrap().get(tokens.len() - 1).unwrap();
    let expected: Vec<f64> =
        candle_nn::ops::log_softmax(&last, 0).unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect();
    let model = load(&ladder, rung, &ledger).with_cache(cache);
    let (kept, hidden) = read(&model, &tokens, &ledger);
    let found = log_softmax(&model, &hidden);
    let off = largest_difference(&found, &expected);
    assert!(off < tolerance, "{rung}, {cache:?}: log-probabilities differ by up to {off}");
    let held = ledger.used(Kind::Cache).get();
    assert_eq!(held, kept.shape().charge(tokens.len()).get(), "{rung}, {cache:?}");
}

#[test]
fn the_fast_decoder_is_the_differentiable_one() {
    // At f16 keys and values have 11 bits, hence the tolerance; tier1 rounds weights to 8 bits as well.
    check_against_twin(TIER0, CachePrecision::F16, 0.03);
    check_against_twin(TIER2, CachePrecision::F16, 0.03);
    check_against_twin(TIER1, CachePrecision::F16, 0.3);
    check_against_twin(TIER0, CachePrecision::F32, 2e-4);
    check_against_twin(TIER2, CachePrecision::F32, 2e-4);
}

fn check_chunks(model: &Model, tokens: &[u32], whole: (&KvCache, &[f32]), sizes: &[usize], ledger: &Ledger) {
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
    check_same(model, (&cache, &hidden), whole, &format!("chunks of {sizes:?}"));
}

/// To the last bit.
fn check_same(model: &Model, found: (&KvCache, &[f32]), expected: (&KvCache, &[f32]), what: &str) {
    assert_eq!(found.1, expected.1, "{what}: last hidden states");
    for layer in 0..model.config().layers {
        assert_eq!(found.0.keys(layer), expected.0.keys(layer), "{what}: keys of layer {layer}");
        assert_eq!(found.0.values(layer), expected.0.values(layer), "{what}: values of layer {layer}");
    }
}

#[test]
fn chunks_make_no_difference() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    for rung in [TIER0, TIER1, TIER2] {
        let model = load(&ladder, rung, &ledger);
        let (cache, hidden) = read(&model, &tokens, &ledger);
        for sizes in [&[1][..], &[7], &[64], &[3, 1, 50]] {
            check_chunks(&model, &tokens, (&cache, &hidden), sizes, &ledger);
        }
    }
}

#[test]
fn company_makes_no_difference() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    for rung in [TIER0, TIER1, TIER2] {
        let model = load(&ladder, rung, &ledger);
        // Of each: how much it has read already, and how much it reads in company; together more than one pass.
        let shares = [(0, tokens.len()), (10, 1), (0, 70), (33, 1), (5, 0), (0, tokens.len())];
        let mut caches: Vec<KvCache> =
            shares.iter().map(|(before, _)| read(&model, &tokens[..*before], &ledger).0).collect();
        let parts = caches.iter_mut().zip(shares);
        let parts = parts.map(|(cache, (before, more))| Part { tokens: &tokens[before..before + more], cache });
        let hidden = model.read_together(&mut parts.collect::<Vec<_>>(), &StopFlag::new()).unwrap();
        let width = model.config().width;
        let mut alone = Vec::new();
        for (at, ((before, more), cache)) in shares.into_iter().zip(&caches).enumerate() {
            let (expected, mut last) = read(&model, &tokens[..before + more], &ledger);
            if more == 0 {
                last = vec![0.0; width];
            }
            check_same(
                &model,
                (cache, &hidden[at * width..(at + 1) * width]),
                (&expected, &last),
                &format!("{rung}, {at}"),
            );
            model.with_logits(&last, |logits| alone.push(logits.to_vec()));
        }
        model.with_each_logits(&hidden, |at, logits| assert_eq!(logits, alone[at], "{rung}: logits of {at}"));
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
    let mut hidden = vec![0.0; tokens.len() * model.config().width];
    model.embed(&tokens, &mut hidden);
    for layer in 0..model.config().layers {
        model.run_layers(layer..layer + 1, &mut hidden, &mut cache, slots.clone(), &StopFlag::new()).unwrap();
        assert_eq!(cache.keys(layer), whole.keys(layer));
        assert_eq!(cache.values(layer), whole.values(layer));
    }
    assert_eq!(hidden[hidden.len() - model.config().width..], expected);
}

#[test]
fn threads_make_no_difference() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let check = |rung: RungIdx| {
        let model = load(&ladder, rung, &ledger);
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (_, hidden) = read(&model, &tokens, &ledger);
                model.with_logits(&hidden, |logits| logits.to_vec())
            })
        };
        let alone = with(1);
        for threads in [2, 3, 7] {
            assert_eq!(with(threads), alone, "{rung} on {threads} threads");
        }
    };
    check(TIER0);
    check(TIER1);
    check(TIER2);
}

#[test]
fn slots_that_lie_apart_are_filled_anew_and_tell_what_they_look_at() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let check = |rung: RungIdx, stretches: &[std::ops::Range<usize>]| {
        let model = load(&ladder, rung, &ledger);
        let (mut cache, _) = read(&model, &tokens[..90], &ledger);
        let (native, _) = read(&model, &tokens[..90], &ledger);
        let ids: Vec<u32> = stretches.iter().flat_map(|s| &tokens[s.clone()]).copied().collect();
        let mut hidden = vec![0.0; ids.len() * model.config().width];
        model.embed(&ids, &mut hidden);
        let (layers, mut received) = (model.config().layers, vec![0.0; 90]);
        model.run_slots(0..layers, &mut hidden, &mut cache, stretches, Some(&mut received), &StopFlag::new()).unwrap();
        for layer in 0..layers {
            assert_eq!(cache.keys(layer), native.keys(layer), "{rung} {stretches:?}: keys of layer {layer}");
            assert_eq!(cache.values(layer), native.values(layer), "{rung} {stretches:?}: values of layer {layer}");
        }
        // Every softmax adds up to one, and nobody looks ahead.
        let all = (layers * model.config().heads * ids.len()) as f32;
        assert!((received.iter().sum::<f32>() / all - 1.0).abs() < 1e-4, "{rung} {stretches:?}");
        let last = stretches.last().unwrap().end;
        assert!(received[last..].iter().all(|weight| *weight == 0.0) && received[..last].iter().all(|w| *w > 0.0));
    };
    for rung in [TIER0, TIER1, TIER2] {
        check(rung, &[0..1, 3..5, 70..90]);
        check(rung, &[11..12, 40..77]);
        check(rung, &[64..66, 89..90]);
    }
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
    let (whole, expected) = read(&model, &tokens, &ledger);
    check_same(&model, (&cache, &again), (&whole, &expected), "read again");
}

#[test]
fn a_step_given_up_at_any_moment_leaves_no_trace() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let model = load(&ladder, TIER0, &ledger);
    let (whole, expected) = read(&model, &tokens, &ledger);
    let (mut given_up, mut finished) = (0, 0);
    for delay in 0..120 {
        let (mut cache, _) = read(&model, &tokens[..20], &ledger);
        let (before, used) = (cache.slots().to_vec(), ledger.total());
        let stop = StopFlag::new();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_micros(delay * 150));
                stop.raise();
            });
            model.read(&tokens[20..], &mut cache, &stop)
        });
        match outcome {
            Ok(hidden) => {
                check_same(&model, (&cache, &hidden), (&whole, &expected), "finished in time");
                finished += 1;
            }
            Err(_) => {
                assert_eq!((cache.slots(), ledger.total()), (&before[..], used));
                let hidden = model.read(&tokens[20..], &mut cache, &StopFlag::new()).unwrap();
                check_same(&model, (&cache, &hidden), (&whole, &expected), "given up and read again");
                given_up += 1;
            }
        }
    }
    assert!(given_up > 0, "never given up; {finished} finished");
}

#[test]
fn ten_thousand_steps_take_no_memory() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let model = load(&ladder, TIER2, &ledger);
    let (mut cache, mut hidden) = read(&model, &[1], &ledger);
    let mut resident = Vec::new();
    for step in 0..10_000 {
        let next = model.with_logits(&hidden, |logits| argmax(logits));
        hidden = model.read(&[next], &mut cache, &StopFlag::new()).unwrap();
        if cache.len() == 500 {
            // The conversation begins again; the pages go back.
            cache.truncate(1);
        }
        if step == 2_000 || step == 9_999 {
            resident.push((ledger.total(), anonymous_kib()));
        }
    }
    let [(books, before), (later, after)] = resident[..] else { unreachable!("looked at twice") };
    // The cache's length differs between the two looks by a few hundred tokens, which is in the books.
    let owed = (later - books).get() / 1024;
    assert!(after < before + owed + 512, "grew from {before} to {after} KiB, of which {owed} are in the books");
}

/// What the process holds that is no file.
fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn the_books_are_what_was_foretold() {
    let ladder = pocket();
    for (rung, cost) in ladder.cost().rungs() {
        let ledger = Ledger::new();
        let model = load(&ladder, rung, &ledger);
        assert_eq!((ledger.used(Kind::Weights), ledger.used(Kind::Scratch)), (cost.weights, cost.scratch), "{rung}");
        let (cache, _) = read(&model, &[1, 2, 3], &ledger);
        // Three tokens lie on one page of every plane.
        let pages = Bytes::from(2 * model.config().layers * page_size());
        assert!(cost.cache_per_token.times(Tokens::new(3)) <= pages);
        assert_eq!(ledger.used(Kind::Cache), pages);
        drop((model, cache));
        assert_eq!(ledger.total(), Bytes::ZERO);
    }
}
