//! `molt demo` on a terminal, or as one JSON object a line.

mod screen;
mod tenants;

use std::io::{ErrorKind, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use crossbeam_channel::{Receiver, bounded};
use molt_kv::carry::CarrySettings;
use molt_kv::numbers::CachePrecision;
use molt_models::pull::PullOptions;
use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, LadderFile};
use molt_runtime::demo::tenants::TenantsSettings;
use molt_runtime::demo::{DemoSettings, Regime, run as run_demo};
use molt_runtime::engine::{Effort, EngineSettings};
use molt_runtime::event::Event;
use molt_runtime::hog::Schedule;
use molt_runtime::real::{RealSettings, RealSummary, run as run_real};
use molt_runtime::replay::Tenants;
use molt_runtime::trace::Trace;
use molt_runtime::workers::Workers;
use molt_scheduler::units::Tokens;

use screen::Screen;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A built-in ladder, or the path of a ladder file.
    #[arg(long, default_value = "pocket")]
    ladder: String,
    /// A built-in pressure trace, or the path of one [default: spike_mid_answer; with --tenants camera_launch].
    #[arg(long)]
    trace: Option<String>,
    /// Show several tenants at once, and what became of each: who asks for what and when is a file, or built in.
    #[arg(long, value_name = "PROFILE", num_args = 0..=1, default_missing_value = "phone")]
    tenants: Option<String>,
    /// What the user says [default: one that suits the ladder].
    #[arg(long, conflicts_with = "tenants")]
    prompt: Option<String>,
    /// Tokens of the answer.
    #[arg(long, default_value_t = 260, conflicts_with = "tenants")]
    tokens: u64,
    /// 0 takes the most likely token always.
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Seed of the choice of tokens.
    #[arg(long, default_value_t = 4)]
    seed: u64,
    /// Keep keys and values at that precision, whatever the ladder says.
    #[arg(long, value_parser = cache_precision)]
    cache: Option<CachePrecision>,
    /// Keep no keepsakes: going up again reads the conversation again.
    #[arg(long)]
    no_keepsakes: bool,
    /// Go up as soon as there is room, over the ladder's bridge up where it has one, and do not read again first.
    #[arg(long)]
    eager_up: bool,
    /// Nothing simulated: another program takes memory that is not there to spare, inside a control group with a limit.
    #[arg(long, conflicts_with_all = ["trace", "tenants"])]
    real: bool,
    /// What the other program is like.
    #[arg(long, default_value = "camera_launch", requires = "real")]
    hog: Schedule,
    /// Print one JSON object a line instead.
    #[arg(long)]
    json: bool,
}

fn cache_precision(text: &str) -> Result<CachePrecision, String> {
    match text {
        "f16" => Ok(CachePrecision::F16),
        "f32" => Ok(CachePrecision::F32),
        _ => Err("caches are kept at f16 or f32".to_owned()),
    }
}

const POCKET: &str = "pocket";

/// `pocket` continues prose; the real ladders answer.
const POCKET_PROMPT: &str = "To the Senate and House of Representatives:\n\nThe condition of the country at the close \
    of the year is one of general peace and of increasing prosperity. The harvests have been large, the trade of our \
    ports has grown, and the revenues of the Government have exceeded the estimates. It is the duty of Congress to \
    consider with care the use that is to be made of this surplus, and the state of the Army and of the Navy.\n\nDuring \
    the past year the people of the United States";
const CHAT_PROMPT: &str = "Explain step by step, with an example for each step, what an operating system does when \
    memory runs low, and what a program can do to help.";

