//! Everything that can be wrong with models and ladders, written for the person who must act on it.

use std::path::PathBuf;

use molt_kv::bridge::BridgeError;
use molt_kv::cache::CacheError;
use molt_kv::decoder::Stopped;
use molt_kv::region::RegionError;
use molt_scheduler::LadderCostError;

/// What is wrong with a model file, a tokenizer or a ladder.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Memory or a file cannot be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A cache cannot hold what it should.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A bridge is unusable.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// Given up as asked.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The header of a model file makes no sense.
    #[error("{} is no usable model file: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file ends before a tensor does.
    #[error(
        "{} is truncated: tensor {tensor} ends at byte {needs}, the file has {has}; fetch it again with `molt pull`",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it ends.
        needs: u64,
        /// Where the file ends.
        has: u64,
    },
    /// A tensor is missing or has another shape than the header promises.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// A model family that the decoder does not know.
    #[error("{} holds a {family} model; Molt runs qwen2 and llama", path.display())]
    Family {
        /// The file.
        path: PathBuf,
        /// What the file says.
        family: String,
    },
    /// A tokenizer that cannot be built.
    #[error("the tokenizer of {}: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A kept rung that is not what it should be.
    #[error("{} is not the kept rung that it should be: {reason}; delete it, or keep the rung again with `molt ladder keep`", path.display())]
    Kept {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A rung that cannot be kept.
    #[error("cannot keep the rung in {}", path.display())]
    Keep {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// What a tuning has reached is not to be gone on from.
    #[error("{} cannot be gone on from: it {reason}; delete it to tune from the beginning", path.display())]
    Tuning {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// What a tuning has reached cannot be kept.
    #[error("cannot keep what tuning has reached in {}", path.display())]
    KeepTuning {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A chat template that cannot be used.
    #[error("the chat template: {0}")]
    Template(String),
    /// A ladder file that cannot be parsed; the message names the key.
    #[error("the ladder {name}: {reason}")]
    LadderSyntax {
        /// The ladder.
        name: String,
        /// What the parser says.
        reason: String,
    },
    /// A ladder that nobody knows.
    #[error("there is no ladder {name}; known are {known}, or give the path of a ladder file")]
    UnknownLadder {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A rung or bridge that names a file the ladder does not list.
    #[error("the ladder {ladder}: {user} names the file {file}, which the ladder does not list")]
    UnlistedFile {
        /// The ladder.
        ladder: String,
        /// Who names it.
        user: String,
        /// The file.
        file: String,
    },
    /// A file that has not been fetched.
    #[error("{} is not there; fetch it with `molt pull {ladder}`", path.display())]
    NotPulled {
        /// The ladder.
        ladder: String,
        /// Where it should be.
        path: PathBuf,
    },
    /// A bridge that has not been fitted.
    #[error("the bridge {} is not there; fit it with `molt fit {ladder}`", path.display())]
    NoBridge {
        /// The ladder.
        ladder: String,
        /// Where it should be.
        path: PathBuf,
    },
    /// A file that is part of the program, under a ladder that means another.
    #[error("{file} is part of the program with SHA-256 {found}, the ladder names {expected}")]
    EmbeddedHash {
        /// The file.
        file: String,
        /// The ladder's hash.
        expected: String,
        /// The program's.
        found: String,
    },
    /// Two rungs with different tokenizers.
    #[error(
        "the ladder {ladder}: {second} has another tokenizer than {first}; a conversation cannot change between them"
    )]
    DifferentTokenizers {
        /// The ladder.
        ladder: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// Rungs that do not fall in size.
    #[error("the ladder {ladder}")]
    Sizes {
        /// The ladder.
        ladder: String,
        /// Which rung.
        source: LadderCostError,
    },
    /// Training or tuning.
    #[error("computing with tensors")]
    Tensors(#[from] candle_core::Error),
    /// A file that is not what the ladder says.
    #[error(transparent)]
    Pull(#[from] crate::pull::PullError),
}
