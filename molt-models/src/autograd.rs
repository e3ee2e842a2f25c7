//! The same decoder over candle tensors, differentiable: it trains the `pocket` ladder and tunes bridges.
//!
//! It is the readable twin of the fast decoder and is tested to agree with it. It must never be used for serving:
//! its weights are heap tensors outside the books, and its attention materialises the scores.

use std::collections::HashMap;

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Storage, Tensor};
use candle_nn::ops::{rms_norm_slow, softmax};
use molt_kv::gemm::{MatrixRef, Threads, multiply};

use parking_lot::Mutex;
use rayon::prelude::*;

use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::kernels::Weights;

/// A decoder whose weights are candle tensors under their GGUF names, any of which may be a `Var`.
#[derive(Debug, Clone)]
pub struct AutogradDecoder {
    config: ModelConfig,
    weights: HashMap<String, Tensor>,
}

/// Keys before rotation and values of a block for the tokens just read, each `[batch, kv_heads, tokens, head_dim]`.
#[derive(Debug, Clone)]
pub struct BlockKv {
    /// Keys as they leave the projection, before RoPE.
    pub keys: Tensor,
    /// Values.
    pub values: Tensor,
}

impl AutogradDecoder {
    /// Takes weights by GGUF name; the output head is the token table where no `output.weight` is given.
    pub fn new(config: ModelConfig, weights: HashMap<String, Tensor>) -> Self {
        Self { config, weights }
    }

    /// The weights of a model file as floats, four bytes each; nobody learns them. As in the fast decoder, one table is
    /// embedding and output head.
    pub fn of_file(file: &ModelFile) -> std::result::Result<Self, ModelError> {
        let mut weights = HashMap::new();
        for (name, entry) in file.read_tensors() {
            let error = |reason: &str| ModelError::Tensor {
                path: file.path().to_owned(),
                tensor: name.to_owned(),
                reason: reason.to_owned(),
            };
            let stored = &file.region().bytes()[entry.range.clone()];
            let stored = Weights::new(entry.format, entry.rows, entry.columns, stored)
                .ok_or_else(|| error("is no whole number of blocks"))?;
            let mut values = vec![0.0f32; entry.rows * entry.columns];
            for (row, out) in values.chunks_exact_mut(entry.columns).enumerate() {
                stored.dequantize_row(row, out);
            }
            let vector = name.ends_with("norm.weight") || name.ends_with("bias");
            let shape = if vector { Shape::from(entry.columns) } else { Shape::from((entry.rows, entry.columns)) };
            let name = if name == file.shared_table() { "token_embd.weight" } else { name };
            weights.insert(name.to_owned(), Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(Self::new(file.config().clone(), weights))
    }

    /// The shape of the decoder.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Every weight by GGUF name, in no order.
    pub fn weights(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.weights.iter()
    }

    fn weight(&self, name: &str) -> Result<&Tensor> {
        self.weights
            .get(name)
            .ok_or_else(|| candle_core::Error::Msg(format!("the decoder has no tensor named {name}")).bt())
    }

    /// `x [.., in] -> [.., out]` through `{name}.weight [out, in]` and, where there is one, `{name}.bias [out]`.
    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let weight = self.weight(&format!("{name}.weight"))?;
        let (batch, tokens, width) = x.dims3()?;
        let rows = x.reshape((batch * tokens, width))?;
        let y = if weight.track_op() { rows.matmul(&weight.t()?)? } else { rows.apply_op1(Frozen(weight.clone()))? };
        let y = y.reshape((batch, tokens, weight.dim(0)?))?;
        match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        rms_norm_slow(x, self.weight(&format!("{name}.weight"))?, self.config.rms_eps)
    }

    /// Token ids `[batch, tokens]` to hidden states `[batch, tokens, width]`.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, tokens) = ids.dims2()?;
        let table = self.weight("token_embd.weight")?;
        table.index_select(&ids.flatten_all()?, 0)?.reshape((batch, tokens, self.config.width))
    }

