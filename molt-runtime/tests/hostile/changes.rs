//! Small changes of a seed, always the same ones: cut off, bits turned over, lengths blown up, parts twice.

/// A length that no machine has.
const HUGE: u64 = 1 << 60;

/// Splitmix64: plain, and the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % bound.max(1) as u64).unwrap_or(0)
    }
}

/// Gives `try_it` about `4 * each` changes of a seed.
pub(crate) fn of(seed: &[u8], each: usize, mut try_it: impl FnMut(&[u8])) {
    let mut numbers = Numbers(seed.len() as u64);
    for cut in (0..seed.len()).step_by(seed.len().div_ceil(each).max(1)) {
        try_it(&seed[..cut]);
    }
    for round in 0..each {
        let mut changed = seed.to_vec();
        for _ in 0..=round % 3 {
            let at = numbers.below(seed.len());
            changed.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << (round % 8));
        }
        try_it(&changed);
    }
    for round in 0..each {
        let at = numbers.below(seed.len().saturating_sub(8));
        let mut changed = seed.to_vec();
        let length = if round % 2 == 0 { HUGE.to_le_bytes() } else { u64::MAX.to_le_bytes() };
        if let Some(place) = changed.get_mut(at..at + 8) {
            place.copy_from_slice(&length);
            try_it(&changed);
        }
    }
    // A number as it is written in text.
    let digits: Vec<usize> = (0..seed.len())
        .filter(|at| {
            seed[*at].is_ascii_digit() && !at.checked_sub(1).is_some_and(|before| seed[before].is_ascii_digit())
        })
        .collect();
    for at in digits.iter().step_by(digits.len().div_ceil(each).max(1)) {
        let end = seed[*at..].iter().position(|byte| !byte.is_ascii_digit()).map_or(seed.len(), |length| at + length);
        for number in [HUGE.to_string(), "-1".to_owned(), "1e400".to_owned(), "18446744073709551615".to_owned()] {
            try_it(&[&seed[..*at], number.as_bytes(), &seed[end..]].concat());
        }
    }
    for _ in 0..each / 4 {
        let (from, to) = (numbers.below(seed.len()), numbers.below(seed.len()));
        let part = &seed[from.min(to)..from.max(to)];
        try_it(&[&seed[..from], part, &seed[from..]].concat());
    }
}
