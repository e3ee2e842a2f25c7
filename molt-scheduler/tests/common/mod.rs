//! The simulator with plain numbers, so that scenes read as data.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

pub mod scene;

use std::num::NonZeroU16;
use std::ops::{Deref, DerefMut};

use molt_scheduler::simulator::{BrokenLaw, Pace, World as Simulator};
use molt_scheduler::units::{Bytes, RungIdx, Span, Tokens};
use molt_scheduler::{
    Class, Config, LadderCost, Observation, Refusal, Request, RungCost, SequenceId, TenantId, TenantSpec,
};
use proptest::prelude::ProptestConfig;

pub fn rung(weights: u64, cache_per_token: u64, scratch: u64) -> RungCost {
    RungCost {
        weights: Bytes::new(weights),
        cache_per_token: Bytes::new(cache_per_token),
        scratch: Bytes::new(scratch),
    }
}

pub fn tenant(class: Class, weight: u16, ceiling: u8, floor: u8) -> TenantSpec {
    TenantSpec {
        class,
        weight: NonZeroU16::new(weight).unwrap(),
        floor: RungIdx::new(floor),
        ceiling: RungIdx::new(ceiling),
        context_limit: Tokens::new(1 << 20),
        quota: None,
    }
}

/// A simulated world whose rounds take 100 ms each.
#[derive(Debug, Clone)]
pub struct World(Simulator);

impl Deref for World {
    type Target = Simulator;
    fn deref(&self) -> &Simulator {
        &self.0
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Simulator {
        &mut self.0
    }
}

impl World {
    pub const STEP: Span = Span::from_millis(100);

    pub fn new(rungs: Vec<RungCost>, config: Config) -> Self {
        Self(Simulator::new(LadderCost::new(rungs).unwrap(), config, Pace::Fixed(Self::STEP)))
    }

    pub fn submit(&mut self, tenant: TenantId, prompt: u64, pinned: u64, answer: u64) -> Result<SequenceId, Refusal> {
        let [prompt, pinned, answer] = [prompt, pinned, answer].map(Tokens::new);
        self.0.submit(Request { tenant, prompt, pinned, answer })
    }

    pub fn cache(&self, rung: RungIdx, cached: Tokens) -> u64 {
        self.0.cache(rung, cached).get()
    }

    pub fn usage(&self) -> u64 {
        self.0.usage().get()
    }

    pub fn served(&self, tenant: TenantId) -> u64 {
        self.0.served.get(&tenant).copied().unwrap_or_default().get()
    }

    pub fn round(&mut self, budget: u64) -> Result<(), BrokenLaw> {
        self.0.round(Bytes::new(budget))
    }

    /// What the next round will see under a budget.
    pub fn observation(&self, budget: u64) -> Observation<'_> {
        Observation { now: self.now, budget: Bytes::new(budget), usage: self.0.usage(), progress: &self.progress }
    }
}

/// So many cases, or what `PROPTEST_CASES` says.
pub fn cases(default: u32) -> ProptestConfig {
    let own = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { own.cases } else { default };
    let kept = proptest::test_runner::FileFailurePersistence::WithSource("regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(kept)), ..own }
}
