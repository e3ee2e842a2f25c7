//! Memory from the signal on: never more than there was, and once within the new budget it stays there. One test in a
//! process of its own, for the resident set is the process's.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::time::{Duration, Instant};

use common::Run;
use molt_runtime::event::{Event, Switch};
use molt_runtime::sampler::{Path, Sampler};
use molt_scheduler::units::{Bytes, RungIdx};

/// Noise: one in so many.
const NOISE: u64 = 50;
/// `pocket` is so small that the heap of a round shows in the resident set.
const HEAP: Bytes = Bytes::mib(1);

fn with_noise(bytes: Bytes) -> Bytes {
    bytes + Bytes::new(bytes.get() / NOISE)
}

#[test]
fn a_switch_never_holds_source_and_destination() {
    let mut run = Run::new();
    let books = run.engine.books();
    let full = Bytes::mib(512);
    for (from, to) in [(0, 1), (0, 2), (1, 2)].repeat(6) {
        let (from, to) = (RungIdx::new(from), RungIdx::new(to));
        let (upper, lower) = (if from == RungIdx::TOP { full } else { run.holds(from) }, run.holds(to));
        let sequence = run.ask(60);
        run.until(upper, "a token", |event| matches!(event, Event::Token { rung, .. } if *rung == from));
        let sampler = Sampler::start(books.clone(), Duration::from_micros(100)).unwrap();
        while !sampler.has_looked() {
            std::thread::yield_now();
        }
        let before = books.usage();
        books.take_peak();
        let signal = Instant::now();
        let told = run.round(lower);
        let peak = books.take_peak();
        let looks = sampler.stop();
        assert!(
            told.iter().any(|event| matches!(event, Event::Switch(Switch { to: rung, .. }) if *rung == to)),
            "{from} to {to}: {told:?}"
        );
        assert!(peak <= before, "{from} to {to}: {before} when the signal came, {peak} at the most afterwards");
        let path = Path::of(&looks, signal, lower).unwrap();
        assert_eq!(path.before, before);
        let within = path.peak_within.unwrap();
        assert!(within <= with_noise(lower), "{from} to {to}: {within} after it was within {lower}");
        let resident = |after: bool| looks.iter().filter(|look| (look.at > signal) == after).map(|look| look.rss).max();
        let (rss, highest) = (resident(false).unwrap(), resident(true).unwrap());
        assert!(highest <= with_noise(rss) + HEAP, "{from} to {to}: {rss} were resident, then {highest}");
        // The reaction is told in the same round, and it is real: the resident set was within the budget.
        let reaction = told.iter().find_map(|event| match event {
            Event::Reaction { before_bytes, budget_bytes, rss_bytes, .. } => {
                Some((*before_bytes, *budget_bytes, *rss_bytes))
            }
            _ => None,
        });
        let (before_bytes, budget_bytes, rss_bytes) = reaction.unwrap();
        assert_eq!((before_bytes, budget_bytes), (before, lower));
        assert!(rss_bytes < rss, "{from} to {to}: {rss} were resident, then {rss_bytes}");
        let told = run.until(lower, "the next token", |event| matches!(event, Event::Token { .. }));
        assert!(!told.is_empty());
        while run.engine.has(sequence) {
            run.round(lower);
        }
        // Nobody is left; what is loaded goes.
        run.round(run.engine.overhead());
    }
}
