//! The service: OpenAI's HTTP on a Unix socket, answers from the engine thread.

mod engine_thread;
mod http;
mod wire;

pub use engine_thread::{EngineClient, EngineGone};
pub use http::{Service, router};
pub use wire::{BadRequest, ChatRequest};
