//! Tuning a bridge by what its destination says: after the fit the maps go on learning, through the frozen destination, to
//! have the next tokens come out as they would after a native read (distillation, arXiv 1503.02531). Residuals of keys and
//! values do not tell which errors the destination would have overlooked; this does.

use candle_core::{D, Device, Tensor, Var};
use candle_nn::ops::log_softmax;
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};
use molt_kv::bridge::{BridgeSpec, Fitted, PlainMap, plain_keys_and_values};
use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::ledger::Ledger;
use molt_scheduler::units::Tokens;

use crate::autograd::{AutogradDecoder, BlockKv};
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::model::Model;

/// How maps are tuned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TuneSettings {
    /// Steps, each over one lesson.
    pub steps: usize,
    /// How far the first steps go (Adam, arXiv 1412.6980); it falls to nothing along a cosine.
    pub learning_rate: f64,
    /// Steps from one look at the lessons held apart to the next.
    pub look_every: usize,
}

impl Default for TuneSettings {
    /// At ten times this rate the maps are wrecked.
    fn default() -> Self {
        Self { steps: 160, learning_rate: 2e-5, look_every: 20 }
    }
}

/// How a window of text is cut into a lesson.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LessonShape {
    /// First tokens that are exact, as in a carry.
    pub exact_first: usize,
    /// Last tokens of the context that are read over the mapped ones.
    pub fed: usize,
    /// Tokens after the context whose distributions are compared.
    pub judged: usize,
}

/// One window of text with everything that does not change while maps learn.
#[derive(Debug)]
pub struct Lesson {
    shape: LessonShape,
    /// The fed tokens and those that are judged.
    ids: Vec<u32>,
    /// Where they begin.
    start: usize,
    /// `[mapped tokens, features]`
    features: Tensor,
    /// Of every block, what is exact before `start`: all of it in native layers, the first tokens in mapped ones.
    exact: Vec<BlockKv>,
    /// Hidden states `[judged, width]` after a native read.
    native: Vec<f32>,
}

impl Lesson {
    /// Reads a window natively with both models.
    ///
    /// # Errors
    /// Where a model cannot read it, or it has no token to map.
    pub fn new(
        fitted: &Fitted,
        source: &Model,
        destination: &Model,
        window: &[u32],
        shape: LessonShape,
    ) -> Result<Self, ModelError> {
        let spec = fitted.spec();
        let LessonShape { exact_first, fed, judged } = shape;
        if fed == 0 || judged == 0 || window.len() <= exact_first + fed + judged {
            return Err(
                candle_core::Error::Msg(format!("a window of {} is too short for {shape:?}", window.len())).into()
            );
        }
        let (context, start) = (window.len() - judged, window.len() - judged - fed);
        let (ledger, stop) = (Ledger::new(), StopFlag::new());
        let mut from = KvCache::new(source.cache_shape(), Tokens::from(context), &ledger)?;
        source.read(&window[..context], &mut from, &stop)?;
        let mut to = KvCache::new(destination.cache_shape(), Tokens::from(window.len()), &ledger)?;
        let (after_native, last) = destination.read_halves(spec.native_layers, window, &mut to, &stop)?;
        let width = spec.destination_width;
        let mapped = exact_first..start;
        let rows = mapped.len();
        let hidden = &after_native[mapped.start * width..mapped.end * width];
        let features = fitted.inputs((&from, source.rope()), mapped, hidden);
        let exact = (0..to.shape().layers).map(|layer| {
            let end = if layer < spec.native_layers { start } else { exact_first };
            let plain = plain_keys_and_values(&to, destination.rope(), layer, 0..end);
            heads(spec, &Tensor::from_vec(plain, (end, spec.outputs()), &Device::Cpu)?)
        });
        Ok(Self {
            shape,
            // The last token's distribution would be about one that is not there.
            ids: window[start..window.len() - 1].to_vec(),
            start,
            features: Tensor::from_vec(features, (rows, spec.features()), &Device::Cpu)?,
            exact: exact.collect::<candle_core::Result<_>>()?,
            native: last[(context - 1) * width..(window.len() - 1) * width].to_vec(),
        })
    }
}

/// `[tokens, outputs]` as a map makes them, cut into heads.
fn heads(spec: &BridgeSpec, plain: &Tensor) -> candle_core::Result<BlockKv> {
    let (tokens, half) = (plain.dim(0)?, spec.outputs() / 2);
    let shape = spec.destination_shape;
    let cut = |start: usize| {
        let part = plain.narrow(1, start, half)?.reshape((1, tokens, shape.kv_heads, shape.head_dim))?;
        part.transpose(1, 2)?.contiguous()
    };
    Ok(BlockKv { keys: cut(0)?, values: cut(half)? })
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
}

