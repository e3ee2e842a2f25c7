//! The order of the levers under both policies, by exhaustive search; and what the policies are worth to the foreground.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::collections::BTreeSet;

use common::scene::{Scene, run, scene};
use common::{World, cases};
use molt_scheduler::simulator::Live;
use molt_scheduler::units::{RungIdx, Tokens};
use molt_scheduler::{Action, Class, LadderCost, Policy};
use proptest::prelude::*;

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

/// What a plan did to those who ran, by lever: to the foreground, to batch.
#[derive(Debug, Default, PartialEq, Eq)]
struct Touched {
    demoted: (bool, bool),
    parked: (bool, bool),
    shed: (bool, bool),
    /// Somebody came back: then batch may have moved over for it.
    back: bool,
    /// Somebody was let in: with the foreground protected, the same.
    admitted: bool,
}

impl Touched {
    fn by(after: &World, before: &World) -> Self {
        let mut touched = Self::default();
        for action in after.plan.actions() {
            let (flags, sequence) = match action {
                Action::Demote { sequence, .. } => (&mut touched.demoted, sequence),
                Action::Park { sequence, .. } => (&mut touched.parked, sequence),
                Action::Shed { sequence, .. } => (&mut touched.shed, sequence),
                Action::Unpark { .. } => {
                    touched.back = true;
                    continue;
                }
                Action::Admit { .. } => {
                    touched.admitted = true;
                    continue;
                }
                _ => continue,
            };
            match before.live[sequence].class {
                Class::Foreground => flags.0 = true,
                Class::Batch => flags.1 = true,
            }
        }
        touched
    }

    fn foreground(&self) -> bool {
        self.demoted.0 || self.parked.0 || self.shed.0
    }
}

/// The world as a round finds it: those who have ended are gone.
fn found(before: &World) -> World {
    let mut world = before.clone();
    for progress in before.progress.iter().filter(|progress| progress.finished) {
        world.live.remove(&progress.sequence);
    }
    world
}

/// Bytes that a sequence may shed.
fn sheddable(world: &World, live: &Live) -> u64 {
    let config = world.scheduler.config();
    let old = live.cached - live.pinned.max(config.sinks) - config.window;
    let block = config.shed_block.get();
    live.rung.map_or(0, |rung| world.cache(rung, Tokens::new(old.get() / block * block)))
}

const NOBODY: fn(&Live) -> bool = |_| false;
const BATCH: fn(&Live) -> bool = |live| live.class == Class::Batch;
const ALL: fn(&Live) -> bool = |_| true;

