//! What `molt top` looks like: a picture of a state, and of nothing else.

use molt_scheduler::Class;
use molt_scheduler::units::Bytes;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line as Text, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, List, Paragraph, Row, Table, Widget};

use super::state::{Line, State, Tenant, WINDOW_MS};

const BUDGET: Color = Color::Yellow;
const USAGE: Color = Color::Cyan;

impl Widget for &State {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let tenants = u16::try_from(self.tenants.len()).unwrap_or(u16::MAX).clamp(1, 12);
        let [head, chart, table, logs, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Min(8),
            Constraint::Length(tenants + 3),
            Constraint::Percentage(30),
            Constraint::Length(1),
        ])
        .areas(area);
        heading(self).render(head, buffer);
        memory(self, chart, buffer);
        tenant_table(self).render(table, buffer);
        let [levers, switches] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(logs);
        log("levers and weights", self.levers.iter()).render(levers, buffer);
        log("switches", self.switches.iter()).render(switches, buffer);
        footer(self).render(foot, buffer);
    }
}

fn heading(state: &State) -> Paragraph<'_> {
    let Some(last) = state.samples.back() else { return Paragraph::new("waiting for the service") };
    let pressure = last.usage.get() as f64 / last.budget.get().max(1) as f64;
    let over = state.overshoot_bytes_max.map_or("none".to_owned(), signed);
    let first = Text::from(vec![
        Span::styled(format!("molt {}", state.ladder), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw("  "),
        Span::styled(format!("budget {}", last.budget), BUDGET),
        Span::raw("  "),
        Span::styled(format!("in use {}", last.usage), USAGE),
        Span::raw(format!("  resident {}  pressure {pressure:.2}  maximum overshoot {over}", state.resident)),
    ]);
    let rungs = state.rungs.iter().map(|rung| match state.loaded.get(&rung.rung) {
        Some(bytes) => Span::styled(format!("[{} {bytes}] ", rung.rung), Modifier::BOLD),
        None => Span::styled(format!(" {} {}  ", rung.rung, rung.weights_bytes), Modifier::DIM),
    });
    Paragraph::new(vec![first, Text::from(rungs.collect::<Vec<_>>())])
}

fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, Bytes::new(bytes.unsigned_abs()))
}

/// Budget against usage over the last two minutes.
fn memory(state: &State, area: Rect, buffer: &mut Buffer) {
    let mib = |bytes: Bytes| bytes.get() as f64 / f64::from(1 << 20);
    let age = |at_ms: u64| -(state.now_ms.saturating_sub(at_ms) as f64) / 1_000.0;
    // A budget stands until it changes: steps, not slopes.
    let mut budget: Vec<(f64, f64)> = Vec::new();
    for sample in &state.samples {
        if let Some((_, before)) = budget.last().copied() {
            budget.push((age(sample.at_ms), before));
        }
        budget.push((age(sample.at_ms), mib(sample.budget)));
    }
    let usage: Vec<(f64, f64)> = state.samples.iter().map(|sample| (age(sample.at_ms), mib(sample.usage))).collect();
    let most = budget.iter().chain(&usage).map(|(_, mib)| *mib).fold(1.0, f64::max) * 1.1;
    let line = |name, colour, data| {
        Dataset::default().name(name).marker(Marker::Braille).graph_type(GraphType::Line).style(colour).data(data)
    };
    let seconds = WINDOW_MS as f64 / 1_000.0;
    Chart::new(vec![line("budget", BUDGET, &budget), line("in use", USAGE, &usage)])
        .block(Block::bordered().title("MiB"))
        .x_axis(Axis::default().bounds([-seconds, 0.0]).labels([format!("-{seconds:.0} s"), "now".to_owned()]))
        .y_axis(Axis::default().bounds([0.0, most]).labels(["0".to_owned(), format!("{most:.0}")]))
        .render(area, buffer);
}

