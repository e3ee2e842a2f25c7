//! Caches of attention state, the memory they live in, and what carries them from one model to another.
//!
//! This crate knows no model file and no tokenizer. What it needs of a decoder is the trait [`Decoder`], which
//! molt-models implements.

pub mod background;
pub mod blocks;
pub mod bridge;
pub mod cache;
pub mod carry;
mod chosen;
pub mod decoder;
#[doc(hidden)]
pub mod faults;
pub mod gemm;
pub mod keepsake;
pub mod ledger;
pub mod numbers;
pub mod record;
pub mod region;
pub mod rope;
mod stop;
mod sync;

pub use decoder::Decoder;
