//! `molt demo` on a terminal, or as one JSON object a line.

use std::io::{ErrorKind, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use anstyle::{AnsiColor, Style};
use anyhow::{Context as _, Result};
use crossbeam_channel::bounded;
use molt_kv::carry::Route;
use molt_models::pull::PullOptions;
use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, LadderFile};
use molt_runtime::demo::{DemoSettings, run as run_demo};
use molt_runtime::engine::EngineSettings;
use molt_runtime::event::{Event, Summary, Switch};
use molt_runtime::hog::Schedule;
use molt_runtime::real::{RealSettings, RealSummary, run as run_real};
use molt_runtime::trace::Trace;
use molt_runtime::workers::Workers;
use molt_scheduler::LeverKind;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    #[arg(long, default_value = "pocket")]
    ladder: String,
    /// A built-in pressure trace, or the path of one.
    #[arg(long, default_value = "spike_mid_answer")]
    trace: String,
    /// What the user says [default: one that suits the ladder].
    #[arg(long)]
    prompt: Option<String>,
    /// Tokens of the answer.
    #[arg(long, default_value_t = 260)]
    tokens: u64,
    /// 0 takes the most likely token always.
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Seed of the choice of tokens.
    #[arg(long, default_value_t = 4)]
    seed: u64,
    /// Keep no keepsakes: going up again reads the conversation again.
    #[arg(long)]
    no_keepsakes: bool,
    /// Nothing simulated: another program takes memory that is not there to spare, inside a control group with a limit.
    #[arg(long, conflicts_with = "trace")]
    real: bool,
    /// What the other program is like.
    #[arg(long, default_value = "camera_launch", requires = "real")]
    hog: Schedule,
    /// Print one JSON object a line instead.
    #[arg(long)]
    json: bool,
}

/// `pocket` continues prose; the real ladders answer.
const POCKET_PROMPT: &str = "To the Senate and House of Representatives:\n\nThe condition of the country at the close \
    of the year is one of general peace and of increasing prosperity. The harvests have been large, the trade of our \
    ports has grown, and the revenues of the Government have exceeded the estimates. It is the duty of Congress to \
    consider with care the use that is to be made of this surplus, and the state of the Army and of the Navy.\n\nDuring \
    the past year the people of the United States";
const CHAT_PROMPT: &str = "Explain step by step, with an example for each step, what an operating system does when \
    memory runs low, and what a program can do to help.";

pub(crate) fn run(args: &Args, models: &Path, workers: Workers) -> Result<()> {
    let trace = Trace::find(&args.trace)?;
    let (claim, beside) = LadderFile::find(&args.ladder)?;
    if !claim.is_pulled(models) {
        eprintln!("The models of {} are not here yet; fetching them into {}.", claim.name, models.display());
        crate::pull_ladder(&claim, models, &PullOptions::default())?;
    }
    let ladder = Arc::new(Ladder::check(&claim, beside.as_deref(), models)?);
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None if ladder.name() == "pocket" => POCKET_PROMPT.to_owned(),
        None => CHAT_PROMPT.to_owned(),
    };
    let engine = match args.no_keepsakes {
        true => EngineSettings { keepsakes: None, ..EngineSettings::default() },
        false => EngineSettings::default(),
    };
    let settings = DemoSettings {
        prompt: prompt.clone(),
        answer: Tokens::new(args.tokens),
        sampling: SamplingSettings {
            temperature: args.temperature,
            repetition_penalty: 1.1,
            seed: args.seed,
            ..SamplingSettings::default()
        },
        engine,
    };
    let (tell, told) = bounded::<Event>(256);
    // The engine has a thread of its own; this one only prints, so that a slow terminal is not counted as a stall until
    // the channel is full.
    let pool = workers.pool()?;
    let program = std::env::current_exe().context("where is this program?")?;
    let real = args.real.then_some(RealSettings { schedule: args.hog, program });
    let worker = std::thread::Builder::new().name("molt-engine".to_owned()).spawn(move || {
        pool.install(|| {
            // Where the printer has gone (a closed pipe), the answer is nobody's any more.
            let tell = |event: &Event| match tell.send(event.clone()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            match &real {
                Some(real) => run_real(&ladder, &settings, real, tell).map_err(anyhow::Error::from),
                None => run_demo(&ladder, &trace, &settings, tell).map(|_| None).map_err(anyhow::Error::from),
            }
        })
    })?;
    let printed = match args.json {
        true => print_json(&told),
        false => Screen::new(&prompt).print(&told),
    };
    drop(told);
    let summary = worker.join().map_err(|_| anyhow::anyhow!("the engine stopped; this is a bug in Molt"))?;
    match printed {
        // A reader that has seen enough is no error.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
        printed => printed.context("cannot print")?,
    }
    if let Some(real) = summary? {
        print_real(&real, args.json)?;
    }
    Ok(())
}

fn print_real(real: &RealSummary, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(&serde_json::json!({"event": "real", "real": real}))?);
        return Ok(());
    }
    let RealSummary { limit_bytes, hog_bytes, biggest_bytes, oom_kills, hog, .. } = real;
    let kills = oom_kills.map_or("the kernel does not say".to_owned(), |kills| kills.to_string());
    println!("the group's limit                  {limit_bytes}");
    println!("the other program wanted           {hog_bytes}; it {hog}");
    println!("the biggest rung takes             {biggest_bytes}");
    println!("killed in the group by the kernel  {kills}");
    Ok(())
}

fn print_json(events: &crossbeam_channel::Receiver<Event>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for event in events {
        serde_json::to_writer(&mut out, &event)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}

/// The conversation on a terminal: words coloured by rung, everything else on lines of its own.
struct Screen<'a> {
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
    fn new(prompt: &'a str) -> Self {
        Self { prompt, rung: None, fresh: true }
    }

    fn print(mut self, events: &crossbeam_channel::Receiver<Event>) -> std::io::Result<()> {
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
    let signed = |bytes: i64| format!("{}{}", if bytes < 0 { "-" } else { "" }, Bytes::new(bytes.unsigned_abs()));
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
