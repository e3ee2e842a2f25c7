//! Carrying on the embedded ladder: exact where it must be, close where it may be, refused where it should be.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::{PROSE, TIER0, TIER1, TIER2, kl, load, log_softmax, pocket, read};
use molt_kv::background;
use molt_kv::bridge::{Bridge, BridgeError};
use molt_kv::cache::{KvCache, Provenance};
use molt_kv::carry::{CarryError, CarrySettings, Route, carry, foretold_flops, reread, restore, take_over};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::keepsake::Keepsake;
use molt_kv::ledger::{Kind, Ledger};
use molt_kv::numbers::Numbers;
use molt_models::Model;
use molt_scheduler::units::{Bytes, Tokens};

/// Mean divergence from a native read over the tokens after the seam.
fn divergence(model: &Model, mut carried: KvCache, tokens: &[u32], seam: usize, ledger: &Ledger) -> f64 {
    let (mut native, _) = read(model, &tokens[..seam], ledger);
    let mut sum = 0.0;
    for token in &tokens[seam..] {
        let of = |cache: &mut KvCache| {
            let hidden = model.read(&[*token], cache, &StopFlag::new()).unwrap();
            log_softmax(model, &hidden)
        };
        sum += kl(&of(&mut native), &of(&mut carried));
    }
    sum / (tokens.len() - seam) as f64
}

fn settings(first: u64, window: u64) -> CarrySettings {
    CarrySettings {
        exact_first: Tokens::new(first),
        fed_window: Tokens::new(window),
        native_share: 1,
        ..CarrySettings::default()
    }
}

#[test]
fn a_carried_cache_is_close_and_the_controls_are_not() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let seam = tokens.len() - 24;
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let (source, _) = read(&big, &tokens[..seam], &ledger);
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let stop = StopFlag::new();
    let carried = |settings| carry(&bridge, (&source, big.rope()), None, &small, settings, &ledger, &stop).unwrap();

    let (cache, report) = carried(settings(8, 16));
    assert_eq!((report.exact.get(), report.over_mapped.get()), (8, 16));
    assert_eq!(report.mapped.get(), seam as u64 - 24);
    assert!(report.flops < report.reread_flops);
    let provenances: Vec<Provenance> = cache.slots().iter().map(|s| s.provenance).collect();
    assert_eq!((provenances[7], provenances[8]), (Provenance::Exact, Provenance::Mapped));
    assert_eq!(provenances[seam - 1], Provenance::OverMapped);
    // Its first layers are exact for every token before the window.
    let (native, _) = read(&small, &tokens[..seam], &ledger);
    let exact = (seam - 16) * native.shape().kv_width();
    let off = |layer: usize| {
        let [found, native] = [cache.keys(layer), native.keys(layer)].map(|keys| keys.slice(0..exact).to_f32());
        found.iter().zip(&native).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()))
    };
    assert!(off(0) < 0.02, "the native layer's keys are off by {}", off(0));
    assert!(off(2) > off(0), "a mapped layer is not exact, or nothing was mapped");

    let good = divergence(&small, cache, &tokens, seam, &ledger);
    let (all_native, _) = carried(settings(10_000, 0));
    assert!(all_native.is_exact());
    let native = divergence(&small, all_native, &tokens, seam, &ledger);
    assert!(native < 1e-4, "a carry that reads everything natively is off by {native}");
    // Controls: all zeroes in the mapped layers, and another document's cache.
    let zeroes = {
        let (mut cache, _) = read(&small, &tokens[..seam], &ledger);
        let zero = vec![0.0; seam * cache.shape().kv_width()];
        (1..cache.shape().layers).for_each(|layer| cache.write(layer, 0, &zero, &zero));
        divergence(&small, cache, &tokens, seam, &ledger)
    };
    let other = {
        let mut reversed = tokens[..seam].to_vec();
        reversed.reverse();
        let (cache, _) = read(&small, &reversed, &ledger);
        divergence(&small, cache, &tokens, seam, &ledger)
    };
    println!("carried {good:.4}, native {native:.6}, zeroes {zeroes:.4}, another text {other:.4}");
    assert!(good * 2.0 < zeroes && good * 2.0 < other, "carried {good}, zeroes {zeroes}, another text {other}");
}

