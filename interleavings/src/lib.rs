//! Every interleaving of the small parts that Molt's threads share.
//!
//! The modules are the very ones of the other crates, by path. Only what they share memory with is another: [loom] runs a model
//! again and again, until every order of its loads, stores and locks that the memory model allows has been seen, also those
//! that no processor at hand would show. A model is at most three threads, each with a few steps.
//!
//! The queues between the engine and the service are not among them: they are of `tokio`, which checks its own with loom, and of
//! `crossbeam-channel`, which is not written for it.
//!
//! Built for its models alone: the modules' own tests are about the real thing, and run where they lie.
#![cfg(not(test))]
#![allow(dead_code, unreachable_pub, reason = "a model uses a part of the module that it is about")]

// The modules name the crates that they lie in.
extern crate self as molt_kv;

#[path = "../../molt-runtime/src/alarm.rs"]
mod alarm;
mod budget;
#[path = "../../molt-kv/src/ledger.rs"]
mod ledger;
pub mod models;
#[path = "../../molt-kv/src/stop.rs"]
mod stop;
mod sync;

/// As much of `molt_kv::decoder` as the alarm needs.
mod decoder {
    pub use crate::stop::StopFlag;
}
