//! The service: OpenAI's HTTP on a Unix socket, answers from the engine thread.

mod engine_thread;
mod http;
mod watch;
mod wire;

pub use engine_thread::{EngineClient, EngineGone};
pub use http::{Service, router};
pub use watch::Watch;
pub use wire::{BadRequest, ChatRequest};
