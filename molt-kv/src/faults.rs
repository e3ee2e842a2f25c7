//! Faults on purpose. A test arms a boundary, and from then on one passing of it fails as a full disk, a refused mapping or a
//! spoilt read would, or panics; or something happens elsewhere meanwhile. In a program that serves nothing is armed, and a boundary costs one relaxed load.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Where something outside of us, or a fault of ours, can break what we do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Boundary {
    /// A mapping of anonymous memory: caches, built weights, every buffer.
    MapMemory,
    /// Reading a tensor's weights while a rung is loaded.
    ReadWeights,
    /// Opening and checking a bridge while a rung is loaded.
    OpenBridge,
    /// What a bridge makes; the fault is numbers that are none.
    ApplyBridge,
    /// The check of a carried cache.
    CheckCache,
    /// Writing a keepsake.
    WriteKeepsake,
    /// Reading one back.
    ReadKeepsake,
    /// A pass of a model over tokens.
    Compute,
    /// Writing what outlives the process: tokens of an answer, records of caches, and their names.
    WriteState,
}

impl Boundary {
    /// All of them; those that a switch itself passes come first.
    pub const ALL: [Self; 9] = [
        Self::MapMemory,
        Self::ReadWeights,
        Self::OpenBridge,
        Self::ApplyBridge,
        Self::CheckCache,
        Self::WriteKeepsake,
        Self::ReadKeepsake,
        Self::Compute,
        Self::WriteState,
    ];
}

/// One passing of a boundary that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub boundary: Boundary,
    /// After so many passings that go well.
    pub after: u64,
    /// Whether it is a fault of ours, which panics.
    pub panics: bool,
}

/// What another thread would do at that moment.
type Deed = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    faults: Vec<Fault>,
    meanwhile: Option<(Boundary, u64, Deed)>,
    passed: [u64; Boundary::ALL.len()],
    hit: u64,
}

static ARMED: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<State> =
    Mutex::new(State { faults: Vec::new(), meanwhile: None, passed: [0; Boundary::ALL.len()], hit: 0 });
/// Held by whoever has armed something: tests of one process take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Faults are armed while this lives.
#[derive(Debug)]
pub struct Armed {
    _turn: MutexGuard<'static, ()>,
}

/// Arms faults, or none, to count passings only. Waits until nobody else has any.
pub fn arm(faults: &[Fault]) -> Armed {
    let armed = Armed { _turn: TURN.lock() };
    *STATE.lock() = State { faults: faults.to_vec(), ..State::default() };
    ARMED.store(true, Ordering::Relaxed);
    armed
}

impl Armed {
    /// Other faults from now on, with passings counted anew. The turn is kept: nobody's faults come in between.
    pub fn instead(&self, faults: &[Fault]) {
        *STATE.lock() = State { faults: faults.to_vec(), ..State::default() };
    }

    /// Has something done, once, when a boundary is passed after so many passings of it: what another thread may do at any
    /// moment, at a moment that is known.
    pub fn meanwhile(&self, boundary: Boundary, after: u64, deed: impl FnOnce() + Send + 'static) {
        STATE.lock().meanwhile = Some((boundary, after, Box::new(deed)));
    }

    /// How often a boundary was passed so far.
    pub fn passed(&self, boundary: Boundary) -> u64 {
        STATE.lock().passed[boundary as usize]
    }

    /// How many faults have happened.
    pub fn hit(&self) -> u64 {
        STATE.lock().hit
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        ARMED.store(false, Ordering::Relaxed);
    }
}

/// Passes a boundary.
///
/// # Errors
/// Where a test has armed a fault there.
///
/// # Panics
/// Where it has armed one that does.
#[inline]
pub fn pass(boundary: Boundary) -> io::Result<()> {
    match ARMED.load(Ordering::Relaxed) {
        false => Ok(()),
        true => pass_armed(boundary),
    }
}

#[cold]
fn pass_armed(boundary: Boundary) -> io::Result<()> {
    let mut state = STATE.lock();
    let passed = &mut state.passed[boundary as usize];
    let before = *passed;
    *passed += 1;
    let now = |(at, after, _): &mut (Boundary, u64, Deed)| *at == boundary && *after == before;
    if let Some((_, _, deed)) = state.meanwhile.take_if(now) {
        drop(state);
        deed();
        state = STATE.lock();
    }
    let due = |fault: &Fault| fault.boundary == boundary && fault.after == before;
    let Some(fault) = state.faults.iter().copied().find(due) else { return Ok(()) };
    state.hit += 1;
    drop(state);
    assert!(!fault.panics, "a fault on purpose: {boundary:?} after {before}");
    Err(io::Error::other(format!("a fault on purpose: {boundary:?} after {before}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_passing_fails_and_the_others_do_not() {
        let fault = Fault { boundary: Boundary::ReadKeepsake, after: 1, panics: false };
        let armed = arm(&[fault]);
        let passings: Vec<bool> = (0..4).map(|_| pass(Boundary::ReadKeepsake).is_ok()).collect();
        assert_eq!(passings, [true, false, true, true]);
        assert_eq!((armed.passed(Boundary::ReadKeepsake), armed.hit()), (4, 1));
        drop(armed);
        let armed = arm(&[]);
        assert!(pass(Boundary::ReadKeepsake).is_ok());
        assert_eq!((armed.passed(Boundary::ReadKeepsake), armed.hit()), (1, 0));
        let done = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let count = done.clone();
        armed.meanwhile(Boundary::ReadKeepsake, 2, move || _ = count.fetch_add(1, Ordering::Relaxed));
        let found = [(); 3].map(|()| {
            assert!(pass(Boundary::ReadKeepsake).is_ok());
            done.load(Ordering::Relaxed)
        });
        assert_eq!(found, [0, 1, 1]);
    }
}
