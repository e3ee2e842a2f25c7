//! What runtimes without elastic models do under the same trace, reckoned with the same costs and speeds: enough of them to
//! compare, and no claim about any program. Both hold the biggest rung, as people run them.

use std::collections::VecDeque;

use molt_scheduler::RungCost;
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use serde::{Deserialize, Serialize};

use super::Setup;
use crate::trace::Frame;

/// What is done when memory runs short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// Nothing: weights go when nobody has asked for a while, and the budget is not heard. What uses more than there is is
    /// killed by the system with everything in flight, started again once it fits, and asked again.
    UnloadWhenIdle,
    /// Caches are evicted, the least recently let in first, and their requests begin again later; where not even the weights
    /// fit, all of them.
    EvictLeastRecent,
}

/// What became of everybody.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerSummary {
    /// What was done.
    pub peer: Peer,
    /// Requests in all.
    pub requests: u64,
    /// Of them, answered to the end.
    pub finished: u64,
    /// Times that the process was killed.
    pub kills: u64,
    /// Requests that lost everything and began again.
    pub restarts: u64,
    /// Tokens that were read or written for nothing.
    pub wasted_tokens: u64,
    /// Largest usage minus budget after a round.
    pub overshoot_bytes_max: i64,
    /// Until the last answer, or until nothing moved any more.
    pub lasted_ms: f64,
    /// From asking to the end of the answer, of those who were answered, on average.
    pub answer_mean_ms: f64,
}

/// Idle time after which weights go.
const KEEP_ALIVE: Span = Span::from_millis(5_000);
/// Prompt tokens of a step.
const CHUNK: u64 = 64;
/// A trace that nobody gets through ends as it is.
const STUCK: Span = Span::from_millis(600_000);

#[derive(Debug, Clone, Copy)]
struct Flight {
    asked: Time,
    prompt: Tokens,
    answer: Tokens,
    read: Tokens,
    written: Tokens,
}

impl Flight {
    fn cached(&self) -> Tokens {
        self.read + self.written
    }

    fn again(self) -> Self {
        Self { read: Tokens::ZERO, written: Tokens::ZERO, ..self }
    }
}

struct Runtime {
    cost: RungCost,
    overhead: Bytes,
    loaded: bool,
    flights: Vec<Flight>,
    waiting: VecDeque<Flight>,
    summary: PeerSummary,
}

impl Runtime {
    fn usage(&self) -> Bytes {
        let weights = if self.loaded { self.cost.held() } else { Bytes::ZERO };
        self.overhead + weights + self.caches()
    }

    fn caches(&self) -> Bytes {
        self.flights.iter().map(|flight| self.cost.cache_per_token.times(flight.cached())).sum()
    }

    /// They lose what they have, and stand in line again, before those who never began.
    fn lose(&mut self, count: usize) {
        for flight in self.flights.drain(..count).rev().collect::<Vec<_>>() {
            self.summary.restarts += 1;
            self.summary.wasted_tokens += flight.cached().get();
            self.waiting.push_front(flight.again());
        }
    }

    /// What it does about a budget.
    fn react(&mut self, budget: Bytes) {
        match self.summary.peer {
            Peer::UnloadWhenIdle => {
                if self.usage() > budget {
                    self.summary.kills += 1;
                    self.lose(self.flights.len());
                    self.loaded = false;
                }
            }
            Peer::EvictLeastRecent => {
                while self.usage() > budget && !self.flights.is_empty() {
                    self.lose(1);
                }
                if self.usage() > budget {
                    self.loaded = false;
                }
            }
        }
    }

    /// Whether one more begins.
    fn lets_in(&self, next: &Flight, budget: Bytes) -> bool {
        let own = self.cost.cache_per_token.times(next.prompt + next.answer);
        let alone = self.overhead + self.cost.held() + own;
        match self.summary.peer {
            // It believes that it has the machine; a supervisor starts it only where one request fits.
            Peer::UnloadWhenIdle => self.loaded || alone <= budget,
            Peer::EvictLeastRecent => {
                let weights = if self.loaded { Bytes::ZERO } else { self.cost.held() };
                self.usage() + weights + own <= budget
            }
        }
    }
}

