//! What holds on every ladder, for all tenants, budgets and arrivals. The simulator checks the laws of execution in every
//! round; here stand those that look at a whole run. The order of the levers is in `order.rs`, shares in `fairness.rs`.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::scene::{Scene, ample, any_policy, bad_day, config, run, scene};
use common::{World, cases, rung, tenant};
use molt_scheduler::{Action, Class, Plan, Policy, Scheduler};
use proptest::prelude::*;

proptest! {
    #![proptest_config(cases(1000))]

    /// Usage stays within the budget whenever the floor fits, transitions included; nobody is ended; all finish once
    /// memory is ample; switches stay within the law of the crate's documentation.
    #[test]
    fn the_budget_is_kept_and_everybody_finishes(scene in bad_day(any_policy(), 10)) {
        let world = run(&scene, |_, _, _| Ok(()))?;
        let config = config(scene.policy);
        let steps = u64::try_from(scene.rungs.len()).unwrap() - 1;
        for (_, live) in &world.past {
            let there = world.now.since(live.born).micros();
            prop_assert!(live.promotions <= 1 + there / config.residence.micros(), "{live:?}");
            prop_assert!(live.switches <= live.promotions + steps * (1 + live.promotions), "{live:?}");
        }
    }

    /// The same state and observation give the same plan, and a state that was written down and read again is the same.
    #[test]
    fn plans_are_reproducible(scene in bad_day(any_policy(), 8)) {
        let scene = Scene { broken: None, ..scene };
        let mut rounds = 0u64;
        run(&scene, |before, after, budget| {
            rounds += 1;
            if !rounds.is_multiple_of(5) {
                return Ok(());
            }
            let written = serde_json::to_string(&before.scheduler).unwrap();
            let mut read: Scheduler = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(&read, &before.scheduler);
            let mut plan = Plan::new();
            read.round(&before.observation(budget), &mut plan);
            prop_assert_eq!(&plan, &after.plan);
            prop_assert_eq!(&read, &after.scheduler);
            Ok(())
        })?;
    }

    /// Once memory is ample, whoever is parked runs again within the patience and a round for each of them; of one class
    /// on one rung nobody comes back before one that was parked before it.
    #[test]
    fn the_parked_come_back(scene in scene(any_policy(), 8)) {
        let plenty = ample(&scene);
        let mut since = None;
        run(&scene, |before, after, budget| {
            if budget < plenty {
                since = None;
                return Ok(());
            }
            let start = *since.get_or_insert(before.now);
            let parked = after.live.values().filter(|live| live.rung.is_some() && !live.running).count();
            let bound = config(scene.policy).patience.micros() + 100_000 * u64::try_from(before.live.len()).unwrap();
            prop_assert!(parked == 0 || before.now.since(start).micros() <= bound, "{:?}", after.live);
            for action in after.plan.actions() {
                let Action::Unpark { sequence, .. } = action else { continue };
                let came = &before.live[sequence];
                for (id, still) in before.live.iter().filter(|(id, _)| after.live.get(id).is_some_and(|now| !now.running)) {
                    let alike = (still.class, still.rung) == (came.class, came.rung);
                    let sooner = still.stopped.is_some_and(|then| came.stopped.is_some_and(|own| then < own));
                    prop_assert!(!(alike && sooner), "{sequence} came back before {id}");
                }
            }
            Ok(())
        })?;
    }
}

/// A saw-tooth whose teeth are shorter than the patience promotes nobody, whatever the ladder.
#[test]
fn a_fast_saw_tooth_promotes_nobody() {
    let check = |high: u64, low: u64, tooth: u64| {
        let rungs = vec![rung(400, 2, 0), rung(200, 2, 0), rung(100, 2, 0)];
        let mut world = World::new(rungs, config(Policy::LeverFirst));
        let who = world.register(tenant(Class::Foreground, 1, 0, 2));
        world.submit(who, 10, 0, 300).unwrap();
        for round in 0..200u64 {
            world.round(if (round / tooth).is_multiple_of(2) { high } else { low }).unwrap();
        }
        let live = world.live.values().next().unwrap();
        (live.promotions, live.switches)
    };
    assert_eq!(check(1200, 400, 4), (0, 1), "down at the first trough, never up");
    assert_eq!(check(1200, 400, 1), (0, 1));
    let (promotions, switches) = check(1200, 400, 12);
    assert!(promotions <= 200 * 100 / 700 && switches <= 2 + 2 * promotions, "{promotions} of {switches}");
}

/// The scenes of the properties reach everything that there is to reach.
#[test]
fn scenes_reach_every_lever() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen: std::collections::BTreeMap<String, u64> = std::collections::BTreeMap::new();
    for _ in 0..400 {
        let scene = scene(any_policy(), 10).new_tree(&mut runner).unwrap().current();
        run(&scene, |before, after, _| {
            for action in after.plan.actions() {
                let name = format!("{action:?}");
                let mut name = name.split(' ').next().unwrap().to_string();
                if let Action::Demote { sequence, .. } | Action::Park { sequence, .. } | Action::Shed { sequence, .. } =
                    action
                {
                    let live = &before.live[sequence];
                    name = format!("{name} {:?} {:?} running {}", scene.policy, live.class, live.running);
                }
                *seen.entry(name).or_default() += 1;
            }
            Ok(())
        })
        .unwrap();
    }
    assert!(seen.len() == 26 && seen.values().all(|count| *count >= 5), "{seen:#?}");
}
