//! Every boundary of a switch made to fail, one passing after another and in pairs. Whatever happens, the answer is written to
//! its end, the next one is too, the books return to nothing, and where the rungs were the same, so is every token.
//!
//! Faults are the process's, so each test takes its turn before it makes an engine.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::{Run, over_the_bridge};
use std::sync::mpsc;

use molt_kv::carry::Route;
use molt_kv::faults::{Boundary, Fault, arm};
use molt_runtime::engine::{AheadSettings, EngineSettings, Shadow};
use molt_runtime::event::{Event, TroubleKind};
use molt_scheduler::units::{Bytes, RungIdx, Span};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const AMPLE: Bytes = Bytes::mib(512);
const ANSWER: u64 = 130;

/// What became of a run.
struct Outcome {
    troubles: Vec<(TroubleKind, String)>,
    tokens: u64,
    rungs: Vec<RungIdx>,
    hit: u64,
    passed: Vec<(Boundary, u64)>,
}

/// A conversation that goes down over every rung and up again; then another, alone; then nothing.
fn conversation(shadow: Shadow, faults: &[Fault]) -> Outcome {
    let ahead = AheadSettings { shadow, every: 1, shadow_every: 2, ..AheadSettings::default() };
    let armed = arm(&[]);
    let mut run = Run::with(EngineSettings { ahead, ..over_the_bridge() });
    // Only now: a ladder that is broken when the engine is made is an error of the start.
    armed.instead(faults);
    let mut outcome = Outcome { troubles: Vec::new(), tokens: 0, rungs: Vec::new(), hit: 0, passed: Vec::new() };
    let [tier0, tier1, tier2] = [0, 1, 2].map(RungIdx::new);
    let budgets = [AMPLE, run.holds(tier1), run.holds(tier2), AMPLE];
    for (budgets, answer) in [(&budgets[..], ANSWER), (&[AMPLE][..], 4)] {
        let sequence = run.ask(answer);
        let mut rounds = 0;
        while run.engine.has(sequence) {
            rounds += 1;
            assert!(rounds < 4_000, "it does not end: {:?}", outcome.troubles);
            // Some tokens at each budget, and most of them on the way up.
            let stage = [15, 30, 50].into_iter().filter(|tokens| outcome.tokens >= *tokens).count();
            let stage = stage.min(budgets.len() - 1);
            for event in run.round(budgets[stage]) {
                match event {
                    Event::Token { rung, .. } => {
                        outcome.tokens += 1;
                        if outcome.rungs.last() != Some(&rung) {
                            outcome.rungs.push(rung);
                        }
                    }
                    Event::Trouble { kind, message, .. } => outcome.troubles.push((kind, message)),
                    Event::Sample { usage_bytes, budget_bytes, .. } => {
                        assert!(usage_bytes <= budget_bytes, "{usage_bytes} of {budget_bytes}: {:?}", outcome.troubles);
                    }
                    _ => {}
                }
            }
        }
    }
    // Nobody is left, and no memory for weights: what remains is the process.
    (0..3).for_each(|_| _ = run.round(run.engine.overhead()));
    assert_eq!(run.engine.usage(), run.engine.overhead(), "after {:?}", outcome.troubles);
    assert!(outcome.rungs.contains(&tier0));
    outcome.hit = armed.hit();
    // An engine alone keeps nothing; `service_faults.rs` has what does.
    let own = Boundary::ALL.into_iter().filter(|boundary| *boundary != Boundary::WriteState);
    outcome.passed = own.map(|boundary| (boundary, armed.passed(boundary))).collect();
    outcome
}

fn check(shadow: Shadow, faults: &[Fault]) {
    let found = conversation(shadow, faults);
    assert_eq!(found.tokens, ANSWER + 4, "{faults:?}: {:?}", found.troubles);
    // A fault of ours is always told. One from outside is told where somebody bears it; a background reading that is given
    // up is nobody's harm.
    let panicked = faults.iter().filter(|fault| fault.panics).count() as u64;
    if panicked > 0 && found.hit == faults.len() as u64 {
        let told = found.troubles.iter().filter(|(kind, _)| *kind == TroubleKind::Panic).count() as u64;
        assert_eq!(told, panicked, "{faults:?}: {:?}", found.troubles);
    }
}

/// How often each boundary is passed where nothing fails.
fn passings(shadow: Shadow) -> Vec<(Boundary, u64)> {
    let found = conversation(shadow, &[]);
    assert_eq!((found.tokens, found.troubles.len()), (ANSWER + 4, 0), "{:?}", found.troubles);
    assert!(found.rungs.len() >= 5, "{:?}", found.rungs);
    found.passed
}

