//! A replay as a table that a person can read. Rounds in which nothing happens are counted, not shown; where there are
//! many tenants, a line stands for a stretch of time and says how many did what.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use molt_scheduler::units::{Bytes, Span, Time};
use molt_scheduler::{Action, SequenceState};

use super::summary::rung;
use super::{Census, Done, Round, Summary, TenantSummary};

/// Up to so many tenants everything is told one by one.
const TOLD_ONE_BY_ONE: usize = 8;
/// With more, a line stands for that long.
const STRETCH: Span = Span::from_millis(5_000);
/// A kind of tenant of which there are more is summed up.
const LISTED: usize = 8;

/// Makes the table, round by round.
#[derive(Debug, Clone)]
pub struct Text {
    folded: bool,
    /// Rounds not shown, with the least and the largest budget in them.
    quiet: Option<(u64, Bytes, Bytes)>,
    stretch: Option<Stretch>,
}

/// What happened in a stretch of time.
#[derive(Debug, Clone)]
struct Stretch {
    since: Time,
    budget: (Bytes, Bytes),
    usage: (Bytes, Bytes),
    counts: BTreeMap<String, u64>,
    census: Census,
}

impl Text {
    /// For so many tenants.
    pub fn new(tenants: usize) -> Self {
        Self { folded: tenants > TOLD_ONE_BY_ONE, quiet: None, stretch: None }
    }

    /// The head of the table.
    pub fn head(&self) -> String {
        let (at, budget, usage, peak) = ("ms", "budget", "usage", "peak");
        if self.folded {
            return format!("{at:>8}  {budget:>23}  {usage:>23}  how many did what, and where all stand then\n");
        }
        format!("{at:>8}  {budget:>11}  {usage:>11}  {peak:>11}  what happened, and where all stand then\n")
    }

    /// The lines of a round; none for most.
    pub fn round(&mut self, round: &Round) -> String {
        if self.folded { self.folded(round) } else { self.told(round) }
    }

    /// What is still to be said at the end.
    pub fn close(&mut self) -> String {
        let mut text = String::new();
        self.flush_quiet(&mut text);
        if let Some(stretch) = self.stretch.take() {
            stretch.write(&mut text);
        }
        text
    }

    fn flush_quiet(&mut self, text: &mut String) {
        if let Some((rounds, low, high)) = self.quiet.take() {
            let range = if low == high { String::new() } else { format!(", budget {low} to {high}") };
            let _ = writeln!(text, "{:49}({rounds} quiet rounds{range})", "");
        }
    }

    fn told(&mut self, round: &Round) -> String {
        let mut text = String::new();
        let budget = round.budget_bytes;
        if round.is_quiet() {
            let (rounds, low, high) = self.quiet.unwrap_or((0, budget, budget));
            self.quiet = Some((rounds + 1, low.min(budget), high.max(budget)));
            return text;
        }
        self.flush_quiet(&mut text);
        let mut head = format!(
            "{:>8}  {:>11}  {:>11}  {:>11}  ",
            round.at_us.micros() / 1_000,
            budget.to_string(),
            round.usage_bytes.to_string(),
            round.peak_bytes.to_string()
        );
        let mut line = |what: String| {
            let _ = writeln!(text, "{head}{what}");
            head = format!("{:49}", "");
        };
        for asked in &round.asked {
            let (who, prompt, answer) = (&asked.sequence, asked.prompt_tokens.get(), asked.answer_tokens.get());
            match &asked.refused {
                None => line(format!("{who} asks: prompt {prompt}, answer {answer}")),
                Some(reason) => line(format!("{who} is refused: {reason}")),
            }
        }
        round.ended.iter().for_each(|who| line(format!("{who} ends")));
        round.done.iter().for_each(|done| line(tell(done)));
        if round.drift_bytes != 0 {
            line(format!("drift {} B", round.drift_bytes));
        }
        let standing: Vec<String> = round
            .standing
            .iter()
            .map(|one| {
                let state = match one.state {
                    SequenceState::Waiting { place } => format!("waits at {place}"),
                    SequenceState::Running { rung } => rung.to_string(),
                    SequenceState::Parked { rung } => format!("parked on {rung}"),
                };
                format!("{} {state} {}/{}", one.sequence, one.cached_tokens.get(), one.answered_tokens.get())
            })
            .collect();
        line(if standing.is_empty() { census(&round.census) } else { format!("= {}", standing.join(" | ")) });
        text
    }

