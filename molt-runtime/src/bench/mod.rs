//! What `molt bench` measures. Every figure in the documentation comes out of here.

pub mod bandwidth;
pub mod cold;
pub mod engine;
mod llama_cpp;
pub mod memory;
pub mod stats;

pub use llama_cpp::{LlamaCpp, LlamaCppError};