#[test]
fn a_carry_takes_what_was_foretold_and_fits_what_may_be_spent() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let stop = StopFlag::new();
    let (source, _) = read(&big, &tokens[..130], &ledger);
    let (mut last, mut paying) = (0.0, 0);
    for effort in CarrySettings::EFFORTS {
        let foretold = foretold_flops(&bridge, &small, Tokens::new(130), effort);
        let (_, report) = carry(&bridge, (&source, big.rope()), None, &small, effort, &ledger, &stop).unwrap();
        // Attention is foretold for whole parts and not for their blocks.
        assert!((foretold / report.flops - 1.0).abs() < 0.05, "{effort:?}: {foretold} foretold, {}", report.flops);
        // Reading everything again may take less than reading most of it over what was mapped.
        assert!(foretold >= last || effort == CarrySettings::EXACT, "{effort:?} takes less than the one before");
        last = foretold;
        let chosen = CarrySettings::within(foretold, &bridge, &small, Tokens::new(130));
        let flops = foretold_flops(&bridge, &small, Tokens::new(130), chosen);
        assert!(flops <= foretold);
        // Nothing is done that would take longer than reading everything again.
        let pays = foretold <= report.reread_flops;
        assert!(!pays || chosen == effort || flops == foretold, "{effort:?} fits, and {chosen:?} is chosen");
        assert_eq!(report.route == Route::Reread, effort == CarrySettings::EXACT, "{effort:?}");
        paying += usize::from(pays);
    }
    assert!(paying >= 4, "only {paying} efforts pay");
    assert_eq!(CarrySettings::within(0.0, &bridge, &small, Tokens::new(130)), CarrySettings::FAST);
    let most = CarrySettings::within(f64::INFINITY, &bridge, &small, Tokens::new(130));
    assert_eq!(most, CarrySettings::EXACT, "who waits gets what is exact");
}

#[test]
fn where_all_mapped_tokens_are_chosen_the_cache_is_native() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let (source, _) = read(&big, &tokens[..100], &ledger);
    let (native, _) = read(&small, &tokens[..100], &ledger);
    let check = |chosen_percent: usize, over_mapped: u64| {
        let settings = CarrySettings { chosen_percent, ..settings(8, 12) };
        let (cache, report) =
            carry(&bridge, (&source, big.rope()), None, &small, settings, &ledger, &StopFlag::new()).unwrap();
        assert_eq!(report.over_mapped, Tokens::new(over_mapped), "{chosen_percent} %");
        assert_eq!(report.tokens(), Tokens::new(100));
        assert!(report.flops > 0.0);
        (0..native.shape().layers)
            .flat_map(|layer| cache.keys(layer).to_f32().into_iter().zip(native.keys(layer).to_f32()))
            .fold(0.0f32, |most, (a, b)| most.max((a - b).abs()))
    };
    // 80 tokens are mapped, 12 fed.
    let (none, half, all) = (check(0, 12), check(50, 12 + 40), check(100, 12 + 80));
    assert_eq!(all, 0.0, "every layer of every token was read over native ones");
    assert!(none > 0.0 && half > 0.0);
}

