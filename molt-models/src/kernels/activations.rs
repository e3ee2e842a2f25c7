//! Inputs of a dot product, rounded to 8 bits: 32 values share a scale.

use crate::kernels::format::RUN;

/// Rows of inputs as signed bytes, each run of 32 with its scale and its sum.
#[derive(Debug, Default)]
pub(super) struct Activations {
    columns: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
    /// Scale times the sum of the run's bytes: what an offset of the weights is multiplied with.
    sums: Vec<f32>,
}

/// One row of [`Activations`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ActivationRow<'a> {
    pub(super) quants: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [f32],
}

impl Activations {
    /// Rounds rows of `columns` values (a multiple of 32).
    pub(super) fn new(input: &[f32], columns: usize) -> Self {
        let mut own = Self { columns, ..Self::default() };
        own.quants.reserve(input.len());
        for run in input.chunks_exact(RUN) {
            let largest = run.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let mut sum = 0i32;
            for value in run {
                #[expect(clippy::cast_possible_truncation, reason = "at most 127 by construction")]
                let rounded = (value * inverse).round_ties_even() as i8;
                own.quants.push(rounded);
                sum += i32::from(rounded);
            }
            let scale = largest / 127.0;
            own.scales.push(scale);
            own.sums.push(scale * sum as f32);
        }
        own
    }

    /// The rows.
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = ActivationRow<'_>> + Clone {
        let runs = self.columns / RUN;
        (0..self.quants.len() / self.columns).map(move |r| ActivationRow {
            quants: &self.quants[r * self.columns..(r + 1) * self.columns],
            scales: &self.scales[r * runs..(r + 1) * runs],
            sums: &self.sums[r * runs..(r + 1) * runs],
        })
    }
}
