//! Shares of batch tenants by tokens served, where there is more demand than memory; floods; waits.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::collections::BTreeMap;

use common::{World, rung, tenant};
use molt_scheduler::units::Tokens;
use molt_scheduler::{Class, Config, Refusal, SequenceState, TenantId};
use proptest::prelude::*;

/// A batch tenant that always has something waiting: its weight, and its requests in turn.
#[derive(Debug, Clone)]
struct Hungry {
    weight: u16,
    asks: Vec<(u64, u64)>,
}

impl Hungry {
    fn longest(&self) -> u64 {
        self.asks.iter().map(|(prompt, answer)| prompt + answer).max().unwrap()
    }
}

/// More than fit into the room of any scene.
const WAITING: usize = 64;

fn hungry() -> impl Strategy<Value = Hungry> {
    let asks = proptest::collection::vec((8u64..60, 1u64..60), 1..4);
    (1u16..6, asks).prop_map(|(weight, asks)| Hungry { weight, asks })
}

struct Demand {
    world: World,
    tenants: Vec<(TenantId, Hungry)>,
    /// Prompt and answer of everybody who was not seen to end.
    sizes: BTreeMap<molt_scheduler::SequenceId, u64>,
    asked: usize,
}

impl Demand {
    fn new(tenants: &[Hungry]) -> Self {
        let config = Config { chunk: Tokens::new(32), queue_limit: 4_096, ..Config::default() };
        let mut world = World::new(vec![rung(100, 1, 0)], config);
        let register = |one: &Hungry| (world.register(tenant(Class::Batch, one.weight, 0, 0)), one.clone());
        let tenants = tenants.iter().map(register).collect();
        Self { world, tenants, sizes: BTreeMap::new(), asked: 0 }
    }

    /// Rounds in which the tenants named always have requests waiting, before and after.
    fn run(&mut self, who: std::ops::Range<usize>, rounds: u64, budget: u64) {
        for _ in 0..rounds {
            for (id, own) in &self.tenants[who.clone()] {
                let waits = |live: &&molt_scheduler::simulator::Live| live.tenant == *id && live.rung.is_none();
                for _ in self.world.live.values().filter(waits).count()..WAITING {
                    let (prompt, answer) = own.asks[self.asked % own.asks.len()];
                    self.asked += 1;
                    let sequence = self.world.submit(*id, prompt, 0, answer).unwrap();
                    self.sizes.insert(sequence, prompt + answer);
                }
            }
            self.world.round(budget).unwrap();
            for (id, _) in &self.tenants[who.clone()] {
                let waits = |live: &molt_scheduler::simulator::Live| live.tenant == *id && live.rung.is_none();
                assert!(self.world.live.values().any(waits), "there is to be more demand than memory");
            }
        }
    }

    /// Tokens served, over the weight, and all that a tenant has inside, over the weight.
    fn standing(&self, index: usize) -> (f64, f64) {
        let (id, own) = &self.tenants[index];
        let inside = self.world.live.iter().filter(|(_, live)| live.tenant == *id && live.rung.is_some());
        let inside: u64 = inside.map(|(sequence, _)| self.sizes[sequence]).sum();
        let weight = f64::from(own.weight);
        (self.world.served(*id) as f64 / weight, inside as f64 / weight)
    }

    /// Its longest request, over the weight.
    fn longest(&self, index: usize) -> f64 {
        let own = &self.tenants[index].1;
        own.longest() as f64 / f64::from(own.weight)
    }

    /// The error that the crate's documentation states for two tenants.
    fn bound(&self, a: usize, b: usize) -> f64 {
        self.longest(a) + self.longest(b) + self.standing(a).1.max(self.standing(b).1)
    }
}

proptest! {
    #![proptest_config(common::cases(100))]

    /// With more demand than memory, tokens served stand as the weights, to within the longest request of each and what
    /// one of them has inside, however long it goes on.
    #[test]
    fn shares_follow_weights_where_not_all_fit(
        tenants in proptest::collection::vec(hungry(), 2..5),
        room in 120u64..500,
    ) {
        let mut demand = Demand::new(&tenants);
        for _ in 0..4 {
            demand.run(0..tenants.len(), 400, 100 + room);
            for (a, b) in (0..tenants.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let (error, bound) = ((demand.standing(a).0 - demand.standing(b).0).abs(), demand.bound(a, b));
                prop_assert!(error <= bound, "{a} and {b} are {error} tokens a weight apart, over {bound}");
            }
        }
        prop_assert!(demand.world.past.len() > 20, "{} were served", demand.world.past.len());
    }

    /// A tenant that was idle has its share from then on, and no more.
    #[test]
    fn idleness_is_not_saved_up(tenants in proptest::collection::vec(hungry(), 2..4), room in 120u64..500) {
        let last = tenants.len() - 1;
        let mut demand = Demand::new(&tenants);
        demand.run(0..last, 800, 100 + room);
        let before: Vec<(f64, f64)> = (0..=last).map(|index| demand.standing(index)).collect();
        demand.run(0..last + 1, 800, 100 + room);
        let since = |index: usize| demand.standing(index).0 - before[index].0;
        for (other, (_, inside)) in before.iter().enumerate().take(last) {
            // Beyond the error of any two: the other one stood up to its longest request off the virtual time at which
            // the idle one began, and what it had inside then was charged before and served after.
            let bound = demand.bound(other, last) + demand.longest(other) + inside;
            let error = (since(other) - since(last)).abs();
            prop_assert!(error <= bound, "{error} tokens a weight apart since then, over {bound}");
        }
    }
}