proptest! {
    #![proptest_config(cases(1000))]

    /// A lever is used only where no assignment of less harmful ones suffices, by exhaustive search; and the foreground
    /// bears it only where batch could not have borne it instead.
    #[test]
    fn levers_are_used_in_order(scene in scene(Just(Policy::LeverFirst), 6)) {
        run(&scene, |before, after, budget| {
            let (world, touched) = (found(before), Touched::by(after, before));
            if touched.back {
                return Ok(());
            }
            let Touched { demoted, parked, shed, .. } = touched;
            let live: Vec<&Live> = world.live.values().filter(|live| live.running).collect();
            let ladder = world.scheduler.ladder();
            let any = |ways: Vec<Way>| ways.iter().find(|way| feasible(&world, &live, way, budget)).cloned();
            if demoted.0 || demoted.1 {
                let way = any(ways(&live, NOBODY, NOBODY, ladder));
                prop_assert!(way.is_none(), "demoted though all fit as they were");
            }
            if demoted.0 && parked == (false, false) {
                let way = any(ways(&live, NOBODY, BATCH, ladder));
                prop_assert!(way.is_none(), "the foreground was demoted though {way:?} of {live:?} fits");
            }
            if parked.0 || parked.1 {
                let way = any(ways(&live, NOBODY, ALL, ladder));
                prop_assert!(way.is_none(), "parked though {way:?} of {live:?} fits");
            }
            if parked.0 {
                let way = any(ways(&live, BATCH, ALL, ladder));
                prop_assert!(way.is_none(), "the foreground was parked though {way:?} of {live:?} fits");
            }
            if shed.0 || shed.1 {
                let way = vec![None; live.len()];
                prop_assert!(!feasible(&world, &live, &way, budget), "shed though parking sufficed");
            }
            Ok(())
        })?;
    }

    /// Where the foreground is protected, batch exhausts all its levers, shedding included, before the foreground bears
    /// any; and within batch and within the foreground the order is the same.
    #[test]
    fn batch_exhausts_its_levers_first(scene in scene(Just(Policy::ProtectForeground), 6)) {
        run(&scene, |before, after, budget| {
            let (world, touched) = (found(before), Touched::by(after, before));
            if touched.back || touched.admitted || touched == Touched::default() {
                return Ok(());
            }
            let Touched { parked, shed, .. } = touched;
            let live: Vec<&Live> = world.live.values().filter(|live| live.running).collect();
            let ladder = world.scheduler.ladder();
            let any = |ways: Vec<Way>| ways.iter().find(|way| feasible(&world, &live, way, budget)).cloned();
            let way = any(ways(&live, NOBODY, NOBODY, ladder));
            prop_assert!(way.is_none(), "{touched:?} though all fit as they were");
            if parked.1 {
                let way = any(ways(&live, NOBODY, BATCH, ladder));
                prop_assert!(way.is_none(), "batch was parked though {way:?} of {live:?} fits");
            }
            // All batch stopped, the foreground as it is, and what that lacks.
            let stopped: Way = live.iter().map(|one| one.rung.filter(|_| !BATCH(one))).collect();
            let old: u64 = world.live.values().filter(|live| BATCH(live)).map(|live| sheddable(&world, live)).sum();
            if shed.0 || shed.1 {
                prop_assert!(!feasible(&world, &live, &stopped, budget), "shed though stopping batch sufficed");
            }
            if touched.foreground() {
                let way = any(ways(&live, BATCH, BATCH, ladder));
                prop_assert!(way.is_none(), "{touched:?}, though {way:?} of {live:?} fits");
                let shed_all = feasible(&world, &live, &stopped, budget + old);
                prop_assert!(!shed_all, "{touched:?}, though shedding {old} bytes of batch suffices");
            }
            if parked.0 {
                let way = any(ways(&live, BATCH, ALL, ladder));
                prop_assert!(way.is_none(), "the foreground was parked though {way:?} of {live:?} fits");
            }
            if shed.0 {
                let left: u64 = after.live.values().filter(|live| BATCH(live)).map(|live| sheddable(after, live)).sum();
                let stepped = after.plan.steps().iter().any(|step| BATCH(&after.live[&step.sequence]));
                prop_assert!(left == 0 && !stepped, "the foreground was shed with {left} bytes of batch left");
            }
            Ok(())
        })?;
    }
}

/// Rungs that the foreground is below its ceiling, summed over its sequences and rounds; a stopped or waiting one counts
/// as one rung below the last.
fn foreground_harm(scene: &Scene) -> u64 {
    let mut harm = 0;
    let bottom = u64::try_from(scene.rungs.len()).unwrap();
    let look = |_: &World, after: &World, _: u64| {
        for live in after.live.values().filter(|live| live.class == Class::Foreground) {
            let top = after.specs[&live.tenant].ceiling.min(after.scheduler.ladder().bottom());
            let own = live.rung.filter(|_| live.running).map_or(bottom, |rung| u64::from(rung.index()));
            harm += own - u64::from(top.index());
        }
        Ok(())
    };
    run(scene, look).unwrap();
    harm
}

/// No theorem on every scene: whom a policy spares now may be in the way later. Over an ensemble the figures hold.
#[test]
fn protecting_the_foreground_spares_it() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut lever_first, mut protected, mut better, mut worse) = (0, 0, 0, 0);
    let mut mixed = 0;
    while mixed < 400 {
        let one = scene(Just(Policy::LeverFirst), 10).new_tree(&mut runner).unwrap().current();
        let classes: BTreeSet<bool> = one.tenants.iter().map(|(foreground, ..)| *foreground).collect();
        if classes.len() < 2 {
            continue;
        }
        mixed += 1;
        let harm = (foreground_harm(&one), foreground_harm(&Scene { policy: Policy::ProtectForeground, ..one }));
        lever_first += harm.0;
        protected += harm.1;
        better += u64::from(harm.1 < harm.0);
        worse += u64::from(harm.1 > harm.0);
    }
    // 30,676 and 28,152, better in 75 scenes and worse in 3, when this was written.
    let figures = format!("harm {lever_first} and {protected}; better in {better}, worse in {worse} of {mixed}");
    assert!(protected * 100 < lever_first * 95 && better >= 50 && worse <= 8, "{figures}");
}
