//! Maps learn from what their destination says.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::path::Path;

use common::{PROSE, TIER0, TIER2, load, pocket};
use molt_kv::bridge::{Bridge, Fitted, PlainMap};
use molt_kv::ledger::Ledger;
use molt_models::tune::{TuneReport, TuneSettings, tune};
use molt_models::{Lesson, ModelError};

/// Six lessons in three groups, so that what is reached is looked at three times.
const SETTINGS: TuneSettings = TuneSettings { lessons: 6, cuts: 2, together: 2, learning_rate: 1e-3 };

/// Tunes maps that `spoil` was let loose on; with a file to keep what is reached in, and a lesson that cannot be read.
fn tuned_with(
    settings: &TuneSettings,
    spoil: impl Fn(&mut PlainMap),
    keep: Option<&Path>,
    fails_at: Option<usize>,
) -> (Result<(Fitted, TuneReport), ModelError>, Vec<usize>) {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let (source, destination) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let fitted = Fitted::from_bridge(&bridge);
    let mut maps: Vec<PlainMap> = fitted.maps().collect();
    maps.iter_mut().for_each(spoil);
    let fitted = fitted.tuned(maps, 0);
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let learner = fitted.clone();
    let lesson = |start: usize| Lesson::new(&learner, &source, &destination, &tokens[start..start + 72]);
    let read = |number: usize| if fails_at == Some(number) { short() } else { lesson(8 * number) };
    let mut heard = Vec::new();
    let file = ladder.rung(TIER2).unwrap().file();
    let apart = [lesson(60).unwrap(), lesson(63).unwrap()];
    let done = tune(fitted, (file, &destination), read, &apart, settings, keep, |at| heard.push(at.steps));
    (done, heard)
}

/// What a lesson says that cannot be read.
fn short() -> Result<Lesson, ModelError> {
    Err(candle_core::Error::Msg("no such lesson".to_owned()).into())
}

fn tuned(settings: &TuneSettings, spoil: impl Fn(&mut PlainMap)) -> (Fitted, TuneReport) {
    let (done, heard) = tuned_with(settings, spoil, None, None);
    let group = settings.together * settings.cuts;
    assert_eq!(heard, (0..=settings.lessons * settings.cuts).step_by(group).collect::<Vec<_>>());
    done.unwrap()
}

fn weaker(map: &mut PlainMap) {
    map.weight.iter_mut().for_each(|weight| *weight *= 0.3);
}

#[test]
fn spoilt_maps_are_mended_and_good_ones_not_made_worse() {
    let (fitted, mended) = tuned(&SETTINGS, weaker);
    let (_, good) = tuned(&TuneSettings { learning_rate: 0.0, ..SETTINGS }, |_| ());
    assert!(mended.before > 1.5 * good.before, "{mended:?}, {good:?}");
    assert!(mended.after < 0.7 * mended.before && mended.best_step > 0, "{mended:?}");
    assert_eq!(fitted.spec().tuning_steps, mended.best_step as u64);
}

#[test]
fn what_tuning_wrecks_is_not_kept() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let bridge = ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap();
    let before: Vec<PlainMap> = Fitted::from_bridge(&bridge).maps().collect();
    let (fitted, report) = tuned(&TuneSettings { learning_rate: 10.0, ..SETTINGS }, |_| ());
    assert_eq!((report.best_step, report.after), (0, report.before));
    assert_eq!(fitted.maps().collect::<Vec<_>>(), before);
}

#[test]
fn a_tuned_bridge_is_written_and_read() {
    let (fitted, _) = tuned(&SETTINGS, weaker);
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
    let check = |tokens: &[u32]| Lesson::new(&fitted, &source, &destination, tokens).map(|_| ());
    check(&tokens[..32]).unwrap();
    let error = format!("{:?}", check(&tokens[..31]).unwrap_err());
    assert!(error.contains("31"), "{error}");
}

#[test]
fn cuts_lie_within_their_window() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let (source, destination) = (load(&ladder, TIER0, &ledger), load(&ladder, TIER2, &ledger));
    let fitted = Fitted::from_bridge(&ladder.bridge(TIER0, TIER2, &ledger).unwrap().unwrap());
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    for length in [32, 33, 72, 100] {
        let lesson = Lesson::new(&fitted, &source, &destination, &tokens[..length]).unwrap();
        for cuts in 1..8 {
            for number in 0..cuts {
                let cut = lesson.cut(number, cuts);
                assert!(cut.exact_first + cut.fed < cut.context && cut.fed > 0 && cut.judged > 0, "{length}: {cut:?}");
                assert!(cut.context + cut.judged <= length, "{length}: {cut:?}");
            }
            let last = lesson.cut(cuts - 1, cuts);
            assert_eq!(last.context + last.judged, length);
        }
    }
}

#[test]
fn an_interrupted_tuning_goes_on_from_what_was_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning");
    let (failed, heard) = tuned_with(&SETTINGS, weaker, Some(&path), Some(4));
    assert!(failed.is_err());
    assert_eq!(heard, [0, 4, 8]);
    let (done, heard) = tuned_with(&SETTINGS, weaker, Some(&path), None);
    assert_eq!(heard, [8, 12], "two of three groups were not read again");
    let (_, report) = done.unwrap();
    assert!(report.after < 0.7 * report.before, "{report:?}");
    let fewer = TuneSettings { lessons: 4, ..SETTINGS };
    let (done, heard) = tuned_with(&fewer, weaker, Some(&path), None);
    assert_eq!((done.unwrap().1, heard.len()), (report, 1), "what was reached is taken as it is");
    let (other, _) = tuned_with(&TuneSettings { cuts: 3, ..SETTINGS }, weaker, Some(&path), None);
    let error = other.unwrap_err().to_string();
    assert!(error.contains("other settings") && error.contains("tuning"), "{error}");
    std::fs::write(&path, b"torn").unwrap();
    let (torn, _) = tuned_with(&SETTINGS, weaker, Some(&path), None);
    assert!(torn.unwrap_err().to_string().contains("delete it"));
}
