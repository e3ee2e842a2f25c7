//! Who looks on: every event of the engine passes here once, on its way to the streams and the log.

use crate::event::Event;
use crate::metrics::Metrics;
use crate::service::feed::Feed;
use crate::systemd::Heartbeat;

/// Counts what happens, passes it on to those who look on, and shows that rounds are made.
#[derive(Debug)]
pub struct Watch {
    metrics: Metrics,
    feed: Feed,
    heartbeat: Heartbeat,
}

impl Watch {
    /// Looks on with these counters and for these readers, and tells the supervisor if there is one.
    pub fn new(metrics: Metrics, feed: Feed) -> Self {
        Self { metrics, feed, heartbeat: Heartbeat::from_environment() }
    }

    /// Something happened.
    pub fn see(&mut self, event: &Event) {
        self.metrics.record(event);
        self.feed.tell(event);
        // Each round has one sample.
        if matches!(event, Event::Sample { .. }) {
            self.heartbeat.beat();
        }
    }
}
