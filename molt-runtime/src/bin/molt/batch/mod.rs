//! `molt batch`: a file of requests, asked by a batch tenant of its own, a few at a time.

mod jobs;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::stream::{self, StreamExt as _};
use indicatif::{ProgressBar, ProgressStyle};
use molt_scheduler::units::RungIdx;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::connection::{self, Client, NotServed, Service};
use jobs::{Answers, Job};

/// Ask all requests of a file, in the background of whoever talks with the service.
///
/// FILE holds one request a line: as OpenAI's batches write them ({"custom_id": "a", "body": {..}}), or plain
/// {"prompt": ..} or {"messages": ..} with an "id" if it shall have one. The answers come one a line, in the order in
/// which they are done, in the form of OpenAI's batches. A run that was ended is gone on with by giving the same
/// command again: what has been answered is not asked again, what failed is.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The requests.
    file: PathBuf,
    /// Where the answers go [default: FILE with .answers.jsonl for its ending].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Requests that are asked at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=32))]
    in_flight: u16,
    /// Most tokens of an answer whose request does not say.
    #[arg(long, default_value_t = 512)]
    max_tokens: u64,
    /// Share among the batch tenants.
    #[arg(long, default_value_t = std::num::NonZeroU16::MIN)]
    weight: std::num::NonZeroU16,
    /// The smallest rung to be answered by while anything else is left (0 is the biggest) [default: any].
    #[arg(long)]
    floor: Option<u8>,
    #[command(flatten)]
    service: Service,
}

/// How often a request that the service cannot take now is asked again.
const TRIES: u32 = 60;
/// What the service says if it says nothing of how long to wait.
const RETRY_AFTER_S: u64 = 5;

pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| args.file.with_extension("answers.jsonl"));
    let jobs = jobs::read(&args.file)?;
    let mut answers = Answers::open(&out)?;
    let todo: Vec<&Job> = jobs.iter().filter(|job| !answers.done.contains(&job.id)).collect();
    let before = jobs.len() - todo.len();
    if todo.is_empty() {
        eprintln!("all {} requests are answered in {}", jobs.len(), out.display());
        return Ok(());
    }
    let client = Client::new(&args.service)?;
    connection::runtime()?.block_on(async {
        // Whoever brings a token is a tenant already.
        let (client, own) = match args.service.token {
            Some(_) => (client, false),
            None => (register(client, args).await?, true),
        };
        let bar = progress(jobs.len(), before);
        let outcome = tokio::select! {
            outcome = ask_all(&client, args, &todo, &mut answers, &bar) => outcome,
            pressed = tokio::signal::ctrl_c() => {
                pressed?;
                Err(connection::Ended.into())
            }
        };
        bar.finish_and_clear();
        if own {
            // Where the service is gone, so is the registration; otherwise it ends by itself.
            let _gone = client.ask(Method::DELETE, "/v1/tenants/me", None).await;
        }
        let Tally { answered, failed, tokens } = outcome?;
        eprintln!("{answered} answered, {before} before, {failed} failed, {tokens} tokens: {}", out.display());
        match failed {
            0 => Ok(()),
            failed => bail!("{failed} requests failed; {} says why, the same command tries them again", out.display()),
        }
    })
}

/// Becomes a batch tenant that is named after the file.
async fn register(client: Client, args: &Args) -> Result<Client> {
    let stem = args.file.file_stem().unwrap_or_default().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = "batch-".chars().chain(stem.chars().map(plain)).take(64).collect();
    let mut claim = json!({"name": name, "class": "batch", "weight": args.weight});
    if let Some(floor) = args.floor {
        claim["floor"] = json!(RungIdx::new(floor));
    }
    let answer = client.ask(Method::POST, "/v1/tenants", Some(&claim)).await.context("cannot register")?;
    let token = answer["token"].as_str().context("the service gave no token")?.to_owned();
    Ok(client.with_token(token))
}

fn progress(all: usize, before: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}, {msg}, {eta} left");
    let bar = ProgressBar::new(all as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    // What was done before says nothing of how long the rest takes.
    bar.set_position(before as u64);
    bar.reset_eta();
    bar.set_message("0 tokens");
    bar
}

/// What a run adds up to.
#[derive(Debug, Default)]
struct Tally {
    answered: u64,
    failed: u64,
    tokens: u64,
}

async fn ask_all(
    client: &Client,
    args: &Args,
    todo: &[&Job],
    answers: &mut Answers,
    bar: &ProgressBar,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let asked = todo.iter().map(|job| async move { (*job, ask(client, args, job).await) });
    let mut asked = stream::iter(asked).buffer_unordered(usize::from(args.in_flight));
    while let Some((job, answer)) = asked.next().await {
        let line = match answer {
            Ok(body) => {
                tally.answered += 1;
                tally.tokens += body["usage"]["completion_tokens"].as_u64().unwrap_or(0);
                line(job, StatusCode::OK, &body, &Value::Null)
            }
            // What is wrong with one request is its own affair; without a service nothing goes on.
            Err(error) => match error.downcast_ref::<NotServed>() {
                Some(refused) if is_its_own(refused.status) => {
                    tally.failed += 1;
                    let error = json!({"code": refused.code, "message": refused.message});
                    line(job, refused.status, &Value::Null, &error)
                }
                _ => return Err(error.context("what has been answered is kept; the same command goes on")),
            },
        };
        answers.write(&line)?;
        bar.set_message(format!("{} tokens, {} failed", tally.tokens, tally.failed));
        bar.inc(1);
    }
    Ok(tally)
}

/// Whether another request may do better where this one was refused.
fn is_its_own(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::UNAUTHORIZED && status != StatusCode::TOO_MANY_REQUESTS
}

/// Asks until the service takes it.
async fn ask(client: &Client, args: &Args, job: &Job) -> Result<Value> {
    let mut body = job.body.clone();
    if body["max_tokens"].is_null() && body["max_completion_tokens"].is_null() {
        body["max_tokens"] = json!(args.max_tokens);
    }
    let mut tries = 1;
    loop {
        let answer = client.ask(Method::POST, job.path, Some(&body)).await;
        let Err(error) = answer else { return answer };
        let busy = error
            .downcast_ref::<NotServed>()
            .filter(|refused| refused.status == StatusCode::TOO_MANY_REQUESTS && tries < TRIES);
        let Some(busy) = busy else { return Err(error) };
        tokio::time::sleep(Duration::from_secs(busy.retry_after_s.unwrap_or(RETRY_AFTER_S))).await;
        tries += 1;
    }
}

/// A line of the answers, in the form of OpenAI's batches.
fn line(job: &Job, status: StatusCode, body: &Value, error: &Value) -> Value {
    let id = body["id"].as_str().unwrap_or_default();
    let response = json!({"status_code": status.as_u16(), "request_id": id, "body": body});
    json!({"id": format!("batch_{id}"), "custom_id": job.id, "response": response, "error": error})
}
