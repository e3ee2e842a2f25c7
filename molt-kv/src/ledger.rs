//! The books: how many bytes of which kind are in use now. Every region charges them when it is made and gives back
//! when it is dropped, so the books cannot drift from what is mapped.

use molt_scheduler::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::sync::{Arc, AtomicU64, Ordering};

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
    /// Tables that last: what grammars are made from.
    Tables,
}

impl Kind {
    /// All kinds, in the order in which usage is shown.
    pub const ALL: [Self; 5] = [Self::Weights, Self::Cache, Self::Scratch, Self::Bridge, Self::Tables];
}

/// Shared counters of bytes in use, one a kind.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    kinds: [AtomicU64; Kind::ALL.len()],
    files: AtomicU64,
    total: AtomicU64,
    peak: AtomicU64,
}

impl Ledger {
    /// Empty books.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of that kind in use.
    pub fn used(&self, kind: Kind) -> Bytes {
        Bytes::new(self.0.kinds[kind as usize].load(Ordering::Relaxed))
    }

    /// All bytes in use.
    pub fn total(&self) -> Bytes {
        Bytes::new(self.0.total.load(Ordering::Relaxed))
    }

    /// The most that was in use at any moment since this was last asked; what is in use now is where it begins again.
    pub fn take_peak(&self) -> Bytes {
        let peak = self.0.peak.swap(self.total().get(), Ordering::AcqRel);
        // What was charged between the two was part of the peak that was taken, and is in use: the next begins with it, too.
        self.0.peak.fetch_max(self.total().get(), Ordering::Relaxed);
        Bytes::new(peak)
    }

    /// Of all bytes in use, those that lie in mapped files: clean pages, resident when they have been touched, and the
    /// system's to drop.
    pub fn files(&self) -> Bytes {
        Bytes::new(self.0.files.load(Ordering::Relaxed))
    }

    /// Charges what lies in no region of ours, as long as the charge is held.
    pub fn hold(&self, kind: Kind, bytes: Bytes) -> Charge {
        self.charge(kind, bytes.get());
        Charge { ledger: self.clone(), kind, bytes }
    }

    pub(crate) fn charge_file(&self, kind: Kind, bytes: u64) {
        self.charge(kind, bytes);
        self.0.files.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_back_file(&self, kind: Kind, bytes: u64) {
        self.give_back(kind, bytes);
        self.0.files.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn charge(&self, kind: Kind, bytes: u64) {
        self.0.kinds[kind as usize].fetch_add(bytes, Ordering::Relaxed);
        let total = self.0.total.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(total, Ordering::Release);
    }

    pub(crate) fn give_back(&self, kind: Kind, bytes: u64) {
        let before = self.0.kinds[kind as usize].fetch_sub(bytes, Ordering::Relaxed);
        self.0.total.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "more {kind:?} given back than was charged");
    }
}

/// Bytes that are in the books as long as this is held.
#[derive(Debug)]
pub struct Charge {
    ledger: Ledger,
    kind: Kind,
    bytes: Bytes,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.give_back(self.kind, self.bytes.get());
    }
}
