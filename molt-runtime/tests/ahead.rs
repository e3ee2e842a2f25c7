//! Reading ahead where a conversation may go next.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::{PROMPT, Run};
use molt_kv::carry::{CarrySettings, Route};
use molt_runtime::engine::{AheadSettings, Effort, EngineSettings, Shadow};
use molt_runtime::event::{Event, Switch};
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};

const AMPLE: Bytes = Bytes::mib(512);
const TIER0: RungIdx = RungIdx::TOP;
const TIER1: RungIdx = RungIdx::new(1);
const TIER2: RungIdx = RungIdx::new(2);

fn run(ahead: AheadSettings) -> Run {
    // Whatever this machine computes in a millisecond: only what is nearly complete is taken over whole.
    Run::with(EngineSettings { ahead, carry: Effort::Fixed(CarrySettings::FAST), ..EngineSettings::default() })
}

fn writes(rung: RungIdx) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::Token { rung: on, .. } if *on == rung)
}

fn switch_to(told: &[Event], rung: RungIdx) -> Switch {
    let to = |event: &Event| match event {
        Event::Switch(switch) if switch.to == rung => Some(switch.clone()),
        _ => None,
    };
    told.iter().find_map(to).unwrap_or_else(|| panic!("no switch to {rung}: {told:?}"))
}

/// Rounds at that budget, in each of which usage stays within it and nobody bears a lever.
fn quiet_rounds(run: &mut Run, budget: Bytes, rounds: usize) -> Vec<Event> {
    let mut all = Vec::new();
    for _ in 0..rounds {
        let told = run.round(budget);
        assert!(!told.iter().any(|event| matches!(event, Event::Lever { .. } | Event::Trouble { .. })), "{told:?}");
        assert!(run.engine.usage() <= budget, "{} of {budget}", run.engine.usage());
        all.extend(told);
    }
    all
}

#[test]
fn going_up_is_caught_up_with_before() {
    let check = |settings: AheadSettings, route: Route, whole: bool| {
        let mut run = run(settings);
        run.ask(300);
        let low = run.holds(TIER2);
        run.until(low, "an answer below", writes(TIER2));
        quiet_rounds(&mut run, low, 40);
        let told = run.until(AMPLE, "an answer above", writes(TIER0));
        // The way from there to the same weights at another precision needs no reading, and so no wait.
        assert_eq!(switch_to(&told, TIER0).route, Route::Identity);
        let switch = switch_to(&told, TIER1);
        assert_eq!((switch.route, switch.mapped_tokens == Tokens::ZERO), (route, route == Route::ReadAhead));
        if route == Route::Bridge {
            assert!(!told.iter().any(|event| matches!(event, Event::ReadAhead { .. })), "it waits for nothing");
            return;
        }
        let read: Vec<_> = told.iter().filter(|event| matches!(event, Event::ReadAhead { .. })).collect();
        let [Event::ReadAhead { rung: TIER1, tokens, used: true, .. }] = read[..] else { panic!("{read:?}") };
        // No keepsake, for it never was above: everything but what is read when it goes.
        assert_eq!(*tokens + Tokens::new(64) >= switch.tokens, whole, "{tokens} of {}", switch.tokens);
        assert!(run.engine.usage() <= AMPLE);
    };
    let settings = AheadSettings { every: 1, tokens: Tokens::new(32), ..AheadSettings::default() };
    check(settings, Route::ReadAhead, true);
    // Too slow: after the wait it goes as it is, and the rest is read at once. A bridge up is there, and is not asked for.
    let slow = AheadSettings { catch_up: Span::from_millis(60), tokens: Tokens::new(1), ..settings };
    check(slow, Route::ReadAhead, false);
    check(AheadSettings { eager_up: true, ..settings }, Route::Bridge, false);
}