#[test]
fn shares_converge_to_the_weights() {
    // One request at a time fits, or a few: (weights, room, largest relative error of a share after 20,000 rounds).
    let check = |weights: &[u16], room: u64, error: f64| {
        let tenants: Vec<Hungry> =
            weights.iter().map(|w| Hungry { weight: *w, asks: vec![(20, 20), (5, 30)] }).collect();
        let mut demand = Demand::new(&tenants);
        demand.run(0..tenants.len(), 20_000, 100 + room);
        let served = |index: usize| demand.world.served(demand.tenants[index].0) as f64;
        let (all, whole) = ((0..tenants.len()).map(served).sum::<f64>(), f64::from(weights.iter().sum::<u16>()));
        for (index, weight) in weights.iter().enumerate() {
            let off = (served(index) / all) / (f64::from(*weight) / whole) - 1.0;
            assert!(off.abs() <= error, "{weights:?} in {room}: {index} is off its share by {off}");
        }
    };
    check(&[1, 1], 45, 0.01);
    check(&[1, 3], 45, 0.01);
    check(&[1, 2, 4], 150, 0.01);
    check(&[7, 1, 1, 2], 90, 0.02);
}

#[test]
fn a_tenant_with_a_hundred_requests_makes_nobody_wait_for_all_of_them() {
    let mut world = World::new(vec![rung(100, 1, 0)], Config { queue_limit: 512, ..Config::default() });
    let (many, one) = (world.register(tenant(Class::Batch, 1, 0, 0)), world.register(tenant(Class::Batch, 1, 0, 0)));
    (0..100).for_each(|_| _ = world.submit(many, 20, 0, 20).unwrap());
    (0..20).for_each(|_| world.round(150).unwrap());
    let late = world.submit(one, 20, 0, 20).unwrap();
    assert!(matches!(world.scheduler.state_of(late), Some(SequenceState::Waiting { place: 0 | 1 })));
    while world.live.contains_key(&late) {
        world.round(150).unwrap();
    }
    let before = world.past.iter().filter(|(_, live)| live.tenant == many).count();
    assert!(before <= 3, "{before} went before it");
}

#[test]
fn a_flood_leaves_room_for_others() {
    let mut world = World::new(vec![rung(100, 1, 0)], Config { queue_limit: 64, ..Config::default() });
    let flood = world.register(tenant(Class::Batch, 1, 0, 0));
    let ask = |world: &mut World, who| world.submit(who, 20, 0, 20).map(|_| ());
    let alone = (0..100).map_while(|_| ask(&mut world, flood).ok()).count();
    assert_eq!(alone, 64, "with nobody beside it, it has the whole queue");
    let mut world = World::new(vec![rung(100, 1, 0)], Config { queue_limit: 64, ..Config::default() });
    let (flood, other) = (world.register(tenant(Class::Batch, 1, 0, 0)), world.register(tenant(Class::Batch, 1, 0, 0)));
    let beside = (0..100).map_while(|_| ask(&mut world, flood).ok()).count();
    assert_eq!(beside, 32);
    let refused = ask(&mut world, flood).unwrap_err();
    assert_eq!(refused, Refusal::TenantQueueFull { waiting: 32, left: 32, retry_after: None });
    let text = "the tenant has 32 requests waiting, and 32 places are left for others beside it";
    assert_eq!(refused.to_string(), text);
    let others = (0..100).map_while(|_| ask(&mut world, other).ok()).count();
    assert_eq!(others, 16, "and so on: a third one still finds places");
}

#[test]
fn a_heavy_request_is_passed_by_eight_of_all_tenants() {
    // Light requests of many tenants that always wait, and one heavy request among them.
    let check = |lights: usize, weight: u16| {
        let mut world = World::new(vec![rung(100, 1, 0)], Config::default());
        let ids: Vec<_> = (0..lights).map(|_| world.register(tenant(Class::Batch, weight, 0, 0))).collect();
        let heavy = world.register(tenant(Class::Batch, 1, 0, 0));
        let budget = 700;
        let feed = |world: &mut World| ids.iter().for_each(|id| _ = world.submit(*id, 5, 0, 45));
        (0..30).for_each(|_| {
            feed(&mut world);
            world.round(budget).unwrap();
        });
        let id = world.submit(heavy, 550, 0, 10).unwrap();
        let (mut admitted, mut rounds) = (0, 0);
        while matches!(world.scheduler.state_of(id), Some(SequenceState::Waiting { .. })) {
            feed(&mut world);
            world.round(budget).unwrap();
            let admits = |action: &&molt_scheduler::Action| matches!(action, molt_scheduler::Action::Admit { .. });
            admitted += world.plan.actions().iter().filter(admits).count();
            rounds += 1;
            assert!(rounds < 2_000, "the heavy one starves");
        }
        // Its tenant begins where the last one began, so each of the others may have had one turn before it.
        assert!(admitted <= 8 + 1 + lights, "{admitted} went in before it");
    };
    check(1, 1);
    check(4, 1);
    check(12, 5);
}
