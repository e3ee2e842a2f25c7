//! The model checker's own kinds of what threads share, under the names that Molt uses.

pub(crate) use loom::sync::Arc;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A mutex that is locked like `parking_lot`'s.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().expect("loom ends a model with its first panic")
    }
}
