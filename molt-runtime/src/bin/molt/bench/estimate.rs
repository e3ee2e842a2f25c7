//! How far a section has come and how long the rest will take, a line for each thing that is done: a log of it reads as well
//! as a terminal.

use std::time::Instant;

/// One section under way.
pub(super) struct Estimate {
    started: Instant,
    done: usize,
    all: usize,
}

impl Estimate {
    /// Of so many things that take about as long as one another.
    pub(super) fn of(all: usize) -> Self {
        Self { started: Instant::now(), done: 0, all }
    }

    /// One more is done.
    pub(super) fn done(&mut self, what: &str) {
        self.done += 1;
        let each = self.started.elapsed().as_secs_f64() / self.done as f64;
        let left = each * self.all.saturating_sub(self.done) as f64;
        eprintln!("{what} ({} of {}, {} left)", self.done, self.all.max(self.done), about(left));
    }
}

fn about(seconds: f64) -> String {
    if seconds >= 90.0 { format!("about {:.0} min", seconds / 60.0) } else { format!("about {seconds:.0} s") }
}
