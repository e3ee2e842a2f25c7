//! Who steps, and how far.
//!
//! - Foreground sequences that decode step every round.
//! - Batch sequences that decode share by the weights of their *tenants*: with `k` decoding sequences and weight `w`,
//!   the tenant with the largest `w / k` steps all its sequences every round, and every other tenant gets tokens in
//!   proportion to its weight. Each sequence keeps a credit and steps when it has a whole token; rounding loses less
//!   than 2^-16 of a token a round, so after `n` rounds two tenants' tokens stand as their weights to within
//!   `k (1 + n / 65536)` tokens.
//! - Prompts share one allowance of tokens a round: [`Config::chunk`](crate::Config::chunk) while anybody decodes,
//!   [`Config::chunk_alone`](crate::Config::chunk_alone) otherwise. A quarter of it goes round in equal slices of at
//!   least one token, so that no prompt stands still behind another; the rest goes to the foreground by weights, and
//!   what the foreground does not need goes to batch by weights.
//! - A chunk is cut to the memory there is, but never below one token: that one the levers have made room for.

use crate::input::Class;
use crate::plan::{Plan, Step};
use crate::round::Scratch;
use crate::scheduler::Scheduler;
use crate::state::{Phase, Sequence};
use crate::transition::Frame;
use crate::units::Tokens;
use crate::usage::{Books, Horizon};

/// A whole token of credit.
pub(crate) const ONE_TOKEN: u32 = 1 << 16;

pub(crate) fn plan(scheduler: &mut Scheduler, frame: &Frame, books: &Books, scratch: &mut Scratch, plan: &mut Plan) {
    if books.running() == 0 {
        return;
    }
    let decoding = decode(scheduler, scratch, plan);
    let config = &scheduler.config;
    let allowance = if decoding { config.chunk } else { config.chunk_alone };
    prefill(scheduler, frame, books, allowance.get().max(1), plan);
}

fn decodes(sequence: &Sequence) -> bool {
    matches!(sequence.phase, Phase::Running { .. }) && sequence.prompt_left == Tokens::ZERO
}

fn reads(sequence: &Sequence) -> bool {
    matches!(sequence.phase, Phase::Running { .. }) && sequence.prompt_left > Tokens::ZERO
}

/// Plans decode steps; whether anybody decodes, be it in this round or not.
fn decode(scheduler: &mut Scheduler, scratch: &mut Scratch, plan: &mut Plan) -> bool {
    // Decoding batch sequences of each tenant, by slot.
    let counts = &mut scratch.counts;
    counts.clear();
    counts.resize(scheduler.tenants.width(), 0);
    for sequence in scheduler.sequences.iter().filter(|sequence| sequence.class == Class::Batch && decodes(sequence)) {
        if let Some(count) = counts.get_mut(sequence.tenant.slot()) {
            *count += 1;
        }
    }
    let of = |counts: &[u64], sequence: &Sequence| counts.get(sequence.tenant.slot()).copied().unwrap_or(1).max(1);
    // The tenant with the largest w / k, as a fraction: a / b > c / d as a d > c b.
    let mut lead = (0u64, 1u64);
    for sequence in scheduler.sequences.iter().filter(|sequence| sequence.class == Class::Batch && decodes(sequence)) {
        let own = (sequence.weight, of(counts, sequence));
        if own.0.saturating_mul(lead.1) > lead.0.saturating_mul(own.1) {
            lead = own;
        }
    }
    let mut anybody = false;
    for class in Scheduler::CLASSES {
        for sequence in scheduler.sequences.iter_mut() {
            if sequence.class != class || !decodes(sequence) {
                continue;
            }
            let Phase::Running { rung } = sequence.phase else { continue };
            anybody = true;
            if class == Class::Batch {
                let (above, below) = (sequence.weight.saturating_mul(lead.1), lead.0 * of(counts, sequence));
                let earned = above.saturating_mul(u64::from(ONE_TOKEN)).checked_div(below).unwrap_or(0);
                let earned = u32::try_from(earned).unwrap_or(ONE_TOKEN).min(ONE_TOKEN);
                sequence.credit = sequence.credit.saturating_add(earned).min(2 * ONE_TOKEN);
                if sequence.credit < ONE_TOKEN {
                    continue;
                }
                sequence.credit -= ONE_TOKEN;
            }
            plan.steps.push(Step { sequence: sequence.id, rung, tokens: Tokens::new(1), prefill: false });
        }
    }
    anybody
}

/// Plans prompt chunks.
fn prefill(scheduler: &Scheduler, frame: &Frame, books: &Books, allowance: u64, plan: &mut Plan) {
    let readers = |class: Class| scheduler.sequences.iter().filter(move |found| found.class == class && reads(found));
    let total =
        |class: Class| readers(class).fold((0u64, 0u64), |(count, weight), found| (count + 1, weight + found.weight));
    let ((foreground, heavy), (batch, light)) = (total(Class::Foreground), total(Class::Batch));
    let count = foreground + batch;
    if count == 0 {
        return;
    }
    let slice = (allowance / 4 / count).max(1);
    let first = plan.steps.len();
    let mut rest = allowance;
    for class in Scheduler::CLASSES {
        for found in readers(class) {
            let Phase::Running { rung } = found.phase else { continue };
            let tokens = slice.min(found.prompt_left.get());
            rest = rest.saturating_sub(tokens);
            plan.steps.push(Step { sequence: found.id, rung, tokens: Tokens::new(tokens), prefill: true });
        }
    }
    // By weights within the class, then whatever that left over in order.
    for (class, weights) in [(Class::Foreground, heavy), (Class::Batch, light)] {
        let share = rest;
        for by_weight in [true, false] {
            for step in plan.steps.iter_mut().skip(first) {
                let Some(found) = scheduler.sequences.get(step.sequence.parts()) else { continue };
                if found.class != class {
                    continue;
                }
                let part =
                    if by_weight { share.saturating_mul(found.weight).checked_div(weights).unwrap_or(0) } else { rest };
                let more = part.min(rest).min((found.prompt_left - step.tokens).get());
                step.tokens += Tokens::new(more);
                rest -= more;
            }
        }
    }
    // Room beyond the one token each that the levers made sure of.
    let needs = books.needs(&scheduler.ladder, Horizon::Step);
    let mut room = frame.limit - needs;
    for step in plan.steps.iter_mut().skip(first) {
        let each = scheduler.ladder.cost(step.rung).cache_per_token;
        let more = step.tokens - Tokens::new(1);
        let fits = room.get().checked_div(each.get()).map_or(more, |fits| more.min(Tokens::new(fits)));
        step.tokens = Tokens::new(1) + fits;
        room -= each.times(fits);
    }
}
