//! The ways back, in rounds in which everything fits: unpark, then admit, then promote.
//!
//! All of them see idle weights as free memory, and none of them ever makes a lever necessary in the same round: what
//! starts again or goes up must fit with its near growth, and the transition must stay within the limit.

mod admit;
mod promote;
mod unpark;

use crate::plan::Prospect;
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::Sequence;
use crate::transition::Frame;
use crate::units::{Bytes, RungIdx, Span, Time};
use crate::usage::Books;

/// How often [`Config::patience`](crate::Config::patience) must have passed until a floor gives way: waiting without
/// end is what a floor does not mean.
const FLOOR_PATIENCES: u64 = 8;

pub(crate) fn climb(
    scheduler: &mut Scheduler,
    frame: &Frame,
    books: &mut Books,
    scratch: &mut Scratch,
    prospects: &mut Vec<Prospect>,
) {
    let parked = unpark::unpark(scheduler, frame, books, scratch);
    admit::admit(scheduler, frame, books, scratch, parked);
    promote::promote(scheduler, frame, books, scratch, prospects);
}

/// Whether that long has passed since then.
fn lasted(since: Time, now: Time, span: Span) -> bool {
    now.since(since) >= span
}

/// The smallest rung that a sequence takes after having waited since then.
fn floor(scheduler: &Scheduler, frame: &Frame, sequence: &Sequence, since: Time) -> RungIdx {
    let patience = scheduler.config.patience.micros().saturating_mul(FLOOR_PATIENCES);
    if lasted(since, frame.now, Span::from_micros(patience)) { scheduler.ladder.bottom() } else { sequence.floor }
}

/// What is left of a limit once the headroom that a step up must leave is taken off.
fn below_headroom(scheduler: &Scheduler, limit: Bytes) -> Bytes {
    let kept = u64::from(100u8.saturating_sub(scheduler.config.headroom_percent));
    Bytes::new((limit.get() / 100).saturating_mul(kept))
}
