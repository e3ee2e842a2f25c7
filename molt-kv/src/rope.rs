//! Rotary position embedding (RoFormer, arXiv 2104.09864), forwards and back.
//!
//! Keys are cached after rotation. A linear map between two models must stand between the un-rotation at the source's
//! angles and the rotation at the destination's: two models with different head widths rotate by different angles.

use parking_lot::RwLock;

/// Which components of a head rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Component `i` with `i + head_dim / 2`: Qwen2, and GPT-NeoX before it.
    Halves,
    /// Component `2 i` with `2 i + 1`: Llama files as llama.cpp permutes them.
    Neighbours,
}

/// The rotation of one model: frequency `base^(-2 i / head_dim)` for pair `i`.
#[derive(Debug)]
pub struct Rope {
    head_dim: usize,
    pairing: RopePairing,
    frequencies: Vec<f64>,
    /// Cosines and sines of all pairs, position after position; grown as positions are asked for.
    table: RwLock<Vec<(f32, f32)>>,
}

/// Which way to turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// As the model does when it caches a key.
    Forward,
    /// Back to the key as it left the projection.
    Back,
}

impl Rope {
    /// The rotation of heads of `head_dim` components (even) with that base.
    pub fn new(head_dim: usize, base: f32, pairing: RopePairing) -> Self {
        let frequencies = (0..head_dim / 2).map(|i| f64::from(base).powf(-2.0 * i as f64 / head_dim as f64)).collect();
        Self { head_dim, pairing, frequencies, table: RwLock::default() }
    }

    /// Turns every head in `heads` (`[n, head_dim]`, all of one token) by the angles of `position`.
    pub fn turn(&self, heads: &mut [f32], position: u32, turn: Turn) {
        let half = self.head_dim / 2;
        let at = position as usize * half;
        self.ensure(at + half);
        let table = self.table.read();
        let angles = &table[at..at + half];
        for head in heads.chunks_exact_mut(self.head_dim) {
            match self.pairing {
                RopePairing::Halves => {
                    let (first, second) = head.split_at_mut(half);
                    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                        turn_pair(a, b, *cos, *sin, turn);
                    }
                }
                RopePairing::Neighbours => {
                    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
                        let (a, b) = pair.split_at_mut(1);
                        turn_pair(&mut a[0], &mut b[0], *cos, *sin, turn);
                    }
                }
            }
        }
    }

    fn ensure(&self, entries: usize) {
        if self.table.read().len() >= entries {
            return;
        }
        let mut table = self.table.write();
        let half = self.frequencies.len();
        while table.len() < entries {
            // Angles in f64: at position 30,000 an f32 angle is already off by a thousandth of a radian.
            let position = (table.len() / half) as f64;
            table.extend(self.frequencies.iter().map(|f| {
                let (sin, cos) = (position * f).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
                (cos as f32, sin as f32)
            }));
        }
    }
}

#[inline(always)]
fn turn_pair(a: &mut f32, b: &mut f32, cos: f32, sin: f32, turn: Turn) {
    let sin = if turn == Turn::Forward { sin } else { -sin };
    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn there_and_back_is_the_identity(
            head in prop::collection::vec(-8.0f32..8.0, 64),
            position in 0u32..40_000,
            base in 1e3f32..1e6,
            halves: bool,
        ) {
            let pairing = if halves { RopePairing::Halves } else { RopePairing::Neighbours };
            let rope = Rope::new(64, base, pairing);
            let mut turned = head.clone();
            rope.turn(&mut turned, position, Turn::Forward);
            let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            prop_assert!((norm(&turned) - norm(&head)).abs() <= 1e-4 * norm(&head).max(1.0), "a rotation keeps the norm");
            rope.turn(&mut turned, position, Turn::Back);
            for (a, b) in head.iter().zip(&turned) {
                prop_assert!((a - b).abs() < 1e-5, "{a} came back as {b}");
            }
        }

        #[test]
        fn scores_depend_on_the_distance_only(
            q in prop::collection::vec(-2.0f32..2.0, 32),
            k in prop::collection::vec(-2.0f32..2.0, 32),
            near in 0u32..500,
            shift in 0u32..500,
        ) {
            let rope = Rope::new(32, 10_000.0, RopePairing::Halves);
            let score = |offset: u32| {
                let (mut q, mut k) = (q.clone(), k.clone());
                rope.turn(&mut q, offset + near, Turn::Forward);
                rope.turn(&mut k, offset, Turn::Forward);
                q.iter().zip(&k).map(|(a, b)| a * b).sum::<f32>()
            };
            prop_assert!((score(0) - score(shift)).abs() < 2e-3);
        }
    }
}
