//! Connections: who is at the other end, how many there may be, and how long one may take to ask.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Sleep;

use crate::metrics::is_local;
use crate::service::http::problem;
use crate::service::tenants::User;

/// Connections at once on each listener; whoever comes later waits for a place.
const CONNECTIONS: usize = 1_024;
/// How long the head of a request may take, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(20);
/// How long a client may take nothing of what is sent to it.
const STUCK: Duration = Duration::from_secs(60);
/// After an accept that failed, which is for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Where clients come from.
#[derive(Debug)]
pub enum Listener {
    /// The socket: the kernel says which user asks.
    Unix(UnixListener),
    /// A loopback port: nobody says who asks.
    Tcp(TcpListener),
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    pub(super) user: User,
}

impl Peer {
    /// A user whom the kernel does not name is no user in particular, and never mistaken for one over TCP.
    const NOBODY: u32 = u32::MAX;
}

/// Whether an address is one of this machine alone.
///
/// # Errors
/// What is wrong with it.
pub fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|error| format!("{error}; for example 127.0.0.1:9753"))?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(format!("{address} is no loopback address")),
    }
}

/// Serves the routes until it is told to stop, and then until every answer has ended.
pub async fn serve(listener: Listener, routes: Router, mut stop: watch::Receiver<bool>) {
    let (places, graceful) = (Arc::new(Semaphore::new(CONNECTIONS)), GracefulShutdown::new());
    let routes = match &listener {
        Listener::Unix(_) => routes,
        Listener::Tcp(_) => routes.layer(from_fn(only_from_here)),
    };
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place.ok(),
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let accepted = tokio::select! {
            accepted = accept(&listener) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match accepted {
            Ok((stream, peer)) => attend(stream, peer, &routes, place, &graceful),
            // The client has its place in the line; a descriptor becomes free when somebody leaves.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

type Stream = Box<dyn Both>;

trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

/// A connection whose client may not stop reading for ever: it would keep its place, and its tenant's.
struct Patient {
    stream: Stream,
    stuck: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// What came of a write, or that the client has been stuck for too long.
    fn judge<T>(&mut self, context: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stuck = None;
            return done;
        }
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(tokio::time::sleep(STUCK)));
        stuck.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, done)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, done)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn accept(listener: &Listener) -> std::io::Result<(Stream, Peer)> {
    Ok(match listener {
        Listener::Unix(listener) => {
            let (stream, _) = listener.accept().await?;
            let user = stream.peer_cred().map_or(Peer::NOBODY, |peer| peer.uid());
            (Box::new(stream), Peer { user: Some(user) })
        }
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Tokens are small and wanted at once.
            stream.set_nodelay(true)?;
            (Box::new(stream), Peer { user: None })
        }
    })
}

/// Answers one client on a task of its own.
fn attend(
    stream: Stream,
    peer: Peer,
    routes: &Router,
    place: Option<OwnedSemaphorePermit>,
    graceful: &GracefulShutdown,
) {
    let service = TowerToHyperService::new(routes.clone().layer(axum::Extension(ConnectInfo(peer))));
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(HEAD);
    let connection = graceful.watch(protocol.serve_connection(TokioIo::new(Patient { stream, stuck: None }), service));
    tokio::spawn(async move {
        // A client that breaks off, or speaks no HTTP, is nobody's trouble but its own.
        let _broken_off = connection.await;
        drop(place);
    });
}

/// A page in a browser can reach a loopback port, and have its own name point to it. What it then sends names its own host,
/// or says from where it comes.
async fn only_from_here(request: Request, next: Next) -> Response {
    match is_from_here(request.headers()) {
        true => next.run(request).await,
        false => problem(StatusCode::FORBIDDEN, "not_local", "the port is for programs of this machine"),
    }
}

fn is_from_here(headers: &HeaderMap) -> bool {
    let of = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let origin = of(header::ORIGIN).map(|origin| origin.split_once("://").map_or("", |(_, host)| host));
    of(header::HOST).is_some_and(is_local) && origin.is_none_or(is_local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_of_this_machine_are_heard_over_tcp() {
        let check = |host: Option<&str>, origin: Option<&str>, heard: bool| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
                value.into_iter().for_each(|value| {
                    headers.insert(&name, value.parse().unwrap());
                });
            }
            assert_eq!(is_from_here(&headers), heard, "{host:?} {origin:?}");
        };
        check(Some("127.0.0.1:8080"), None, true);
        check(Some("localhost"), Some("http://localhost:3000"), true);
        check(Some("[::1]:80"), None, true);
        check(None, None, false);
        check(Some("evil.example"), None, false);
        check(Some("127.0.0.1:8080"), Some("https://evil.example"), false);
        check(Some("127.0.0.1:8080"), Some("null"), false);
        check(Some("127.0.0.1.evil.example"), None, false);
    }

    #[test]
    fn only_loopback_addresses_are_listened_on() {
        let check = |text: &str, good: bool| assert_eq!(loopback(text).is_ok(), good, "{text}");
        check("127.0.0.1:8080", true);
        check("[::1]:0", true);
        check("0.0.0.0:8080", false);
        check("192.168.1.2:80", false);
        check("localhost", false);
    }
}
