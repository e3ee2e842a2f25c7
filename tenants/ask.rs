//! A question and its whole answer, in as little Rust as that takes; `docs/app-developer.md` shows the function.
//!
//! ```text
//! cargo run --release --example ask -- /run/molt/molt.sock "The people of"
//! ```

use std::path::Path;

async fn ask(socket: &Path, text: &str) -> reqwest::Result<String> {
    let client = reqwest::Client::builder().unix_socket(socket).build()?;
    let question = serde_json::json!({"messages": [{"role": "user", "content": text}], "max_tokens": 12});
    client.post("http://molt/v1/chat/completions").body(question.to_string()).send().await?.text().await
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, text] = arguments.as_slice() else { return Err("which socket, and what is to be asked?".into()) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    println!("{}", runtime.block_on(ask(Path::new(socket), text))?);
    Ok(())
}
