//! Downloads from the model hub, resumed where they broke off.
//!
//! Built on `hf-hub`'s ranged stream. That stream does not tell whether the server honoured the range, only how long
//! the answer is; an answer of any other length than the missing bytes is therefore dropped and asked for anew from
//! the first byte.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt;
use hf_hub::{HFClient, HFError};
use tokio::runtime::Runtime;

use super::part::Part;
use super::progress::Bar;
use super::{FileSource, HubSource, PullError};

/// How long a connection may take: short, so that a hub out of reach gives way to the wheels soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the hub may be silent within an answer.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// Requests for one file before a download that keeps breaking off is given up.
const ATTEMPTS_MAX: u32 = 6;

/// The pause after the first broken attempt; it grows by as much with each further one.
const PAUSE: Duration = Duration::from_millis(250);

/// Status of an answer to a range that lies outside the file.
const RANGE_NOT_SATISFIABLE: u16 = 416;

/// A client of one hub.
pub(super) struct Hub {
    client: HFClient,
    /// Taken only by [`Drop`].
    runtime: Option<Runtime>,
}

/// Why one attempt did not bring the file.
enum Stop {
    /// Another attempt cannot help.
    ForGood(PullError),
    /// Another attempt may help.
    ForNow(HFError),
    /// The server has no such range, or sent other bytes than the missing ones; the file must be asked for whole.
    Range,
}

impl Hub {
    /// Sets a client up; no connection is made yet. The token is the user's own, as `hf-hub` finds it.
    pub(super) fn new(endpoint: Option<&str>) -> Result<Self, PullError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| PullError::HubSetup {
            endpoint: endpoint.unwrap_or("its default address").to_owned(),
            source,
        };
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("molt/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(SILENCE_TIMEOUT);
        if endpoint.is_some_and(is_loopback) {
            // A proxy from the environment could not reach this machine's own hub.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|e| failed(Box::new(e)))?;
        // hf-hub's own attempts would each wait for the connection anew; ours tell an absent hub from a broken one.
        let mut builder = HFClient::builder().client(http).cache_enabled(false).retry_max_attempts(0);
        if let Some(endpoint) = endpoint {
            builder = builder.endpoint(endpoint);
        }
        let client = builder.build().map_err(|e| failed(Box::new(e)))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| failed(Box::new(e)))?;
        Ok(Self { client, runtime: Some(runtime) })
    }

    /// Brings the missing bytes of `part` and finishes it.
    pub(super) fn fetch(
        &self,
        source: &FileSource,
        at: &HubSource,
        mut part: Part<'_>,
        bar: &Bar,
    ) -> Result<(), PullError> {
        let url = format!("{}/{}/resolve/main/{}", self.client.endpoint(), at.repository, at.file);
        let Some(runtime) = &self.runtime else {
            return Err(PullError::HubDown { why: "its client is closed".to_owned() });
        };
        let mut attempt = 1;
        let mut answered = false;
        loop {
            bar.stage(if attempt == 1 { "hub".to_owned() } else { format!("hub, attempt {attempt}") });
            let before = part.bytes();
            let error = match runtime.block_on(self.attempt(at, &mut part, &url)) {
                Ok(()) => return part.finish(&url),
                Err(Stop::ForGood(error)) => return Err(error),
                Err(Stop::Range) => {
                    // Once only: a request for the whole file has no range to be refused.
                    part.restart()?;
                    continue;
                }
                Err(Stop::ForNow(error)) => error,
            };
            answered |= part.bytes() > before;
            if !answered && is_unreachable(&error) {
                return Err(PullError::HubUnreachable { url, source: bare(error) });
            }
            if attempt == ATTEMPTS_MAX {
                let (done, expected) = (part.bytes(), source.bytes);
                return Err(PullError::Interrupted { url, done, expected, source: bare(error) });
            }
            std::thread::sleep(PAUSE * attempt);
            attempt += 1;
        }
    }

    /// One request for the bytes that `part` lacks.
    async fn attempt(&self, at: &HubSource, part: &mut Part<'_>, url: &str) -> Result<(), Stop> {
        let (owner, name) = hf_hub::split_id(&at.repository);
        let model = self.client.model(owner, name);
        let (start, missing) = (part.bytes(), part.remaining());
        // A range only where there is something to resume: no server can take a plain request amiss.
        let range = (start > 0).then(|| start..start + missing);
        let resumes = range.is_some();
        let answer = model.download_file_stream().filename(&at.file).maybe_range(range).send().await;
        let (length, stream) = answer.map_err(|error| classify(error, resumes, url))?;
        match length {
            Some(length) if length == missing => {}
            _ if resumes => return Err(Stop::Range),
            None => {}
            Some(found) => {
                let error = PullError::WrongSize { what: url.to_owned(), expected: missing, found };
                return Err(Stop::ForGood(error));
            }
        }
        let mut stream = pin!(stream);
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(Stop::ForNow)?;
            part.append(&chunk, url).map_err(Stop::ForGood)?;
        }
        if part.remaining() > 0 {
            return Err(Stop::ForNow(HFError::Other("the answer ended too early".to_owned())));
        }
        Ok(())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // A name that is still being looked up would otherwise keep the pull waiting long after its timeout.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn is_loopback(endpoint: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(endpoint) else { return false };
    let address = |host: &str| host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    url.host_str().is_some_and(|host| host == "localhost" || address(host))
}

/// Sorts the error of a request.
fn classify(error: HFError, resumes: bool, url: &str) -> Stop {
    match &error {
        HFError::Http { context } if resumes && context.status.as_u16() == RANGE_NOT_SATISFIABLE => Stop::Range,
        HFError::Http { context } if context.status.is_server_error() => Stop::ForNow(error),
        HFError::Request { .. } | HFError::RateLimited { .. } | HFError::Xet { .. } => Stop::ForNow(error),
        _ => Stop::ForGood(PullError::HubRefused { url: url.to_owned(), source: bare(error) }),
    }
}

/// Did no conversation come about at all?
fn is_unreachable(error: &HFError) -> bool {
    matches!(error, HFError::Request { source, .. } if source.is_connect() || source.is_timeout())
}

/// The error without the wrapper and the address, which would say everything twice.
fn bare(error: HFError) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        HFError::Request { source, .. } => Box::new(source.without_url()),
        other => Box::new(other),
    }
}
