//! The heap of one thread, counted and bounded: what is asked for past the bound is not given, and what asked for it is named.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static BOUND: Cell<isize> = const { Cell::new(isize::MAX) };
    static CASE: Cell<&'static str> = const { Cell::new("") };
}

/// The system's allocator with an account for each thread.
pub(crate) struct Counted;

fn take(size: usize) -> bool {
    let held = HELD.get().saturating_add_unsigned(size);
    if held > BOUND.get() {
        // Whoever asked is about to be ended by the runtime, so this is said here and without the heap.
        let _told = std::io::stderr().write_all(b"\nmore memory than the bound is asked for by ");
        let _told = std::io::stderr().write_all(CASE.get().as_bytes());
        let _told = std::io::stderr().write_all(b"\n");
        return false;
    }
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
    true
}

// SAFETY: every block comes from the system's allocator and goes back to it with the layout that it came with; the account
// is plain numbers of the thread, which need no heap.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        HELD.set(HELD.get().saturating_sub_unsigned(layout.size()));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Runs a case under a bound and returns the most bytes that it held at once.
pub(crate) fn within(bound: usize, case: &'static str, run: impl FnOnce()) -> usize {
    let before = HELD.get();
    CASE.set(case);
    PEAK.set(before);
    BOUND.set(before.saturating_add_unsigned(bound));
    run();
    BOUND.set(isize::MAX);
    usize::try_from(PEAK.get() - before).unwrap_or(0)
}
