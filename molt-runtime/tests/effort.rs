//! How much of a way down is read natively: as much as a reader waits for, or what was asked for.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::Run;
use molt_kv::carry::{CarrySettings, Route};
use molt_runtime::engine::{Effort, EngineSettings};
use molt_runtime::event::Event;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};

#[test]
fn what_a_reader_waits_for_is_read_and_what_he_does_not_is_mapped() {
    let check = |carry: Effort, route: Route| {
        let mut run = Run::with(EngineSettings { carry, ..EngineSettings::default() });
        run.ask(300);
        run.until(Bytes::mib(512), "a token", |event| matches!(event, Event::Token { .. }));
        let bottom = RungIdx::new(2);
        let told = run.until(
            run.holds(bottom),
            "a token below",
            |event| matches!(event, Event::Token { rung, .. } if *rung == bottom),
        );
        let switch = told.iter().find_map(|event| match event {
            Event::Switch(switch) if switch.to == bottom => Some(switch.clone()),
            _ => None,
        });
        let switch = switch.unwrap();
        assert_eq!(switch.route, route, "{carry:?}");
        assert_eq!(switch.mapped_tokens > Tokens::ZERO, route == Route::Bridge, "{carry:?}");
        assert_eq!(switch.exact_tokens == switch.tokens, route == Route::Reread, "{carry:?}");
        // Nothing to heal where nothing was mapped.
        let healed = run.until(run.holds(bottom), "another token", |event| matches!(event, Event::Token { .. }));
        let heals = healed.iter().any(|event| matches!(event, Event::Healed { .. }));
        assert!(!heals || route == Route::Bridge, "{carry:?}: {healed:?}");
    };
    // A day is enough for any machine, a nanosecond for none.
    check(Effort::Stall { target_ms: 86_400_000.0 }, Route::Reread);
    check(Effort::Stall { target_ms: 1e-6 }, Route::Bridge);
    check(Effort::Fixed(CarrySettings::FAST), Route::Bridge);
    check(Effort::Fixed(CarrySettings::FAITHFUL), Route::Bridge);
    check(Effort::Fixed(CarrySettings::EXACT), Route::Reread);
}