/// Tunes the maps of a bridge to `destination`, loaded from `file`, on `lessons`; those of `apart` choose when it was best.
/// `progress` hears of steps done and, after each look, the divergence.
///
/// # Errors
/// Where there is no lesson, or not enough memory for tensors.
pub fn tune(
    fitted: Fitted,
    (file, destination): (&ModelFile, &Model),
    (lessons, apart): (&[Lesson], &[Lesson]),
    settings: &TuneSettings,
    mut progress: impl FnMut(usize, Option<f64>),
) -> Result<(Fitted, TuneReport), ModelError> {
    if lessons.is_empty() || apart.is_empty() {
        return Err(candle_core::Error::Msg("no text to tune on".to_owned()).into());
    }
    let spec = fitted.spec().clone();
    let variable = |values: Vec<f32>, shape: candle_core::Shape| Var::from_vec(values, shape, &Device::Cpu);
    let maps = spec.mapped_layers().zip(fitted.maps()).map(|(layer, map)| {
        let weight = variable(map.weight, (spec.outputs(), spec.inputs(layer)).into())?;
        Ok(Map { layer, weight, bias: variable(map.bias, spec.outputs().into())? })
    });
    let maps = maps.collect::<candle_core::Result<Vec<_>>>()?;
    let variables = maps.iter().flat_map(|map| [map.weight.clone(), map.bias.clone()]).collect();
    let tuner = Tuner { decoder: AutogradDecoder::of_file(file)?, destination, maps, spec };
    let parameters = ParamsAdamW { lr: settings.learning_rate, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables, parameters)?;
    let before = tuner.mean(apart)?;
    progress(0, Some(before));
    let mut best = (before, 0, tuner.plain()?);
    for step in 0..settings.steps {
        let done = step as f64 / settings.steps as f64;
        optimizer.set_learning_rate(settings.learning_rate * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()));
        // Neighbours come from the same text: a stride through them mixes what is learnt.
        const STRIDE: usize = 7919;
        let loss = tuner.divergence(&lessons[step * STRIDE % lessons.len()])?;
        optimizer.backward_step(&loss)?;
        let step = step + 1;
        let look = step % settings.look_every.max(1) == 0 || step == settings.steps;
        let found = if look { Some(tuner.mean(apart)?) } else { None };
        if let Some(found) = found.filter(|found| *found < best.0) {
            best = (found, step, tuner.plain()?);
        }
        progress(step, found);
    }
    let (after, best_step, maps) = best;
    Ok((fitted.tuned(maps, best_step as u64), TuneReport { before, after, best_step }))
}

impl Tuner<'_> {
    fn plain(&self) -> candle_core::Result<Vec<PlainMap>> {
        let plain =
            |map: &Map| Ok(PlainMap { weight: map.weight.flatten_all()?.to_vec1()?, bias: map.bias.to_vec1()? });
        self.maps.iter().map(plain).collect()
    }

    fn mean(&self, lessons: &[Lesson]) -> candle_core::Result<f64> {
        let mut sum = 0.0;
        for lesson in lessons {
            sum += f64::from(self.divergence(lesson)?.to_scalar::<f32>()?);
        }
        Ok(sum / lessons.len() as f64)
    }

    /// KL(native || carried) in nats, the mean over the judged positions.
    fn divergence(&self, lesson: &Lesson) -> candle_core::Result<Tensor> {
        let native = lesson.native.len() / self.spec.destination_width;
        let mut logits = Vec::with_capacity(native * self.decoder.config().vocab);
        self.destination.with_each_logits(&lesson.native, |_, each| logits.extend_from_slice(each));
        let logits = Tensor::from_vec(logits, (native, self.decoder.config().vocab), &Device::Cpu)?;
        let native = log_softmax(&logits, D::Minus1)?;
        let mut past = lesson.exact.clone();
        for map in &self.maps {
            let mapped = heads(&self.spec, &self.mapped(map, &lesson.features)?)?;
            let exact = &mut past[map.layer];
            exact.keys = Tensor::cat(&[&exact.keys, &mapped.keys], 2)?;
            exact.values = Tensor::cat(&[&exact.values, &mapped.values], 2)?;
        }
        let hidden = self.decoder.continue_over(&lesson.ids, &past, lesson.start)?;
        let LessonShape { fed, judged, .. } = lesson.shape;
        let carried = self.decoder.logits(&hidden.narrow(1, fed - 1, judged)?.contiguous()?)?.squeeze(0)?;
        let carried = log_softmax(&carried, D::Minus1)?;
        (native.exp()? * (native - carried)?)?.sum(D::Minus1)?.mean(0)
    }

    fn mapped(&self, map: &Map, features: &Tensor) -> candle_core::Result<Tensor> {
        let parts = self.spec.input_ranges(map.layer).map(|range| features.narrow(1, range.start, range.len()));
        let [from_source, hidden] = parts;
        let inputs = Tensor::cat(&[&from_source?, &hidden?], 1)?;
        inputs.matmul(&map.weight.t()?)?.broadcast_add(&map.bias)
    }
}
