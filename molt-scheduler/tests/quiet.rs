//! A round in which nothing changes allocates nothing.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{World, rung, tenant};
use molt_scheduler::units::{Bytes, Tokens};
use molt_scheduler::{Class, Config, Observation, Plan, Progress};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; the counter is a plain number of this thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps to the contract of `alloc`, which is the same here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract of `dealloc`, which is the same here.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_quiet_round_allocates_nothing() {
    let mut world = World::new(vec![rung(1000, 4, 5), rung(500, 2, 5)], Config::default());
    for (class, weight) in [(Class::Foreground, 1), (Class::Batch, 1), (Class::Batch, 3)] {
        let who = world.register(tenant(class, weight, 0, 1));
        world.submit(who, 100, 10, 10_000).unwrap();
    }
    let hungry = world.register(tenant(Class::Batch, 1, 0, 0));
    world.submit(hungry, 100_000, 0, 10_000).unwrap();
    let (budget, mut plan) = (20_000, Plan::new());
    for _ in 0..50 {
        world.round(budget).unwrap();
    }
    for _ in 0..20 {
        let progress: Vec<Progress> = world.progress.drain(..).collect();
        let observation = Observation {
            now: world.now,
            budget: Bytes::new(budget),
            usage: Bytes::new(world.usage()),
            progress: &progress,
        };
        world.scheduler.round(&observation, &mut plan);
        world.now = world.now + World::STEP;
        let before = ALLOCATIONS.with(Cell::get);
        let observation = Observation { now: world.now, progress: &[], ..observation };
        world.scheduler.round(&observation, &mut plan);
        assert_eq!(ALLOCATIONS.with(Cell::get), before);
        assert!(plan.actions().is_empty() && plan.steps().iter().any(|step| step.tokens == Tokens::new(1)));
    }
}
