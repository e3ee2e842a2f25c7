//! What `molt top` knows: events and registrations go in, everything that is drawn is taken from it.

use std::collections::{BTreeMap, VecDeque};

use molt_scheduler::units::{Bytes, RungIdx};
use molt_scheduler::{Class, LeverKind};
use serde::Deserialize;

use crate::told::{News, Rung, Told};

/// How far back budget and usage are shown.
pub(super) const WINDOW_MS: u64 = 120_000;
/// Over how long tokens a second are counted.
const RATE_MS: u64 = 5_000;
/// Lines of a log that are kept.
const LINES: usize = 200;

/// A budget and what was used of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) at_ms: u64,
    pub(super) budget: Bytes,
    pub(super) usage: Bytes,
}

/// A tenant as the events tell of it. What runs is known by its events alone, so whoever joins late knows a sequence
/// from its first event on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tenant {
    pub(super) class: Class,
    /// `None` until it is registered, or told of otherwise.
    pub(super) weight: Option<u64>,
    pub(super) rung: Option<RungIdx>,
    pub(super) waiting: u32,
    pub(super) running: u32,
    pub(super) parked: u32,
    /// Tokens since `molt top` began.
    pub(super) tokens: u64,
    /// Tokens of the last seconds, by the second.
    recent: VecDeque<(u64, u64)>,
    pub(super) last_wait_ms: Option<f64>,
}

impl Tenant {
    fn new(class: Class) -> Self {
        Self {
            class,
            weight: None,
            rung: None,
            waiting: 0,
            running: 0,
            parked: 0,
            tokens: 0,
            recent: VecDeque::new(),
            last_wait_ms: None,
        }
    }

    fn token(&mut self, at_ms: u64) {
        self.tokens += 1;
        let second = at_ms / 1_000;
        match self.recent.back_mut() {
            Some((last, tokens)) if *last == second => *tokens += 1,
            _ => self.recent.push_back((second, 1)),
        }
        while self.recent.front().is_some_and(|(at, _)| at * 1_000 + 2 * RATE_MS < at_ms) {
            self.recent.pop_front();
        }
    }

    /// Tokens a second over the last whole seconds.
    pub(super) fn tok_s(&self, now_ms: u64) -> f64 {
        let (now, span) = (now_ms / 1_000, RATE_MS / 1_000);
        let counted = self.recent.iter().filter(|(at, _)| *at < now && *at + span >= now);
        counted.map(|(_, tokens)| *tokens).sum::<u64>() as f64 / span as f64
    }

    /// The state in a word or two.
    pub(super) fn state(&self) -> String {
        let parts = [(self.running, "running"), (self.parked, "parked"), (self.waiting, "waiting")];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, word)| format!("{count} {word}")).collect();
        if parts.is_empty() { "idle".to_owned() } else { parts.join(", ") }
    }
}

/// A registration, as the service lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Registered {
    tenant: Claim,
    in_flight: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Claim {
    name: String,
    class: Class,
    weight: u64,
}

/// A line of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) at_ms: u64,
    pub(super) text: String,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct State {
    pub(super) ladder: String,
    pub(super) rungs: Vec<Rung>,
    /// Time of the newest event.
    pub(super) now_ms: u64,
    pub(super) samples: VecDeque<Sample>,
    /// Largest usage minus budget that was seen.
    pub(super) overshoot_bytes_max: Option<i64>,
    pub(super) resident: Bytes,
    pub(super) loaded: BTreeMap<RungIdx, Bytes>,
    pub(super) tenants: BTreeMap<String, Tenant>,
    pub(super) levers: VecDeque<Line>,
    pub(super) switches: VecDeque<Line>,
    pub(super) missed: u64,
    /// Why nothing comes any more.
    pub(super) gone: Option<String>,
}

fn push(log: &mut VecDeque<Line>, at_ms: u64, text: String) {
    log.push_front(Line { at_ms, text });
    log.truncate(LINES);
}

