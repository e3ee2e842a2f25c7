//! Runs every model. Where one fails, `LOOM_LOG=1 LOOM_LOCATION=1` says in which order.

use molt_interleavings::models;

macro_rules! run {
    ($($model:ident),+ $(,)?) => {
        $(#[test]
        fn $model() {
            models::$model();
        })+
    };
}

run!(
    the_books_balance,
    no_peak_is_lost,
    no_interruption_is_lost,
    what_a_round_answers_does_not_hide_less,
    when_it_rang_is_told_once,
);
