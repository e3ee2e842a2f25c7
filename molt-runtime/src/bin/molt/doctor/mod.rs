//! `molt doctor`: what this machine offers Molt, and what to do about what is missing.

mod folder;
mod ladders;
mod machine;
mod service;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use crate::connection::Service;
use folder::Folder;
use machine::Machine;

/// Say what this machine offers, and what to do about what is missing.
///
/// Looks at memory, pressure files, the control group, systemd, the processor, the ladders and the service. Changes
/// nothing. Exits with 0 where Molt can run, whatever else could be better, and with 1 where something is broken.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object instead.
    #[arg(long)]
    json: bool,
    /// Look at the system below this folder instead of the running one.
    #[arg(long, default_value = "/", hide = true)]
    root: PathBuf,
    #[command(flatten)]
    service: Service,
}

/// How something stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// As it should be.
    Good,
    /// Molt runs without it; with it, it does more.
    Missing,
    /// In Molt's way.
    Broken,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    about: String,
    state: State,
    says: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn good(about: &str, says: impl Into<String>) -> Self {
        Self { about: about.to_owned(), state: State::Good, says: says.into(), advice: None }
    }

    fn missing(about: &str, says: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { about: about.to_owned(), state: State::Missing, says: says.into(), advice: Some(advice.into()) }
    }

    fn broken(about: &str, says: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { state: State::Broken, ..Self::missing(about, says, advice) }
    }
}

/// `named` is the folder of models that the command line names, `own` the one that it would be otherwise.
pub(crate) fn run(args: &Args, named: Option<PathBuf>, own: Option<PathBuf>) -> Result<()> {
    let models = Folder::find(named, &args.root, own).context(crate::NO_FOLDER)?;
    let environment = |name: &str| std::env::var(name).ok();
    let mut findings = Machine { root: &args.root, environment: &environment }.findings();
    findings.extend(ladders::findings(&models));
    findings.push(service::finding(&args.service));
    let mut out = anstream::stdout().lock();
    match args.json {
        true => {
            let ok = findings.iter().all(|finding| finding.state != State::Broken);
            writeln!(out, "{}", serde_json::json!({"ok": ok, "findings": findings}))?;
        }
        false => print(&mut out, &findings)?,
    }
    let broken = findings.iter().filter(|finding| finding.state == State::Broken).count();
    if broken > 0 {
        bail!("{broken} of {} things are broken", findings.len());
    }
    Ok(())
}

fn print(out: &mut impl std::io::Write, findings: &[Finding]) -> std::io::Result<()> {
    use anstyle::AnsiColor::{Green, Red, Yellow};
    for Finding { about, state, says, advice } in findings {
        let (colour, word) = match state {
            State::Good => (Green, "good"),
            State::Missing => (Yellow, "missing"),
            State::Broken => (Red, "broken"),
        };
        let style = colour.on_default();
        writeln!(out, "{style}{word:8}{style:#} {about:22} {says}")?;
        if let Some(advice) = advice {
            writeln!(out, "{:8} {:22} -> {advice}", "", "")?;
        }
    }
    Ok(())
}