    /// One block over hidden states that start at position `start`, with an optional past (rotated here, as given
    /// before RoPE). Returns the new hidden states and the keys and values of the tokens read.
    pub fn block(&self, layer: usize, x: &Tensor, start: usize, past: Option<&BlockKv>) -> Result<(Tensor, BlockKv)> {
        let c = &self.config;
        let (batch, tokens, _) = x.dims3()?;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let n = self.norm(&name("attn_norm"), x)?;
        let split =
            |t: Tensor, heads: usize| t.reshape((batch, tokens, heads, c.head_dim))?.transpose(1, 2)?.contiguous();
        let q = split(self.linear(&name("attn_q"), &n)?, c.heads)?;
        let own = BlockKv {
            keys: split(self.linear(&name("attn_k"), &n)?, c.kv_heads)?,
            values: split(self.linear(&name("attn_v"), &n)?, c.kv_heads)?,
        };
        let q = self.rotate(&q, start)?;
        let (mut k, mut v, mut before) = (self.rotate(&own.keys, start)?, own.values.clone(), 0);
        if let Some(past) = past {
            before = past.keys.dim(2)?;
            k = Tensor::cat(&[&self.rotate(&past.keys, start - before)?, &k], 2)?;
            v = Tensor::cat(&[&past.values, &v], 2)?;
        }
        let group = c.heads / c.kv_heads;
        let q = q.reshape((batch * c.kv_heads, group * tokens, c.head_dim))?;
        let total = before + tokens;
        let k = k.reshape((batch * c.kv_heads, total, c.head_dim))?;
        let v = v.reshape((batch * c.kv_heads, total, c.head_dim))?;
        let scores = (q.matmul(&k.t()?)? * (c.head_dim as f64).powf(-0.5))?;
        let scores = scores.reshape((batch * c.kv_heads * group, tokens, total))?.broadcast_add(&causal_mask(
            tokens,
            before,
            x.device(),
        )?)?;
        let scores = softmax(&scores, D::Minus1)?.reshape((batch * c.kv_heads, group * tokens, total))?;
        let mixed = scores.matmul(&v)?.reshape((batch, c.heads, tokens, c.head_dim))?.transpose(1, 2)?.reshape((
            batch,
            tokens,
            c.q_width(),
        ))?;
        let x = (x + self.linear(&name("attn_output"), &mixed)?)?;
        let n = self.norm(&name("ffn_norm"), &x)?;
        let gated = (self.linear(&name("ffn_gate"), &n)?.silu()? * self.linear(&name("ffn_up"), &n)?)?;
        let x = (&x + self.linear(&name("ffn_down"), &gated)?)?;
        Ok((x, own))
    }

    /// Hidden states after the last block to logits `[batch, tokens, vocab]`.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let n = self.norm("output_norm", x)?;
        let head = if self.weights.contains_key("output.weight") { "output" } else { "token_embd" };
        self.linear(head, &n)
    }

    /// Token ids `[batch, tokens]` from position 0 to logits `[batch, tokens, vocab]`.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embed(ids)?;
        for layer in 0..self.config.layers {
            x = self.block(layer, &x, 0, None)?.0;
        }
        self.logits(&x)
    }

    /// Token ids that stand at `start` and after, over what is cached of each block (from position 0 to `start`): hidden
    /// states `[1, tokens, width]` after the last block.
    pub fn continue_over(&self, ids: &[u32], past: &[BlockKv], start: usize) -> Result<Tensor> {
        let mut x = self.embed(&Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?)?;
        for (layer, past) in past.iter().enumerate() {
            x = self.block(layer, &x, start, Some(past))?.0;
        }
        Ok(x)
    }

    /// The mean of KL(native || carried) in nats, where `carried [1, tokens, width]` are hidden states after the last block, and
    /// `native [tokens, vocab]` the logits that should be theirs.
    ///
    /// The logits of a large vocabulary are far more than the hidden states that they come from: as a chain of tensor
    /// operations, each would be written a dozen times. Here it is one operation, and the way back is made on the way there.
    pub fn divergence_from(&self, native: Vec<f32>, carried: &Tensor) -> Result<Tensor> {
        let name = if self.weights.contains_key("output.weight") { "output.weight" } else { "token_embd.weight" };
        let head = self.weight(name)?.clone();
        let normed = self.norm("output_norm", carried)?.squeeze(0)?.contiguous()?;
        normed.apply_op1(Divergence { head, native, gradient: Mutex::new(Vec::new()) })
    }

    /// RoPE on `[batch, heads, tokens, head_dim]` whose first token stands at `start`.
    fn rotate(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let (batch, heads, tokens, head_dim) = x.dims4()?;
        let half = head_dim / 2;
        let mut angles = Vec::with_capacity(tokens * half);
        for t in 0..tokens {
            for i in 0..half {
                let frequency = f64::from(self.config.rope_base).powf(-2.0 * i as f64 / head_dim as f64);
                angles.push((start + t) as f64 * frequency);
            }
        }
        let angles = Tensor::from_vec(angles, (tokens, half), x.device())?;
        let (cos, sin) = (angles.cos()?.to_dtype(DType::F32)?, angles.sin()?.to_dtype(DType::F32)?);
        let (first, second) = match self.config.rope_pairing {
            RopePairing::Halves => (x.narrow(3, 0, half)?, x.narrow(3, half, half)?),
            RopePairing::Neighbours => {
                let pairs = x.reshape((batch, heads, tokens, half, 2))?;
                (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?)
            }
        };
        let a = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
        let b = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
        match self.config.rope_pairing {
            RopePairing::Halves => Tensor::cat(&[&a, &b], 3),
            RopePairing::Neighbours => Tensor::stack(&[&a, &b], 4)?.reshape((batch, heads, tokens, head_dim)),
        }
    }
}

