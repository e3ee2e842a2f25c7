//! Single rules, each as a few lines of data.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::{World, rung, tenant};
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{
    Action, Class, Config, LadderCost, LadderCostError, Observation, Plan, Policy, Progress, Refusal, SequenceState,
    TenantSpec,
};

fn one_rung(config: Config) -> World {
    World::new(vec![rung(100, 1, 0)], config)
}

#[test]
fn what_can_never_fit_is_refused_with_the_numbers() {
    let check = |prompt: u64, answer: u64, spec: TenantSpec, expected: Result<(), &str>| {
        let config =
            Config { budget_limit: Bytes::new(400), overhead: Bytes::new(50), queue_limit: 1, ..Config::default() };
        let mut world = one_rung(config);
        let who = world.register(spec);
        let got = world.submit(who, prompt, 0, answer).map(|_| ()).map_err(|refusal| refusal.to_string());
        assert_eq!(got, expected.map_err(str::to_string));
    };
    let plain = tenant(Class::Batch, 1, 0, 0);
    check(10, 10, plain.clone(), Ok(()));
    check(0, 10, plain.clone(), Err("the prompt is empty"));
    let needs = "the request needs 401 B on the smallest rung, and there can never be more than 400 B";
    check(240, 11, plain.clone(), Err(needs));
    check(240, 10, plain.clone(), Ok(()));
    let short = TenantSpec { context_limit: Tokens::new(100), ..plain.clone() };
    let over = "prompt (90 tokens) and answer (up to 20 tokens) are over the tenant's limit of 100 tokens";
    check(90, 20, short.clone(), Err(over));
    check(
        u64::MAX,
        u64::MAX,
        short,
        Err("prompt (18446744073709551615 tokens) and answer (up to \
        18446744073709551615 tokens) are over the tenant's limit of 100 tokens"),
    );
    let poor = TenantSpec { quota: Some(Tokens::new(30)), ..plain };
    check(20, 20, poor, Err("the request may cache 40 tokens, over the tenant's quota of 30 tokens"));
}

#[test]
fn a_full_queue_refuses_and_says_how_long() {
    let mut world = one_rung(Config { queue_limit: 2, ..Config::default() });
    let who = world.register(tenant(Class::Batch, 1, 0, 0));
    let running = world.submit(who, 10, 0, 100).unwrap();
    for _ in 0..5 {
        world.round(300).unwrap();
    }
    assert!(matches!(world.scheduler.state_of(running), Some(SequenceState::Running { .. })));
    let waiting: Vec<_> = (0..2).map(|_| world.submit(who, 190, 0, 100).unwrap()).collect();
    let Err(Refusal::QueueFull { length: 2, retry_after: Some(wait) }) = world.submit(who, 1, 0, 1) else {
        panic!("the queue should be full")
    };
    assert_eq!(wait, Span::from_millis(9_600), "96 tokens at a round of 100 ms each");
    world.round(300).unwrap();
    let told: Vec<_> = world.plan.actions().to_vec();
    assert!(matches!(told[..], [Action::Defer { place: 0, .. }, Action::Defer { place: 1, .. }]), "{told:?}");
    world.round(300).unwrap();
    assert_eq!(world.plan.actions(), [], "told once");
    world.scheduler.cancel(waiting[0]);
    assert_eq!(world.scheduler.state_of(waiting[1]), Some(SequenceState::Waiting { place: 0 }));
}

