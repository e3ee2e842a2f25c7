//! Fitting a bridge: ridge regression on Gram matrices that are gathered window by window, so that memory does not
//! grow with the calibration text.

use std::ops::Range;
use std::path::{Path, PathBuf};

use faer::linalg::solvers::Solve as _;
use faer::{Mat, Side};
use rayon::prelude::*;

use crate::blocks::{BLOCK, BLOCK_BYTES, dequantize_row};
use crate::bridge::features::{features, keys_and_values, normalise};
use crate::bridge::file::{Bridge, BridgeError, Parts};
use crate::bridge::spec::{BridgeSpec, Residual};
use crate::cache::KvCache;
use crate::gemm::{MatrixRef, Threads, multiply};
use crate::rope::Rope;

mod kept;

/// Why a fit failed.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// Too little text.
    #[error("{rows} calibration tokens are too few for maps of {inputs} inputs; give at least {inputs}")]
    TooFewRows {
        /// Tokens seen.
        rows: u64,
        /// Inputs of the widest map.
        inputs: usize,
    },
    /// The normal equations have no solution.
    #[error("the normal equations of layer {layer} are singular at regularisation {lambda}")]
    Singular {
        /// The destination layer.
        layer: usize,
        /// The ridge.
        lambda: f64,
    },
    /// What has been read cannot be kept, or what was kept cannot be read.
    #[error("the sums of the fit in {}", path.display())]
    Keep {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// What was kept is of no use.
    #[error("{} cannot be gone on from: it {reason}; delete it to fit from the beginning", path.display())]
    Resume {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The result cannot be written.
    #[error(transparent)]
    Write(#[from] BridgeError),
}

/// What one window of text shows: features and what should come out.
#[derive(Debug)]
pub struct Sample {
    rows: usize,
    /// `[rows, spec.features()]`
    features: Vec<f32>,
    /// `[rows, mapped layers * spec.outputs()]`
    targets: Vec<f32>,
}

impl Sample {
    /// Reads `slots` of a window that both models have read natively; `hidden [slots, width]` left the destination's
    /// native layers.
    pub fn new(
        spec: &BridgeSpec,
        source: (&KvCache, &Rope),
        destination: (&KvCache, &Rope),
        hidden: &[f32],
        slots: Range<usize>,
    ) -> Self {
        let rows = slots.len();
        let (layers, outputs) = (spec.mapped_layers(), spec.outputs());
        let mut targets = vec![0.0; rows * layers.len() * outputs];
        targets.par_chunks_mut(layers.len() * outputs).zip(slots.clone()).for_each(|(row, slot)| {
            for (out, layer) in row.chunks_exact_mut(outputs).zip(layers.clone()) {
                keys_and_values(destination.0, destination.1, layer, slot, out);
            }
        });
        let mut inputs = vec![0.0; rows * spec.features()];
        features(spec, source.0, source.1, slots, hidden, &mut inputs);
        Self { rows, features: inputs, targets }
    }
}

/// Sums over all windows so far.
#[derive(Debug)]
pub struct BridgeFit {
    spec: BridgeSpec,
    rows: u64,
    /// The first window's mean, subtracted from all features before they are squared, for the sake of f32.
    shift: Vec<f32>,
    target_shift: Vec<f32>,
    feature_sum: Vec<f64>,
    target_sum: Vec<f64>,
    /// For pairs of feature groups that some map reads together: `X_i^T X_j`.
    grams: Vec<Product>,
    /// For each mapped layer and each group that feeds it: `X_i^T Y_layer`.
    crosses: Vec<Product>,
}

/// `X[:, left]^T Z[:, right]`, summed.
#[derive(Debug)]
struct Product {
    left: Range<usize>,
    right: Range<usize>,
    sum: Vec<f64>,
}

impl Product {
    fn new(left: Range<usize>, right: Range<usize>) -> Self {
        let sum = vec![0.0; left.len() * right.len()];
        Self { left, right, sum }
    }

    fn add(&mut self, x: &[f32], x_width: usize, z: &[f32], z_width: usize, rows: usize) {
        let mut product = vec![0.0; self.sum.len()];
        let left = MatrixRef::strided(&x[self.left.start..], rows, self.left.len(), x_width, 1);
        let right = MatrixRef::strided(&z[self.right.start..], rows, self.right.len(), z_width, 1);
        multiply(left.t(), right, &mut product, self.right.len(), Threads::One);
        for (sum, value) in self.sum.iter_mut().zip(&product) {
            *sum += f64::from(*value);
        }
    }
}

impl BridgeFit {
    /// Empty sums for maps of that frame.
    pub fn new(spec: BridgeSpec) -> Self {
        let group = |g: usize| {
            let start = g * spec.group_width();
            let width = if g == spec.source_shape.layers { spec.destination_width } else { spec.group_width() };
            start..start + width
        };
        let hidden = spec.source_shape.layers;
        let mut pairs = std::collections::BTreeSet::new();
        let mut crosses = Vec::new();
        for (index, layer) in spec.mapped_layers().enumerate() {
            let groups: Vec<usize> = spec.source_layers(layer).chain([hidden]).collect();
            let outputs = index * spec.outputs()..(index + 1) * spec.outputs();
            for (at, i) in groups.iter().enumerate() {
                pairs.extend(groups[at..].iter().map(|j| (*i, *j)));
                crosses.push(Product::new(group(*i), outputs.clone()));
            }
        }
        let grams = pairs.into_iter().map(|(i, j)| Product::new(group(i), group(j))).collect();
        let targets = spec.mapped_layers().len() * spec.outputs();
        Self {
            rows: 0,
            shift: Vec::new(),
            target_shift: Vec::new(),
            feature_sum: vec![0.0; spec.features()],
            target_sum: vec![0.0; targets],
            grams,
            crosses,
            spec,
        }
    }

    /// The frame.
    pub fn spec(&self) -> &BridgeSpec {
        &self.spec
    }

    /// Adds a window.
    pub fn add(&mut self, mut sample: Sample) {
        let (width, targets) = (self.spec.features(), self.target_sum.len());
        if self.rows == 0 {
            self.shift = column_means(&sample.features, width);
            self.target_shift = column_means(&sample.targets, targets);
        }
        subtract(&mut sample.features, &self.shift);
        subtract(&mut sample.targets, &self.target_shift);
        add_columns(&mut self.feature_sum, &sample.features);
        add_columns(&mut self.target_sum, &sample.targets);
        let (x, y) = (&sample.features, &sample.targets);
        self.grams.par_iter_mut().for_each(|p| p.add(x, width, x, width, sample.rows));
        self.crosses.par_iter_mut().for_each(|p| p.add(x, width, y, targets, sample.rows));
        self.rows += sample.rows as u64;
    }

    /// Solves for the maps. Of the regularisations given (in shares of the mean diagonal), each layer takes the one
    /// with the least error on `validation`; the residuals that the bridge carries are measured on `held_out`.
    pub fn finish(mut self, lambdas: &[f64], validation: &[Sample], held_out: &[Sample]) -> Result<Fitted, FitError> {
        let widest = self.spec.mapped_layers().map(|l| self.spec.inputs(l)).max().unwrap_or(0);
        if self.rows < widest as u64 {
            return Err(FitError::TooFewRows { rows: self.rows, inputs: widest });
        }
        let n = self.rows as f64;
        let mut inverse_scale = vec![1.0f64; self.spec.features()];
        for product in self.grams.iter().filter(|p| p.left == p.right) {
            for (at, feature) in product.left.clone().enumerate() {
                let mean = self.feature_sum[feature] / n;
                let variance = product.sum[at * product.right.len() + at] / n - mean * mean;
                inverse_scale[feature] = 1.0 / variance.max(1e-10).sqrt();
            }
        }
        let mean: Vec<f32> = self.feature_sum.iter().zip(&self.shift).map(|(s, m)| narrow(s / n) + m).collect();
        let narrow_scale: Vec<f32> = inverse_scale.iter().map(|s| narrow(*s)).collect();
        let mut maps = Vec::new();
        for (index, layer) in self.spec.mapped_layers().enumerate() {
            let mut best: Option<(f64, Vec<f32>)> = None;
            let (gram, cross) = self.normal_equations(index, layer, &inverse_scale);
            let bias: Vec<f32> = (0..self.spec.outputs())
                .map(|o| index * self.spec.outputs() + o)
                .map(|o| narrow(self.target_sum[o] / n) + self.target_shift[o])
                .collect();
            for lambda in lambdas {
                let weight = solve(&gram, &cross, lambda * n).ok_or(FitError::Singular { layer, lambda: *lambda })?;
                let (k, v) = self.error(index, layer, (&mean, &narrow_scale), (&weight, &bias), validation);
                if best.as_ref().is_none_or(|(error, _)| k + v < *error) {
                    best = Some((k + v, weight));
                }
            }
            let (_, weight) = best.ok_or(FitError::Singular { layer, lambda: 0.0 })?;
            let (keys, values) = self.error(index, layer, (&mean, &narrow_scale), (&weight, &bias), held_out);
            self.spec.residuals.push(Residual { layer, keys, values });
            maps.push((weight, bias));
        }
        self.spec.calibration_tokens = self.rows;
        Ok(Fitted(Parts { spec: self.spec, mean, inverse_scale: narrow_scale, maps }))
    }

    /// Centred, scaled `X^T X [inputs, inputs]` and `X^T Y [inputs, outputs]` of one layer.
    fn normal_equations(&self, index: usize, layer: usize, inverse_scale: &[f64]) -> (Mat<f64>, Mat<f64>) {
        let (inputs, outputs) = (self.spec.inputs(layer), self.spec.outputs());
        let ranges = self.spec.input_ranges(layer);
        // Where a feature stands among this layer's inputs.
        let place = |feature: usize| match ranges[0].contains(&feature) {
            true => feature - ranges[0].start,
            false => ranges[0].len() + feature - ranges[1].start,
        };
        let uses = |range: &Range<usize>| ranges.iter().any(|r| r.contains(&range.start));
        let n = self.rows as f64;
        let mut gram = Mat::<f64>::zeros(inputs, inputs);
        for p in self.grams.iter().filter(|p| uses(&p.left) && uses(&p.right)) {
            for (a, i) in p.left.clone().enumerate() {
                for (b, j) in p.right.clone().enumerate() {
                    let centred = p.sum[a * p.right.len() + b] - self.feature_sum[i] * self.feature_sum[j] / n;
                    let value = centred * inverse_scale[i] * inverse_scale[j];
                    gram[(place(i), place(j))] = value;
                    gram[(place(j), place(i))] = value;
                }
            }
        }
        let mut cross = Mat::<f64>::zeros(inputs, outputs);
        let own = index * outputs..(index + 1) * outputs;
        for p in self.crosses.iter().filter(|p| p.right == own) {
            for (a, i) in p.left.clone().enumerate() {
                for (b, o) in own.clone().enumerate() {
                    let centred = p.sum[a * outputs + b] - self.feature_sum[i] * self.target_sum[o] / n;
                    cross[(place(i), b)] = centred * inverse_scale[i];
                }
            }
        }
        (gram, cross)
    }

    /// Relative root-mean-square errors of keys and values.
    fn error(
        &self,
        index: usize,
        layer: usize,
        (mean, inverse_scale): (&[f32], &[f32]),
        (weight, bias): (&[f32], &[f32]),
        samples: &[Sample],
    ) -> (f64, f64) {
        let (inputs, outputs, width) = (self.spec.inputs(layer), self.spec.outputs(), self.spec.features());
        let (mut error, mut total) = ([0.0f64; 2], [0.0f64; 2]);
        for sample in samples {
            let mut x = Vec::with_capacity(sample.rows * inputs);
            for row in sample.features.chunks_exact(width) {
                for range in self.spec.input_ranges(layer) {
                    x.extend(range.map(|i| (row[i] - mean[i]) * inverse_scale[i]));
                }
            }
            let mut y = vec![0.0; sample.rows * outputs];
            let weight = MatrixRef::row_major(weight, outputs, inputs).t();
            multiply(MatrixRef::row_major(&x, sample.rows, inputs), weight, &mut y, outputs, Threads::All);
            for (row, target) in y.chunks_exact(outputs).zip(sample.targets.chunks_exact(self.target_sum.len())) {
                let target = &target[index * outputs..(index + 1) * outputs];
                for (o, ((got, bias), wanted)) in row.iter().zip(bias).zip(target).enumerate() {
                    let half = usize::from(o >= outputs / 2);
                    error[half] += f64::from(got + bias - wanted).powi(2);
                    total[half] += f64::from(wanted - bias).powi(2);
                }
            }
        }
        let relative = |half: usize| (error[half] / total[half].max(1e-30)).sqrt();
        (relative(0), relative(1))
    }
}

/// Solves `(gram + ridge I) W = cross`; returns `W^T [outputs, inputs]`.
fn solve(gram: &Mat<f64>, cross: &Mat<f64>, ridge: f64) -> Option<Vec<f32>> {
    let mut regular = gram.clone();
    for i in 0..regular.nrows() {
        regular[(i, i)] += ridge;
    }
    let solution = regular.llt(Side::Lower).ok()?.solve(cross);
    let mut weight = Vec::with_capacity(solution.nrows() * solution.ncols());
    for o in 0..solution.ncols() {
        weight.extend((0..solution.nrows()).map(|i| narrow(solution[(i, o)])));
    }
    weight.iter().all(|w| w.is_finite()).then_some(weight)
}

/// A finished fit, not yet written.
#[derive(Debug, Clone)]
pub struct Fitted(Parts);

/// The map of one layer as plain numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct PlainMap {
    /// `[spec.outputs(), spec.inputs(layer)]`.
    pub weight: Vec<f32>,
    /// `[spec.outputs()]`.
    pub bias: Vec<f32>,
}

impl Fitted {
    /// A bridge that was written before, to be tuned further.
    pub fn from_bridge(bridge: &Bridge) -> Self {
        let spec = bridge.spec().clone();
        let plain = |layer: usize| {
            let map = bridge.map(layer)?;
            let mut weight = Vec::with_capacity(spec.outputs() * spec.inputs(layer));
            let mut row = vec![0.0; map.weight.columns()];
            for blocks in map.weight.bytes().chunks_exact(row.len() / BLOCK * BLOCK_BYTES) {
                dequantize_row(blocks, &mut row);
                weight.extend_from_slice(&row[..spec.inputs(layer)]);
            }
            Some((weight, map.bias.clone()))
        };
        let maps = spec.mapped_layers().filter_map(plain).collect();
        let (mean, inverse_scale) = bridge.scales();
        Self(Parts { mean: mean.to_vec(), inverse_scale: inverse_scale.to_vec(), maps, spec })
    }

    /// Scaled features `[slots, spec.features()]`, as the maps take them; `hidden [slots, width]` left the destination's
    /// native layers.
    pub fn inputs(&self, source: (&KvCache, &Rope), slots: Range<usize>, hidden: &[f32]) -> Vec<f32> {
        let mut all = vec![0.0; slots.len() * self.0.spec.features()];
        features(&self.0.spec, source.0, source.1, slots, hidden, &mut all);
        normalise(&mut all, &self.0.mean, &self.0.inverse_scale);
        all
    }

    /// The maps, one a mapped layer.
    pub fn maps(&self) -> impl Iterator<Item = PlainMap> {
        self.0.maps.iter().map(|(weight, bias)| PlainMap { weight: weight.clone(), bias: bias.clone() })
    }

    /// The same frame with maps that were tuned further by so many steps.
    ///
    /// # Panics
    /// Where a map has another shape.
    pub fn tuned(self, maps: impl IntoIterator<Item = PlainMap>, steps: u64) -> Self {
        let mut parts = self.0;
        let tuned: Vec<_> = maps.into_iter().map(|map| (map.weight, map.bias)).collect();
        let sizes = |maps: &[(Vec<f32>, Vec<f32>)]| maps.iter().map(|(w, b)| (w.len(), b.len())).collect::<Vec<_>>();
        assert_eq!(sizes(&tuned), sizes(&parts.maps), "maps of another frame");
        parts.maps = tuned;
        parts.spec.tuning_steps += steps;
        Self(parts)
    }

    /// Its frame, residuals included.
    pub fn spec(&self) -> &BridgeSpec {
        &self.0.spec
    }

    /// Writes the bridge file; never half of it under the final name.
    pub fn write(&self, path: &Path) -> Result<(), FitError> {
        Ok(self.0.write(path)?)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
fn narrow(value: f64) -> f32 {
    value as f32
}

fn column_means(values: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0; width];
    add_columns(&mut sums, values);
    let rows = (values.len() / width) as f64;
    sums.into_iter().map(|s| narrow(s / rows)).collect()
}

fn add_columns(sums: &mut [f64], values: &[f32]) {
    for row in values.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
    }
}

fn subtract(values: &mut [f32], shift: &[f32]) {
    for row in values.chunks_exact_mut(shift.len()) {
        for (value, shift) in row.iter_mut().zip(shift) {
            *value -= shift;
        }
    }
}
