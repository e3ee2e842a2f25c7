//! Ladders, weights, tokenizers and the decoder of Molt.

mod attention;
pub mod autograd;
pub mod config;
mod embedded;
mod error;
pub mod file;
mod grammar;
mod kept;
pub mod kernels;
mod ladder;
mod lesson;
mod matrix;
mod merges;
mod model;
mod precision;
pub mod pretokenize;
pub mod pull;
pub mod sampling;
mod scratch;
mod template;
mod texts;
mod tokenizer;
pub mod tune;

pub use error::ModelError;
pub use grammar::{Grammar, GrammarError, GrammarSpec, Grammars};
pub use kept::KeptRung;
pub use ladder::{BridgeEntry, FileEntry, Ladder, LadderFile, Rung, RungEntry};
pub use lesson::{Cut, Lesson};
pub use matrix::Matrix;
pub use model::{Embedding, Model, ModelBytes, Part};
pub use precision::{Precision, Stored};
pub use scratch::CHUNK;
pub use template::{ChatPrompt, ChatTemplate, Message, TOOL_CALL};
pub use tokenizer::{TextStream, Tokenizer, Vocabulary};
