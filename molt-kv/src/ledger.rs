//! The books: how many bytes of which kind are in use now. Every region charges them when it is made and gives back
//! when it is dropped, so the books cannot drift from what is mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use molt_scheduler::units::Bytes;
use serde::{Deserialize, Serialize};

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Weights of a rung.
    Weights,
    /// Caches of sequences.
    Cache,
    /// Buffers of a step.
    Scratch,
    /// The maps of a bridge while a carry uses them.
    Bridge,
}

impl Kind {
    /// All kinds, in the order in which usage is shown.
    pub const ALL: [Self; 4] = [Self::Weights, Self::Cache, Self::Scratch, Self::Bridge];
}

/// Shared counters of bytes in use, one a kind.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<[AtomicU64; 4]>);

impl Ledger {
    /// Empty books.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of that kind in use.
    pub fn used(&self, kind: Kind) -> Bytes {
        Bytes::new(self.0[kind as usize].load(Ordering::Relaxed))
    }

    /// All bytes in use.
    pub fn total(&self) -> Bytes {
        Kind::ALL.iter().map(|kind| self.used(*kind)).sum()
    }

    pub(crate) fn charge(&self, kind: Kind, bytes: u64) {
        self.0[kind as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, kind: Kind, bytes: u64) {
        let before = self.0[kind as usize].fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "more {kind:?} given back than was charged");
    }
}
