//! What a dashboard sees, made from the same events that the streams and the log carry. Looking never loads a model and
//! never asks the engine.

mod families;
mod http;
mod record;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use metrics::{describe_counter, describe_gauge, describe_histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

pub use families::{FAMILIES, Family, Kind};
pub use http::{is_local, routes, serve};

use crate::event::Event;

/// Samples of histograms pile up until somebody looks; this often they are put away where nobody does.
pub const UPKEEP: Duration = Duration::from_secs(5);

/// Counters, gauges and histograms of one engine. The recorder is this value's own and no global one, so that two
/// engines in one process do not mix.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// Largest usage minus budget of any sample; a gauge cannot keep a maximum.
    overshoot_max: AtomicI64,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("overshoot_max", &self.overshoot_max).finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All families described; those whose labels are known beforehand stand at zero, so that a rate over them sees
    /// their first rise.
    pub fn new() -> Self {
        let mut builder = PrometheusBuilder::new();
        for family in FAMILIES {
            if let Kind::Histogram(bounds) = family.kind {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(family.name.to_owned()), bounds)
                    .expect("every histogram has bounds");
            }
        }
        let recorder = builder.build_recorder();
        with_local_recorder(&recorder, || {
            for Family { name, kind, help } in FAMILIES {
                match kind {
                    Kind::Counter => describe_counter!(*name, *help),
                    Kind::Gauge => describe_gauge!(*name, *help),
                    Kind::Histogram(_) => describe_histogram!(*name, *help),
                }
            }
            record::zeroes();
        });
        let handle = recorder.handle();
        Self(Arc::new(Inner { recorder, handle, overshoot_max: AtomicI64::new(i64::MIN) }))
    }

    /// Counts what happened.
    pub fn record(&self, event: &Event) {
        let overshoot_max = match event {
            Event::Sample { usage_bytes, budget_bytes, .. } => {
                let overshoot = record::difference(*usage_bytes, *budget_bytes);
                self.0.overshoot_max.fetch_max(overshoot, Ordering::Relaxed).max(overshoot)
            }
            _ => 0,
        };
        with_local_recorder(&self.0.recorder, || record::record(event, overshoot_max));
    }

    /// Prometheus' text.
    pub fn render(&self) -> String {
        self.0.handle.render()
    }

    /// Puts samples of histograms away; wants to be called every [`UPKEEP`].
    pub fn upkeep(&self) {
        self.0.handle.run_upkeep();
    }
}

#[cfg(test)]
mod tests;
