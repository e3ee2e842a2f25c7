//! What threads share is made of these, so that `interleavings/` can put a model checker's own in their place.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
