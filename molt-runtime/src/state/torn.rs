//! What a loss of power or a bad disk leaves: every file of a state folder cut off at every byte, with every byte altered, and
//! with zeros where something was not written yet. What is sound is used, what is not is refused by name, and nothing else is lost.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use molt_kv::cache::{CacheShape, KvCache};
use molt_kv::ledger::Ledger;
use molt_kv::numbers::CachePrecision;
use molt_kv::record;
use molt_scheduler::units::Tokens;

use crate::state::journal::tests::head;
use crate::state::{State, StateSettings, answers};

const SETTINGS: StateSettings = StateSettings { every_tokens: 8, grace: Duration::from_secs(60) };
const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 1, head_dim: 4, precision: CachePrecision::F16 };
const MODELS: &[(&str, CacheShape)] = &[("abc", SHAPE)];
const LIMIT: Tokens = Tokens::new(40);
/// What was answered.
const SAID: [u32; 5] = [5, 6, 7, 8, 9];

/// The bytes of every file in a folder, by its path from there.
type Image = BTreeMap<String, Vec<u8>>;

fn open(folder: &Path) -> Arc<State> {
    State::open(folder, SETTINGS).unwrap()
}

/// A cache of the prompt and the answer.
fn cache() -> KvCache {
    let mut cache = KvCache::new(SHAPE, LIMIT, &Ledger::new()).unwrap();
    let tokens = [&head("a").prompt[..], &SAID].concat();
    let slots = cache.append(&tokens).unwrap();
    let values: Vec<f32> = (0u8..32).map(|i| (f32::from(i) * 0.37).sin()).collect();
    cache.write(0, slots.start, &values, &values);
    cache
}

/// A folder with two answers that were being written, their caches, and who had registered.
fn image() -> Image {
    let folder = tempfile::tempdir().unwrap();
    let state = open(folder.path());
    state.keep_registrations(&vec!["mail".to_owned(), "notes".to_owned()]);
    let mut record = Vec::new();
    record::write(&cache(), "abc", &mut record).unwrap();
    for id in ["a", "b"] {
        state.begin(&head(id)).unwrap().unwrap().write(&SAID);
        std::fs::write(state.record_path(id, "abc"), &record).unwrap();
    }
    drop(state);
    let names = |sub: &str| -> Vec<String> {
        let entries = std::fs::read_dir(folder.path().join(sub)).unwrap().map(Result::unwrap);
        let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
        files.map(|entry| format!("{sub}{}", entry.file_name().to_string_lossy())).collect()
    };
    let names = [names(""), names(&format!("{}/", answers::FOLDER))].concat();
    names.into_iter().map(|name| (name.clone(), std::fs::read(folder.path().join(&name)).unwrap())).collect()
}

/// What of an answer can be gone on with.
#[derive(Debug, Default, PartialEq)]
struct Left {
    tokens: Vec<u32>,
    caches: usize,
}

/// Takes an answer up; a cache that it gives must be the one that was kept. What is wrong with it is told.
fn left(state: &Arc<State>, id: &str, told: &mut Vec<String>) -> Left {
    let Ok(Ok(taken)) = state.take(id, &head(id).owner, MODELS) else { return Left::default() };
    assert_eq!(taken.head, head(id));
    let (mut caches, whole) = (0, cache());
    for mut kept in taken.caches {
        match kept.restore(LIMIT, &Ledger::new()) {
            Ok(back) => {
                assert_eq!((back.slots(), back.keys(0)), (whole.slots(), whole.keys(0)));
                assert_eq!(back.values(0), whole.values(0));
                caches += 1;
            }
            Err(error) => told.push(crate::engine::chain(&error)),
        }
    }
    Left { tokens: taken.tokens, caches }
}

/// Opens a folder in which one file is harmed and looks what is left; returns that of the answer whose file it was.
fn check(image: &Image, harmed: &str, bytes: &[u8], how: &str) -> Left {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(answers::FOLDER)).unwrap();
    for (name, whole) in image {
        std::fs::write(folder.path().join(name), if name == harmed { bytes } else { whole }).unwrap();
    }
    let state = open(folder.path());
    let registered: Vec<String> = state.registrations();
    let of = |id: &str| harmed.starts_with(&format!("{}/{id}.", answers::FOLDER));
    let mut told = Vec::new();
    let found: Vec<(bool, Left)> = ["a", "b"].map(|id| (of(id), left(&state, id, &mut told))).into();
    told.extend(state.troubles());
    let whole = Left { tokens: SAID.to_vec(), caches: 1 };
    for (_, other) in found.iter().filter(|(own, _)| !own) {
        assert_eq!(*other, whole, "{harmed} {how}: another answer lost something: {told:?}");
    }
    match harmed {
        "tenants.json" => assert!(registered.is_empty() || registered == ["mail", "notes"], "{how}: {registered:?}"),
        _ => assert_eq!(registered, ["mail", "notes"], "{harmed} {how}"),
    }
    let own = found.into_iter().find_map(|(own, left)| own.then_some(left)).unwrap_or(whole);
    assert!(SAID.starts_with(&own.tokens), "{harmed} {how}: {own:?}");
    // A journal that was cut off behind its head loses tokens without a word: they are chosen again.
    let silent = own.caches == 1 || harmed == "secret" || harmed == "lock" || harmed == "tenants.json";
    let name = harmed.rsplit('/').next().unwrap_or(harmed);
    assert!(silent || told.iter().any(|told| told.contains(name)), "{harmed} {how}: nobody says so: {told:?}");
    if harmed == "tenants.json" && registered.is_empty() {
        assert!(told.iter().any(|told| told.contains(name)), "{how}: nobody says so: {told:?}");
    }
    own
}

#[test]
fn whatever_a_loss_of_power_leaves_is_used_or_refused_by_name() {
    let image = image();
    let (mut cases, mut refused) = (0, 0);
    assert_eq!(image.len(), 7, "{:?}", image.keys());
    for (name, whole) in &image {
        let mut harm = |bytes: &[u8], how: &str| {
            let left = check(&image, name, bytes, how);
            cases += 1;
            refused += usize::from(left.caches == 0 || left.tokens.is_empty());
        };
        harm(whole, "whole");
        for at in 0..whole.len() {
            harm(&whole[..at], &format!("cut off at {at}"));
            let mut altered = whole.clone();
            altered[at] ^= 1 << (at % 8);
            harm(&altered, &format!("altered at {at}"));
            let mut holes = whole.clone();
            holes[at..].fill(0);
            harm(&holes, &format!("zeros from {at}"));
        }
        harm(&[&whole[..], &[0; 24]].concat(), "with zeros behind it");
    }
    println!("{cases} harmed folders, {refused} of them without the answer or its cache");
    // Some were harmed where it does no harm: behind the last token, or in what is not of an answer.
    assert!(refused > 1_000 && cases - refused > 100, "{refused} of {cases}");
}