    fn folded(&mut self, round: &Round) -> String {
        let mut text = String::new();
        if let Some(stretch) = self.stretch.take_if(|stretch| round.at_us.since(stretch.since) >= STRETCH) {
            stretch.write(&mut text);
        }
        let (budget, usage) = (round.budget_bytes, round.usage_bytes);
        let stretch = self.stretch.get_or_insert_with(|| Stretch {
            since: round.at_us,
            budget: (budget, budget),
            usage: (usage, usage),
            counts: BTreeMap::new(),
            census: Census::default(),
        });
        stretch.budget = (stretch.budget.0.min(budget), stretch.budget.1.max(budget));
        stretch.usage = (stretch.usage.0.min(usage), stretch.usage.1.max(usage));
        stretch.census = round.census.clone();
        let mut count = |what: String| *stretch.counts.entry(what).or_default() += 1;
        for asked in &round.asked {
            count(if asked.refused.is_some() { "refused" } else { "asked" }.to_owned());
        }
        round.ended.iter().for_each(|_| count("ended".to_owned()));
        round.done.iter().for_each(|done| count(kind(done)));
        text
    }
}

impl Stretch {
    fn write(&self, text: &mut String) {
        let range = |(low, high): (Bytes, Bytes)| match low == high {
            true => low.to_string(),
            false => format!("{:.0} .. {high}", low.as_mib()),
        };
        let (at, budget, usage) = (self.since.micros() / 1_000, range(self.budget), range(self.usage));
        let did: Vec<String> = self.counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
        let did = if did.is_empty() { String::new() } else { format!("{} ", did.join(", ")) };
        let _ = writeln!(text, "{at:>8}  {budget:>23}  {usage:>23}  {did}{}", census(&self.census));
    }
}

fn kind(done: &Done) -> String {
    match done.action {
        Action::Defer { .. } => "defer".to_owned(),
        Action::Demote { from, to, .. } => format!("demote {from}-{to}"),
        Action::Park { .. } => "park".to_owned(),
        Action::Shed { .. } => "shed".to_owned(),
        Action::Release { rung, .. } => format!("release {rung}"),
        Action::Load { rung, .. } => format!("load {rung}"),
        Action::Admit { rung, .. } => format!("admit {rung}"),
        Action::Unpark { .. } => "unpark".to_owned(),
        Action::Promote { from, to, .. } => format!("promote {from}-{to}"),
    }
}

fn tell(done: &Done) -> String {
    let who = done.sequence.as_deref().unwrap_or_default();
    match done.action {
        Action::Defer { place, wait, .. } => {
            let wait = wait.map_or("unknown".to_owned(), seconds);
            format!("defer {who} (place {place}, wait {wait})")
        }
        Action::Demote { from, to, frees, .. } => format!("demote {who} {from} -> {to} (frees {frees})"),
        Action::Park { rung, frees, .. } => format!("park {who} on {rung} (frees {frees})"),
        Action::Shed { from, tokens, frees, .. } => {
            format!("shed {who} {}..{} (frees {frees})", from.get(), (from + tokens).get())
        }
        Action::Release { rung, frees } => format!("release {rung} ({frees})"),
        Action::Load { rung, takes } => format!("load {rung} ({takes})"),
        Action::Admit { rung, .. } => format!("admit {who} on {rung}"),
        Action::Unpark { rung, .. } => format!("unpark {who} on {rung}"),
        Action::Promote { from, to, .. } => format!("promote {who} {from} -> {to}"),
    }
}

fn census(census: &Census) -> String {
    let mut parts = Vec::new();
    for (index, (running, parked)) in census.rungs.iter().enumerate().filter(|(_, count)| **count != (0, 0)) {
        let stopped = if *parked > 0 { format!(", {parked} parked") } else { String::new() };
        parts.push(format!("{} {running} run{stopped}", rung(index)));
    }
    if census.waiting > 0 {
        parts.push(format!("{} wait", census.waiting));
    }
    if parts.is_empty() { "= nobody is there".to_owned() } else { format!("= {}", parts.join(" | ")) }
}

