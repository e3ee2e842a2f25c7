//! Random scenes (ladders, tenants, requests, budgets, bad days) and how one is run to its end.

use std::collections::BTreeSet;

use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use molt_scheduler::{Class, Config, Policy, RungCost, SequenceId};
use proptest::prelude::*;

use super::{World, rung, tenant};

#[derive(Debug, Clone)]
pub struct Ask {
    pub round: u64,
    pub tenant: usize,
    pub prompt: u64,
    pub pinned: u64,
    pub answer: u64,
    pub cancel_after: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct Scene {
    pub rungs: Vec<RungCost>,
    pub tenants: Vec<(bool, u16, u8, u8)>,
    pub asks: Vec<Ask>,
    /// Percent of what everything at its biggest would take, and for how many rounds.
    pub budgets: Vec<(u64, u64)>,
    pub policy: Policy,
    /// A rung that does not load, from one round to another.
    pub broken: Option<(u8, u64, u64)>,
    /// Bytes that the engine uses unbeknown to the scheduler, by round, in turn.
    pub leaks: Vec<u64>,
}

pub fn ladder(longest: usize) -> impl Strategy<Value = Vec<RungCost>> {
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

pub fn scene(policy: impl Strategy<Value = Policy>, most: usize) -> impl Strategy<Value = Scene> {
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
pub fn bad_day(policy: impl Strategy<Value = Policy>, most: usize) -> impl Strategy<Value = Scene> {
    let broken = proptest::option::of((0u8..4, 0u64..60, 1u64..40));
    let leaks = proptest::collection::vec(prop_oneof![Just(0), 0u64..200], 1..6);
    (scene(policy, most), broken, leaks).prop_map(|(scene, broken, leaks)| Scene {
        broken: broken.map(|(rung, from, rounds)| (rung, from, from + rounds)),
        leaks,
        ..scene
    })
}

pub fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::LeverFirst), Just(Policy::ProtectForeground)]
}

pub fn config(policy: Policy) -> Config {
    Config {
        policy,
        overhead: Bytes::new(10),
        patience: Span::from_millis(500),
        residence: Span::from_millis(700),
        catch_up: Span::from_millis(400),
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
pub fn ample(scene: &Scene) -> u64 {
    let held: u64 = scene.rungs.iter().map(|cost| cost.weights.get() + cost.scratch.get()).sum();
    let dearest = scene.rungs.iter().map(|cost| cost.cache_per_token.get()).max().unwrap_or(0);
    let tokens: u64 = scene.asks.iter().map(|ask| ask.prompt + ask.answer + 64).sum();
    (held + dearest * tokens * 2 + 10) * 2
}

/// What the budgets are percentages of.
pub fn scale(scene: &Scene) -> u64 {
    let top = scene.rungs.first().map_or(0, |cost| cost.weights.get() + cost.scratch.get());
    let dearest = scene.rungs.iter().map(|cost| cost.cache_per_token.get()).max().unwrap_or(0);
    let tokens: u64 = scene.asks.iter().map(|ask| ask.prompt + ask.answer).sum();
    top + top / 2 + dearest * tokens / 2
}

/// Runs a scene, with a look at the world before and after each round, and then with ample memory until all are done.
pub fn run(
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
