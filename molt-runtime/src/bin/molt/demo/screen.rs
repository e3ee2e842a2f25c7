//! A conversation on a terminal: words coloured by rung, everything else on lines of its own.

use std::io::Write as _;

use anstyle::{AnsiColor, Style};
use molt_kv::carry::Route;
use molt_runtime::event::{Event, Summary, Switch};
use molt_scheduler::LeverKind;
use molt_scheduler::units::{Bytes, RungIdx};

/// The conversation on a terminal: words coloured by rung, everything else on lines of its own.
pub(super) struct Screen<'a> {
    prompt: &'a str,
    rung: Option<RungIdx>,
    /// Whether the cursor stands at the start of a line.
    fresh: bool,
}

fn colour(rung: RungIdx) -> Style {
    // Distinguishable for colour-blind readers too: blue, orange-like yellow, magenta; the marks say it in words.
    let colours = [AnsiColor::BrightBlue, AnsiColor::BrightYellow, AnsiColor::BrightMagenta, AnsiColor::BrightCyan];
    colours[rung.get() % colours.len()].on_default()
}

impl<'a> Screen<'a> {
    pub(super) fn new(prompt: &'a str) -> Self {
        Self { prompt, rung: None, fresh: true }
    }

    pub(super) fn print(mut self, events: &crossbeam_channel::Receiver<Event>) -> std::io::Result<()> {
        let mut out = anstream::stdout().lock();
        for event in events {
            self.event(&mut out, &event)?;
            out.flush()?;
        }
        Ok(())
    }

    fn line(&mut self, out: &mut impl std::io::Write, text: &str) -> std::io::Result<()> {
        let dim = Style::new().dimmed();
        if !self.fresh {
            writeln!(out)?;
        }
        self.fresh = true;
        // Words after this line say again whose they are.
        self.rung = None;
        writeln!(out, "{dim}  -- {text}{dim:#}")
    }

    fn event(&mut self, out: &mut impl std::io::Write, event: &Event) -> std::io::Result<()> {
        match event {
            Event::Start(start) => {
                writeln!(out, "ladder {}, kernels {}", start.ladder, start.isa)?;
                for rung in &start.rungs {
                    let style = colour(rung.rung);
                    let (name, file, precision) = (rung.rung, &rung.file, &rung.precision);
                    writeln!(
                        out,
                        "  {style}{name}{style:#}  {:>11}  {file}, {precision}",
                        rung.weights_bytes.to_string()
                    )?;
                }
                writeln!(out, "\n> {}\n", self.prompt.replace('\n', "\n> "))
            }
            Event::Token { text, rung, .. } => {
                let style = colour(*rung);
                if self.rung != Some(*rung) {
                    write!(out, "{style}[{rung}]{style:#} ")?;
                    self.rung = Some(*rung);
                }
                if !text.is_empty() {
                    self.fresh = text.ends_with('\n');
                    write!(out, "{style}{text}{style:#}")?;
                }
                Ok(())
            }
            Event::Budget { budget_bytes, usage_bytes } => {
                let pressure = usage_bytes.get() as f64 / budget_bytes.get().max(1) as f64;
                self.line(out, &format!("budget {budget_bytes}, in use {usage_bytes}, pressure {pressure:.2}"))
            }
            Event::Limit { source, limit_bytes: Some(limit), reason, .. } => {
                self.line(out, &format!("{source} allows {limit}: {reason}"))
            }
            Event::Limit { source, limit_bytes: None, .. } => self.line(out, &format!("{source} limits nothing now")),
            Event::Switch(switch) => self.line(out, &describe(switch)),
            Event::Lever { kind, bytes, .. } => {
                let name = match kind {
                    LeverKind::Defer => "the request waits",
                    LeverKind::Demote => "demote",
                    LeverKind::Park => "parked; the cache is kept",
                    LeverKind::Shed => "the oldest context is shed",
                };
                self.line(out, &format!("lever: {name}, frees {bytes}"))
            }
            Event::Unpark { rung, .. } => self.line(out, &format!("runs again on {rung}")),
            Event::Healed { rung, tokens, heal_ms, .. } => self
                .line(out, &format!("healed on {rung}: {tokens} read natively in the background in {heal_ms:.0} ms")),
            Event::ReadAhead { rung, tokens, read_ms, used, .. } => {
                let then = if *used { "" } else { ", and forgotten" };
                self.line(out, &format!("read ahead on {rung}: {tokens} in the background in {read_ms:.0} ms{then}"))
            }
            Event::Load { rung, bytes, load_ms } => {
                self.line(out, &format!("{rung} loaded: {bytes} in {load_ms:.0} ms"))
            }
            Event::Release { rung, bytes, release_ms } => {
                self.line(out, &format!("{rung} given back: {bytes} in {release_ms:.1} ms"))
            }
            Event::Reaction { reaction_ms, before_bytes, rss_bytes, .. } => {
                let text = format!("back with the system {reaction_ms:.1} ms after the signal");
                self.line(out, &format!("{text}: {before_bytes} were in use, {rss_bytes} are resident"))
            }
            Event::GivenUp { tokens, .. } => {
                self.line(out, &format!("a step of {tokens} was given up; it is done again"))
            }
            Event::Standby { rung, bytes } => {
                self.line(out, &format!("{bytes} of {rung} are fetched, in case it is next"))
            }
            Event::Trouble { message, .. } => self.line(out, message),
            Event::Sample { .. }
            | Event::Stall { .. }
            | Event::Finished { .. }
            | Event::Asked { .. }
            | Event::Refused { .. }
            | Event::Admitted { .. }
            | Event::Cancelled { .. } => Ok(()),
            Event::Summary(summary) => {
                if !self.fresh {
                    writeln!(out)?;
                }
                writeln!(out)?;
                table(out, summary)
            }
        }
    }
}

