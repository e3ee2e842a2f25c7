//! Whether the service answers.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Result;
use reqwest::Method;

use super::Finding;
use crate::connection::{self, Client, Service};

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn finding(service: &Service) -> Finding {
    let (about, path) = ("service", service.socket.display());
    if let Err(error) = UnixStream::connect(&service.socket) {
        return match error.kind() {
            ErrorKind::NotFound => Finding::missing(
                about,
                format!("there is no socket {path}"),
                "start it: `systemctl enable --now moltd.socket`, or `moltd` by hand; another socket is given with --socket",
            ),
            ErrorKind::PermissionDenied => Finding::broken(
                about,
                format!("{path} does not let you in"),
                "join the socket's group: `sudo usermod -aG molt $USER`, then log in again",
            ),
            ErrorKind::ConnectionRefused => Finding::broken(
                about,
                format!("{path} was left behind; nobody listens"),
                "start the service again; moltd replaces a stale socket",
            ),
            _ => Finding::broken(about, format!("{path}: {error}"), "is it the socket of moltd?"),
        };
    }
    match serves(service) {
        Ok(model) => Finding::good(about, format!("serves {model} on {path}")),
        Err(error) => {
            Finding::broken(about, format!("{path}: {error:#}"), "look at the journal: `journalctl -u moltd -n 50`")
        }
    }
}

fn serves(service: &Service) -> Result<String> {
    let client = Client::new(service)?;
    connection::runtime()?.block_on(async {
        let models = tokio::time::timeout(PATIENCE, client.ask(Method::GET, "/v1/models", None));
        let models = models.await.map_err(|_| anyhow::anyhow!("no answer within {} s", PATIENCE.as_secs()))??;
        Ok(models["data"][0]["id"].as_str().unwrap_or("no model").to_owned())
    })
}