#[test]
fn tokens_served_follow_the_weights_of_tenants() {
    let check = |tenants: &[(u16, u64)], rounds: u64| {
        let mut world = one_rung(Config { admit_for_tokens: Tokens::new(1), ..Config::default() });
        let ids: Vec<_> = tenants
            .iter()
            .map(|(weight, sequences)| {
                let id = world.register(tenant(Class::Batch, *weight, 0, 0));
                (0..*sequences).for_each(|_| _ = world.submit(id, 1, 0, 1_000_000).unwrap());
                id
            })
            .collect();
        for _ in 0..=rounds {
            world.round(1 << 40).unwrap();
        }
        let unit = |index: usize| world.served(ids[index]) as f64 / f64::from(tenants[index].0);
        for (index, (weight, sequences)) in tenants.iter().enumerate() {
            let error = (unit(index) - unit(0)).abs() * f64::from(*weight);
            let bound = 2.0 * *sequences as f64 * (2.0 + rounds as f64 / 65_536.0) * f64::from(*weight).max(1.0);
            assert!(error <= bound, "{tenants:?}: tenant {index} is {error} tokens off its share, over {bound}");
        }
        assert!(world.served.values().max().unwrap().get() >= rounds, "somebody steps in every round");
    };
    check(&[(1, 1), (1, 1)], 100);
    check(&[(1, 1), (2, 1), (3, 1)], 1_000);
    check(&[(1, 3), (1, 1)], 1_000);
    check(&[(5, 2), (1, 4), (7, 1)], 3_000);
}

#[test]
fn a_long_prompt_blocks_nobody() {
    let mut world = one_rung(Config::default());
    let heavy = world.register(tenant(Class::Batch, 1, 0, 0));
    let light = world.register(tenant(Class::Foreground, 1, 0, 0));
    let writer = world.register(tenant(Class::Batch, 1, 0, 0));
    world.submit(writer, 1, 0, 1_000).unwrap();
    world.submit(heavy, 10_000, 0, 10).unwrap();
    for _ in 0..3 {
        world.round(1 << 40).unwrap();
    }
    world.submit(light, 100, 0, 10).unwrap();
    for round in 0..3 {
        let (wrote, read) = (world.served(writer), world.served(heavy));
        world.round(1 << 40).unwrap();
        assert_eq!(world.served(writer), wrote + 1, "the writer goes on");
        assert!(world.served(heavy) >= read + 8, "the heavy one goes on too");
        assert!(world.served(light) >= 56 * (round + 1).min(1), "the foreground reads first");
        let chunks: u64 = world.plan.steps().iter().filter(|step| step.prefill).map(|step| step.tokens.get()).sum();
        assert!(chunks <= 64, "within the chunk: {chunks}");
    }
    assert!(world.served(light) >= 100, "100 tokens of prompt in two rounds, and an answer begun");
}

#[test]
fn a_heavy_request_is_passed_but_not_for_ever() {
    let mut world = one_rung(Config::default());
    let who = world.register(tenant(Class::Batch, 1, 0, 0));
    world.submit(who, 10, 0, 400).unwrap();
    world.round(1_000).unwrap();
    let heavy = world.submit(who, 700, 0, 10).unwrap();
    let waits = |world: &World, id| matches!(world.scheduler.state_of(id), Some(SequenceState::Waiting { .. }));
    let mut passed = 0;
    for _ in 0..20 {
        let light = world.submit(who, 5, 0, 20).unwrap();
        world.round(1_000).unwrap();
        passed += u64::from(!waits(&world, light));
    }
    assert!(waits(&world, heavy));
    for _ in 0..600 {
        world.round(1_000).unwrap();
    }
    assert!(!waits(&world, heavy), "the heavy one starves");
    assert_eq!(passed, 8);
}

#[test]
fn drift_is_reported_and_set_aside() {
    let check = |leak: u64, drift: i64, parked: bool| {
        let mut world = one_rung(Config::default());
        let who = world.register(tenant(Class::Foreground, 1, 0, 0));
        let id = world.submit(who, 10, 0, 100).unwrap();
        world.round(200).unwrap();
        world.leak = Bytes::new(leak);
        world.round(200).unwrap();
        assert_eq!(world.scheduler.drift(), drift);
        let state = world.scheduler.state_of(id).unwrap();
        assert_eq!(matches!(state, SequenceState::Parked { .. }), parked, "{state:?}");
        world.leak = Bytes::ZERO;
        world.round(200).unwrap();
        assert_eq!(world.scheduler.drift(), 0);
    };
    check(0, 0, false);
    check(89, 89, false);
    check(90, 90, true);
}

