//! Several sources at once, and the watcher that looks at them between rounds.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use molt_scheduler::units::{Bytes, Time};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use crate::alarm::Alarm;
use crate::budget::{BudgetSource, Step, Wake};

/// The smallest budget of several sources. It falls at once; what the *machine* says rises by no more than a share of the
/// last budget a second, so that a moment of quiet brings nothing back.
pub struct Strictest {
    /// What is taken at its word.
    said: Vec<Box<dyn BudgetSource>>,
    /// What is measured, and so moves by itself.
    measured: Vec<Box<dyn BudgetSource>>,
    last: Option<(Time, Bytes)>,
}

/// The smallest of what several sources allow.
struct Least {
    bytes: Bytes,
    /// The number of the source.
    index: usize,
    /// Whether it would be more, had it not been less before.
    slowed: bool,
}

/// The budget that holds, for whoever wants to know why it is no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holds {
    /// What may be used.
    pub bytes: Bytes,
    /// Whose word that is.
    pub source: &'static str,
    /// Why it is that.
    pub reason: String,
}

/// A measured budget rises by one part in so many a second.
const RISE: u64 = 20;
/// And by at least so much.
const RISE_BYTES: Bytes = Bytes::mib(8);

impl Strictest {
    /// Of what is said and what is measured.
    pub fn new(said: Vec<Box<dyn BudgetSource>>, measured: Vec<Box<dyn BudgetSource>>) -> Self {
        Self { said, measured, last: None }
    }

    /// The smallest of what all sources allow now.
    pub fn now(&mut self, now: Time) -> Bytes {
        self.least(now).map_or(Bytes::MAX, |least| least.bytes)
    }

    /// The same, whose it is and why; `None` where no source sets a limit.
    pub fn holds(&mut self, now: Time) -> Option<Holds> {
        let Least { bytes, index, slowed } = self.least(now)?;
        let source = self.sources().nth(index)?;
        let slowly = if slowed { "; less was there a while ago, and what is measured rises slowly" } else { "" };
        Some(Holds { bytes, source: source.name(), reason: format!("{}{slowly}", source.reason()) })
    }

    fn least(&mut self, now: Time) -> Option<Least> {
        let least = |sources: &mut Vec<Box<dyn BudgetSource>>| {
            let all = sources.iter_mut().enumerate();
            all.filter_map(|(index, source)| Some((source.budget(now)?, index))).min()
        };
        let said = least(&mut self.said).map(|(bytes, index)| Least { bytes, index, slowed: false });
        let measured = least(&mut self.measured).map(|(found, index)| {
            let risen = self.last.map_or(found, |(then, last)| {
                let share = (last.get() / RISE).max(RISE_BYTES.get());
                let rise = u128::from(share) * u128::from(now.since(then).micros()) / 1_000_000;
                found.min(last + Bytes::new(u64::try_from(rise).unwrap_or(u64::MAX)))
            });
            self.last = Some((now, risen));
            Least { bytes: risen, index: self.said.len() + index, slowed: risen < found }
        });
        said.into_iter().chain(measured).min_by_key(|least| least.bytes)
    }

    fn sources(&mut self) -> impl Iterator<Item = &mut Box<dyn BudgetSource>> {
        self.said.iter_mut().chain(&mut self.measured)
    }

    /// Steps that nobody was told of.
    pub fn steps(&mut self) -> Vec<Step> {
        self.sources().filter_map(|source| source.step()).collect()
    }

    /// What to wait for, by the number of the source.
    fn wakes(&mut self) -> Vec<(usize, Wake)> {
        self.sources().enumerate().filter_map(|(index, source)| Some((index, source.wake()?))).collect()
    }

    /// A source has become ready. Says whether it can again.
    fn woken(&mut self, index: usize) -> bool {
        self.sources().nth(index).is_some_and(|source| source.woken())
    }
}

/// Sources that a thread watches between the engine's rounds.
#[derive(Clone)]
pub struct Watched {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}

struct Shared {
    sources: Mutex<Strictest>,
    alarm: Alarm,
    started: Instant,
}

/// How often the watcher looks: a reader of a few files of the kernel's.
const WATCH: Duration = Duration::from_millis(50);

impl Watched {
    /// Steps of sources since this was last asked.
    pub fn steps(&self) -> Vec<Step> {
        self.shared.sources.lock().steps()
    }

    /// Starts the watcher, which interrupts the engine when less is there than is used. It ends with the last clone.
    pub fn start(sources: Strictest, alarm: Alarm) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { sources: Mutex::new(sources), alarm, started: Instant::now() });
        let watched = Arc::downgrade(&shared);
        std::thread::Builder::new().name("molt-budget".to_owned()).spawn(move || watch(&watched))?;
        Ok(Self { shared })
    }

    /// The budget now.
    pub fn budget(&self) -> Bytes {
        self.shared.look()
    }

    /// The same, and why it is no more.
    pub fn holds(&self) -> Option<Holds> {
        self.shared.sources.lock().holds(self.shared.now())
    }
}

impl Shared {
    fn look(&self) -> Bytes {
        let now = self.now();
        self.sources.lock().now(now)
    }

