//! The books against what the system says is resident, through everything that an engine does with memory. One test in a
//! process of its own: what another test holds would be counted too.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use common::Run;
use molt_runtime::event::{Event, Switch};
use molt_runtime::memory::Resident;
use molt_scheduler::LeverKind;
use molt_scheduler::units::{Bytes, RungIdx};

/// What is on the heap beside the books, and grows with nothing: tokens of conversations, candidates of a choice,
/// attention's tiles and the stacks of threads.
const BESIDE: Bytes = Bytes::mib(3);
/// What the books may be off beside that: one in so many.
const SHARE: u64 = 20;
/// Heap that may come and go between two looks at the same state.
const GROWTH: Bytes = Bytes::mib(1);
const CYCLES: usize = 50;

#[test]
fn books_and_resident_set_agree_and_fifty_cycles_leave_nothing() {
    let mut run = Run::new();
    let start = Resident::now().unwrap();
    let books = run.engine.books();
    let check = |books: &molt_runtime::sampler::Books, overhead: Bytes, state: &str| {
        let now = Resident::now().unwrap();
        // Clean pages of files come and go as the system likes; they are compared only from above.
        let (said, found) = (books.usage() - overhead - books.files(), now.anonymous - start.anonymous);
        let (share, unused) = (Bytes::new(said.get() / SHARE), books.scratch());
        assert!(
            found <= said + share + BESIDE && said <= found + share + BESIDE + unused,
            "{state}: the books hold {said} that is no file's, {unused} of them room for passes, and {found} are resident"
        );
        let files = (now.rss - now.anonymous) - (start.rss - start.anonymous);
        assert!(files <= books.files() + BESIDE, "{state}: {files} of files, {} in the books", books.files());
        found
    };
    let overhead = run.engine.overhead();
    let (full, middle, small) = (Bytes::mib(512), run.holds(RungIdx::new(1)), run.holds(RungIdx::new(2)));
    let token = |event: &Event| matches!(event, Event::Token { .. });
    let switched = |to: u8| move |event: &Event| matches!(event, Event::Switch(Switch { to: rung, .. }) if *rung == RungIdx::new(to));
    let lever = |wanted: LeverKind| move |event: &Event| matches!(event, Event::Lever { kind, .. } if *kind == wanted);
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for cycle in 0..CYCLES {
        let sequence = run.ask(150);
        let mut found = Vec::new();
        let mut look = |run: &Run, state: &str| {
            found.push((state.to_owned(), check(&run.engine.books(), overhead, &format!("cycle {cycle}, {state}"))));
        };
        run.until(full, "a token", token);
        look(&run, "on the biggest rung");
        run.until(middle, "the way down to the middle", switched(1));
        look(&run, "on the middle rung");
        run.until(small, "the way down to the smallest", switched(2));
        look(&run, "on the smallest rung");
        run.until(full, "the way up", switched(0));
        look(&run, "up again");
        run.until(overhead + Bytes::mib(1), "parking", lever(LeverKind::Park));
        look(&run, "parked");
        run.until(overhead + Bytes::new(64 << 10), "shedding", lever(LeverKind::Shed));
        look(&run, "shed");
        run.until(full, "going on", token);
        while run.engine.has(sequence) {
            run.round(full);
        }
        run.round(overhead);
        look(&run, "nobody there");
        assert_eq!(books.usage(), overhead, "everything is given back");
        if cycle == 4 {
            first = found;
        } else {
            last = found;
        }
    }
    for ((state, first), (_, last)) in first.into_iter().zip(last) {
        assert!(last <= first + GROWTH, "{state}: {first} after five cycles, {last} after {CYCLES}");
    }
    // What grammars are made from comes with the first of them, lies on the heap, and stays.
    let before = Resident::now().unwrap().anonymous;
    let tables = run.ladder.grammars().unwrap().bytes();
    run.round(overhead);
    assert!(tables > Bytes::ZERO);
    assert_eq!((books.usage(), books.by_kind().tables_bytes), (overhead + tables, tables));
    let found = Resident::now().unwrap().anonymous - before;
    assert!(found <= tables + GROWTH, "{tables} in the books, {found} resident");
}
