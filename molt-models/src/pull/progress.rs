//! Progress bars on standard error: one a file, with bytes, speed and time to go.
//!
//! Nothing is drawn where standard error is no terminal; results are told by return values, never by these lines.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::FileSource;

/// The place where all bars of a pull are drawn.
pub(super) struct Progress {
    bars: MultiProgress,
}

impl Progress {
    pub(super) fn new(visible: bool) -> Self {
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bars: MultiProgress::with_draw_target(target) }
    }

    /// A line above the bars.
    pub(super) fn note(&self, line: &str) {
        // A terminal that cannot be written to must not end a download.
        let _ = self.bars.println(line);
    }

    /// A bar for one file.
    pub(super) fn bar(&self, file: &FileSource) -> Bar {
        let style =
            ProgressStyle::with_template("{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = self.bars.add(ProgressBar::new(file.bytes).with_style(style));
        bar.set_prefix(file.name.clone());
        Bar { bar }
    }
}

/// The bar of one file. Dropped before it is done, it stays where the work broke off.
pub(super) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    pub(super) fn set(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    /// Goes to where earlier work ended, which must not count as speed.
    pub(super) fn resume_at(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.bar.reset_eta();
    }

    /// Says what is being done.
    pub(super) fn stage(&self, what: String) {
        self.bar.set_message(what);
    }

    pub(super) fn done(&self) {
        self.bar.finish_with_message("done");
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if !self.bar.is_finished() {
            self.bar.abandon();
        }
    }
}
