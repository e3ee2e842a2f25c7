//! The live feed as a client reads it: the events of the service, and a line of words for each.

use molt_scheduler::units::{Bytes, RungIdx, Tokens};
use molt_scheduler::{Class, LeverKind};
use serde::Deserialize;

/// An event and when it was.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Told {
    /// Milliseconds since the service began; of what the feed itself says there is none.
    #[serde(default)]
    pub(crate) at_ms: u64,
    #[serde(flatten)]
    pub(crate) event: News,
}

/// What a client knows to read. What a newer service tells beside it is `Other`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum News {
    Start {
        ladder: String,
        rungs: Vec<Rung>,
    },
    Missed {
        events: u64,
    },
    Asked {
        tenant: String,
        class: Class,
        prompt_tokens: Tokens,
    },
    Refused {
        tenant: String,
        reason: String,
    },
    Admitted {
        tenant: String,
        class: Class,
        rung: RungIdx,
        wait_ms: f64,
    },
    Token {
        tenant: String,
        class: Class,
        rung: RungIdx,
        wait_ms: Option<f64>,
    },
    Budget {
        budget_bytes: Bytes,
        usage_bytes: Bytes,
    },
    Switch(Switch),
    Lever {
        kind: LeverKind,
        tenant: String,
        class: Class,
        bytes: Bytes,
        tokens: Tokens,
    },
    Unpark {
        tenant: String,
        class: Class,
        rung: RungIdx,
    },
    Healed {
        tenant: String,
        rung: RungIdx,
        tokens: Tokens,
        heal_ms: f64,
    },
    ReadAhead {
        tenant: String,
        rung: RungIdx,
        tokens: Tokens,
        read_ms: f64,
        used: bool,
    },
    Load {
        rung: RungIdx,
        bytes: Bytes,
        load_ms: f64,
    },
    Release {
        rung: RungIdx,
        bytes: Bytes,
        release_ms: f64,
    },
    Limit {
        source: String,
        reason: String,
    },
    Reaction {
        reaction_ms: f64,
        before_bytes: Bytes,
        rss_bytes: Bytes,
    },
    Stall {
        tenant: String,
        stall_ms: f64,
    },
    GivenUp {
        rung: RungIdx,
        tokens: Tokens,
        given_up_ms: f64,
    },
    Standby {
        rung: RungIdx,
        bytes: Bytes,
    },
    Trouble {
        message: String,
    },
    Sample {
        usage_bytes: Bytes,
        budget_bytes: Bytes,
        rss_bytes: Bytes,
    },
    Finished {
        tenant: String,
        class: Class,
        tokens: Tokens,
        reason: String,
        total_ms: f64,
    },
    Cancelled {
        tenant: String,
        class: Class,
        tokens: Tokens,
    },
    #[serde(other)]
    Other,
}

/// A rung of the ladder that is served.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Rung {
    pub(crate) rung: RungIdx,
    pub(crate) precision: String,
    pub(crate) weights_bytes: Bytes,
}

/// A change of rung.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Switch {
    pub(crate) tenant: String,
    pub(crate) class: Class,
    pub(crate) from: RungIdx,
    pub(crate) to: RungIdx,
    pub(crate) route: String,
    pub(crate) switch_ms: f64,
    pub(crate) tokens: Tokens,
}

impl News {
    /// Whether it is one of the thousands in a second that a person does not want to read.
    pub(crate) fn is_frequent(&self) -> bool {
        matches!(self, Self::Token { .. } | Self::Sample { .. })
    }

