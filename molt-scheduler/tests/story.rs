//! Whole runs as text that a person can review: what happened, when, and what it cost.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use common::{World, rung, tenant};
use molt_scheduler::units::{RungIdx, Span};
use molt_scheduler::{Action, Class, Config, Policy, SequenceId, SequenceState, plan_snapshot, snapshot};

/// One line of a script.
enum Event {
    /// From that round on, this budget.
    Budget(u64),
    /// A request of the tenant with that name: prompt, pinned, answer.
    Ask(&'static str, u64, u64, u64),
    /// The load of a rung fails from now on, or works again.
    Broken(u8, bool),
}

struct Story {
    world: World,
    tenants: BTreeMap<&'static str, molt_scheduler::TenantId>,
    names: BTreeMap<SequenceId, String>,
    text: String,
}

impl Story {
    fn name(&self, id: SequenceId) -> &str {
        self.names.get(&id).map_or("?", String::as_str)
    }

    fn tell(&self, action: &Action) -> String {
        match *action {
            Action::Defer { sequence, place, wait } => {
                let wait = wait.map_or("unknown".into(), |wait| format!("{} ms", wait.micros() / 1000));
                format!("defer {} (place {place}, wait {wait})", self.name(sequence))
            }
            Action::Demote { sequence, from, to, frees } => {
                format!("demote {} {from} -> {to} (frees {})", self.name(sequence), frees.get())
            }
            Action::Park { sequence, rung, frees } => {
                format!("park {} on {rung} (frees {})", self.name(sequence), frees.get())
            }
            Action::Shed { sequence, from, tokens, frees } => {
                let until = from + tokens;
                format!("shed {} {}..{} (frees {})", self.name(sequence), from.get(), until.get(), frees.get())
            }
            Action::Release { rung, frees } => format!("release {rung} ({})", frees.get()),
            Action::Load { rung, takes } => format!("load {rung} ({})", takes.get()),
            Action::Admit { sequence, rung } => format!("admit {} on {rung}", self.name(sequence)),
            Action::Unpark { sequence, rung } => format!("unpark {} on {rung}", self.name(sequence)),
            Action::Promote { sequence, from, to } => format!("promote {} {from} -> {to}", self.name(sequence)),
        }
    }