pub(crate) fn run(args: &Args, models: &Path, workers: Workers) -> Result<()> {
    let other = if args.tenants.is_some() { "camera_launch" } else { "spike_mid_answer" };
    let trace = Trace::find(args.trace.as_deref().unwrap_or(other))?;
    let (claim, beside) = LadderFile::find(&args.ladder)?;
    if !claim.is_pulled(models) {
        eprintln!("The models of {} are not here yet; fetching them into {}.", claim.name, models.display());
        crate::pull_ladder(&claim, models, &PullOptions::default())?;
    }
    let ladder = Arc::new(Ladder::check(&claim.with_cache(args.cache), beside.as_deref(), models)?);
    let mut engine = EngineSettings::default();
    if ladder.name() == POCKET {
        // Reading it all again takes the smallest model a few milliseconds, and nobody would see a bridge.
        engine.carry = Effort::Fixed(CarrySettings::FAITHFUL);
    }
    engine.ahead.eager_up = args.eager_up;
    if args.no_keepsakes {
        engine.keepsakes = None;
    }
    let sampling = SamplingSettings {
        temperature: args.temperature,
        repetition_penalty: 1.1,
        seed: args.seed,
        ..SamplingSettings::default()
    };
    if let Some(profile) = &args.tenants {
        let settings = TenantsSettings { tenants: Tenants::find(profile)?, sampling, engine };
        return tenants::run(ladder, trace, settings, args.json, workers);
    }
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None if ladder.name() == POCKET => POCKET_PROMPT.to_owned(),
        None => CHAT_PROMPT.to_owned(),
    };
    let settings = DemoSettings {
        prompt: prompt.clone(),
        answer: Tokens::new(args.tokens),
        sampling,
        engine,
        regime: Regime::Governed,
    };
    let print = |told: &Receiver<Event>| match args.json {
        true => print_json(told),
        false => Screen::new(&prompt).print(told),
    };
    if args.real {
        let program = std::env::current_exe().context("where is this program?")?;
        let real = RealSettings { schedule: args.hog, program };
        let ran = beside_the_engine(workers, move |tell| run_real(&ladder, &settings, &real, tell), print)?;
        return ran.map_or(Ok(()), |summary| print_real(&summary, args.json));
    }
    beside_the_engine(workers, move |tell| run_demo(&ladder, &trace, &settings, tell), print).map(|_summary| ())
}

fn print_real(real: &RealSummary, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(&serde_json::json!({"event": "real", "real": real}))?);
        return Ok(());
    }
    let RealSummary { limit_bytes, hog_bytes, biggest_bytes, answers, oom_kills, hog, .. } = real;
    let kills = oom_kills.map_or("the kernel does not say".to_owned(), |kills| kills.to_string());
    println!("the group's limit                  {limit_bytes}");
    println!("the other program wanted           {hog_bytes}; it {hog}");
    println!("the biggest rung takes             {biggest_bytes}");
    println!("answers completed                  {answers}");
    println!("killed in the group by the kernel  {kills}");
    Ok(())
}

/// Runs the engine on a thread of its own, while this one only prints, so that a slow terminal is not counted as a stall
/// until the channel is full. Returns what the run returned, or `None` where it was broken off or nobody reads any more.
fn beside_the_engine<T, E>(
    workers: Workers,
    run: impl FnOnce(&mut dyn FnMut(&Event) -> ControlFlow<()>) -> Result<Option<T>, E> + Send + 'static,
    print: impl FnOnce(&Receiver<Event>) -> std::io::Result<()>,
) -> Result<Option<T>>
where
    T: Send + 'static,
    E: std::error::Error + Send + Sync + 'static,
{
    let (tell, told) = bounded::<Event>(256);
    let pool = workers.pool()?;
    let worker = std::thread::Builder::new().name("molt-engine".to_owned()).spawn(move || {
        pool.install(|| {
            run(&mut |event| {
                // Where the printer has gone (a closed pipe), the answer is nobody's any more.
                match tell.send(event.clone()) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            })
        })
    })?;
    let printed = print(&told);
    drop(told);
    let outcome = worker.join().map_err(|_| anyhow::anyhow!("the engine stopped; this is a bug in Molt"))?;
    match printed {
        // A reader that has seen enough is no error.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(None),
        printed => printed.context("cannot print")?,
    }
    Ok(outcome?)
}

fn print_json(events: &Receiver<Event>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for event in events {
        serde_json::to_writer(&mut out, &event)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}
