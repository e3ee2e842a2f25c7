//! A program that wants memory: it takes and touches it on a schedule, as a camera, a browser or a leak does.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use molt_scheduler::units::Bytes;
use serde::Serialize;

/// How a program wants memory over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Schedule {
    /// Everything within half a second, held for eight, given back at once: a camera that is opened and closed.
    CameraLaunch,
    /// A quarter with each tab, two tabs closed, one opened again, the program ended.
    Browser,
    /// A little more all the time, nothing given back until the end.
    Leak,
}

/// From when on which share of all of it is wanted; between two of them the share moves evenly.
type Points = &'static [(f64, f64)];

impl Schedule {
    fn points(self) -> Points {
        match self {
            Self::CameraLaunch => &[(0.0, 0.0), (2.0, 0.0), (2.5, 1.0), (10.5, 1.0), (10.5, 0.0), (14.0, 0.0)],
            Self::Browser => &[
                (0.0, 0.0),
                (1.0, 0.0),
                (1.6, 0.25),
                (3.0, 0.25),
                (3.6, 0.5),
                (5.0, 0.5),
                (5.6, 0.75),
                (7.0, 0.75),
                (7.6, 1.0),
                (10.0, 1.0),
                (10.0, 0.5),
                (12.0, 0.5),
                (12.6, 0.75),
                (15.0, 0.75),
                (15.0, 0.0),
                (18.0, 0.0),
            ],
            Self::Leak => &[(0.0, 0.0), (1.0, 0.0), (21.0, 1.0), (24.0, 1.0), (24.0, 0.0), (27.0, 0.0)],
        }
    }

    /// How long it takes.
    pub fn length(self) -> Duration {
        Duration::from_secs_f64(self.points().last().map_or(0.0, |(end, _)| *end))
    }

    /// The share of all of it that is wanted after so long.
    fn share(self, after: Duration) -> f64 {
        let (points, after) = (self.points(), after.as_secs_f64());
        let next = points.partition_point(|(at, _)| *at <= after);
        match (next.checked_sub(1).and_then(|last| points.get(last)), points.get(next)) {
            (Some((from, low)), Some((to, high))) => low + (high - low) * (after - from) / (to - from),
            (Some((_, last)), None) => *last,
            (None, _) => 0.0,
        }
    }
}

/// Taken and given back at a time.
const PIECE: usize = 1 << 20;
/// Between two looks at the schedule.
const TICK: Duration = Duration::from_millis(10);
/// How often everything is touched again, so that it stays in memory.
const TOUCH: Duration = Duration::from_millis(500);

/// What a hog says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Held {
    /// Since it began.
    pub after_ms: f64,
    /// What it holds.
    pub held_bytes: Bytes,
}

/// Why a hog ended early.
#[derive(Debug, thiserror::Error)]
#[error("the system gave no more memory after {held}")]
pub struct HogError {
    held: Bytes,
    source: std::io::Error,
}

/// Takes up to `all` on that schedule, to its end. `tell` hears whenever an eighth more or less is held.
pub fn run(schedule: Schedule, all: Bytes, mut tell: impl FnMut(Held)) -> Result<(), HogError> {
    let (started, pieces) = (Instant::now(), pieces(all));
    let (mut held, mut touched, mut told): (Vec<MmapMut>, _, _) = (Vec::new(), Instant::now(), usize::MAX);
    loop {
        let after = started.elapsed();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count of pieces")]
        let wanted = (schedule.share(after) * pieces as f64).round() as usize;
        held.truncate(wanted);
        while held.len() < wanted {
            let bytes = Bytes::from(held.len() * PIECE);
            let mut piece = MmapMut::map_anon(PIECE).map_err(|source| HogError { held: bytes, source })?;
            fill(&mut piece, held.len());
            held.push(piece);
        }
        let whole = held.is_empty() || held.len() == pieces;
        if told.abs_diff(held.len()) > pieces / 8 || (whole && told != held.len()) {
            told = held.len();
            tell(Held { after_ms: after.as_secs_f64() * 1e3, held_bytes: Bytes::from(told * PIECE) });
        }
        if touched.elapsed() >= TOUCH {
            touched = Instant::now();
            held.iter_mut().enumerate().for_each(|(nth, piece)| touch(piece, nth));
        }
        if after >= schedule.length() {
            return Ok(());
        }
        std::thread::sleep(TICK);
    }
}

fn pieces(all: Bytes) -> usize {
    usize::try_from(all.get()).unwrap_or(usize::MAX) / PIECE
}

/// Bytes that no page shares with another, and that do not shrink when they are compressed: noise (xorshift), and in front
/// of it the page's number.
fn fill(piece: &mut [u8], nth: usize) {
    static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let words = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        words.take(4096 / 8).flatten().collect()
    });
    for (at, page) in piece.chunks_exact_mut(4096).enumerate() {
        page.copy_from_slice(&NOISE);
        page[..8].copy_from_slice(&(nth * PIECE + at).to_le_bytes());
    }
}

/// One byte of every page.
fn touch(piece: &mut [u8], nth: usize) {
    for page in piece.chunks_mut(4096) {
        page[0] = page[0].wrapping_add(u8::try_from(nth & 1).unwrap_or(0) + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_take_everything_and_give_it_back() {
        for schedule in [Schedule::CameraLaunch, Schedule::Browser, Schedule::Leak] {
            let points = schedule.points();
            assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{schedule:?}: time goes on");
            assert!(points.iter().any(|(_, share)| *share == 1.0), "{schedule:?}: all of it is wanted once");
            assert_eq!(schedule.share(schedule.length()), 0.0, "{schedule:?}: nothing is held at the end");
        }
        let check = |after: f64, expected: f64| {
            let share = Schedule::CameraLaunch.share(Duration::from_secs_f64(after));
            assert!((share - expected).abs() < 1e-9, "{share} after {after} s");
        };
        check(1.0, 0.0);
        check(2.25, 0.5);
        check(7.0, 1.0);
        check(10.5, 0.0);
        check(99.0, 0.0);
    }

    #[test]
    fn what_is_taken_is_resident_and_differs_from_page_to_page() {
        let mut piece = vec![0; PIECE];
        fill(&mut piece, 3);
        let mut pages: Vec<&[u8]> = piece.chunks(4096).collect();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), PIECE / 4096);
    }
}
