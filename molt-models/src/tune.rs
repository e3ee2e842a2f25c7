//! Tuning a bridge by what its destination says: after the fit the maps go on learning, through the frozen destination, to
//! have the next tokens come out as they would after a native read (distillation, arXiv 1503.02531). Residuals of keys and
//! values do not tell which errors the destination would have overlooked; this does.
//!
//! Text streams by: a few windows are read with both models, every one of them is cut at several places, each cut is a step,
//! and they are gone. So there may be more text than memory, and what was reached is kept in a file to go on from.

use std::path::Path;

use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};
use molt_kv::bridge::{BridgeSpec, Fitted, PlainMap};

use crate::autograd::AutogradDecoder;
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::lesson::{Cut, Lesson, heads};
use crate::model::Model;
use kept::Kept;

mod kept;

/// How maps are tuned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TuneSettings {
    /// Windows of text; each is read once.
    pub lessons: usize,
    /// Places at which a window is cut: so many steps each.
    pub cuts: usize,
    /// Windows that are in memory at a time; their cuts take turns.
    pub together: usize,
    /// How far the first steps go (Adam, arXiv 1412.6980); it falls to nothing along a cosine.
    pub learning_rate: f64,
}

impl Default for TuneSettings {
    /// At ten times this rate the maps are wrecked.
    fn default() -> Self {
        Self { lessons: 64, cuts: 6, together: 8, learning_rate: 2e-5 }
    }
}

/// What tuning did to the mean divergence KL(native || carried), in nats, on the lessons held apart.
#[derive(Debug, Clone, PartialEq)]
pub struct TuneReport {
    /// Of the maps as they were.
    pub before: f64,
    /// Of those that are kept: the best that was seen.
    pub after: f64,
    /// The step after which they were it; 0 where none was better.
    pub best_step: usize,
}

/// How far tuning has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TuneProgress {
    /// Windows that were learnt from.
    pub lessons: usize,
    /// Steps that were taken.
    pub steps: usize,
    /// The mean divergence on the lessons held apart.
    pub divergence: f64,
}

/// Tunes the maps of a bridge to `destination`, loaded from `file`, on lessons that `read` makes as they are asked for, by
/// their number; those of `apart` choose when it was best. `progress` hears of the beginning and of every few windows. With
/// `keep`, what was reached is written to that file then, and a tuning of the same bridge goes on from what stands there:
/// with more lessons than before further, with fewer it ends with the best so far.
///
/// # Errors
/// Where there is no lesson, not enough memory for tensors, or the file cannot be written or is of another tuning.
pub fn tune(
    fitted: Fitted,
    (file, destination): (&ModelFile, &Model),
    mut read: impl FnMut(usize) -> Result<Lesson, ModelError>,
    apart: &[Lesson],
    settings: &TuneSettings,
    keep: Option<&Path>,
    mut progress: impl FnMut(TuneProgress),
) -> Result<(Fitted, TuneReport), ModelError> {
    if settings.lessons * settings.cuts == 0 || apart.is_empty() {
        return Err(candle_core::Error::Msg("no text to tune on".to_owned()).into());
    }
    let together = settings.together.max(1);
    let identity = kept::identity(&fitted, settings);
    let kept = keep.map(|path| kept::read(path, &identity)).transpose()?.flatten();
    let first: Vec<PlainMap> = fitted.maps().collect();
    let (start, now, best_step, mut best) = match kept {
        Some(kept) => (kept.lessons, kept.now, kept.best_step, kept.best),
        None => (0, first.clone(), 0, first.clone()),
    };
    let mut tuner = Tuner::new(fitted.spec(), first, (file, destination), settings.learning_rate)?;
    let before = tuner.mean(apart, settings.cuts)?;
    // Anew, where it goes on: with another number of lessons others are held apart.
    let mut report = TuneReport { before, after: before, best_step };
    if start > 0 {
        tuner.set(&best)?;
        report.after = tuner.mean(apart, settings.cuts)?;
        tuner.set(&now)?;
    }
    let mut steps = start * settings.cuts;
    progress(TuneProgress { lessons: start, steps, divergence: report.after });
    for first in (start..settings.lessons).step_by(together) {
        let numbers = first..(first + together).min(settings.lessons);
        let lessons = numbers.clone().map(&mut read).collect::<Result<Vec<_>, _>>()?;
        for cut in 0..settings.cuts {
            for (lesson, number) in lessons.iter().zip(numbers.clone()) {
                let done = steps as f64 / (settings.lessons * settings.cuts) as f64;
                // Lessons take up different cuts at a time, so that neighbouring steps differ in length.
                let cut = lesson.cut((cut + number) % settings.cuts, settings.cuts);
                tuner.step(lesson, cut, 0.5 * (1.0 + (std::f64::consts::PI * done).cos()))?;
                steps += 1;
            }
        }
        let divergence = tuner.mean(apart, settings.cuts)?;
        if divergence < report.after {
            (report.after, report.best_step, best) = (divergence, steps, tuner.plain()?);
        }
        if let Some(path) = keep {
            let reached = Kept { lessons: numbers.end, now: tuner.plain()?, best, best_step: report.best_step };
            kept::write(path, &identity, &reached)?;
            best = reached.best;
        }
        progress(TuneProgress { lessons: numbers.end, steps, divergence });
    }
    Ok((fitted.tuned(best, report.best_step as u64), report))
}

