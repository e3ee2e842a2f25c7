//! What comes from outside harms nothing: every committed seed and many changes of it go through the functions that are
//! fuzzed. They are taken, or refused by name; nothing panics, and nothing takes memory because a file says so.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

// A crate of its own where it is fuzzed.
#[allow(unreachable_pub)]
#[path = "../../fuzz/src/lib.rs"]
mod boundaries;
#[path = "hostile/changes.rs"]
mod changes;
#[path = "hostile/heap.rs"]
mod heap;

use std::path::{Path, PathBuf};

use boundaries::BOUNDARIES;

#[global_allocator]
static HEAP: heap::Counted = heap::Counted;

/// No case may hold more at once, whatever it claims.
const BOUND: usize = 64 << 20;
/// Changes of each kind.
const CHANGES: usize = 60;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn seeds(name: &str) -> Vec<(&'static str, Vec<u8>)> {
    let entries = std::fs::read_dir(fuzz().join("corpus").join(name)).unwrap();
    let mut seeds: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let label = format!("{name}/{}", path.file_name().unwrap().to_string_lossy());
            (&*label.leak(), std::fs::read(&path).unwrap())
        })
        .collect();
    seeds.sort();
    seeds
}

/// Runs a case; what goes wrong with it is said with the seed it came from.
fn run(name: &str, label: &'static str, bytes: &[u8]) -> usize {
    heap::within(BOUND, label, || {
        let held = std::panic::catch_unwind(|| boundaries::hold(name, bytes));
        assert!(held.is_ok(), "a change of {label}: {:?}", String::from_utf8_lossy(bytes));
    })
}

fn check(name: &str) {
    let boundary = BOUNDARIES.iter().find(|b| b.name == name).unwrap();
    let (mut cases, mut peak) = (0, 0);
    for (label, seed) in seeds(name) {
        peak = peak.max(run(name, label, &seed));
        let taken = (boundary.read)(&seed);
        assert_eq!(taken.is_ok(), label.contains("/good"), "{label}: {taken:?}");
        changes::of(&seed, CHANGES, |bytes| {
            peak = peak.max(run(name, label, bytes));
            cases += 1;
        });
    }
    println!("{name}: {cases} changes, at most {} KiB at once", peak >> 10);
}

#[test]
fn gguf_headers_are_read_or_refused_by_name() {
    check("gguf");
}

#[test]
fn safetensors_headers_are_read_or_refused_by_name() {
    check("safetensors");
}

#[test]
fn ladder_files_are_read_or_refused_by_name() {
    check("ladder");
}

#[test]
fn configurations_are_read_or_refused_by_name() {
    check("config");
}

#[test]
fn bridges_are_read_or_refused_by_name() {
    check("bridge");
}

#[test]
fn templates_are_bounded_in_steps_and_memory() {
    check("template");
}

#[test]
fn bodies_are_read_or_refused_by_field() {
    check("request");
}

#[test]
fn traces_are_read_or_refused_by_name() {
    check("trace");
}

#[test]
fn records_are_restored_or_refused_by_name() {
    check("record");
}

#[test]
fn journals_are_taken_up_or_refused_by_name() {
    check("journal");
}

#[test]
fn pressure_variables_are_read_or_refused_by_name() {
    check("pressure");
}

#[test]
fn every_boundary_has_a_target_seeds_and_a_test() {
    let tests = include_str!("hostile.rs");
    let mut bytes = 0;
    for boundary in BOUNDARIES {
        let target = std::fs::read_to_string(fuzz().join(format!("targets/{}.rs", boundary.name))).unwrap();
        assert!(target.contains(&format!("\"{}\"", boundary.name)), "{target}");
        assert!(tests.contains(&format!("check(\"{}\")", boundary.name)), "{} has no test", boundary.name);
        let seeds = seeds(boundary.name);
        assert!((5..=25).contains(&seeds.len()), "{} has {} seeds", boundary.name, seeds.len());
        bytes += seeds.iter().map(|(_, seed)| seed.len()).sum::<usize>();
    }
    assert!(bytes < 200_000, "seeds of {bytes} bytes");
}
