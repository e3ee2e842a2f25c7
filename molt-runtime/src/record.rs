//! Recording a pressure trace from what the system says of its memory while something else uses it.
//!
//! The budget of a step is what could be given to programs at that time (`MemAvailable`), or a stated share of it; how
//! long tasks stalled for memory since the step before (`pressure/memory`) stands beside it as a comment.

use std::fmt::Write as _;
use std::path::PathBuf;

use molt_scheduler::units::{Bytes, Span, Time};
use procfs::{FromRead as _, Meminfo, MemoryPressure, ProcError};

/// What the system said at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Since the recording began.
    pub at: Time,
    /// What could be given to programs.
    pub available: Bytes,
    /// For how long, ever, some task has stalled for memory; `None` where the system does not tell.
    pub stalled: Option<Span>,
}

/// Why nothing can be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system's file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ProcError,
    },
    /// The system does not say what is available.
    #[error("{} does not say MemAvailable", path.display())]
    NotTold {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the memory of a system whose `/proc` is at a root.
#[derive(Debug, Clone)]
pub struct Reader {
    root: PathBuf,
}

impl Reader {
    /// This system's is at `/proc`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// What it says now; the caller knows the time.
    pub fn read(&self, at: Time) -> Result<Sample, RecordError> {
        let path = self.root.join("meminfo");
        let info = Meminfo::from_file(&path).map_err(|source| RecordError::Read { path: path.clone(), source })?;
        let available = info.mem_available.map(Bytes::new).ok_or(RecordError::NotTold { path })?;
        // Kernels without pressure information are no reason to record nothing.
        let pressure = MemoryPressure::from_file(self.root.join("pressure/memory")).ok();
        Ok(Sample { at, available, stalled: pressure.map(|found| Span::from_micros(found.some.total)) })
    }
}

/// The samples that a trace of at most `most` steps needs: the first, and every one that differs from the one kept
/// before it by more than a threshold, which is doubled until few enough are kept.
pub fn condense(samples: &[Sample], most: usize) -> Vec<Sample> {
    let mut threshold = Bytes::mib(1);
    loop {
        let mut kept: Vec<Sample> = Vec::new();
        for sample in samples {
            let differs = |last: &Sample| {
                let (a, b) = (last.available, sample.available);
                a.max(b) - a.min(b) >= threshold
            };
            if kept.last().is_none_or(differs) {
                kept.push(*sample);
            }
        }
        if kept.len() <= most.max(1) {
            return kept;
        }
        threshold = threshold + threshold;
    }
}

/// Writes samples as a trace. `about` says what was recorded, `share_percent` which part of what is available is the
/// budget.
pub fn write(name: &str, about: &str, share_percent: u64, samples: &[Sample]) -> String {
    let mut text = String::new();
    for line in about.lines() {
        let _ = writeln!(text, "# {line}");
    }
    let _ = writeln!(
        text,
        "#\n# Recorded by `molt record` from MemAvailable of /proc/meminfo; each budget is {share_percent} % of it. The"
    );
    let _ = writeln!(
        text,
        "# comment of a step says for how long tasks stalled for memory since the step before (/proc/pressure/memory)."
    );
    let _ = writeln!(text, "name = {name:?}");
    let mut last: Option<Sample> = None;
    for sample in samples {
        let mib = sample.available.get().saturating_mul(share_percent) / 100 / (1 << 20);
        let stalled = last.and_then(|last| Some((last.stalled?, sample.stalled?)));
        let note = stalled.map_or(0, |(before, now)| now.micros().saturating_sub(before.micros()) / 1_000);
        let note = if note > 0 { format!(" # stalled for {note} ms") } else { String::new() };
        let at_ms = sample.at.micros() / 1_000;
        let _ = writeln!(text, "\n[[step]]\nat_ms = {at_ms}\nbudget = \"{mib} MiB\"{note}");
        last = Some(*sample);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    fn sample(second: u64, mib: u64, stalled_ms: u64) -> Sample {
        let stalled = Some(Span::from_millis(stalled_ms));
        Sample { at: Time::from_millis(second * 1_000), available: Bytes::mib(mib), stalled }
    }

    #[test]
    fn what_the_system_says_is_read_from_a_root() {
        let root = tempfile::tempdir().unwrap();
        let reader = Reader::new(root.path());
        let meminfo = root.path().join("meminfo");
        let error = reader.read(Time::START).unwrap_err().to_string();
        assert!(error.contains(meminfo.to_str().unwrap()), "{error}");
        let plain = "MemTotal: 2048 kB\nMemFree: 512 kB\nMemAvailable: 1024 kB\nBuffers: 0 kB\nCached: 0 kB\n\
            SwapCached: 0 kB\nActive: 0 kB\nInactive: 0 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nDirty: 0 kB\n\
            Writeback: 0 kB\nMapped: 0 kB\nSlab: 0 kB\nCommitted_AS: 0 kB\nVmallocTotal: 0 kB\nVmallocUsed: 0 kB\n\
            VmallocChunk: 0 kB\n";
        std::fs::write(&meminfo, plain).unwrap();
        let without = reader.read(Time::START).unwrap();
        assert_eq!((without.available, without.stalled), (Bytes::mib(1), None));
        std::fs::create_dir(root.path().join("pressure")).unwrap();
        let line = |kind: &str, total: u64| format!("{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n");
        std::fs::write(root.path().join("pressure/memory"), line("some", 7_000) + &line("full", 9)).unwrap();
        assert_eq!(reader.read(Time::START).unwrap().stalled, Some(Span::from_millis(7)));
        std::fs::write(&meminfo, plain.replace("MemAvailable: 1024 kB\n", "")).unwrap();
        assert!(matches!(reader.read(Time::START), Err(RecordError::NotTold { .. })));
    }

    #[test]
    fn a_recording_is_condensed_and_reads_as_a_trace() {
        let samples: Vec<Sample> = (0..100).map(|n| sample(n, 1_000 + n * n, n * 3)).collect();
        let kept = condense(&samples, 10);
        assert!(kept.len() <= 10 && kept.len() > 3 && kept[0] == samples[0], "{}", kept.len());
        let flat = condense(&[sample(0, 5, 0), sample(1, 5, 0)], 10);
        assert_eq!(flat.len(), 1);
        let text = write("r", "a test", 50, &kept);
        assert!(text.starts_with("# a test\n") && text.contains("stalled for"), "{text}");
        let trace = Trace::parse("r", &text).unwrap();
        assert_eq!(trace.last_step(), kept.last().unwrap().at);
    }
}
