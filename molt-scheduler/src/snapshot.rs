//! The whole state as text, for tests and for reports of bugs.
//!
//! Every field is taken apart by name, so that a new one does not compile until it is shown.

use std::fmt::Write as _;

use crate::plan::{Action, Plan, Prospect};
use crate::queue::{Account, Line};
use crate::scheduler::{RungState, Scheduler};
use crate::state::{Phase, Sequence, Tenant};
use crate::units::{Span, Time};

/// Everything that a scheduler knows, a line for each tenant, rung and sequence.
pub fn snapshot(scheduler: &Scheduler) -> String {
    let Scheduler {
        ladder,
        // Settings do not change.
        config: _,
        tenants,
        sequences,
        queues,
        resident,
        rungs,
        drift_bytes,
        arrivals,
        parkings,
        pressed,
        last_round,
        pace,
        came,
        // Holds nothing between rounds.
        scratch: _,
    } = scheduler;
    let mut text = String::new();
    let pressed = pressed.map_or("never".to_owned(), ms);
    let last = last_round.map_or("none".to_owned(), |(at, stepped)| {
        format!("{}{}", ms(at), if stepped { "" } else { " without a step" })
    });
    let _ = writeln!(
        text,
        "drift {drift_bytes} B, {arrivals} came, {parkings} parkings, pressed {pressed}, last round {last}, pace {}",
        span(*pace)
    );
    for ((rung, cost), RungState { loading, room_since, retry }) in ladder.rungs().zip(rungs) {
        let _ = write!(text, "{rung} {}", cost.held().get());
        let _ = write!(text, "{}{}", flag(resident.contains(rung), "resident"), flag(*loading, "loading"));
        let room = room_since.map(|since| format!(", room since {}", ms(since))).unwrap_or_default();
        let retry = retry.map(|(at, pause)| format!(", tried again at {} after {}", ms(at), span(pause)));
        let _ = writeln!(text, "{room}{}", retry.unwrap_or_default());
    }
    for class in Scheduler::CLASSES {
        let Line { turns, length, untold, now } = queues.of(class);
        let turns: Vec<String> = turns.iter().map(|turn| turn.tenant.to_string()).collect();
        let _ = writeln!(
            text,
            "{class:?}: {length} wait ({untold} untold), turns [{}], virtual time {}",
            turns.join(" "),
            virtual_tokens(*now)
        );
    }
    for Tenant { id, spec, account } in tenants.iter() {
        // The turn is the line's own key, told above.
        let Account { waiting, start, turn: _, inside } = account;
        let waiting: Vec<String> = waiting.iter().map(ToString::to_string).collect();
        let quota = spec.quota.map(|quota| format!(" of {}", quota.get())).unwrap_or_default();
        let _ = writeln!(
            text,
            "{id} {:?} weight {} {}..{} context {}: starts at {}, inside {}{quota}, waiting [{}]",
            spec.class,
            spec.weight,
            spec.ceiling,
            spec.floor,
            spec.context_limit.get(),
            virtual_tokens(*start),
            inside.get(),
            waiting.join(" ")
        );
    }
    for sequence in sequences.iter() {
        let Sequence {
            id,
            tenant,
            // Its tenant's, shown there.
            class: _,
            weight: _,
            floor: _,
            ceiling: _,
            pinned,
            longest,
            answer,
            cached,
            prompt_left,
            answered,
            submitted,
            order,
            ahead,
            switched,
            credit,
            phase,
        } = sequence;
        let phase = match phase {
            Phase::Waiting { told, overtaken } => format!("waits, passed {overtaken} times{}", flag(*told, "told")),
            Phase::Running { rung } => format!("runs on {rung}"),
            Phase::Parked { rung, since, ticket } => {
                format!("parked on {rung} since {} with ticket {ticket}", ms(*since))
            }
        };
        let ahead = ahead.map(|rung| format!(", read ahead on {rung}")).unwrap_or_default();
        let switched = switched.map(|at| format!(", switched at {}", ms(at))).unwrap_or_default();
        let credit = f64::from(*credit) / f64::from(crate::steps::ONE_TOKEN);
        let _ = writeln!(
            text,
            "{id} of {tenant}, number {order}, came at {}: {phase}{ahead}{switched}; cached {} (pinned {}), prompt left {}, \
             answered {} of {} ({} at most), credit {credit:.2}",
            ms(*submitted),
            cached.get(),
            pinned.get(),
            prompt_left.get(),
            answered.get(),
            answer.get(),
            longest.get(),
        );
    }
    for (id, phase) in came {
        let _ = writeln!(text, "{id} came to a rung that is being loaded, from {phase:?}");
    }
    text
}

/// A plan in one line a decision.
pub fn plan_snapshot(plan: &Plan) -> String {
    let Plan { actions, steps, prospects, usage, peak, crest } = plan;
    let mut text = format!("usage {}, peak {}, {} once all is released\n", usage.get(), peak.get(), crest.get());
    for action in actions {
        let _ = writeln!(text, "{}", action_line(action));
    }
    for step in steps {
        let does = if step.prefill { "reads" } else { "writes" };
        let _ = writeln!(text, "{} {does} {} on {}", step.sequence, step.tokens.get(), step.rung);
    }
    for Prospect { sequence, to } in prospects {
        let _ = writeln!(text, "{sequence} may be read ahead on {to}");
    }
    text
}

fn action_line(action: &Action) -> String {
    match *action {
        Action::Defer { sequence, place, wait } => {
            format!("defer {sequence} at place {place} for {}", wait.map_or("a time unknown".to_owned(), span))
        }
        Action::Demote { sequence, from, to, frees } => {
            format!("demote {sequence} {from} -> {to}, frees {}", frees.get())
        }
        Action::Park { sequence, rung, frees } => format!("park {sequence} on {rung}, frees {}", frees.get()),
        Action::Shed { sequence, from, tokens, frees } => {
            format!("shed {sequence} {}..{}, frees {}", from.get(), (from + tokens).get(), frees.get())
        }
        Action::Release { rung, frees } => format!("release {rung}, frees {}", frees.get()),
        Action::Load { rung, takes } => format!("load {rung}, takes {}", takes.get()),
        Action::Admit { sequence, rung } => format!("admit {sequence} on {rung}"),
        Action::Unpark { sequence, rung } => format!("unpark {sequence} on {rung}"),
        Action::Promote { sequence, from, to } => format!("promote {sequence} {from} -> {to}"),
    }
}

fn ms(at: Time) -> String {
    span(at.since(Time::START))
}

fn span(span: Span) -> String {
    format!("{} ms", span.micros() / 1_000)
}

fn virtual_tokens(virtual_time: u64) -> String {
    format!("{:.1}", virtual_time as f64 / crate::queue::TOKEN as f64)
}

fn flag(set: bool, name: &str) -> String {
    if set { format!(", {name}") } else { String::new() }
}
