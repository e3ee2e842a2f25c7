//! `GET /metrics`, on the service's socket and, for a Prometheus that scrapes no sockets, on a loopback port that serves
//! nothing else.

use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use crate::metrics::Metrics;

/// What Prometheus' text calls itself.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The route.
pub fn routes(metrics: Metrics) -> Router {
    Router::new().route("/metrics", get(scrape)).with_state(metrics)
}

async fn scrape(State(metrics): State<Metrics>) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], metrics.render()).into_response()
}

/// Serves the route alone, to whoever names this machine itself.
pub async fn serve(listener: TcpListener, metrics: Metrics) -> std::io::Result<()> {
    axum::serve(listener, routes(metrics).layer(from_fn(only_local_hosts))).await
}

/// A page in a browser can have its own name point to this machine; what it then sends names its own host.
async fn only_local_hosts(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    match host.is_some_and(is_local) {
        true => next.run(request).await,
        false => (StatusCode::FORBIDDEN, "only for localhost\n").into_response(),
    }
}

/// Whether a `Host` names this machine and no other.
pub fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<SocketAddr>().map(|address| address.ip()).or_else(|_| bare.parse::<IpAddr>());
    match address {
        Ok(address) => address.is_loopback(),
        Err(_) => host.split(':').next().is_some_and(|name| name.eq_ignore_ascii_case("localhost")),
    }
}
