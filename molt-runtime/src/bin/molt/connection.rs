//! The way from `molt` to a running `moltd`: requests over its socket, answers whole or event by event.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use reqwest::{Method, StatusCode};
use serde_json::Value;

/// Where the service is, and who asks.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Service {
    /// The service's socket.
    #[arg(long, env = "MOLT_SOCKET", default_value = "/run/molt/molt.sock")]
    pub(crate) socket: PathBuf,
    /// The token of a registered tenant.
    #[arg(long, env = "MOLT_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
}

/// Talks to the service.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    token: Option<String>,
    socket: PathBuf,
}

/// What the service says of a request that it does not serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct NotServed {
    pub(crate) status: StatusCode,
    pub(crate) code: String,
    pub(crate) message: String,
    /// Seconds until it may be worth asking again.
    pub(crate) retry_after_s: Option<u64>,
}

/// Ctrl-C ended it. `molt` exits with 130, as a shell does.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("ended; the same command goes on where it was")]
pub(crate) struct Ended;

/// The runtime of a client: one thread.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

impl Client {
    pub(crate) fn new(service: &Service) -> Result<Self> {
        // No connection is kept: it would belong to the runtime that opened it. Nothing is encrypted on a socket, and a
        // machine without certificates (Debian's smallest) has it as well: none are looked for.
        let http = reqwest::Client::builder().unix_socket(service.socket.clone()).pool_max_idle_per_host(0);
        let http = http.tls_certs_only([]).build()?;
        Ok(Self { http, token: service.token.clone(), socket: service.socket.clone() })
    }

    /// The same with the token of a tenant.
    pub(crate) fn with_token(self, token: String) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Sends a request. An answer that is no success is a [`NotServed`].
    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<reqwest::Response> {
        let mut request = self.http.request(method, format!("http://molt{path}"));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let answer = request.send().await;
        let answer = answer.with_context(|| format!("cannot reach the service on {}", self.socket.display()))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let after = answer.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let body: Value = serde_json::from_slice(&answer.bytes().await?).unwrap_or_default();
        let text = |field: &str, other: &str| body["error"][field].as_str().unwrap_or(other).to_owned();
        let (code, message) = (text("code", ""), text("message", status.as_str()));
        Err(NotServed { status, code, message, retry_after_s: after }.into())
    }

    /// Asks and reads the whole answer.
    pub(crate) async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.send(method, path, body).await?;
        let bytes = answer.bytes().await.context("the answer was cut off")?;
        serde_json::from_slice(&bytes).context("the service sent something else than JSON")
    }

    /// Reads an answer event by event, until `hear` has heard enough. Returns whether it has; if not, the stream ended.
    pub(crate) async fn listen(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        mut hear: impl FnMut(&[u8]) -> Result<ControlFlow<()>>,
    ) -> Result<bool> {
        let mut answer = self.send(method, path, body).await?;
        let mut buffer = Vec::new();
        while let Some(bytes) = answer.chunk().await? {
            buffer.extend_from_slice(&bytes);
            let mut from = 0;
            while let Some(length) = buffer[from..].iter().position(|byte| *byte == b'\n') {
                let line = &buffer[from..from + length];
                from += length + 1;
                if let Some(data) = line.strip_prefix(b"data: ")
                    && hear(data.trim_ascii())?.is_break()
                {
                    return Ok(true);
                }
            }
            buffer.drain(..from);
        }
        Ok(false)
    }
}
