//! Maps learn from what their destination says.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::{PROSE, TIER0, TIER2, load, pocket};
use molt_kv::bridge::{Bridge, Fitted, PlainMap};
use molt_kv::ledger::Ledger;
use molt_models::tune::{Lesson, LessonShape, TuneReport, TuneSettings, tune};

const SHAPE: LessonShape = LessonShape { exact_first: 4, fed: 8, judged: 16 };

/// Tunes maps that `spoil` was let loose on, for some steps.
fn tuned(shape: LessonShape, steps: usize, spoil: impl Fn(&mut PlainMap)) -> (Fitted, TuneReport) {
    tuned_at(1e-3, shape, steps, spoil)
}

fn tuned_at(
    learning_rate: f64,
    shape: LessonShape,
    steps: usize,
    spoil: impl Fn(&mut PlainMap),
) -> (Fitted, TuneReport) {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let (source, destination) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let fitted = Fitted::from_bridge(&bridge);
    let mut maps: Vec<PlainMap> = fitted.maps().collect();
    maps.iter_mut().for_each(spoil);
    let fitted = fitted.tuned(maps, 0);
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let lesson = |start: usize| {
        let window = &tokens[start..start + 72];
        Lesson::new(&fitted, &source, &destination, window, shape).unwrap()
    };
    let (lessons, apart) = ([lesson(0), lesson(20), lesson(40)], [lesson(60)]);
    let settings = TuneSettings { steps, learning_rate, look_every: 2 };
    let mut heard = Vec::new();
    let file = ladder.rung(TIER2).unwrap().file();
    let done = tune(fitted, (file, &destination), (&lessons, &apart), &settings, |step, _| heard.push(step)).unwrap();
    assert_eq!(heard, (0..=steps).collect::<Vec<_>>());
    done
}

#[test]
fn a_lesson_without_mapped_tokens_but_one_hardly_diverges() {
    // 72 tokens: 16 judged, 8 fed, 47 exact, and one that is mapped. What remains is the rounding of cached halves.
    let shape = LessonShape { exact_first: 47, ..SHAPE };
    let (_, report) = tuned(shape, 0, |_| ());
    assert!(report.before < 1e-3, "{report:?}");
}

#[test]
fn spoilt_maps_are_mended_and_good_ones_not_made_worse() {
    let spoil = |map: &mut PlainMap| map.weight.iter_mut().for_each(|weight| *weight *= 0.3);
    let (fitted, mended) = tuned(SHAPE, 12, spoil);
    let (_, good) = tuned(SHAPE, 0, |_| ());
    assert!(mended.before > 1.5 * good.before, "{mended:?}, {good:?}");
    assert!(mended.after < 0.7 * mended.before && mended.best_step > 0, "{mended:?}");
    assert_eq!(fitted.spec().tuning_steps, mended.best_step as u64);
}

#[test]
fn what_tuning_wrecks_is_not_kept() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let before: Vec<PlainMap> = Fitted::from_bridge(&bridge).maps().collect();
    let (fitted, report) = tuned_at(10.0, SHAPE, 2, |_| ());
    assert_eq!((report.best_step, report.after), (0, report.before));
    assert_eq!(fitted.maps().collect::<Vec<_>>(), before);
}

#[test]
fn a_tuned_bridge_is_written_and_read() {
    let (fitted, _) = tuned(SHAPE, 2, |map| map.weight.iter_mut().for_each(|weight| *weight *= 0.3));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuned.safetensors");
    fitted.write(&path).unwrap();
    let read = Bridge::open(&path, &Ledger::new()).unwrap();
    assert_eq!(read.spec(), fitted.spec());
    // Blocks of 8 bits lie within half a step of what was written.
    for (written, read) in fitted.maps().zip(Fitted::from_bridge(&read).maps()) {
        let largest = written.weight.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let off = written.weight.iter().zip(&read.weight).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= largest / 127.0, "off by {off}, the largest is {largest}");
        assert_eq!(written.bias, read.bias);
    }
}

#[test]
fn a_window_that_is_too_short_is_refused() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let (source, destination) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let fitted = Fitted::from_bridge(&ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let check = |tokens: &[u32]| Lesson::new(&fitted, &source, &destination, tokens, SHAPE).map(|_| ());
    check(&tokens[..29]).unwrap();
    let error = format!("{:?}", check(&tokens[..28]).unwrap_err());
    assert!(error.contains("28"), "{error}");
}