fn describe(switch: &Switch) -> String {
    let Switch { from, to, switch_ms, carry_ms, tokens, flops_saved_ratio, pressure_ratio, .. } = switch;
    let route = match switch.route {
        Route::Identity => "same weights, the cache is taken as it is",
        Route::Bridge => "carried over the bridge",
        Route::Keepsake => "keepsake restored",
        Route::ReadAhead => "it was read ahead there",
        Route::Reread => "read again",
    };
    let (mapped, saved) = (switch.mapped_tokens.get(), flops_saved_ratio * 100.0);
    format!(
        "switch {from} -> {to}: {route}; {tokens} ({mapped} mapped), {switch_ms:.0} ms in all, carry {carry_ms:.1} ms, \
         {saved:.0} % of a re-read's FLOPs saved, pressure {pressure_ratio:.2}"
    )
}

fn table(out: &mut impl std::io::Write, s: &Summary) -> std::io::Result<()> {
    let rungs: Vec<String> = s.rungs.iter().map(ToString::to_string).collect();
    for (name, value) in [
        ("tokens", format!("{} ({:.1} a second, switches included)", s.tokens, s.tok_s)),
        ("rungs used", rungs.join(", ")),
        ("switches", format!("{}, the longest {:.0} ms", s.switches, s.switch_ms_max)),
        ("first token", format!("{:.0} ms", s.first_token_ms)),
        ("largest stall between two tokens", format!("{:.0} ms", s.stall_ms_max)),
        ("maximum overshoot", signed(s.overshoot_bytes_max)),
        ("largest resident set", Bytes::new(s.rss_bytes_max).to_string()),
        ("resident set minus books, at most", signed(s.rss_minus_usage_bytes_max)),
        ("killed", s.killed.to_string()),
    ] {
        writeln!(out, "{name:34} {value}")?;
    }
    Ok(())
}

/// A difference of bytes, for people.
pub(super) fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, Bytes::new(bytes.unsigned_abs()))
}