#[test]
fn a_shadow_makes_the_way_down_exact() {
    let settings =
        AheadSettings { shadow: Shadow::On, shadow_every: 1, tokens: Tokens::new(16), ..AheadSettings::default() };
    // So many rounds after the first token; which route then, and whether some tokens are mapped.
    let check = |settings: AheadSettings, rounds: usize, route: Route, begun: bool| {
        let mut run = run(settings);
        run.ask(300);
        run.until(AMPLE, "a token", writes(TIER0));
        quiet_rounds(&mut run, AMPLE, rounds);
        let low = run.holds(TIER2);
        let before = run.engine.usage();
        let told = run.round(low);
        let switch = switch_to(&told, TIER2);
        assert_eq!(switch.route, route, "{settings:?} {rounds}");
        assert!(switch.tokens >= Tokens::from(PROMPT));
        match route {
            Route::ReadAhead => assert_eq!(switch.exact_tokens, switch.tokens),
            _ => assert_eq!(switch.exact_tokens > Tokens::new(100), begun, "{switch:?}"),
        }
        assert!(run.engine.usage() <= low && before > low);
        let told = run.until(low, "a token below", writes(TIER2));
        assert!(!told.iter().any(|event| matches!(event, Event::Trouble { .. })), "{told:?}");
    };
    check(settings, 60, Route::ReadAhead, true);
    check(settings, 12, Route::Bridge, true);
    check(AheadSettings { shadow: Shadow::Off, ..settings }, 60, Route::Bridge, false);
    check(AheadSettings { shadow_bytes: Bytes::new(4096), ..settings }, 60, Route::Bridge, false);
}

#[test]
fn what_is_read_ahead_goes_before_anybody_bears_a_lever() {
    let settings = AheadSettings { shadow: Shadow::On, shadow_every: 1, ..AheadSettings::default() };
    let mut run = run(settings);
    run.ask(400);
    run.until(AMPLE, "a token", writes(TIER0));
    quiet_rounds(&mut run, AMPLE, 100);
    let full = run.engine.usage();
    // Just too little for the shadow beside everything else.
    let tight = run.holds(TIER0);
    assert!(tight < full, "{tight} of {full}");
    let told = quiet_rounds(&mut run, tight, 60);
    let forgotten = |event: &Event| matches!(event, Event::ReadAhead { rung: TIER2, used: false, .. });
    assert_eq!(told.iter().filter(|event| forgotten(event)).count(), 1, "{told:?}");
    assert!(told.iter().any(writes(TIER0)));
    // And with memory it comes again.
    quiet_rounds(&mut run, AMPLE, 100);
    assert!(run.engine.usage() > tight);
}

#[test]
fn the_next_rung_is_fetched_when_the_budget_begins_to_fall_and_while_there_is_room() {
    let check = |budgets: &dyn Fn(&Run) -> Vec<Bytes>, expected: &[usize]| {
        let mut run = run(AheadSettings::default());
        let budgets = budgets(&run);
        run.ask(300);
        run.until(AMPLE, "a token", writes(TIER0));
        let mut fetched = Vec::new();
        for (at, budget) in budgets.iter().enumerate() {
            for event in quiet_rounds(&mut run, *budget, 3) {
                if let Event::Standby { rung, bytes } = event {
                    assert!(rung == TIER1 && bytes > Bytes::ZERO && run.engine.usage() <= *budget);
                    fetched.push(at);
                }
            }
        }
        assert_eq!(fetched, expected, "{budgets:?}");
    };
    let less = |share: u64| Bytes::new(AMPLE.get() / 100 * share);
    // Once a fall, however long it takes; a fall that ends is another.
    check(&|_| vec![less(95), less(90), less(80)], &[0]);
    check(&|_| vec![less(95), AMPLE, less(95)], &[0, 2]);
    check(&|_| vec![AMPLE, less(99), AMPLE], &[]);
    // No room for both.
    check(&|run| vec![run.holds(TIER0)], &[]);
}

#[test]
fn the_bigger_rung_is_fetched_while_going_up_wants_patience_as_far_as_there_is_room() {
    let check = |room: &dyn Fn(&Run) -> Bytes, beside: bool| {
        // Nothing is loaded beforehand to be read ahead on: that would need no fetching.
        let mut run = run(AheadSettings { catch_up: Span::ZERO, ..AheadSettings::default() });
        let (low, high) = (run.holds(TIER2), room(&run));
        run.ask(300);
        run.until(low, "an answer below", writes(TIER2));
        let told = run.until(high, "an answer above", writes(TIER1));
        let fetched: Vec<_> = told
            .iter()
            .take_while(|event| !matches!(event, Event::Switch(_)))
            .filter_map(|event| match event {
                Event::Standby { rung, bytes } => Some((*rung, *bytes)),
                _ => None,
            })
            .collect();
        let whole = run.engine.cost().get(TIER1).unwrap().weights;
        let [(TIER1, bytes)] = fetched[..] else { panic!("{fetched:?}") };
        assert_eq!(bytes == whole, beside, "{bytes} of {whole} with {high}");
    };
    check(&|_| AMPLE, true);
    check(&|run| run.holds(TIER1) + Bytes::mib(1), false);
}
