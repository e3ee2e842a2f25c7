//! What `molt bench` measures. Every figure in the documentation comes out of here.

pub mod ablations;
mod answering;
pub mod bandwidth;
pub mod cold;
pub mod conditions;
pub mod daemon;
pub mod engine;
mod facts;
pub mod judge;
pub mod ladder;
mod llama_cpp;
pub mod memory;
pub mod results;
pub mod seams;
pub mod shedding;
pub mod stats;
pub mod switch_cost;
pub mod tasks;
pub mod tenants;
pub mod wire;

pub use llama_cpp::{LlamaCpp, LlamaCppError};
