//! How long programs wait for memory, as the kernel adds it up (pressure stall information): the machine's, and the
//! control group's.

use std::path::{Path, PathBuf};

use molt_scheduler::units::{Bytes, Span, Time};
use procfs::{FromRead as _, MemoryPressure};

use crate::alarm::Alarm;
use crate::budget::squeeze::{Move, Shortage, Squeeze};
use crate::budget::{BudgetSource, Step};

/// Waiting is added up over so long: the kernel's own shortest window for services.
const WINDOW: Span = Span::from_millis(2_000);

/// A limit that falls while programs wait for memory and grows when nobody does.
///
/// What counts is how the waiting grows now. The averages that the kernel gives lag behind by ten seconds and more, in
/// which a machine can come to a stop.
#[derive(Debug)]
pub struct PressureBudget {
    name: &'static str,
    file: PathBuf,
    /// Knows what is used.
    alarm: Alarm,
    squeeze: Squeeze,
    /// When the waiting was last added up, and its microseconds since the start of the machine.
    last: Option<(Time, u64)>,
    step: Option<Step>,
    /// Why the limit last fell.
    reason: String,
}

impl PressureBudget {
    /// Of a file in the form of `/proc/pressure/memory`; `None` where the kernel keeps none.
    pub fn new(name: &'static str, file: &Path, alarm: Alarm) -> Option<Self> {
        let (file, squeeze) = (file.to_owned(), Squeeze::default());
        let own = Self { name, file, alarm, squeeze, last: None, step: None, reason: String::new() };
        own.total().is_some().then_some(own)
    }

    /// Microseconds in which at least one program waited.
    fn total(&self) -> Option<u64> {
        MemoryPressure::from_file(&self.file).ok().map(|pressure| pressure.some.total)
    }
}

impl BudgetSource for PressureBudget {
    fn budget(&mut self, now: Time) -> Option<Bytes> {
        let window = self.last.map(|(then, _)| now.since(then));
        if window.is_some_and(|window| window < WINDOW) {
            return self.squeeze.limit();
        }
        // A file that cannot be read for once says nothing; the limit stays.
        let Some(total) = self.total() else { return self.squeeze.limit() };
        if let Some(((_, before), window)) = self.last.replace((now, total)).zip(window) {
            let ratio = total.saturating_sub(before) as f64 / window.micros().max(1) as f64;
            let moved = self.squeeze.feel(now, Shortage::of_stall(ratio), self.alarm.used());
            let reason =
                format!("programs waited for memory {:.1} % of the last {} ms", ratio * 100.0, window.micros() / 1_000);
            if matches!(moved, Some(Move::Shrunk(_))) {
                self.reason.clone_from(&reason);
            }
            self.step = moved.map(|moved| Step { source: self.name, moved, reason });
        }
        self.squeeze.limit()
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn reason(&self) -> String {
        format!("{} when the limit last fell", self.reason)
    }

    fn step(&mut self) -> Option<Step> {
        self.step.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded while six programs fought for the memory of a control group, and after they had ended; see its first lines.
    const RECORDED: &str = include_str!("../../tests/data/psi-thrashing.txt");

    #[test]
    fn a_recorded_fight_for_memory_shrinks_the_budget_and_quiet_lets_it_grow() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("memory");
        let alarm = Alarm::default();
        alarm.note(Bytes::mib(1_000));
        assert!(PressureBudget::new("host", &file, alarm.clone()).is_none(), "no such file");
        let mut lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
        let (mut source, mut moves) = (None, Vec::new());
        while let (Some(at), Some(some), Some(full)) = (lines.next(), lines.next(), lines.next()) {
            std::fs::write(&file, format!("{some}\n{full}\n")).unwrap();
            let source = source.get_or_insert_with(|| PressureBudget::new("host", &file, alarm.clone()).unwrap());
            let limit = source.budget(Time::from_millis(at.parse().unwrap()));
            moves.extend(source.step().map(|step| {
                assert!(step.reason.contains('%'), "{}", step.reason);
                step.moved
            }));
            if let Some(Move::Shrunk(bytes)) = moves.last() {
                assert_eq!(limit, Some(*bytes));
            }
        }
        let shrunk = moves.iter().filter(|moved| matches!(moved, Move::Shrunk(_))).count();
        assert!(shrunk >= 3, "{moves:?}");
        assert!(
            matches!(moves.first(), Some(Move::Shrunk(_))) && matches!(moves.last(), Some(Move::Grows(_))),
            "{moves:?}"
        );
    }
}
