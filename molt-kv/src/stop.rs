//! The flag by which work is given up.

use crate::sync::{Arc, AtomicBool, Ordering};

/// Raised by anybody to have a step or a carry given up between two layers.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that is down.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag. Whoever lowers it after that sees what was written before.
    pub fn raise(&self) {
        self.0.swap(true, Ordering::AcqRel);
    }

    /// Lowers the flag. Both exchange rather than write over: whoever lowers a flag that was raised must see why, or would go on
    /// with what it knew before, and the flag down.
    pub fn lower(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }

    /// Whether it is up.
    pub fn is_up(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
