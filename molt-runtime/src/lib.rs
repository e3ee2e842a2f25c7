//! The engine of Molt and what stands around it: budgets, traces, demonstrations.

pub mod alarm;
pub mod bench;
pub mod budget;
pub mod calibrate;
pub mod config;
pub mod demo;
pub mod engine;
pub mod eval;
pub mod event;
pub mod hog;
pub mod manual;
pub mod memory;
pub mod metrics;
pub mod own_ladder;
pub mod paths;
pub mod real;
pub mod record;
pub mod replay;
pub mod report;
pub mod rung_name;
pub mod sampler;
pub mod service;
pub mod systemd;
pub mod texts;
pub mod trace;
pub mod workers;
