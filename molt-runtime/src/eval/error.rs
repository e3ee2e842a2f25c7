//! Why an evaluation gives no figures.

use std::path::PathBuf;

use molt_kv::background::BackgroundError;
use molt_kv::cache::CacheError;
use molt_kv::carry::CarryError;
use molt_kv::decoder::Stopped;

use molt_kv::keepsake::KeepsakeError;
use molt_models::ModelError;

/// Why an evaluation gives no figures.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A carry.
    #[error(transparent)]
    Carry(#[from] CarryError),
    /// A healing.
    #[error(transparent)]
    Heal(#[from] BackgroundError),
    /// A keepsake.
    #[error(transparent)]
    Keepsake(#[from] KeepsakeError),
    /// A cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Given up as asked.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A way that needs a bridge, between models that have none.
    #[error("the ladder has no bridge for {pair}")]
    NoBridge {
        /// The pair.
        pair: String,
    },
    /// A pair that cannot be judged.
    #[error("{pair} is no pair of the ladder with different weights; there are {known}")]
    NoPair {
        /// What was asked for.
        pair: String,
        /// What there is.
        known: String,
    },
    /// A context that does not fit into what the models were trained for.
    #[error("a context of {context} tokens and what comes after it need {needed}, the models hold {trained}")]
    Context {
        /// The context.
        context: usize,
        /// Tokens of a window.
        needed: usize,
        /// Tokens that the models were trained for.
        trained: usize,
    },
    /// No text is long enough.
    #[error("{documents} texts, the longest of {found} tokens; a context of {context} needs {needed}")]
    TooShort {
        /// How many texts.
        documents: usize,
        /// Tokens of the longest.
        found: usize,
        /// The context.
        context: usize,
        /// Tokens of a window.
        needed: usize,
    },
    /// A gate that must hold before any figure counts.
    #[error("{pair}: the gate \"{gate}\" fails: {found}; no figure counts")]
    Gate {
        /// The pair.
        pair: String,
        /// Which.
        gate: &'static str,
        /// The numbers.
        found: String,
    },
    /// The file of finished seams.
    #[error("the file of finished seams {}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A line of it that is no seam.
    #[error("{}, line {line}: {reason}", path.display())]
    JournalLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
}
