//! What must hold in every interleaving.

use loom::thread;
use molt_scheduler::units::Bytes;

use crate::alarm::Alarm;
use crate::budget::operator::OperatorBudget;
use crate::ledger::{Kind, Ledger};

/// Two threads charge the books and give back; a third may look on. In the end the books are empty, and no look has seen more than
/// was ever there at once.
pub fn the_books_balance() {
    loom::model(|| {
        let books = Ledger::new();
        let user = |kind: Kind, bytes: u64| {
            let books = books.clone();
            thread::spawn(move || {
                books.charge(kind, bytes);
                books.give_back(kind, bytes);
            })
        };
        let users = [user(Kind::Cache, 3), user(Kind::Scratch, 5)];
        let seen = books.total();
        assert!([0, 3, 5, 8].contains(&seen.get()), "{seen} were never in use");
        users.into_iter().for_each(|user| user.join().expect("it ends"));
        assert_eq!(books.total(), Bytes::ZERO);
        assert!(Kind::ALL.iter().all(|kind| books.used(*kind) == Bytes::ZERO));
        let peak = books.take_peak();
        assert!([5, 8].contains(&peak.get()), "{peak} was not the most");
    });
}

/// Somebody asks for the peak while memory is charged. What stays in use is in this peak or in the next one, and never in
/// none.
pub fn no_peak_is_lost() {
    loom::model(|| {
        let books = Ledger::new();
        let user = {
            let books = books.clone();
            thread::spawn(move || books.charge(Kind::Cache, 7))
        };
        let first = books.take_peak();
        user.join().expect("it ends");
        let second = books.take_peak();
        assert!([0, 7].contains(&first.get()), "{first}");
        assert_eq!(second, Bytes::new(7), "after {first}: it was in use all the time");
    });
}

/// An operator sets a budget that does not hold what is used while the engine begins a round. Either the round has the new
/// budget, or what it is at is interrupted: one that knows the old budget never runs on with the flag down.
pub fn no_interruption_is_lost() {
    loom::model(|| {
        let alarm = Alarm::default();
        alarm.note(Bytes::new(100));
        let budget = OperatorBudget::new(Bytes::new(200), alarm.clone());
        let operator = {
            let budget = budget.clone();
            thread::spawn(move || budget.set(Bytes::new(50)))
        };
        // As `Run::until_stopped` begins a round.
        alarm.forget();
        let known = budget.get();
        operator.join().expect("it ends");
        assert!(known == Bytes::new(50) || alarm.flag().is_up(), "{known} is gone on with, and nobody interrupts");
    });
}

/// The same while the round before has not ended: it answers a budget, and what it answers is no news to it.
pub fn what_a_round_answers_does_not_hide_less() {
    loom::model(|| {
        let alarm = Alarm::default();
        alarm.note(Bytes::new(100));
        let budget = OperatorBudget::new(Bytes::new(80), alarm.clone());
        let operator = {
            let budget = budget.clone();
            thread::spawn(move || budget.set(Bytes::new(50)))
        };
        alarm.answer(Some(Bytes::new(80)));
        alarm.answer(None);
        alarm.forget();
        let known = budget.get();
        operator.join().expect("it ends");
        assert!(known == Bytes::new(50) || alarm.flag().is_up(), "{known} is gone on with, and nobody interrupts");
    });
}

/// A ring while a round begins: when it rang is told by that round or by the next, and once.
pub fn when_it_rang_is_told_once() {
    loom::model(|| {
        let alarm = Alarm::default();
        alarm.note(Bytes::new(100));
        let ringer = {
            let alarm = alarm.clone();
            thread::spawn(move || alarm.ring_if_over(Bytes::new(50)))
        };
        alarm.forget();
        let first = alarm.heard();
        assert_eq!(alarm.heard(), None, "told twice");
        ringer.join().expect("it ends");
        alarm.forget();
        let second = alarm.heard();
        assert!(first.is_some() != second.is_some(), "told {first:?} and {second:?}");
        assert!(!alarm.flag().is_up());
    });
}
