//! Which slots are read natively after a carry because those that come last look at them, and how they are cut into chunks.

use std::ops::Range;

/// Stretches cut so that no chunk holds more than `limit` slots.
pub(crate) fn chunks_of(stretches: &[Range<usize>], limit: usize) -> Vec<Vec<Range<usize>>> {
    let mut chunks: Vec<Vec<Range<usize>>> = Vec::new();
    let mut room = 0;
    for stretch in stretches.iter().filter(|stretch| !stretch.is_empty()) {
        let mut start = stretch.start;
        while start < stretch.end {
            if room == 0 {
                chunks.push(Vec::new());
                room = limit.max(1);
            }
            let end = stretch.end.min(start + room);
            room -= end - start;
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(start..end);
            }
            start = end;
        }
    }
    chunks
}

/// The `count` slots from `first` on that got most attention, in order and joined where they touch.
pub(crate) fn most_looked_at(received: &[f32], first: usize, count: usize) -> Vec<Range<usize>> {
    let mut slots: Vec<usize> = (0..received.len()).collect();
    slots.sort_by(|a, b| received[*b].total_cmp(&received[*a]));
    slots.truncate(count);
    slots.sort_unstable();
    let mut stretches: Vec<Range<usize>> = Vec::new();
    for slot in slots.into_iter().map(|slot| first + slot) {
        match stretches.last_mut() {
            Some(last) if last.end == slot => last.end += 1,
            _ => stretches.push(slot..slot + 1),
        }
    }
    stretches
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    #[test]
    fn the_most_looked_at_are_joined_in_order() {
        let check = |received: &[f32], count, expected: &[Range<usize>]| {
            assert_eq!(most_looked_at(received, 10, count), expected, "{count} of {received:?}");
        };
        check(&[0.5, 0.1, 0.4, 0.3, 0.2], 3, &[10..11, 12..14]);
        check(&[0.1, 0.2, 0.3], 3, &[10..13]);
        // Of equals the first.
        check(&[0.2, 0.2, 0.2], 2, &[10..12]);
        check(&[0.2], 0, &[]);
        check(&[], 4, &[]);
    }

    #[test]
    fn chunks_hold_what_fits_and_lose_nothing() {
        let check = |stretches: &[Range<usize>], limit, expected: &[&[Range<usize>]]| {
            assert_eq!(chunks_of(stretches, limit), expected, "{stretches:?} at {limit}");
        };
        check(&[0..3, 5..6], 8, &[&[0..3, 5..6]]);
        check(&[0..3, 5..9], 4, &[&[0..3, 5..6], &[6..9]]);
        check(&[2..12], 4, &[&[2..6], &[6..10], &[10..12]]);
        check(&[4..4], 4, &[]);
    }
}