#[test]
fn what_was_read_ahead_is_taken_over_exactly() {
    let (ladder, ledger, stop) = (pocket(), Ledger::new(), StopFlag::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let check = |chunk: u64, ahead: usize, shed: bool| {
        let (mut source, _) = read(&big, &tokens[..100], &ledger);
        if shed {
            source.shed(4..36).unwrap();
        }
        let slots = source.slots();
        let (native, _) = reread(slots, source.limit(), &small, &ledger, &stop).unwrap();
        let mut begun = KvCache::new(small.cache_shape(), source.limit(), &ledger).unwrap();
        while begun.len() < ahead {
            let before = begun.len();
            stop.raise();
            assert!(background::read_on(&mut begun, slots, &small, Tokens::new(chunk), &ledger, &stop).is_err());
            assert_eq!(begun.len(), before, "given up, and changed nothing");
            stop.lower();
            let count = Tokens::new(chunk).min(Tokens::from(ahead - before));
            assert_eq!(background::read_on(&mut begun, slots, &small, count, &ledger, &stop).unwrap(), count);
        }
        let half = begun.prefix(ahead / 2, begun.limit(), &ledger).unwrap();
        let (cache, report) = take_over(begun, slots, &small, &ledger, &stop).unwrap();
        assert_eq!((report.route, report.exact), (Route::ReadAhead, Tokens::from(slots.len())));
        assert_eq!((cache.slots(), cache.next_position()), (native.slots(), native.next_position()));
        for layer in 0..native.shape().layers {
            assert_eq!(cache.keys(layer), native.keys(layer), "chunks of {chunk}: layer {layer}");
            assert_eq!(cache.values(layer), native.values(layer), "chunks of {chunk}: layer {layer}");
        }
        // Half of it, and the rest over the bridge.
        let begun = half.len();
        let ends = (&source, big.rope());
        let (cache, report) = carry(&bridge, ends, Some(half), &small, settings(4, 8), &ledger, &stop).unwrap();
        assert_eq!((report.exact, report.over_mapped), (Tokens::from(begun), Tokens::new(8)));
        assert_eq!(report.tokens(), Tokens::from(slots.len()));
        let width = native.shape().kv_width();
        for layer in 0..native.shape().layers {
            let [found, native] = [cache.keys(layer), native.keys(layer)].map(|keys| keys.slice(0..begun * width));
            assert_eq!(found, native, "layer {layer}");
        }
    };
    check(1_000, 60, false);
    check(8, 60, false);
    check(7, 40, true);
    // Another conversation's.
    let (other, _) = read(&small, &tokens[50..90], &ledger);
    let (source, _) = read(&big, &tokens[..100], &ledger);
    let refused = take_over(other, source.slots(), &small, &ledger, &stop).unwrap_err();
    assert!(matches!(refused, CarryError::OtherConversation), "{refused}");
}

#[test]
fn a_healed_cache_is_what_a_native_read_makes() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let stop = StopFlag::new();
    // Healing takes `chunk` tokens at a time while the conversation goes on by one token after each.
    let check = |chunk: u64, shed: bool| {
        let (mut source, _) = read(&big, &tokens[..100], &ledger);
        if shed {
            source.shed(4..36).unwrap();
        }
        let (mut cache, _) =
            carry(&bridge, (&source, big.rope()), None, &small, settings(8, 16), &ledger, &stop).unwrap();
        let mut at = 100;
        while background::left(&cache) > Tokens::ZERO {
            let before: Vec<_> = [cache.keys(2), cache.values(2)].map(Numbers::to_f32).to_vec();
            stop.raise();
            assert!(background::heal(&mut cache, &small, Tokens::new(chunk), &ledger, &stop).is_err());
            assert_eq!(before, [cache.keys(2), cache.values(2)].map(Numbers::to_f32), "given up, and changed nothing");
            stop.lower();
            let left = background::left(&cache);
            let healed = background::heal(&mut cache, &small, Tokens::new(chunk), &ledger, &stop).unwrap();
            assert_eq!((healed, background::left(&cache)), (left.min(Tokens::new(chunk)), left - healed));
            if at < tokens.len() {
                small.read(&tokens[at..at + 1], &mut cache, &stop).unwrap();
                at += 1;
            }
        }
        assert!(cache.is_exact());
        let (mut slots, next) = (source.slots().to_vec(), cache.next_position());
        slots.extend_from_slice(&cache.slots()[slots.len()..]);
        let (native, _) = reread(&slots, cache.limit(), &small, &ledger, &stop).unwrap();
        assert_eq!((cache.slots(), next), (native.slots(), native.next_position()));
        for layer in 0..native.shape().layers {
            let both = |cache: &KvCache| (cache.keys(layer).to_f32(), cache.values(layer).to_f32());
            assert_eq!(both(&cache), both(&native), "chunks of {chunk}: layer {layer}");
        }
    };
    check(1_000, false);
    check(8, false);
    check(3, true);
}

#[test]
fn a_rungs_own_cache_reproduces_its_own_logits() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let model = load(&ladder, TIER1, &ledger);
    let (mut cache, _) = read(&model, &tokens[..60], &ledger);
    let mut keepsake = Keepsake::save(&cache, model.source(), &std::env::temp_dir()).unwrap();
    let stop = StopFlag::new();
    let (mut back, report) = restore(&mut keepsake, cache.slots(), cache.limit(), &model, &ledger, &stop).unwrap();
    assert_eq!(report.flops, 0.0);
    let next = |cache: &mut KvCache| log_softmax(&model, &model.read(&tokens[60..61], cache, &stop).unwrap());
    assert_eq!(next(&mut cache), next(&mut back));
}

#[test]
fn going_back_up_over_a_keepsake_is_exact() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let model = load(&ladder, TIER0, &ledger);
    let (before, _) = read(&model, &tokens[..60], &ledger);
    let mut keepsake = Keepsake::save(&before, model.source(), &std::env::temp_dir()).unwrap();
    let (whole, _) = read(&model, &tokens[..90], &ledger);
    let stop = StopFlag::new();
    let (restored, report) = restore(&mut keepsake, whole.slots(), whole.limit(), &model, &ledger, &stop).unwrap();
    assert!(restored.is_exact() && report.flops * 2.0 < report.reread_flops);
    assert!(divergence(&model, restored, &tokens, 90, &ledger) < 1e-4);
}

