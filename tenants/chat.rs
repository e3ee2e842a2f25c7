//! A foreground tenant: registers, asks, prints the answer as it comes, and says when another rung goes on with it.
//!
//! ```console
//! $ cargo run --release --example chat -- /run/molt/molt.sock "The people of the United States"
//! ```

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use std::io::Write as _;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(socket), Some(prompt)) = (args.next(), args.next()) else { bail!("usage: chat SOCKET PROMPT [TOKENS]") };
    let tokens: u64 = args.next().map_or(Ok(200), |text| text.parse()).context("TOKENS is no number")?;
    // Any name does for the host: the socket is the address.
    let http = reqwest::Client::builder().unix_socket(socket).build()?;
    let post = |path: &str, body: Value| {
        let request = http.post(format!("http://molt{path}")).header("content-type", "application/json");
        request.body(body.to_string())
    };

    // A tenant of one's own has a class, a share, and limits. The token is what other clients call the API key.
    let claim = json!({"name": "example-chat", "class": "foreground", "weight": 2});
    let registered = read(post("/v1/tenants", claim).send().await?).await?;
    let token = registered["token"].as_str().context("no token came back")?;

    let body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": true});
    let mut answer = post("/v1/chat/completions", body).bearer_auth(token).send().await?;
    if !answer.status().is_success() {
        bail!("{}", read(answer).await?);
    }
    let mut buffer = Vec::new();
    while let Some(bytes) = answer.chunk().await? {
        buffer.extend_from_slice(&bytes);
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            // Between the events stand empty lines, and comments that keep the connection alive.
            let Some(data) = line.strip_prefix(b"data: ").filter(|data| !data.starts_with(b"[DONE]")) else { continue };
            hear(&serde_json::from_slice(data)?)?;
        }
    }
    println!();
    // Whoever does not say goodbye is forgotten after the grace time.
    http.delete("http://molt/v1/tenants/me").bearer_auth(token).send().await?;
    Ok(())
}

/// A chunk has a piece of text, or news of the memory and no choices.
fn hear(chunk: &Value) -> Result<()> {
    if let Some(message) = chunk["error"]["message"].as_str() {
        bail!("{message}");
    }
    if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str() {
        print!("{text}");
        std::io::stdout().flush()?;
    }
    let molt = &chunk["molt"];
    match molt["event"].as_str() {
        Some("switch") => println!(
            "\n[tier{} -> tier{}: {} tokens came along in {:.0} ms]",
            molt["from"],
            molt["to"],
            molt["tokens"],
            molt["switch_ms"].as_f64().unwrap_or_default()
        ),
        Some("lever") if molt["kind"] == "park" => {
            println!("\n[parked: memory is wanted elsewhere; the answer goes on]")
        }
        Some("unpark") => println!("\n[goes on]"),
        _ => {}
    }
    Ok(())
}

async fn read(answer: reqwest::Response) -> Result<Value> {
    let body: Value = serde_json::from_slice(&answer.bytes().await?)?;
    match body["error"]["message"].as_str() {
        Some(message) => bail!("{message}"),
        None => Ok(body),
    }
}