impl State {
    /// Something was told.
    pub(super) fn hear(&mut self, told: &Told) {
        self.now_ms = self.now_ms.max(told.at_ms);
        let at_ms = told.at_ms;
        match &told.event {
            News::Start { ladder, rungs } => {
                // A service that began again knows nothing of what was.
                *self = Self { ladder: ladder.clone(), rungs: rungs.clone(), now_ms: at_ms, ..Self::default() };
            }
            News::Missed { events } => self.missed += events,
            News::Asked { tenant, class, .. } => self.tenant(tenant, *class).waiting += 1,
            News::Admitted { tenant, class, rung, .. } => {
                let tenant = self.tenant(tenant, *class);
                tenant.waiting = tenant.waiting.saturating_sub(1);
                tenant.running += 1;
                tenant.rung = Some(*rung);
            }
            News::Token { tenant, class, rung, wait_ms } => {
                let tenant = self.tenant(tenant, *class);
                tenant.running = tenant.running.max(1);
                tenant.rung = Some(*rung);
                tenant.last_wait_ms = wait_ms.or(tenant.last_wait_ms);
                tenant.token(at_ms);
            }
            News::Budget { budget_bytes, usage_bytes } => self.sample(at_ms, *budget_bytes, *usage_bytes),
            News::Sample { usage_bytes, budget_bytes, rss_bytes } => {
                self.resident = *rss_bytes;
                // Only after the levers of a round can usage be held against the budget.
                let over = signed(*usage_bytes) - signed(*budget_bytes);
                self.overshoot_bytes_max = Some(self.overshoot_bytes_max.map_or(over, |most| most.max(over)));
                self.sample(at_ms, *budget_bytes, *usage_bytes);
            }
            News::Switch(switch) => {
                self.tenant(&switch.tenant, switch.class).rung = Some(switch.to);
                push(&mut self.switches, at_ms, switch.words());
            }
            News::Lever { kind, tenant, class, .. } => {
                let tenant = self.tenant(tenant, *class);
                if *kind == LeverKind::Park {
                    tenant.running = tenant.running.saturating_sub(1);
                    tenant.parked += 1;
                }
            }
            News::Unpark { tenant, class, rung } => {
                let tenant = self.tenant(tenant, *class);
                tenant.parked = tenant.parked.saturating_sub(1);
                tenant.running += 1;
                tenant.rung = Some(*rung);
            }
            News::Finished { tenant, class, .. } => {
                let tenant = self.tenant(tenant, *class);
                tenant.running = tenant.running.saturating_sub(1);
            }
            News::Cancelled { tenant, class, .. } => {
                // Which of its sequences left is not told; registrations put it right where this guess is wrong.
                let tenant = self.tenant(tenant, *class);
                let count = [&mut tenant.running, &mut tenant.parked, &mut tenant.waiting];
                if let Some(count) = count.into_iter().find(|count| **count > 0) {
                    *count -= 1;
                }
            }
            News::Load { rung, bytes, .. } => {
                self.loaded.insert(*rung, *bytes);
            }
            News::Release { rung, .. } => {
                self.loaded.remove(rung);
            }
            News::Refused { .. }
            | News::Healed { .. }
            | News::ReadAhead { .. }
            | News::Limit { .. }
            | News::Reaction { .. }
            | News::Stall { .. }
            | News::GivenUp { .. }
            | News::Standby { .. }
            | News::Trouble { .. }
            | News::Other => {}
        }
        let is_lever = matches!(
            told.event,
            News::Lever { .. }
                | News::Unpark { .. }
                | News::Load { .. }
                | News::Release { .. }
                | News::Limit { .. }
                | News::Reaction { .. }
                | News::Trouble { .. }
        );
        if let Some(words) = told.event.words().filter(|_| is_lever) {
            push(&mut self.levers, at_ms, words);
        }
    }

    /// Who is registered, in place of what was known: whoever left is taken out.
    pub(super) fn registered(&mut self, all: &[Registered]) {
        self.tenants.retain(|name, _| all.iter().any(|registered| registered.tenant.name == *name));
        for Registered { tenant: claim, .. } in all {
            let weight = Some(claim.weight);
            self.tenant(&claim.name, claim.class).weight = weight;
        }
        for (name, tenant) in &mut self.tenants {
            // Several registrations may share a name.
            let of_name = all.iter().filter(|registered| registered.tenant.name == *name);
            if of_name.map(|registered| registered.in_flight).sum::<u64>() == 0 {
                (tenant.waiting, tenant.running, tenant.parked) = (0, 0, 0);
            }
        }
    }

    fn tenant(&mut self, name: &str, class: Class) -> &mut Tenant {
        self.tenants.entry(name.to_owned()).or_insert_with(|| Tenant::new(class))
    }