#[test]
fn reading_again_after_shedding_keeps_the_survivors_positions() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let (mut cache, _) = read(&big, &tokens[..100], &ledger);
    cache.shed(4..36).unwrap();
    let stop = StopFlag::new();
    let (again, _) = reread(cache.slots(), cache.limit(), &small, &ledger, &stop).unwrap();
    assert_eq!((again.len(), again.next_position()), (68, 100));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let (carried, report) =
        carry(&bridge, (&cache, big.rope()), None, &small, settings(16, 8), &ledger, &stop).unwrap();
    assert_eq!(
        carried.slots().iter().map(|s| s.position).collect::<Vec<_>>(),
        cache.slots().iter().map(|s| s.position).collect::<Vec<_>>()
    );
    // Exact over what is kept, the gap included.
    assert_eq!((report.exact.get(), carried.next_position()), (16, 100));
}

#[test]
fn a_bridge_that_does_not_belong_or_was_altered_is_refused_by_name() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let refusal = bridge.check_models("0000", ladder.rung(TIER2).unwrap().source()).unwrap_err().to_string();
    assert!(refusal.contains("source") && refusal.contains("0000"), "{refusal}");

    // The other way round: the cache of the small model into the bridge from the big one.
    let (small, stop) = (load(&ladder, TIER2, &ledger), StopFlag::new());
    let (cache, _) = read(&small, &[1, 2, 3], &ledger);
    let refusal =
        carry(&bridge, (&cache, small.rope()), None, &small, CarrySettings::default(), &ledger, &stop).unwrap_err();
    assert!(matches!(refusal, CarryError::Shape { .. }), "{refusal}");

    let original = include_bytes!("../ladders/pocket/pocket-tier0-to-tier2.bridge.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("altered.safetensors");
    for at in [original.len() - 5, original.len() / 2, 300, 12] {
        let mut bytes = original.to_vec();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let refusal = Bridge::open(&path, &ledger).unwrap_err();
        assert!(refusal.to_string().contains("altered.safetensors"), "byte {at}: {refusal}");
    }
    for length in [0, 7, 100, original.len() - 1] {
        std::fs::write(&path, &original[..length]).unwrap();
        let refusal = Bridge::open(&path, &ledger).unwrap_err();
        assert!(matches!(refusal, BridgeError::Malformed { .. }), "{length} bytes: {refusal}");
    }
}

#[test]
fn a_carry_that_is_given_up_gives_everything_back() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let (source, _) = read(&big, &tokens, &ledger);
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let before = ledger.used(Kind::Cache);
    let stop = StopFlag::new();
    stop.raise();
    let given_up = carry(&bridge, (&source, big.rope()), None, &small, CarrySettings::default(), &ledger, &stop);
    assert!(matches!(given_up, Err(CarryError::Stopped(_))));
    assert_eq!(ledger.used(Kind::Cache), before);
    assert!(ledger.used(Kind::Bridge) > Bytes::ZERO, "the bridge's maps are in the books while it is open");
}

#[test]
fn ten_hops_down_and_up_do_not_drift() {
    let (ladder, ledger, stop) = (pocket(), Ledger::new(), StopFlag::new());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (big, small) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let (start, written) = (60, 4);
    let (mut above, _) = read(&big, &tokens[..start], &ledger);
    let mut at = start;
    let down = |above: &KvCache, at: usize| {
        let ends = (above, big.rope());
        let (below, _) = carry(&bridge, ends, None, &small, settings(8, 8), &ledger, &stop).unwrap();
        let copy = below.prefix(below.len(), below.limit(), &ledger).unwrap();
        (below, divergence(&small, copy, &tokens[..at + 24], at, &ledger))
    };
    let mut divergences = Vec::new();
    for hop in 0..10 {
        let (mut below, off) = down(&above, at);
        divergences.push(off);
        let mut keepsake = Keepsake::save(&above, big.source(), &std::env::temp_dir()).unwrap();
        drop(above);
        // The answer goes on below, and up again.
        small.read(&tokens[at..at + written], &mut below, &stop).unwrap();
        at += written;
        (above, _) = restore(&mut keepsake, below.slots(), below.limit(), &big, &ledger, &stop).unwrap();
        let (native, _) = read(&big, &tokens[..at], &ledger);
        assert_eq!((above.slots(), above.is_exact()), (native.slots(), true), "hop {hop}");
        for layer in 0..native.shape().layers {
            assert_eq!(above.keys(layer), native.keys(layer), "hop {hop}, layer {layer}");
            assert_eq!(above.values(layer), native.values(layer), "hop {hop}, layer {layer}");
        }
    }
    // What is carried down after ten hops is carried from the same cache as if there had been none before.
    let (native, _) = read(&big, &tokens[..at - written], &ledger);
    let (_, alone) = down(&native, at - written);
    assert_eq!(divergences.last(), Some(&alone), "{divergences:?}");
}
