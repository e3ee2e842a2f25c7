//! What holds on every ladder, for all tenants, budgets and arrivals. The engine in `common` checks the laws of
//! execution in every round; here stand those that look at a whole run, and the order of the levers.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::collections::BTreeSet;

use common::{World, rung, tenant};
use molt_scheduler::simulator::Live;
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use molt_scheduler::{Action, Class, Config, LadderCost, Plan, Policy, RungCost, Scheduler, SequenceId};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Ask {
    round: u64,
    tenant: usize,
    prompt: u64,
    pinned: u64,
    answer: u64,
    cancel_after: Option<u64>,
}

#[derive(Debug, Clone)]
struct Scene {
    rungs: Vec<RungCost>,
    tenants: Vec<(bool, u16, u8, u8)>,
    asks: Vec<Ask>,
    /// Percent of what everything at its biggest would take, and for how many rounds.
    budgets: Vec<(u64, u64)>,
    policy: Policy,
    /// A rung that does not load, from one round to another.
    broken: Option<(u8, u64, u64)>,
    /// Bytes that the engine uses unbeknown to the scheduler, by round, in turn.
    leaks: Vec<u64>,
}

fn ladder(longest: usize) -> impl Strategy<Value = Vec<RungCost>> {
    proptest::collection::vec((prop_oneof![20u64..400, 200u64..4000], 1u64..8, 0u64..40), 1..=longest).prop_map(
        |steps| {
            let mut weights = 0;
            let mut rungs: Vec<RungCost> = steps
                .into_iter()
                .map(|(more, cache, scratch)| {
                    weights += more;
                    rung(weights, cache, scratch)
                })
                .collect();
            rungs.reverse();
            rungs
        },
    )
}

fn scene(policy: impl Strategy<Value = Policy>, most: usize) -> impl Strategy<Value = Scene> {
    let tenants = proptest::collection::vec((any::<bool>(), 1u16..5, 0u8..4, 0u8..4), 1..4);
    let ask = (0u64..40, 0usize..8, 1u64..80, 0u64..20, 1u64..90, proptest::option::weighted(0.15, 1u64..40));
    let asks = proptest::collection::vec(ask, 1..most).prop_map(|asks| {
        asks.into_iter()
            .map(|(round, tenant, prompt, pinned, answer, cancel_after)| Ask {
                round,
                tenant,
                prompt,
                pinned,
                answer,
                cancel_after,
            })
            .collect()
    });
    let budgets = proptest::collection::vec((0u64..110, 1u64..25), 1..10);
    (ladder(4), tenants, asks, budgets, policy).prop_map(|(rungs, tenants, asks, budgets, policy)| Scene {
        rungs,
        tenants,
        asks,
        budgets,
        policy,
        broken: None,
        leaks: vec![0],
    })
}

/// The same on a bad day.
fn bad_day(policy: impl Strategy<Value = Policy>, most: usize) -> impl Strategy<Value = Scene> {
    let broken = proptest::option::of((0u8..4, 0u64..60, 1u64..40));
    let leaks = proptest::collection::vec(prop_oneof![Just(0), 0u64..200], 1..6);
    (scene(policy, most), broken, leaks).prop_map(|(scene, broken, leaks)| Scene {
        broken: broken.map(|(rung, from, rounds)| (rung, from, from + rounds)),
        leaks,
        ..scene
    })
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::LeverFirst), Just(Policy::ProtectForeground)]
}

fn config(policy: Policy) -> Config {
    Config {
        policy,
        overhead: Bytes::new(10),
        patience: Span::from_millis(500),
        residence: Span::from_millis(700),
        promote_for_tokens: Tokens::new(4),
        admit_for_tokens: Tokens::new(20),
        chunk: Tokens::new(16),
        chunk_alone: Tokens::new(64),
        shed_block: Tokens::new(8),
        sinks: Tokens::new(2),
        window: Tokens::new(8),
        ..Config::default()
    }
}

/// More than everything together can take.
fn ample(scene: &Scene) -> u64 {
    let held: u64 = scene.rungs.iter().map(|cost| cost.weights.get() + cost.scratch.get()).sum();
    let dearest = scene.rungs.iter().map(|cost| cost.cache_per_token.get()).max().unwrap_or(0);
    let tokens: u64 = scene.asks.iter().map(|ask| ask.prompt + ask.answer + 64).sum();
    (held + dearest * tokens * 2 + 10) * 2
}

/// What the budgets are percentages of.
fn scale(scene: &Scene) -> u64 {
    let top = scene.rungs.first().map_or(0, |cost| cost.weights.get() + cost.scratch.get());
    let dearest = scene.rungs.iter().map(|cost| cost.cache_per_token.get()).max().unwrap_or(0);
    let tokens: u64 = scene.asks.iter().map(|ask| ask.prompt + ask.answer).sum();
    top + top / 2 + dearest * tokens / 2
}