    fn sample(&mut self, at_ms: u64, budget: Bytes, usage: Bytes) {
        self.samples.push_back(Sample { at_ms, budget, usage });
        while self.samples.front().is_some_and(|first| first.at_ms + WINDOW_MS < at_ms) {
            self.samples.pop_front();
        }
    }
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.get()).unwrap_or(i64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A state that has heard these events, each a JSON object without its time, a tenth of a second apart.
    pub(in crate::top) fn after(events: &[&str]) -> State {
        let mut state = State::default();
        for (event, at) in events.iter().zip(0u64..) {
            let mut told: Told = serde_json::from_str(event).unwrap();
            told.at_ms = at * 100;
            state.hear(&told);
        }
        state
    }

    const MAIL: &str = r#""tenant": "mail", "class": "batch""#;

    fn mail(event: &str, more: &str) -> String {
        format!(r#"{{"event": "{event}", {MAIL}, "tokens": 7, "bytes": 5, "rung": 1, "wait_ms": 3.0{more}}}"#)
    }

    #[test]
    fn a_tenant_is_where_its_events_put_it() {
        let asked = mail("asked", r#", "prompt_tokens": 4"#);
        let [admitted, token, unpark, cancelled] = ["admitted", "token", "unpark", "cancelled"].map(|e| mail(e, ""));
        let finished = mail("finished", r#", "reason": "stop", "total_ms": 1.0"#);
        let park = mail("lever", r#", "kind": "park""#);
        let check = |events: &[&String], state: &str| {
            let events: Vec<&str> = events.iter().map(|event| event.as_str()).collect();
            assert_eq!(after(&events).tenants["mail"].state(), state, "{events:?}");
        };
        check(&[&asked], "1 waiting");
        check(&[&asked, &asked, &admitted], "1 running, 1 waiting");
        check(&[&asked, &admitted, &park], "1 parked");
        check(&[&asked, &admitted, &park, &unpark], "1 running");
        check(&[&asked, &admitted, &token, &finished], "idle");
        // Whoever joins late hears of it with its next token.
        check(&[&token, &token], "1 running");
        check(&[&asked, &cancelled], "idle");
        check(&[&finished], "idle");
    }

    #[test]
    fn registrations_put_right_what_was_guessed() {
        let mut state = after(&[&mail("token", ""), &mail("asked", r#", "prompt_tokens": 4"#)]);
        let all = |in_flight: u64| -> Vec<Registered> {
            let text = format!(
                r#"[{{"object": "tenant", "in_flight": {in_flight}, "tenant": {{"name": "mail", "class": "batch", "weight": 2, "floor": 15}}}}]"#
            );
            serde_json::from_str(&text).unwrap()
        };
        state.registered(&all(2));
        let mail = &state.tenants["mail"];
        assert_eq!((mail.state().as_str(), mail.weight), ("1 running, 1 waiting", Some(2)));
        state.registered(&all(0));
        assert_eq!(state.tenants["mail"].state(), "idle");
        state.registered(&[]);
        assert_eq!(state.tenants.len(), 0);
    }

    #[test]
    fn tokens_a_second_are_those_of_the_last_five() {
        let mut tenant = Tenant::new(Class::Batch);
        for at_ms in (0..20_000).step_by(100) {
            tenant.token(at_ms);
        }
        assert_eq!(tenant.tok_s(20_000), 10.0);
        assert_eq!(tenant.tok_s(22_000), 6.0);
        assert_eq!(tenant.tok_s(40_000), 0.0);
        assert!(tenant.recent.len() <= 12, "it forgets: {:?}", tenant.recent);
    }

    #[test]
    fn memory_levers_and_switches() {
        let sample = |usage: u64, budget: u64| {
            format!(r#"{{"event": "sample", "usage_bytes": {usage}, "budget_bytes": {budget}, "rss_bytes": 9}}"#)
        };
        let switch = mail("switch", r#", "from": 0, "to": 2, "route": "bridge", "switch_ms": 4.0"#);
        let state = after(&[
            r#"{"event": "load", "rung": 0, "bytes": 80, "load_ms": 1.0}"#,
            &sample(90, 100),
            &sample(70, 60),
            &sample(50, 60),
            &switch,
            r#"{"event": "release", "rung": 0, "bytes": 80, "release_ms": 1.0}"#,
            r#"{"event": "load", "rung": 2, "bytes": 30, "load_ms": 1.0}"#,
            r#"{"event": "missed", "events": 3}"#,
        ]);
        assert_eq!(state.samples.len(), 3);
        assert_eq!(state.overshoot_bytes_max, Some(10));
        assert_eq!(state.loaded, [(RungIdx::new(2), Bytes::new(30))].into());
        assert_eq!((state.levers.len(), state.switches.len(), state.missed), (3, 1, 3));
        assert_eq!(state.tenants["mail"].rung, Some(RungIdx::new(2)));
        let began_again = after(&[&switch, r#"{"event": "start", "ladder": "pocket", "rungs": []}"#]);
        assert_eq!((began_again.tenants.len(), began_again.ladder.as_str()), (0, "pocket"));
    }
}