/// `x [rows, in] -> [rows, out]` through weights `[out, in]` that nobody learns. As a plain product, every step back would
/// make and keep a gradient for each weight of the model.
struct Frozen(Tensor);

impl CustomOp1 for Frozen {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((rows, width), (out_width, _)) = (layout.shape().dims2()?, self.0.dims2()?);
        let x = floats(storage, layout)?;
        let (weights, weights_layout) = self.0.storage_and_layout();
        let Storage::Cpu(weights) = &*weights else { candle_core::bail!("weights that are not in memory") };
        let weights = floats(weights, weights_layout)?;
        let mut out = vec![0.0f32; rows * out_width];
        let (x, weights) = (MatrixRef::row_major(x, rows, width), MatrixRef::row_major(weights, out_width, width));
        multiply(x, weights.t(), &mut out, out_width, Threads::All);
        Ok((CpuStorage::F32(out), Shape::from((rows, out_width))))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.contiguous()?.matmul(&self.0)?))
    }
}

/// Normalised hidden states `[tokens, width]` to the mean of KL(native || carried).
struct Divergence {
    /// `[vocab, width]`
    head: Tensor,
    /// `[tokens, vocab]`
    native: Vec<f32>,
    /// Of the mean with respect to the hidden states.
    gradient: Mutex<Vec<f32>>,
}

impl CustomOp1 for Divergence {
    fn name(&self) -> &'static str {
        "divergence"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((rows, width), (vocab, _)) = (layout.shape().dims2()?, self.head.dims2()?);
        let x = floats(storage, layout)?;
        let (head, head_layout) = self.head.storage_and_layout();
        let Storage::Cpu(head) = &*head else { candle_core::bail!("weights that are not in memory") };
        let head = floats(head, head_layout)?;
        let mut logits = vec![0.0f32; rows * vocab];
        let (x, head) = (MatrixRef::row_major(x, rows, width), MatrixRef::row_major(head, vocab, width));
        multiply(x, head.t(), &mut logits, vocab, Threads::All);
        let each = logits.par_chunks_exact_mut(vocab).zip(self.native.par_chunks_exact(vocab));
        // Summed up in their order, whoever was first.
        let each: Vec<f64> = each.map(|(carried, native)| divergence(native, carried)).collect();
        let sum: f64 = each.iter().sum();
        // What is left in the place of the logits is their gradient.
        logits.par_iter_mut().for_each(|gradient| *gradient /= rows as f32);
        let mut gradient = vec![0.0f32; rows * width];
        multiply(MatrixRef::row_major(&logits, rows, vocab), head, &mut gradient, width, Threads::All);
        *self.gradient.lock() = gradient;
        #[expect(clippy::cast_possible_truncation, reason = "rounded to what tensors hold")]
        let mean = (sum / rows as f64) as f32;
        Ok((CpuStorage::F32(vec![mean]), Shape::from(())))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let own = Tensor::from_vec(std::mem::take(&mut *self.gradient.lock()), x.shape(), x.device())?;
        Ok(Some(own.broadcast_mul(gradient)?))
    }
}

/// KL(native || carried) of two rows of logits. Leaves its gradient in the place of the carried ones: the difference of
/// both distributions.
fn divergence(native: &[f32], carried: &mut [f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let top = logits.iter().fold(f32::NEG_INFINITY, |top, value| top.max(*value));
        top + logits.iter().map(|value| (value - top).exp()).sum::<f32>().ln()
    };
    let (native_sum, carried_sum) = (log_sum(native), log_sum(carried));
    let mut sum = 0.0;
    for (native, carried) in native.iter().zip(carried) {
        let (p, q) = (native - native_sum, *carried - carried_sum);
        sum += f64::from(p.exp() * (p - q));
        *carried = q.exp() - p.exp();
    }
    sum
}

fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("rows that do not follow one another"),
    }
}

/// `[tokens, before + tokens]`: zero where a query may look, minus infinity ahead of it.
fn causal_mask(tokens: usize, before: usize, device: &Device) -> Result<Tensor> {
    let mask: Vec<f32> = (0..tokens)
        .flat_map(|i| (0..before + tokens).map(move |j| if j > before + i { f32::NEG_INFINITY } else { 0.0 }))
        .collect();
    Tensor::from_vec(mask, (tokens, before + tokens), device)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    #[test]
    fn a_frozen_product_is_a_product_and_leads_back_to_its_input() -> Result<()> {
        let check = |rows: u16, width: u16, out: u16| -> Result<()> {
            let values = |count: u16, step: f32| (0..count).map(|i| (f32::from(i) * step).sin()).collect::<Vec<_>>();
            let x = Var::from_vec(values(rows * width, 0.7), (usize::from(rows), usize::from(width)), &Device::Cpu)?;
            let weight =
                Tensor::from_vec(values(out * width, 0.3), (usize::from(out), usize::from(width)), &Device::Cpu)?;
            let plain = x.matmul(&weight.t()?)?;
            let frozen = x.apply_op1(Frozen(weight.clone()))?;
            let off = |a: &Tensor, b: &Tensor| -> Result<f32> { (a - b)?.abs()?.max_all()?.to_scalar() };
            assert!(off(&plain, &frozen)? < 1e-4, "{rows} x {width} x {out}");
            let back = |y: &Tensor| -> Result<Tensor> {
                let gradients = y.sqr()?.sum_all()?.backward()?;
                Ok(gradients.get(&x).cloned().unwrap_or_else(|| x.as_tensor().clone()))
            };
            let (plain, frozen) = (back(&plain)?, back(&frozen)?);
            assert!(off(&plain, x.as_tensor())? > 1e-3, "there is a gradient");
            assert!(off(&plain, &frozen)? < 1e-3 * plain.abs()?.max_all()?.to_scalar::<f32>()?);
            Ok(())
        };
        check(1, 8, 3)?;
        check(5, 32, 17)?;
        check(33, 96, 64)
    }

    #[test]
    fn the_divergence_in_one_operation_is_that_of_many_and_so_is_the_way_back() -> Result<()> {
        let (rows, width, vocab) = (7, 12, 50);
        let values = |count: usize, step: f32| (0..count).map(|i| (i as f32 * step).sin()).collect::<Vec<_>>();
        let x = Var::from_vec(values(rows * width, 0.7), (rows, width), &Device::Cpu)?;
        let head = Tensor::from_vec(values(vocab * width, 0.3), (vocab, width), &Device::Cpu)?;
        let native = values(rows * vocab, 0.9);
        let logs = |logits: &Tensor| candle_nn::ops::log_softmax(logits, D::Minus1);
        let (theirs, ours) =
            (logs(&Tensor::from_vec(native.clone(), (rows, vocab), &Device::Cpu)?)?, logs(&x.matmul(&head.t()?)?)?);
        let many = (theirs.exp()? * (theirs - ours)?)?.sum(D::Minus1)?.mean(0)?;
        let one = x.apply_op1(Divergence { head, native, gradient: Mutex::new(Vec::new()) })?;
        let (expected, found) = (many.to_scalar::<f32>()?, one.to_scalar::<f32>()?);
        assert!(expected > 0.1 && (expected - found).abs() < 1e-5, "{expected} and {found}");
        // Twice, so that what comes from above counts.
        let back = |y: &Tensor| -> Result<Vec<f32>> {
            let gradients = (y * 2.0)?.backward()?;
            gradients.get(&x).map_or(Ok(Vec::new()), |g| g.flatten_all()?.to_vec1())
        };
        let (expected, found) = (back(&many)?, back(&one)?);
        assert_eq!((expected.len(), found.len()), (rows * width, rows * width));
        for (expected, found) in expected.iter().zip(&found) {
            assert!((expected - found).abs() < 1e-5, "{expected} and {found}");
        }
        Ok(())
    }
}