/// Runs a scene, with a look at the world before and after each round, and then with ample memory until all are done.
fn run(
    scene: &Scene,
    mut look: impl FnMut(&World, &World, u64) -> Result<(), TestCaseError>,
) -> Result<World, TestCaseError> {
    let mut world = World::new(scene.rungs.clone(), config(scene.policy));
    let tenants: Vec<_> = scene
        .tenants
        .iter()
        .map(|(foreground, weight, a, b)| {
            let class = if *foreground { Class::Foreground } else { Class::Batch };
            world.register(tenant(class, *weight, *a.min(b), *a.max(b)))
        })
        .collect();
    let mut cancels: Vec<(u64, SequenceId)> = Vec::new();
    let timeline: Vec<u64> = scene
        .budgets
        .iter()
        .flat_map(|(percent, rounds)| vec![scale(scene) * percent / 100; usize::try_from(*rounds).unwrap()])
        .collect();
    let mut round = 0u64;
    let mut accepted = 0;
    let mut cancelled = 0usize;
    loop {
        let end = u64::try_from(timeline.len()).unwrap().max(61);
        let budget = timeline.get(usize::try_from(round).unwrap()).copied().unwrap_or(ample(scene));
        for ask in scene.asks.iter().filter(|ask| ask.round == round) {
            let id = world.submit(tenants[ask.tenant % tenants.len()], ask.prompt, ask.pinned, ask.answer);
            let id = id.map_err(|refusal| TestCaseError::fail(refusal.to_string()))?;
            accepted += 1;
            cancels.extend(ask.cancel_after.map(|after| (round + after, id)));
        }
        for (_, id) in cancels.iter().filter(|(at, _)| *at == round) {
            cancelled += usize::from(world.cancel(*id));
        }
        if let Some((rung, from, to)) = scene.broken {
            world.broken = if (from..to).contains(&round) { [RungIdx::new(rung)].into() } else { BTreeSet::new() };
        }
        let turn = usize::try_from(round / 7).unwrap() % scene.leaks.len();
        world.leak = Bytes::new(if round < end { scene.leaks[turn] } else { 0 });
        let before = world.clone();
        world.round(budget).map_err(|broken| TestCaseError::fail(format!("round {round}: {}", broken.law)))?;
        look(&before, &world, budget)?;
        round += 1;
        if round > end && world.live.is_empty() {
            break;
        }
        prop_assert!(round < end + 3000, "{:?} never end", world.live);
    }
    prop_assert_eq!(world.past.len() + cancelled, accepted, "somebody was ended");
    Ok(world)
}

/// A thousand cases, or what `PROPTEST_CASES` says.
fn cases() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 1000 };
    let kept = proptest::test_runner::FileFailurePersistence::WithSource("regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(kept)), ..default }
}

proptest! {
    #![proptest_config(cases())]

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

    /// Once memory is ample, whoever is parked runs again within the patience and a round for each of them.
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
            Ok(())
        })?;
    }
}

/// One way to go on: for each running sequence a rung, or `None` to park.
type Way = Vec<Option<RungIdx>>;

/// All ways, demoting within floors, with `parks` saying who may be parked and `moves` who may be moved.
fn ways(live: &[&Live], parks: impl Fn(&Live) -> bool, moves: impl Fn(&Live) -> bool, ladder: &LadderCost) -> Vec<Way> {
    let mut all: Vec<Way> = vec![Vec::new()];
    for one in live {
        let own = one.rung.unwrap();
        let mut options: Vec<Option<RungIdx>> = vec![Some(own)];
        if moves(one) {
            options.extend(
                ladder.rungs().map(|(rung, _)| rung).filter(|rung| *rung > own && *rung <= one.floor).map(Some),
            );
        }
        if parks(one) {
            options.push(None);
        }
        all = all.iter().flat_map(|way| options.iter().map(|option| [way.clone(), vec![*option]].concat())).collect();
    }
    all
}

