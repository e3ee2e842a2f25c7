//! Who looks on: every event of the engine passes here once, on its way to the streams and the log.

use crate::event::Event;
use crate::metrics::Metrics;
use crate::service::feed::Feed;
use crate::systemd::{self, Heartbeat};

/// Counts what happens, passes it on to those who look on, and shows that rounds are made.
#[derive(Debug)]
pub struct Watch {
    metrics: Metrics,
    feed: Feed,
    heartbeat: Heartbeat,
    /// What is served, as the run's beginning said.
    ladder: String,
}

impl Watch {
    /// Looks on with these counters and for these readers, and tells the supervisor if there is one.
    pub fn new(metrics: Metrics, feed: Feed) -> Self {
        Self { metrics, feed, heartbeat: Heartbeat::from_environment(), ladder: String::new() }
    }

    /// Something happened.
    pub fn see(&mut self, event: &Event) {
        self.metrics.record(event);
        self.feed.tell(event);
        match event {
            // Each round has one.
            Event::Sample { .. } => self.heartbeat.beat(),
            Event::Start(start) => self.ladder.clone_from(&start.ladder),
            // The supervisor's line for people says what holds now, and not what held at first.
            Event::Budget { budget_bytes, .. } => {
                systemd::status(&format!("serving {}, budget {budget_bytes}", self.ladder));
            }
            _ => {}
        }
    }
}