#[test]
fn below_the_books_nothing_is_made_of_drift() {
    let mut world = one_rung(Config::default());
    let who = world.register(tenant(Class::Foreground, 1, 0, 0));
    world.submit(who, 10, 0, 100).unwrap();
    world.round(200).unwrap();
    let progress = std::mem::take(&mut world.progress);
    let expected = world.scheduler.expected_usage();
    let mut plan = Plan::new();
    let observation =
        Observation { now: world.now, budget: Bytes::new(200), usage: Bytes::new(50), progress: &progress };
    world.scheduler.round(&observation, &mut plan);
    assert_eq!(expected, Bytes::new(100), "progress is not told yet");
    assert_eq!(world.scheduler.drift(), 50 - 110);
    assert_eq!(plan.usage(), Bytes::new(111));
}

#[test]
fn late_words_touch_nobody() {
    let mut world = one_rung(Config::default());
    let who = world.register(tenant(Class::Batch, 1, 0, 0));
    let first = world.submit(who, 10, 0, 100).unwrap();
    world.round(1_000).unwrap();
    world.scheduler.cancel(first);
    world.scheduler.cancel(first);
    let second = world.submit(who, 10, 0, 100).unwrap();
    assert_ne!(first, second);
    let late = Progress {
        ahead: None,
        sequence: first,
        cached: Tokens::new(9_999),
        prompt_left: Tokens::ZERO,
        answered: Tokens::new(1),
        finished: true,
    };
    let mut plan = Plan::new();
    let observation =
        Observation { now: Time::from_millis(5), budget: Bytes::new(1_000), usage: Bytes::new(100), progress: &[late] };
    world.scheduler.round(&observation, &mut plan);
    assert_eq!(world.scheduler.state_of(first), None);
    assert!(matches!(world.scheduler.state_of(second), Some(SequenceState::Running { .. })));
    assert_eq!(world.scheduler.drift(), 0);
    world.scheduler.load_failed(RungIdx::new(200), Time::START);
    world.scheduler.deregister(who);
    world.scheduler.deregister(who);
    assert_eq!(world.scheduler.state_of(second), None);
    let gone = world.submit(who, 10, 0, 100);
    assert_eq!(gone, Err(Refusal::UnknownTenant { tenant: who }));
}

#[test]
fn a_quota_holds_back_its_tenant_only() {
    let mut world = one_rung(Config::default());
    let poor = world.register(TenantSpec { quota: Some(Tokens::new(100)), ..tenant(Class::Batch, 1, 0, 0) });
    let other = world.register(tenant(Class::Batch, 1, 0, 0));
    let asks = [(poor, 50, true), (poor, 51, false), (other, 400, true), (poor, 50, true)];
    let ids: Vec<_> = asks.iter().map(|(who, tokens, _)| world.submit(*who, *tokens, 0, 0).unwrap()).collect();
    world.round(1 << 30).unwrap();
    for (id, (_, _, inside)) in ids.iter().zip(asks) {
        let waits = matches!(world.scheduler.state_of(*id), Some(SequenceState::Waiting { .. }));
        assert_eq!(waits, !inside);
    }
}

#[test]
fn ladders_are_checked() {
    let count = LadderCost::new(Vec::new());
    assert_eq!(count, Err(LadderCostError::Count { rungs: 0 }));
    let flat = LadderCost::new(vec![rung(5, 1, 0), rung(5, 1, 0)]).unwrap_err();
    assert_eq!(flat.to_string(), "tier1 takes 5 B of weights, no less than the rung above it (5 B)");
    let read: Result<LadderCost, _> = serde_json::from_str("[]");
    assert!(read.is_err());
}