/// Whether a way fits the budget in the end, and an order of its carries keeps to the law of transitions.
fn feasible(world: &World, live: &[&Live], way: &Way, budget: u64) -> bool {
    let held = |rungs: &BTreeSet<RungIdx>| -> u64 {
        rungs.iter().map(|rung| world.cost(*rung).weights.get() + world.cost(*rung).scratch.get()).sum()
    };
    let used: BTreeSet<RungIdx> = way.iter().flatten().copied().collect();
    let before = world.usage();
    let fixed = before - held(&world.resident);
    let mut end = fixed + held(&used);
    let mut carries: Vec<(u64, u64)> = Vec::new();
    for (one, to) in live.iter().zip(way) {
        let Some(to) = to else { continue };
        let (source, destination) = (world.cache(one.rung.unwrap(), one.cached), world.cache(*to, one.cached));
        end = end - source + destination + world.cost(*to).cache_per_token.get();
        if Some(*to) != one.rung {
            carries.push((source, destination));
        }
    }
    if end > budget {
        return false;
    }
    let kept = used.intersection(&world.resident).copied().collect();
    let level = fixed + held(&kept);
    let within = level <= budget;
    let start = fixed + held(&used);
    let cap = |within: bool| if within { budget } else { before.max(budget) };
    let goes = |carries: &[(u64, u64)]| {
        let (mut level, mut within) = (start, within || start <= budget);
        carries.iter().all(|(source, destination)| {
            let fits = level + destination <= cap(within);
            level = level + destination - source;
            within |= level <= budget;
            fits
        })
    };
    // Two orders: that of least peak, and the big ones first for as long as usage is over the budget anyway.
    let grows = |carry: &(u64, u64)| carry.1 > carry.0;
    let least = |carry: &(u64, u64)| (grows(carry), if grows(carry) { u64::MAX - carry.0 } else { carry.1 });
    carries.sort_by_key(least);
    if start > cap(within) || goes(&carries) {
        return start <= cap(within);
    }
    carries.sort_by_key(|carry| (grows(carry), u64::MAX - if grows(carry) { carry.0 } else { carry.1 }));
    let mut after = start;
    let big = carries.iter().take_while(|(source, destination)| {
        let over = after > budget;
        after = after + destination - source;
        over
    });
    let big = big.count();
    carries[big..].sort_by_key(least);
    goes(&carries)
}

proptest! {
    #![proptest_config(cases())]

    /// A lever is used only where no assignment of less harmful ones suffices, by exhaustive search; and the foreground
    /// bears it only where batch could not have borne it instead.
    #[test]
    fn levers_are_used_in_order(scene in scene(Just(Policy::LeverFirst), 6)) {
        run(&scene, |before, after, budget| {
            let mut world = before.clone();
            for progress in &before.progress {
                if progress.finished {
                    world.live.remove(&progress.sequence);
                }
            }
            let running: Vec<(&SequenceId, &Live)> = world.live.iter().filter(|(_, live)| live.running).collect();
            let live: Vec<&Live> = running.iter().map(|(_, live)| *live).collect();
            let ladder = world.scheduler.ladder();
            let (mut demoted, mut parked) = ((false, false), (false, false));
            let (mut shed, mut back) = (false, false);
            for action in after.plan.actions() {
                let class = |id: &SequenceId| running.iter().find(|(run, _)| *run == id).map(|(_, live)| live.class);
                let mark = |flags: &mut (bool, bool), id: &SequenceId| match class(id) {
                    Some(Class::Foreground) => flags.0 = true,
                    Some(Class::Batch) => flags.1 = true,
                    None => {}
                };
                match action {
                    Action::Demote { sequence, .. } => mark(&mut demoted, sequence),
                    Action::Park { sequence, .. } => mark(&mut parked, sequence),
                    Action::Shed { .. } => shed = true,
                    Action::Unpark { .. } => back = true,
                    _ => {}
                }
            }
            // In a round in which somebody comes back, batch may move over for the foreground; that is looked at below.
            if back {
                return Ok(());
            }
            let any = |ways: Vec<Way>| ways.iter().find(|way| feasible(&world, &live, way, budget)).cloned();
            let nobody = |_: &Live| false;
            let batch = |live: &Live| live.class == Class::Batch;
            let all = |_: &Live| true;
            if demoted.0 || demoted.1 {
                let way = any(ways(&live, nobody, nobody, ladder));
                prop_assert!(way.is_none(), "demoted though all fit as they were");
            }
            if demoted.0 && parked == (false, false) {
                let way = any(ways(&live, nobody, batch, ladder));
                prop_assert!(way.is_none(), "the foreground was demoted though {way:?} of {live:?} fits");
            }
            if parked.0 || parked.1 {
                let way = any(ways(&live, nobody, all, ladder));
                prop_assert!(way.is_none(), "parked though {way:?} of {live:?} fits");
            }
            if parked.0 {
                let way = any(ways(&live, batch, all, ladder));
                prop_assert!(way.is_none(), "the foreground was parked though {way:?} of {live:?} fits");
            }
            if shed {
                let way = vec![None; live.len()];
                prop_assert!(!feasible(&world, &live, &way, budget), "shed though parking sufficed");
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
