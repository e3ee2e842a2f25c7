//! What a round costs: `cargo bench -p molt-scheduler`.
//!
//! Tenants have one sequence each, a tenth of them in the foreground, on a ladder of three rungs.
//!
//! - `quiet`: all decode, and nothing is told of anybody.
//! - `progress`: all decode, and the observation tells of each of them, as an engine does after every step.
//! - `waiting`: eight run, and all others wait and do not fit.
//! - `fall`: the budget falls, and everybody is demoted.
//! - `arrivals`: everybody comes at once and is let in.
//!
//! The table of what was measured is in `molt-scheduler/README.md`.
#![allow(clippy::unwrap_used, reason = "a benchmark may stop where its ground is missing")]
#![allow(missing_docs, reason = "made by the harness's macros")]

use std::num::NonZeroU16;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use molt_scheduler::simulator::{Pace, World};
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use molt_scheduler::{Class, Config, LadderCost, Observation, Plan, Request, RungCost, TenantSpec};

const SIZES: [u64; 6] = [3, 10, 100, 1_000, 4_000, 10_000];
const STEP: Span = Span::from_millis(100);

fn ladder() -> LadderCost {
    let rung = |mib| RungCost { weights: Bytes::mib(mib), cache_per_token: Bytes::new(8_192), scratch: Bytes::mib(8) };
    LadderCost::new(vec![rung(4_000), rung(1_000), rung(400)]).unwrap()
}

/// So many tenants with a request each, none of which has been looked at.
fn asked(tenants: u64) -> World {
    let limit = u32::try_from(tenants).unwrap().max(8);
    let config = Config { admit_limit: limit, queue_limit: limit, ..Config::default() };
    let mut world = World::new(ladder(), config, Pace::Fixed(STEP));
    for index in 0..tenants {
        let tenant = world.register(TenantSpec {
            class: if index % 10 == 0 { Class::Foreground } else { Class::Batch },
            weight: NonZeroU16::new(u16::try_from(index % 4 + 1).unwrap()).unwrap(),
            floor: RungIdx::new(2),
            ceiling: RungIdx::TOP,
            context_limit: Tokens::new(1 << 20),
            quota: None,
        });
        let [prompt, pinned, answer] = [20, 4, 500_000].map(Tokens::new);
        world.submit(Request { tenant, prompt, pinned, answer }).unwrap();
    }
    world
}

/// All that everybody can take for a while.
fn ample(tenants: u64) -> Bytes {
    Bytes::mib(6_000) + Bytes::mib(3).times(Tokens::new(tenants)) + Bytes::new(8_192).times(Tokens::new(tenants * 600))
}

/// The same once all decode on the biggest rung.
fn decoding(tenants: u64, budget: Bytes) -> World {
    let mut world = asked(tenants);
    for _ in 0..60 {
        world.round(budget).unwrap();
    }
    world
}

fn rounds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round");
    for tenants in SIZES {
        group.throughput(Throughput::Elements(tenants));
        let budget = ample(tenants);
        let settled = decoding(tenants, budget);
        assert!(settled.live.values().all(|live| live.running && live.prompt_left == Tokens::ZERO));
        let usage = settled.usage();

        let mut quiet = settled.clone();
        quiet
            .scheduler
            .round(&Observation { now: quiet.now, budget, usage, progress: &quiet.progress }, &mut quiet.plan);
        group.bench_function(BenchmarkId::new("quiet", tenants), |bencher| {
            bencher.iter(|| {
                quiet.now = quiet.now + STEP;
                let observation = Observation { now: quiet.now, budget, usage, progress: &[] };
                quiet.scheduler.round(&observation, &mut quiet.plan);
            });
        });
        assert!(quiet.plan.actions().is_empty() && !quiet.plan.steps().is_empty());

        let mut busy = settled.clone();
        group.bench_function(BenchmarkId::new("progress", tenants), |bencher| {
            bencher.iter(|| {
                busy.now = busy.now + STEP;
                let observation = Observation { now: busy.now, budget, usage, progress: &busy.progress };
                busy.scheduler.round(&observation, &mut busy.plan);
            });
        });
        assert!(busy.plan.actions().is_empty() && !busy.plan.steps().is_empty());

        // Eight of the first rung's fit; with everybody's answer to come, no ninth does.
        let mut crowd = asked(tenants);
        crowd.round(Bytes::mib(4_008 + 18)).unwrap();
        let (crowd_usage, crowd_budget) = (crowd.usage(), Bytes::mib(4_008 + 18));
        let waiting = crowd.live.values().filter(|live| live.rung.is_none()).count();
        assert_eq!(u64::try_from(waiting).unwrap(), tenants.saturating_sub(8), "eight are in");
        crowd.progress.clear();
        group.bench_function(BenchmarkId::new("waiting", tenants), |bencher| {
            bencher.iter(|| {
                crowd.now = crowd.now + STEP;
                let observation =
                    Observation { now: crowd.now, budget: crowd_budget, usage: crowd_usage, progress: &[] };
                crowd.scheduler.round(&observation, &mut crowd.plan);
            });
        });

        let less = usage - Bytes::mib(2_500);
        group.bench_function(BenchmarkId::new("fall", tenants), |bencher| {
            let setup = || (settled.scheduler.clone(), Plan::new());
            bencher.iter_batched_ref(
                setup,
                |(scheduler, plan)| {
                    let progress = &settled.progress;
                    scheduler.round(&Observation { now: settled.now, budget: less, usage, progress }, plan);
                    assert!(plan.actions().len() > usize::from(Tokens::new(tenants)));
                },
                BatchSize::LargeInput,
            );
        });

        let fresh = asked(tenants);
        // A plan that has held as much before, for plans are used again.
        let mut held = Plan::new();
        let first = Observation { now: fresh.now, budget, usage: Bytes::ZERO, progress: &[] };
        fresh.scheduler.clone().round(&first, &mut held);
        group.bench_function(BenchmarkId::new("arrivals", tenants), |bencher| {
            let setup = || (fresh.scheduler.clone(), held.clone());
            bencher.iter_batched_ref(
                setup,
                |(scheduler, plan)| {
                    let usage = Bytes::ZERO;
                    scheduler.round(&Observation { now: fresh.now, budget, usage, progress: &[] }, plan);
                    assert_eq!(plan.actions().len(), usize::from(Tokens::new(tenants)) + 1);
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
        .sample_size(20);
    targets = rounds
}
criterion_main!(benches);