    fn now(&self) -> Time {
        Time::from_micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

fn watch(watched: &Weak<Shared>) {
    let mut wakes = watched.upgrade().map(|shared| shared.sources.lock().wakes()).unwrap_or_default();
    while let Some(shared) = watched.upgrade() {
        shared.alarm.ring_if_over(shared.look());
        drop(shared);
        let ready = ready(&wakes);
        let Some(shared) = watched.upgrade().filter(|_| !ready.is_empty()) else { continue };
        let mut sources = shared.sources.lock();
        let ended = |(index, broken): (usize, bool)| (broken || !sources.woken(index)).then_some(index);
        let ended: Vec<usize> = ready.into_iter().filter_map(ended).collect();
        wakes.retain(|(index, _)| !ended.contains(index));
    }
}

/// Waits until the next look is due or a source has news; the numbers of those that have, and whether it is that they are
/// broken: a file of the kernel's without a trigger, or of a group that is gone, would be ready for ever.
fn ready(wakes: &[(usize, Wake)]) -> Vec<(usize, bool)> {
    let mut polled: Vec<PollFd<'_>> =
        wakes.iter().map(|(_, wake)| PollFd::new(wake.file.as_fd(), wake.flags)).collect();
    let timeout = PollTimeout::try_from(WATCH).unwrap_or(PollTimeout::ZERO);
    if poll(&mut polled, timeout).is_err() {
        // Interrupted; the next look comes a little early.
        return Vec::new();
    }
    let any = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
    let broken = |fd: &PollFd<'_>| fd.revents().is_some_and(|r| r.intersects(PollFlags::POLLERR | PollFlags::POLLNVAL));
    wakes.iter().zip(&polled).filter(|(_, fd)| any(fd)).map(|((index, _), fd)| (*index, broken(fd))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Script(&'static str, Vec<Option<u64>>);

    impl BudgetSource for Script {
        fn budget(&mut self, _now: Time) -> Option<Bytes> {
            self.1.remove(0).map(Bytes::mib)
        }

        fn name(&self) -> &'static str {
            self.0
        }

        fn reason(&self) -> String {
            format!("{} wants it so", self.0)
        }
    }

    #[test]
    fn budgets_fall_at_once_and_rise_slowly() {
        // A look a second.
        let check = |said: &[Option<u64>], measured: &[Option<u64>], expected: &[u64]| {
            let source = |script: &[Option<u64>]| -> Vec<Box<dyn BudgetSource>> {
                vec![Box::new(Script("one", script.to_vec()))]
            };
            let mut strictest = Strictest::new(source(said), source(measured));
            let found: Vec<u64> = (0..u64::try_from(expected.len()).unwrap())
                .map(|second| strictest.now(Time::from_millis(1_000 * second)).get() >> 20)
                .collect();
            assert_eq!(found, expected, "{said:?} {measured:?}");
        };
        let none = [None; 4];
        check(&[Some(500), Some(900)], &none, &[500, 900]);
        check(&none, &[Some(1_000), Some(400), Some(1_000), Some(1_000)], &[1_000, 400, 420, 441]);
        check(&none, &[Some(20), Some(100), Some(25)], &[20, 28, 25]);
        check(&[Some(300), Some(300), Some(300)], &[Some(1_000), Some(200), Some(1_000)], &[300, 200, 210]);
        check(&none, &none, &[u64::MAX >> 20; 2]);
    }

    #[test]
    fn the_strictest_is_named_with_its_reason() {
        let slowly = "; less was there a while ago, and what is measured rises slowly";
        // The budgets of three sources, second by second; the first is said, the others are measured.
        let check = |budgets: [&[Option<u64>]; 3], expected: &[Option<(u64, &'static str, &str)>]| {
            let [said, one, other] = [("said", budgets[0]), ("one", budgets[1]), ("other", budgets[2])]
                .map(|(name, script)| -> Box<dyn BudgetSource> { Box::new(Script(name, script.to_vec())) });
            let mut strictest = Strictest::new(vec![said], vec![one, other]);
            for (second, expected) in (0..).zip(expected) {
                let expected = expected.map(|(mib, source, more)| {
                    let reason = format!("{source} wants it so{more}");
                    Holds { bytes: Bytes::mib(mib), source, reason }
                });
                assert_eq!(strictest.holds(Time::from_millis(1_000 * second)), expected, "{budgets:?} at {second} s");
            }
        };
        let none = &[None, None];
        check(
            [&[Some(5), Some(9)], &[Some(6), Some(8)], &[Some(7), Some(7)]],
            &[Some((5, "said", "")), Some((7, "other", ""))],
        );
        check(
            [none, &[Some(20), Some(90)], &[Some(30), Some(80)]],
            &[Some((20, "one", "")), Some((28, "other", slowly))],
        );
        check([&[Some(5), Some(5)], &[Some(5), None], none], &[Some((5, "said", "")), Some((5, "said", ""))]);
        check([none, none, none], &[None, None]);
    }

    #[test]
    fn the_watcher_interrupts_an_engine_that_uses_more() {
        struct Fixed;
        impl BudgetSource for Fixed {
            fn budget(&mut self, _now: Time) -> Option<Bytes> {
                Some(Bytes::mib(100))
            }

            fn name(&self) -> &'static str {
                "fixed"
            }

            fn reason(&self) -> String {
                "it is fixed".to_owned()
            }
        }
        let check = |usage: Bytes, interrupted: bool| {
            let alarm = Alarm::default();
            alarm.note(usage);
            let watched = Watched::start(Strictest::new(vec![Box::new(Fixed)], Vec::new()), alarm.clone()).unwrap();
            assert_eq!(watched.budget(), Bytes::mib(100));
            let reason = "it is fixed".to_owned();
            assert_eq!(watched.holds(), Some(Holds { bytes: Bytes::mib(100), source: "fixed", reason }));
            let started = Instant::now();
            while alarm.flag().is_up() != interrupted || (!interrupted && started.elapsed() < 3 * WATCH) {
                assert!(started.elapsed() < Duration::from_secs(60), "usage {usage}: never interrupted");
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(alarm.flag().is_up(), interrupted);
        };
        check(Bytes::mib(101), true);
        check(Bytes::mib(99), false);
    }
}