/// So many passings of a boundary are tried one by one, spread over all that there are.
fn tried() -> u64 {
    std::env::var("MOLT_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

#[test]
fn whatever_fails_nothing_is_lost() {
    let mut all = 0;
    for shadow in [Shadow::Off, Shadow::On] {
        let passings = passings(shadow);
        for (boundary, count) in &passings {
            let reached = matches!((boundary, shadow), (Boundary::ApplyBridge, Shadow::On)) || *count > 0;
            assert!(reached, "{boundary:?} is never passed with shadow {shadow:?}");
            let tried = tried().min(*count);
            for at in 0..tried {
                let after = at * count / tried;
                for panics in [false, true] {
                    check(shadow, &[Fault { boundary: *boundary, after, panics }]);
                    all += 1;
                }
            }
        }
        let mut random = StdRng::seed_from_u64(11);
        for _ in 0..4 * tried() {
            let mut fault = || {
                let (boundary, count) = passings[random.random_range(0..passings.len())];
                Fault { boundary, after: random.random_range(0..count.max(1)), panics: random.random() }
            };
            check(shadow, &[fault(), fault()]);
            all += 1;
        }
    }
    println!("{all} runs with faults");
}

#[test]
fn what_always_fails_is_given_up() {
    let faults: Vec<Fault> = (0..20).map(|after| Fault { boundary: Boundary::Compute, after, panics: true }).collect();
    let armed = arm(&[]);
    let mut run = Run::new();
    armed.instead(&faults);
    run.ask(4);
    let mut told = Vec::new();
    let went_on: Vec<bool> = (0..9).map(|_| run.guarded(AMPLE, &mut told)).collect();
    assert_eq!(went_on, [true, true, true, true, true, true, true, false, false]);
    let failed = |event: &&Event| matches!(event, Event::Trouble { kind: TroubleKind::Panic, .. });
    assert_eq!(told.iter().filter(failed).count(), 9);
}

/// Whether the alarm rings where the budget falls again, to that, while the smaller rung is being loaded.
fn check_second_fall(second: impl Fn(&Run) -> Bytes, rings: bool) {
    let armed = arm(&[]);
    let mut run = Run::new();
    let tier1 = RungIdx::new(1);
    run.ask(60);
    run.until(AMPLE, "a token", |event| matches!(event, Event::Token { .. }));
    let (first, second, alarm) = (run.holds(tier1), second(&run), run.engine.alarm().clone());
    assert!(second < first && first < run.engine.usage(), "{second}, {first}, {}", run.engine.usage());
    armed.instead(&[]);
    armed.meanwhile(Boundary::ReadWeights, 1, move || alarm.ring_if_over(second));
    let told = run.round(first);
    assert!(armed.passed(Boundary::ReadWeights) > 1, "the moment came");
    assert!(told.iter().any(|event| matches!(event, Event::Switch(switch) if switch.to == tier1)), "{told:?}");
    assert_eq!(run.engine.alarm().flag().is_up(), rings, "at {second}");
    // Who is interrupted for nothing waits for nothing.
    assert_eq!(told.iter().any(|event| matches!(event, Event::Token { .. })), !rings, "at {second}: {told:?}");
}

#[test]
fn a_second_fall_during_a_load_interrupts_only_where_it_does_not_hold_what_is_loaded() {
    let tier1 = RungIdx::new(1);
    check_second_fall(|run| run.holds(tier1) - Bytes::new(64 << 10), false);
    check_second_fall(|run| run.engine.overhead() + run.engine.cost().get(tier1).unwrap().held(), true);
}

/// A rung that does not load when a conversation would be read ahead there is no reason to wait: it goes up as if there were
/// no such thing, once the scheduler has loaded the rung itself.
#[test]
fn a_rung_that_fails_to_be_read_ahead_is_not_waited_for() {
    // Longer than all rounds that are tried: who waited it out would never be above.
    let ahead = AheadSettings { every: 1, catch_up: Span::from_millis(3_600_000), ..AheadSettings::default() };
    let armed = arm(&[]);
    let mut run = Run::with(EngineSettings { ahead, ..over_the_bridge() });
    run.ask(ANSWER);
    let [tier0, tier1, tier2] = [0, 1, 2].map(RungIdx::new);
    let writes = |at: RungIdx| move |event: &Event| matches!(event, Event::Token { rung, .. } if *rung == at);
    let low = run.holds(tier2);
    run.until(low, "an answer below", writes(tier2));
    armed.instead(&[Fault { boundary: Boundary::ReadWeights, after: 0, panics: false }]);
    let told = run.until(AMPLE, "an answer above", writes(tier0));
    assert_eq!(armed.hit(), 1);
    assert!(told.iter().any(|event| matches!(event, Event::Trouble { .. })), "nobody was told: {told:?}");
    let to_tier1 = told.iter().find_map(|event| match event {
        Event::Switch(switch) if switch.to == tier1 => Some(switch.route),
        _ => None,
    });
    assert!(to_tier1.is_some_and(|route| route != Route::ReadAhead), "{to_tier1:?}: {told:?}");
}

/// Weights are in the books tensor by tensor, so that whoever looks while a rung is loaded sees how far it is.
#[test]
fn a_load_shows_in_the_books_while_it_lasts() {
    let armed = arm(&[]);
    let mut run = Run::new();
    let (books, (see, seen)) = (run.engine.books(), mpsc::channel());
    armed.meanwhile(Boundary::ReadWeights, 9, move || see.send(books.by_kind().weights_bytes).unwrap());
    run.ask(10);
    run.until(AMPLE, "a token", |event| matches!(event, Event::Token { .. }));
    let (part, whole) = (seen.recv().unwrap(), run.engine.books().by_kind().weights_bytes);
    assert!(part > Bytes::ZERO && part < whole, "{part} of {whole}");
}
