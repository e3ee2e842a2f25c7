//! The service: OpenAI's HTTP on a Unix socket, answers from the engine thread.

mod answer;
mod engine_thread;
pub mod feed;
mod form;
mod http;
mod likelihood;
mod log;
mod messages;
mod prepare;
mod rate;
mod request_key;
mod resume;
mod serve;
mod tenants;
mod token;
mod tool_text;
mod watch;
mod wire;

pub use engine_thread::{Asked, EngineClient, EngineGone};
pub use form::Form;
pub use http::{Service, router};
pub use log::{Log, LogLevel};
pub use messages::Prompt;
pub use serve::{Listener, Peer, loopback, serve};
pub use tenants::{InFlight, NotServed, TenantClaim, TenantLimits, Tenants, User};
pub use watch::Watch;
pub use wire::{BadRequest, ChatRequest, Kind};