fn tenant_table(state: &State) -> Table<'_> {
    let row = |(name, tenant): (&String, &Tenant)| {
        let class = match tenant.class {
            Class::Foreground => "foreground",
            Class::Batch => "batch",
        };
        let number = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        Row::new([
            name.clone(),
            class.to_owned(),
            number(tenant.weight.map(|weight| weight.to_string())),
            number(tenant.rung.map(|rung| rung.to_string())),
            format!("{:.1}", tenant.tok_s(state.now_ms)),
            tenant.tokens.to_string(),
            number(tenant.last_wait_ms.map(|ms| format!("{ms:.0}"))),
            tenant.state(),
        ])
    };
    let widths = [
        Constraint::Min(12),
        Constraint::Length(10),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Min(20),
    ];
    let head = Row::new(["tenant", "class", "weight", "rung", "tok/s", "tokens", "wait ms", "state"]);
    Table::new(state.tenants.iter().map(row), widths)
        .header(head.style(Modifier::BOLD))
        .block(Block::bordered().title("tenants"))
}

fn log<'a>(title: &'a str, lines: impl Iterator<Item = &'a Line>) -> List<'a> {
    let line = |line: &Line| format!("{:>8.1} {}", line.at_ms as f64 / 1_000.0, line.text);
    List::new(lines.map(line)).block(Block::bordered().title(title))
}

fn footer(state: &State) -> Paragraph<'_> {
    let missed = match state.missed {
        0 => String::new(),
        missed => format!("   {missed} events missed"),
    };
    match &state.gone {
        Some(reason) => Paragraph::new(format!("{reason}; trying again   q quits")).style(Color::Red),
        None => Paragraph::new(format!("q quits{missed}")).style(Modifier::DIM),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::state::tests::after;
    use super::*;

    /// How a state looks on a terminal of that size.
    fn drawn(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| frame.render_widget(state, frame.area())).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_foreground_and_a_batch_tenant_under_pressure() {
        let sample = |usage: u64, budget: u64| {
            let (usage, budget) = (usage << 20, budget << 20);
            format!(r#"{{"event": "sample", "usage_bytes": {usage}, "budget_bytes": {budget}, "rss_bytes": {usage}}}"#)
        };
        let start = r#"{"event": "start", "ladder": "pocket", "rungs": [
            {"rung": 0, "precision": "f32", "weights_bytes": 9437184},
            {"rung": 1, "precision": "q8_0", "weights_bytes": 4299161}]}"#;
        let load = r#"{"event": "load", "rung": 0, "bytes": 11429478, "load_ms": 9.0}"#;
        let token = |tenant: &str, class: &str, rung: usize| {
            format!(
                r#"{{"event": "token", "tenant": "{tenant}", "class": "{class}", "rung": {rung}, "wait_ms": 12.0}}"#
            )
        };
        let mut events = vec![start.to_owned(), load.to_owned()];
        for step in 0..20u64 {
            events.push(sample(20 + step / 2, 32));
            events.push(token("reader", "foreground", 0));
            events.push(token("mail", "batch", 0));
        }
        events.push(
            r#"{"event": "lever", "kind": "park", "tenant": "mail", "class": "batch", "bytes": 2097152, "tokens": 0}"#
                .to_owned(),
        );
        events.push(r#"{"event": "release", "rung": 0, "bytes": 11429478, "release_ms": 1.5}"#.to_owned());
        events.push(r#"{"event": "load", "rung": 1, "bytes": 6186598, "load_ms": 11.0}"#.to_owned());
        events.push(
            r#"{"event": "switch", "tenant": "reader", "class": "foreground", "from": 0, "to": 1, "route": "identity",
                "switch_ms": 13.0, "tokens": 169}"#
                .to_owned(),
        );
        events.push(sample(18, 22));
        let events: Vec<&str> = events.iter().map(String::as_str).collect();
        insta::assert_snapshot!(drawn(&after(&events), 110, 34));
    }

    #[test]
    fn nothing_yet_a_service_that_is_gone_and_a_tiny_terminal() {
        let mut state = State::default();
        assert!(drawn(&state, 80, 24).contains("waiting for the service"));
        state.gone = Some("cannot reach the service on /x".to_owned());
        assert!(drawn(&state, 80, 24).contains("cannot reach the service on /x; trying again"));
        drawn(&state, 5, 3);
        drawn(&state, 1, 1);
    }
}