    /// In words; `None` where this client knows none.
    pub(crate) fn words(&self) -> Option<String> {
        Some(match self {
            Self::Start { ladder, rungs } => format!("serving {ladder}, {} rungs", rungs.len()),
            Self::Missed { events } => format!("{events} events were missed"),
            Self::Asked { tenant, prompt_tokens, .. } => format!("{tenant} asks: {prompt_tokens}"),
            Self::Refused { tenant, reason } => format!("{tenant} is refused: {reason}"),
            Self::Admitted { tenant, rung, wait_ms, .. } => {
                format!("{tenant} is let in on {rung} after {wait_ms:.0} ms")
            }
            Self::Token { tenant, rung, wait_ms, .. } => match wait_ms {
                Some(wait_ms) => format!("{tenant} has a token from {rung} after {wait_ms:.1} ms"),
                None => format!("{tenant} has a token from {rung}"),
            },
            Self::Budget { budget_bytes, usage_bytes } => format!("budget {budget_bytes}, in use {usage_bytes}"),
            Self::Switch(switch) => switch.words(),
            Self::Lever { kind, tenant, bytes, tokens, .. } => match kind {
                LeverKind::Defer => format!("{tenant} waits to be let in"),
                LeverKind::Demote => format!("{tenant} goes down, {bytes} freed"),
                LeverKind::Park => format!("{tenant} is parked, {bytes} freed; its cache is kept"),
                LeverKind::Shed => format!("{tenant} sheds its oldest {tokens}, {bytes} freed"),
            },
            Self::Unpark { tenant, rung, .. } => format!("{tenant} runs again on {rung}"),
            Self::Healed { tenant, rung, tokens, heal_ms } => {
                format!("{tenant} healed on {rung}: {tokens} read natively in {heal_ms:.0} ms")
            }
            Self::ReadAhead { tenant, rung, tokens, read_ms, used } => {
                let then = if *used { "" } else { ", and forgotten" };
                format!("{tenant} was read ahead on {rung}: {tokens} in {read_ms:.0} ms{then}")
            }
            Self::Load { rung, bytes, load_ms } => format!("{rung} loaded: {bytes} in {load_ms:.0} ms"),
            Self::Release { rung, bytes, release_ms } => format!("{rung} given back: {bytes} in {release_ms:.1} ms"),
            Self::Limit { source, reason } => format!("limit by {source}: {reason}"),
            Self::Reaction { reaction_ms, before_bytes, rss_bytes } => {
                let text = format!("back with the system {reaction_ms:.1} ms after the signal");
                format!("{text}: {before_bytes} were in use, {rss_bytes} are resident")
            }
            Self::Stall { tenant, stall_ms } => format!("{tenant} waited {stall_ms:.0} ms for its next token"),
            Self::GivenUp { rung, given_up_ms, .. } => {
                format!("a step on {rung} was given up after {given_up_ms:.0} ms; it is done again")
            }
            Self::Standby { rung, bytes } => {
                format!("{bytes} of {rung} are fetched, in case it is next")
            }
            Self::Trouble { message } => message.clone(),
            Self::Sample { usage_bytes, budget_bytes, rss_bytes } => {
                format!("in use {usage_bytes} of {budget_bytes}, resident {rss_bytes}")
            }
            Self::Finished { tenant, tokens, reason, total_ms, .. } => {
                format!("{tenant} has its answer ({reason}): {tokens} in {total_ms:.0} ms")
            }
            Self::Cancelled { tenant, tokens, .. } => format!("{tenant} left after {tokens}"),
            Self::Other => return None,
        })
    }
}

impl Switch {
    pub(crate) fn words(&self) -> String {
        let Self { tenant, from, to, route, switch_ms, tokens, .. } = self;
        format!("{tenant} {from} -> {to} ({route}): {tokens} in {switch_ms:.0} ms")
    }
}

#[cfg(test)]
mod tests {
    use molt_runtime::event::Event;

    use super::*;

    #[test]
    fn what_the_service_tells_is_what_the_client_reads() {
        let check = |event: &Event, words: &str| {
            let mut told = serde_json::to_value(event).unwrap();
            told["at_ms"] = serde_json::json!(5);
            told["number"] = serde_json::json!(6);
            let told: Told = serde_json::from_value(told).unwrap();
            assert_eq!((told.at_ms, told.event.words().as_deref()), (5, Some(words)));
        };
        let (tenant, class, rung) = ("mail".to_owned(), Class::Batch, RungIdx::new(1));
        let (bytes, tokens) = (Bytes::mib(3), Tokens::new(40));
        check(&Event::Budget { budget_bytes: bytes, usage_bytes: Bytes::mib(1) }, "budget 3.0 MiB, in use 1.0 MiB");
        let kind = LeverKind::Shed;
        let lever = Event::Lever { kind, tenant: tenant.clone(), class, bytes, tokens };
        check(&lever, "mail sheds its oldest 40 tokens, 3.0 MiB freed");
        check(&Event::Unpark { tenant: tenant.clone(), class, rung }, "mail runs again on tier1");
        check(
            &Event::Finished {
                tenant: tenant.clone(),
                class,
                tokens,
                reason: molt_runtime::event::FinishReason::Stop,
                total_ms: 12.0,
            },
            "mail has its answer (stop): 40 tokens in 12 ms",
        );
        let switch = molt_runtime::event::Switch {
            tenant,
            class,
            from: RungIdx::TOP,
            to: rung,
            route: molt_kv::carry::Route::Bridge,
            switch_ms: 11.4,
            carry_ms: 3.0,
            tokens,
            exact_tokens: Tokens::ZERO,
            mapped_tokens: tokens,
            flops_saved_ratio: 0.5,
            pressure_ratio: 1.1,
        };
        check(&Event::Switch(switch), "mail tier0 -> tier1 (bridge): 40 tokens in 11 ms");
        let (before_bytes, budget_bytes) = (Bytes::mib(9), Bytes::mib(4));
        let reaction = Event::Reaction { reaction_ms: 7.25, before_bytes, budget_bytes, rss_bytes: bytes };
        check(&reaction, "back with the system 7.2 ms after the signal: 9.0 MiB were in use, 3.0 MiB are resident");
        let newer: Told = serde_json::from_str(r#"{"event": "sung", "at_ms": 1, "song": [1]}"#).unwrap();
        assert_eq!(newer.event.words(), None);
    }
}