#[test]
fn batch_moves_over_for_the_foreground() {
    // Under each policy: what happens to a batch sequence on the only rung's budget when a reader comes.
    let check = |policy: Policy, reader_waits: bool| {
        let config = Config { policy, ..Config::default() };
        let mut world = World::new(vec![rung(400, 1, 0), rung(100, 1, 0)], config);
        let batch = world.register(tenant(Class::Batch, 1, 1, 1));
        let reader = world.register(tenant(Class::Foreground, 1, 0, 0));
        world.submit(batch, 10, 0, 300).unwrap();
        world.round(520).unwrap();
        let id = world.submit(reader, 10, 0, 50).unwrap();
        world.round(520).unwrap();
        let waits = matches!(world.scheduler.state_of(id), Some(SequenceState::Waiting { .. }));
        assert_eq!(waits, reader_waits, "{policy:?} {:?}", world.plan.actions());
        for _ in 0..700 {
            world.round(520).unwrap();
        }
        assert_eq!(world.past.len(), 2);
    };
    check(Policy::LeverFirst, true);
    check(Policy::ProtectForeground, false);
}

#[test]
fn a_parked_reader_takes_the_place_of_batch() {
    // All are stopped; then there is room for the batch tenant's small rung only, and later for either rung but not
    // for both.
    let mut world = World::new(vec![rung(400, 1, 0), rung(100, 1, 0)], Config::default());
    let reader = world.register(tenant(Class::Foreground, 1, 0, 0));
    let batch = world.register(tenant(Class::Batch, 1, 1, 1));
    let (read, written) = (world.submit(reader, 10, 0, 300).unwrap(), world.submit(batch, 10, 0, 300).unwrap());
    let standing =
        |world: &World| (world.scheduler.state_of(read).unwrap(), world.scheduler.state_of(written).unwrap());
    let (top, small) = (RungIdx::new(0), RungIdx::new(1));
    let check = |world: &mut World, budget: u64, rounds: u64, expected: (SequenceState, SequenceState)| {
        (0..rounds).for_each(|_| world.round(budget).unwrap());
        assert_eq!(standing(world), expected, "at {:?}", world.now);
    };
    let (runs, stopped) = (|rung| SequenceState::Running { rung }, |rung| SequenceState::Parked { rung });
    check(&mut world, 2_000, 5, (runs(top), runs(small)));
    check(&mut world, 100, 5, (stopped(top), stopped(small)));
    check(&mut world, 300, 40, (stopped(top), runs(small)));
    check(&mut world, 590, 1, (runs(top), stopped(small)));
    assert!(matches!(world.plan.actions()[0], Action::Park { sequence, .. } if sequence == written));
    check(&mut world, 2_000, 25, (runs(top), runs(small)));
}

#[test]
fn a_promotion_waits_until_it_is_read_ahead_and_not_for_ever() {
    // Rounds of 100 ms; the patience is 2 s, the simulator reads ahead within three rounds.
    let check = |catch_up: u64, high: u64, forgetful: bool, expected: u64| {
        let config = Config { catch_up: Span::from_millis(catch_up), ..Config::default() };
        let mut world = World::new(vec![rung(4_000, 1, 0), rung(1_000, 1, 0)], config);
        let who = world.register(tenant(Class::Foreground, 1, 0, 1));
        let id = world.submit(who, 10, 0, 400).unwrap();
        (0..5).for_each(|_| world.round(3_000).unwrap());
        let mut named = 0;
        for round in 0..400u64 {
            world.round(high).unwrap();
            named += world.plan.prospects().len();
            if forgetful {
                world.progress.iter_mut().for_each(|progress| progress.ahead = None);
            }
            if world.scheduler.state_of(id) == Some(SequenceState::Running { rung: RungIdx::TOP }) {
                assert_eq!(named > 0, catch_up > 0 && high > 6_000, "named {named} times");
                assert!(world.plan.prospects().is_empty(), "it is there");
                assert_eq!(round, expected, "catch up {catch_up} ms under {high}");
                return;
            }
        }
        panic!("never promoted: catch up {catch_up} ms under {high}");
    };
    // The residence of 3 s begins with the budget's rise at the latest.
    check(0, 20_000, false, 20);
    check(10_000, 20_000, false, 20);
    check(10_000, 20_000, true, 120);
    // Not both rungs at once: nothing can be read ahead.
    check(10_000, 4_900, false, 20);
}