fn seconds(span: Span) -> String {
    let ms = span.micros() / 1_000;
    format!("{}.{} s", ms / 1_000, ms % 1_000 / 100)
}

fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, Bytes::new(bytes.unsigned_abs()))
}

/// What a replay adds up to, for people.
impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lasted = seconds(self.lasted_us.since(Time::START));
        let super::LeverCounts { defer, demote, park, shed } = self.levers;
        for (name, value) in [
            ("trace, tenants, ladder", format!("{}, {}, {}", self.trace, self.tenants_name, self.ladder)),
            ("rounds", format!("{} in {lasted}", self.rounds)),
            ("levers", format!("defer {defer}, demote {demote}, park {park}, shed {shed}")),
            ("ways back", format!("unpark {}, promote {}; {} loads", self.returns, self.promotions, self.loads)),
            ("maximum overshoot", signed(self.overshoot_bytes_max)),
            ("maximum drift", Bytes::new(self.drift_bytes_max).to_string()),
        ] {
            writeln!(f, "{name:24} {value}")?;
        }
        for (index, time) in self.rungs.iter().enumerate() {
            let (running, parked) = (seconds(time.running_us), seconds(time.parked_us));
            writeln!(f, "{:24} {running} run, {parked} parked", format!("time on {}", rung(index)))?;
        }
        writeln!(
            f,
            "\n{:20} {:>10} {:>6} {:>11} {:>7} {:>9} {:>14} {:>9} {:>9} {:>9}",
            "tenant", "class", "weight", "served", "share", "of weight", "finished", "wait mean", "wait max", "parked"
        )?;
        let mut kinds: BTreeMap<(std::cmp::Reverse<molt_scheduler::Class>, std::cmp::Reverse<u16>), Vec<_>> =
            BTreeMap::new();
        for tenant in &self.tenants {
            let kind = (std::cmp::Reverse(tenant.class), std::cmp::Reverse(tenant.weight));
            kinds.entry(kind).or_default().push(tenant);
        }
        let folded = self.tenants.len() > LISTED;
        for alike in kinds.values() {
            if folded {
                self.line(f, &format!("{} alike", alike.len()), alike)?;
            } else {
                alike.iter().try_for_each(|one| self.line(f, &one.name, &[one]))?;
            }
        }
        Ok(())
    }
}

impl Summary {
    /// A line for tenants of one class and weight: what they had together, of what their class had.
    fn line(&self, f: &mut std::fmt::Formatter<'_>, name: &str, alike: &[&TenantSummary]) -> std::fmt::Result {
        let Some(first) = alike.first() else { return Ok(()) };
        let class = || self.tenants.iter().filter(|tenant| tenant.class == first.class);
        let percent = |part: u64, whole: u64| match whole {
            0 => "-".to_owned(),
            whole => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
        };
        let sum = |of: fn(&TenantSummary) -> u64| alike.iter().map(|tenant| of(tenant)).sum::<u64>();
        let served = sum(|tenant| tenant.served_tokens.get());
        let weight = sum(|tenant| u64::from(tenant.weight));
        let share = percent(served, class().map(|tenant| tenant.served_tokens.get()).sum());
        let entitled = percent(weight, class().map(|tenant| u64::from(tenant.weight)).sum());
        let refused = sum(|tenant| tenant.refused);
        let refused = if refused > 0 { format!(" -{refused}") } else { String::new() };
        let finished = format!("{}/{}{refused}", sum(|tenant| tenant.finished), sum(|tenant| tenant.requests));
        let waits = sum(|tenant| tenant.wait_us_sum.micros()).checked_div(sum(|tenant| tenant.admitted)).unwrap_or(0);
        let most = |of: fn(&TenantSummary) -> Span| alike.iter().map(|tenant| of(tenant)).max().unwrap_or_default();
        let class_name = format!("{:?}", first.class).to_lowercase();
        writeln!(
            f,
            "{name:20} {class_name:>10} {:>6} {served:>11} {share:>7} {entitled:>9} {finished:>14} {:>9} {:>9} {:>9}",
            first.weight,
            seconds(Span::from_micros(waits)),
            seconds(most(|tenant| tenant.wait_us_max)),
            seconds(most(|tenant| tenant.parked_us_max)),
        )
    }
}