struct Map {
    layer: usize,
    weight: Var,
    bias: Var,
}

struct Tuner<'a> {
    spec: BridgeSpec,
    decoder: AutogradDecoder,
    destination: &'a Model,
    maps: Vec<Map>,
    optimizer: AdamW,
    learning_rate: f64,
}

impl<'a> Tuner<'a> {
    fn new(
        spec: &BridgeSpec,
        maps: Vec<PlainMap>,
        (file, destination): (&ModelFile, &'a Model),
        learning_rate: f64,
    ) -> Result<Self, ModelError> {
        let variable = |values: Vec<f32>, shape: candle_core::Shape| Var::from_vec(values, shape, &Device::Cpu);
        let maps = spec.mapped_layers().zip(maps).map(|(layer, map)| {
            let weight = variable(map.weight, (spec.outputs(), spec.inputs(layer)).into())?;
            Ok(Map { layer, weight, bias: variable(map.bias, spec.outputs().into())? })
        });
        let maps = maps.collect::<candle_core::Result<Vec<_>>>()?;
        let variables = maps.iter().flat_map(|map| [map.weight.clone(), map.bias.clone()]).collect();
        let parameters = ParamsAdamW { lr: learning_rate, weight_decay: 0.0, ..ParamsAdamW::default() };
        let optimizer = AdamW::new(variables, parameters)?;
        let decoder = AutogradDecoder::of_file(file)?;
        Ok(Self { spec: spec.clone(), decoder, destination, maps, optimizer, learning_rate })
    }

    /// Goes on from these maps.
    fn set(&self, maps: &[PlainMap]) -> candle_core::Result<()> {
        for (own, map) in self.maps.iter().zip(maps) {
            own.weight.set(&Tensor::from_slice(&map.weight, own.weight.shape(), &Device::Cpu)?)?;
            own.bias.set(&Tensor::from_slice(&map.bias, own.bias.shape(), &Device::Cpu)?)?;
        }
        Ok(())
    }

    /// One step, at a part of the learning rate.
    fn step(&mut self, lesson: &Lesson, cut: Cut, rate: f64) -> candle_core::Result<()> {
        self.optimizer.set_learning_rate(self.learning_rate * rate);
        let divergence = self.divergence(lesson, cut)?;
        self.optimizer.backward_step(&divergence)
    }

    fn plain(&self) -> candle_core::Result<Vec<PlainMap>> {
        let plain =
            |map: &Map| Ok(PlainMap { weight: map.weight.flatten_all()?.to_vec1()?, bias: map.bias.to_vec1()? });
        self.maps.iter().map(plain).collect()
    }

    /// Over lessons, each at one cut; all cuts take turns.
    fn mean(&self, lessons: &[Lesson], cuts: usize) -> candle_core::Result<f64> {
        let mut sum = 0.0;
        for (at, lesson) in lessons.iter().enumerate() {
            sum += f64::from(self.divergence(lesson, lesson.cut(cuts - 1 - at % cuts, cuts))?.to_scalar::<f32>()?);
        }
        Ok(sum / lessons.len() as f64)
    }

    /// KL(native || carried) in nats, the mean over the judged positions.
    fn divergence(&self, lesson: &Lesson, cut: Cut) -> candle_core::Result<Tensor> {
        let (start, judged) = (cut.context - cut.fed, cut.judged);
        let mut native = Vec::with_capacity(judged * self.decoder.config().vocab);
        let hidden = lesson.native_hidden(cut.context - 1..cut.context - 1 + judged);
        self.destination.with_each_logits(hidden, |_, each| native.extend_from_slice(each));
        let features = lesson.features(cut.exact_first..start)?;
        let mut past = (0..self.spec.destination_shape.layers)
            .map(|layer| lesson.exact(layer, if layer < self.spec.native_layers { start } else { cut.exact_first }))
            .collect::<candle_core::Result<Vec<_>>>()?;
        for map in &self.maps {
            let mapped = heads(&self.spec, &self.mapped(map, &features)?)?;
            let exact = &mut past[map.layer];
            exact.keys = Tensor::cat(&[&exact.keys, &mapped.keys], 2)?;
            exact.values = Tensor::cat(&[&exact.values, &mapped.values], 2)?;
        }
        // The last token's distribution would be about one that is not judged.
        let hidden = self.decoder.continue_over(lesson.ids(start..cut.context + judged - 1), &past, start)?;
        self.decoder.divergence_from(native, &hidden.narrow(1, cut.fed - 1, judged)?)
    }

    fn mapped(&self, map: &Map, features: &Tensor) -> candle_core::Result<Tensor> {
        let parts = self.spec.input_ranges(map.layer).map(|range| features.narrow(1, range.start, range.len()));
        let [from_source, hidden] = parts;
        let inputs = Tensor::cat(&[&from_source?, &hidden?], 1)?;
        inputs.matmul(&map.weight.t()?)?.broadcast_add(&map.bias)
    }
}