/// Runs the setup's trace and tenants as that peer would.
pub fn run_peer(setup: &Setup<'_>, peer: Peer) -> PeerSummary {
    let Setup { trace, tenants, costs, .. } = *setup;
    let frame = Frame { ladder: &costs.ladder, overhead: costs.overhead, context: tenants.context() };
    let top = RungIdx::TOP;
    let (cost, speed) = (costs.ladder.get(top), &costs.speed);
    let cost = cost.unwrap_or(RungCost { weights: Bytes::ZERO, cache_per_token: Bytes::ZERO, scratch: Bytes::ZERO });
    let own = speed.rungs.first().copied();
    let token = |prefill: bool, tokens: u64| {
        own.map_or(Span::ZERO, |own| if prefill { own.prompt_token } else { own.decode_token }.times(tokens))
    };
    let mut coming: Vec<(Time, Flight)> = Vec::new();
    for request in tenants.tenants.iter().flat_map(|tenant| &tenant.requests) {
        let (asked, prompt, answer) = (request.at, request.prompt, request.answer);
        coming.push((asked, Flight { asked, prompt, answer, read: Tokens::ZERO, written: Tokens::ZERO }));
    }
    coming.sort_by_key(|(at, _)| *at);
    let requests = coming.len() as u64;
    let mut coming: VecDeque<_> = coming.into();
    let summary = PeerSummary {
        peer,
        requests,
        finished: 0,
        kills: 0,
        restarts: 0,
        wasted_tokens: 0,
        overshoot_bytes_max: i64::MIN,
        lasted_ms: 0.0,
        answer_mean_ms: 0.0,
    };
    let mut runtime = Runtime {
        cost,
        overhead: costs.overhead,
        loaded: false,
        flights: Vec::new(),
        waiting: VecDeque::new(),
        summary,
    };
    let (mut now, mut busy, mut waits) = (Time::START, Time::START, Span::ZERO);
    loop {
        while let Some((_, flight)) = coming.front().copied().filter(|(at, _)| *at <= now) {
            coming.pop_front();
            runtime.waiting.push_back(flight);
        }
        let budget = trace.budget_at(now, &frame);
        let over =
            |usage: Bytes| i64::try_from(usage.get()).unwrap_or(i64::MAX) - i64::try_from(budget.get()).unwrap_or(0);
        // Usage is looked at before anything is done about it, as the system does.
        if peer == Peer::UnloadWhenIdle {
            let usage = runtime.usage();
            runtime.summary.overshoot_bytes_max = runtime.summary.overshoot_bytes_max.max(over(usage));
        }
        runtime.react(budget);
        let usage = runtime.usage();
        runtime.summary.overshoot_bytes_max = runtime.summary.overshoot_bytes_max.max(over(usage));
        let mut took = Span::ZERO;
        while runtime.waiting.front().is_some_and(|next| runtime.lets_in(next, budget)) {
            if !std::mem::replace(&mut runtime.loaded, true) {
                let ms = cost.weights.get().checked_div(speed.load_bytes_per_ms.get()).unwrap_or(0);
                took = took + Span::from_millis(ms);
            }
            runtime.flights.extend(runtime.waiting.pop_front());
        }
        for flight in &mut runtime.flights {
            let left = flight.prompt.get() - flight.read.get();
            if left > 0 {
                let chunk = left.min(CHUNK);
                flight.read += Tokens::new(chunk);
                took = took + token(true, chunk);
            } else {
                flight.written += Tokens::new(1);
                took = took + token(false, 1);
            }
        }
        now = now + if took == Span::ZERO { speed.idle } else { took };
        let done = runtime.flights.extract_if(.., |flight| flight.written >= flight.answer);
        for flight in done.collect::<Vec<_>>() {
            runtime.summary.finished += 1;
            waits = waits + now.since(flight.asked);
            runtime.summary.lasted_ms = now.micros() as f64 / 1e3;
        }
        if took > Span::ZERO {
            busy = now;
        } else if now.since(busy) >= KEEP_ALIVE {
            runtime.loaded = false;
        }
        let empty = coming.is_empty() && runtime.waiting.is_empty() && runtime.flights.is_empty();
        if (empty && now >= trace.last_step()) || now.since(busy) > STUCK {
            break;
        }
    }
    let finished = runtime.summary.finished.max(1);
    runtime.summary.answer_mean_ms = waits.micros() as f64 / 1e3 / finished as f64;
    runtime.summary
}