    /// Where everybody stands, with tokens cached and tokens answered.
    fn standing(&self) -> String {
        let mut line = String::new();
        for (id, live) in &self.world.live {
            let state = match self.world.scheduler.state_of(*id).unwrap() {
                SequenceState::Waiting { place } => format!("waits at {place}"),
                SequenceState::Running { rung } => format!("{rung}"),
                SequenceState::Parked { rung } => format!("parked on {rung}"),
            };
            let (cached, answered) = (live.cached.get(), live.answered.get());
            let _ = write!(line, " | {} {state} {cached}/{answered}", self.name(*id));
        }
        line
    }
}

/// Runs a script of events by round and tells everything that is not quiet.
fn check(
    name: &str,
    config: Config,
    tenants: &[(&'static str, Class, u16, u8, u8)],
    rounds: u64,
    script: &[(u64, Event)],
) -> World {
    let ladder = vec![rung(1000, 4, 50), rung(500, 4, 50), rung(200, 2, 30)];
    let mut story = Story {
        world: World::new(ladder, config),
        tenants: BTreeMap::new(),
        names: BTreeMap::new(),
        text: String::new(),
    };
    for (name, class, weight, ceiling, floor) in tenants {
        let id = story.world.register(tenant(*class, *weight, *ceiling, *floor));
        story.tenants.insert(name, id);
    }
    let mut budget = 0;
    let mut quiet = 0;
    for round in 0..rounds {
        let mut news = String::new();
        for (_, event) in script.iter().filter(|(at, _)| *at == round) {
            match event {
                Event::Budget(bytes) => {
                    budget = *bytes;
                    let _ = writeln!(news, "          budget {budget}");
                }
                Event::Ask(who, prompt, pinned, answer) => {
                    let id = story.world.submit(story.tenants[who], *prompt, *pinned, *answer).unwrap();
                    let nth = story.names.values().filter(|name| name.starts_with(who)).count() + 1;
                    story.names.insert(id, format!("{who}{nth}"));
                    let _ = writeln!(news, "          {who}{nth} asks: prompt {prompt}, answer {answer}");
                }
                Event::Broken(rung, true) => {
                    story.world.broken.insert(RungIdx::new(*rung));
                    let _ = writeln!(news, "          tier{rung} no longer loads");
                }
                Event::Broken(rung, false) => {
                    story.world.broken.remove(&RungIdx::new(*rung));
                    let _ = writeln!(news, "          tier{rung} loads again");
                }
            }
        }
        let done = story.world.past.len();
        let at = story.world.now.micros() / 1000;
        let before = story.world.usage();
        story.world.round(budget).unwrap();
        for (id, _) in &story.world.past[done..] {
            let _ = writeln!(news, "          {} ends", story.name(*id));
        }
        let actions: Vec<String> = story.world.plan.actions().iter().map(|action| story.tell(action)).collect();
        if actions.is_empty() && news.is_empty() {
            quiet += 1;
            continue;
        }
        if quiet > 0 {
            let _ = writeln!(story.text, "          ({quiet} quiet rounds)");
            quiet = 0;
        }
        let _ = write!(story.text, "{at:>6} ms usage {before} -> {}", story.world.plan.usage().get());
        let _ = writeln!(story.text, " peak {} of {budget}", story.world.plan.peak().get());
        story.text.push_str(&news);
        for action in actions {
            let _ = writeln!(story.text, "          {action}");
        }
        let standing = story.standing();
        let _ = writeln!(story.text, "         {standing}");
    }
    if quiet > 0 {
        let _ = writeln!(story.text, "          ({quiet} quiet rounds)");
    }
    insta::assert_snapshot!(name, story.text);
    story.world
}

fn config(policy: Policy) -> Config {
    Config { policy, overhead: molt_scheduler::units::Bytes::new(20), ..Config::default() }
}

const THREE: [(&str, Class, u16, u8, u8); 3] =
    [("reader", Class::Foreground, 1, 0, 2), ("mail", Class::Batch, 2, 0, 2), ("index", Class::Batch, 1, 1, 2)];

fn asks() -> Vec<(u64, Event)> {
    vec![
        (0, Event::Ask("reader", 40, 10, 200)),
        (0, Event::Ask("mail", 60, 10, 200)),
        (2, Event::Ask("index", 80, 10, 200)),
    ]
}

fn spike() -> Vec<(u64, Event)> {
    let mut script = asks();
    script.extend([
        (0, Event::Budget(6000)),
        (30, Event::Budget(2000)),
        (45, Event::Budget(1250)),
        (70, Event::Budget(6000)),
    ]);
    script
}

#[test]
fn a_spike_in_the_middle_of_the_answer() {
    check("spike_lever_first", config(Policy::LeverFirst), &THREE, 400, &spike());
}

#[test]
fn a_spike_with_the_foreground_protected() {
    check("spike_protect_foreground", config(Policy::ProtectForeground), &THREE, 400, &spike());
}

#[test]
fn a_collapse_to_the_floor_and_back() {
    let mut script = asks();
    script.extend([
        (0, Event::Budget(6000)),
        (30, Event::Budget(1150)),
        (31, Event::Budget(1000)),
        (90, Event::Budget(1400)),
        (150, Event::Budget(6000)),
    ]);
    check("collapse", config(Policy::LeverFirst), &THREE, 600, &script);
}

#[test]
fn a_saw_tooth_budget() {
    let mut script = asks();
    for tooth in 0..15 {
        script.push((tooth * 20, Event::Budget(6000)));
        script.push((tooth * 20 + 10, Event::Budget(2300)));
    }
    let world = check("saw_tooth", config(Policy::LeverFirst), &THREE, 400, &script);
    assert_eq!(world.past.len(), 3);
}

#[test]
fn a_rung_that_does_not_load() {
    let mut script = asks();
    script.extend([(0, Event::Budget(6000)), (0, Event::Broken(0, true)), (60, Event::Broken(0, false))]);
    check("broken_rung", config(Policy::LeverFirst), &THREE, 400, &script);
}

#[test]
fn a_lone_conversation_outgrows_its_budget() {
    let config = Config { patience: Span::from_millis(500), ..config(Policy::LeverFirst) };
    let script = [(0, Event::Budget(900)), (0, Event::Ask("reader", 100, 10, 600))];
    check("outgrown", config, &THREE[..1], 900, &script);
}

/// The whole state and the plan that led to it, after so many rounds of a script.
fn state(name: &str, policy: Policy, rounds: &[u64]) {
    let mut world = World::new(vec![rung(1000, 4, 50), rung(500, 4, 50), rung(200, 2, 30)], config(policy));
    let mut text = String::new();
    let mut ids = Vec::new();
    for (_, class, weight, ceiling, floor) in THREE {
        let quota = (weight == 2).then_some(molt_scheduler::units::Tokens::new(500));
        ids.push(world.register(molt_scheduler::TenantSpec { quota, ..tenant(class, weight, ceiling, floor) }));
    }
    for round in 0..=*rounds.last().unwrap() {
        if round == 0 {
            (0..4).for_each(|_| _ = world.submit(ids[2], 80, 10, 100).unwrap());
            (0..2).for_each(|_| _ = world.submit(ids[1], 60, 10, 200).unwrap());
            world.submit(ids[0], 40, 10, 200).unwrap();
        }
        world.broken = if (30..40).contains(&round) { [RungIdx::new(2)].into() } else { [].into() };
        let budget = [(60, 900), (45, 1250), (30, 2000), (0, 3500)].into_iter().find(|(at, _)| *at <= round).unwrap().1;
        world.round(budget).unwrap();
        if rounds.contains(&round) {
            let (plan, state) = (plan_snapshot(&world.plan), snapshot(&world.scheduler));
            let _ = writeln!(text, "--- round {round}, budget {budget}\n{plan}\n{state}");
        }
    }
    insta::assert_snapshot!(name, text);
}

#[test]
fn the_whole_state_at_some_points() {
    state("state_lever_first", Policy::LeverFirst, &[0, 29, 30, 45, 60, 90]);
    state("state_protect_foreground", Policy::ProtectForeground, &[30, 45, 60, 90]);
}
