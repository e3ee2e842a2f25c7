//! `molt` as a client of `moltd`: a conversation, a completion, the budget, the tenants.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::ops::ControlFlow;

use anyhow::{Context as _, Result, bail};
use molt_scheduler::units::Bytes;
use reqwest::Method;
use serde_json::{Value, json};

use crate::connection::{self, Client, Service};

/// What an answer may be.
#[derive(clap::Args)]
struct Answer {
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: u64,
    /// 0 takes the most likely token always.
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Seed of the choice of tokens [default: another one each time].
    #[arg(long)]
    seed: Option<u64>,
}

/// Talk with the service; each line is a message. Ctrl-C ends an answer, Ctrl-D the conversation.
#[derive(clap::Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    service: Service,
    #[command(flatten)]
    answer: Answer,
    /// A system prompt, which is never shed.
    #[arg(long)]
    system: Option<String>,
}

/// Go on with a text.
#[derive(clap::Args)]
pub(crate) struct CompleteArgs {
    /// The text; read from standard input where it is `-`.
    text: String,
    #[command(flatten)]
    service: Service,
    #[command(flatten)]
    answer: Answer,
    /// The answer ends before this text.
    #[arg(long)]
    stop: Vec<String>,
}

/// Show the operator's budget, or set it.
#[derive(clap::Args)]
pub(crate) struct BudgetArgs {
    /// What it shall be, in MiB.
    mib: Option<u64>,
    #[command(flatten)]
    service: Service,
}

/// List who is registered.
#[derive(clap::Args)]
pub(crate) struct TenantsArgs {
    #[command(flatten)]
    service: Service,
}

pub(crate) fn chat(args: &ChatArgs) -> Result<()> {
    let client = Client::new(&args.service)?;
    let mut messages: Vec<Value> = args.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    let prompt = || {
        if std::io::stdin().is_terminal() {
            eprint!("> ");
        }
    };
    prompt();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("cannot read what you say")?;
        if !line.trim().is_empty() {
            messages.push(json!({"role": "user", "content": line}));
            let request = request(&args.answer, json!({"messages": messages}));
            let answer = answer(&client, "/v1/chat/completions", &request)?;
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        prompt();
    }
    Ok(())
}

pub(crate) fn complete(args: &CompleteArgs) -> Result<()> {
    let text = match args.text.as_str() {
        "-" => std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?,
        text => text.to_owned(),
    };
    let more = json!({"prompt": text, "stop": args.stop});
    answer(&Client::new(&args.service)?, "/v1/completions", &request(&args.answer, more)).map(|_| ())
}

pub(crate) fn budget(args: &BudgetArgs) -> Result<()> {
    let wanted = args.mib.map(|mib| json!({"budget_bytes": Bytes::mib(mib)}));
    let method = if wanted.is_some() { Method::PUT } else { Method::GET };
    let client = Client::new(&args.service)?;
    let answer = connection::runtime()?.block_on(client.ask(method, "/v1/budget", wanted.as_ref()))?;
    let bytes = |value: &Value| value.as_u64().map(Bytes::new).context("the service says no budget");
    let word = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
    println!("{} set by the operator", bytes(&answer["budget_bytes"])?);
    let strictest = &answer["strictest"];
    let (source, reason) = (word(&strictest["source"]), word(&strictest["reason"]));
    println!("{} may be used now; {source}: {reason}", bytes(&answer["usable_bytes"])?);
    let kinds = [("weights", "weights"), ("cache", "caches"), ("scratch", "buffers"), ("bridge", "bridges")];
    let kinds = kinds.into_iter().chain([("tables", "tables"), ("overhead", "the process")]);
    let kinds = kinds.map(|(kind, name)| {
        let used = bytes(&answer["usage_by_kind"][format!("{kind}_bytes")])?;
        Ok(format!("{name} {used}"))
    });
    let kinds: Vec<String> = kinds.collect::<Result<_>>()?;
    println!("{} in use: {}", bytes(&answer["usage_bytes"])?, kinds.join(", "));
    Ok(())
}

pub(crate) fn tenants(args: &TenantsArgs) -> Result<()> {
    let client = Client::new(&args.service)?;
    let answer = connection::runtime()?.block_on(client.ask(Method::GET, "/v1/tenants", None))?;
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["name", "class", "weight", "ceiling", "floor", "in flight"]);
    for entry in answer["data"].as_array().into_iter().flatten() {
        let tenant = &entry["tenant"];
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let fields = ["name", "class", "weight", "ceiling", "floor"].map(|field| text(&tenant[field]));
        table.add_row(fields.into_iter().chain([text(&entry["in_flight"])]));
    }
    println!("{table}");
    Ok(())
}

fn request(answer: &Answer, mut fields: Value) -> Value {
    fields["stream"] = json!(true);
    fields["max_tokens"] = json!(answer.max_tokens);
    fields["temperature"] = json!(answer.temperature);
    fields["seed"] = json!(answer.seed);
    fields
}

/// Prints an answer as it comes, switches in between on standard error; returns its text. Ctrl-C ends it.
fn answer(client: &Client, path: &str, request: &Value) -> Result<String> {
    let mut text = String::new();
    connection::runtime()?.block_on(async {
        tokio::select! {
            told = print(client, path, request, &mut text) => told,
            // Leaving drops the connection, and the service ends the answer.
            pressed = tokio::signal::ctrl_c() => {
                eprintln!("\n  -- ended");
                Ok(pressed?)
            }
        }
    })?;
    println!();
    Ok(text)
}

async fn print(client: &Client, path: &str, request: &Value, text: &mut String) -> Result<()> {
    let hear = |data: &[u8]| {
        if data == b"[DONE]" {
            return Ok(ControlFlow::Break(()));
        }
        let chunk: Value = serde_json::from_slice(data).context("the service sent something else than JSON")?;
        if let Some(message) = chunk["error"]["message"].as_str() {
            bail!("{message}");
        }
        let choice = &chunk["choices"][0];
        let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        text.push_str(piece);
        print!("{piece}");
        std::io::stdout().flush()?;
        if let Some(news) = news(&chunk["molt"]) {
            eprintln!("\n  -- {news}");
        }
        Ok(ControlFlow::Continue(()))
    };
    match client.listen(Method::POST, path, Some(request), hear).await? {
        true => Ok(()),
        false => bail!("the answer was cut off"),
    }
}

/// What a chunk without a choice tells, in words.
fn news(molt: &Value) -> Option<String> {
    let rung = |field: &str| format!("tier{}", molt[field]);
    Some(match molt["event"].as_str()? {
        "switch" => format!(
            "{} -> {}: {} tokens carried ({}) in {:.0} ms",
            rung("from"),
            rung("to"),
            molt["tokens"],
            molt["route"].as_str().unwrap_or_default(),
            molt["switch_ms"].as_f64().unwrap_or_default()
        ),
        "lever" if molt["kind"] == "park" => "parked; the cache is kept".to_owned(),
        "lever" if molt["kind"] == "shed" => "the oldest context was shed".to_owned(),
        "lever" if molt["kind"] == "defer" => "waiting to be let in".to_owned(),
        "unpark" => format!("runs again on {}", rung("rung")),
        "healed" => format!("healed on {}: {} tokens read natively", rung("rung"), molt["tokens"]),
        _ => return None,
    })
}
