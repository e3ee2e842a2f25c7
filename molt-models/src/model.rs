//! The fast decoder of the Qwen2 and Llama families: explicit cache, layers that run one by one, weights in memory of
//! ours. One block is RMSNorm (arXiv 1910.07467), grouped-query attention (arXiv 2305.13245) with rotary positions,
//! RMSNorm and SwiGLU (arXiv 2002.05202).

use std::ops::Range;

use molt_kv::blocks::Q8Matrix;
use molt_kv::cache::{CacheShape, KvCache};
use molt_kv::decoder::{Decoder, StopFlag, Stopped};
use molt_kv::ledger::{Kind, Ledger};
use molt_kv::numbers::CachePrecision;
use molt_kv::region::Region;
use molt_kv::rope::{Rope, Turn};
use molt_scheduler::units::Bytes;
use parking_lot::Mutex;
use rayon::prelude::*;

use crate::attention::{add_received, attend};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::kernels::{Format, Product, Weights, multiply_all, silu_mul};
use crate::matrix::Matrix;
use crate::precision::{self, Origin, Precision, Stored};
use crate::sampling::Room;
use crate::scratch::{CHUNK, LOGITS, Scratch};

/// Values of SwiGLU that one thread takes at a time: those of one token of a small model, some of a big one.
const SILU: usize = 4_096;

/// Which table embeds tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Embedding {
    /// The one table that is output head as well (the finer one where the file has two).
    #[default]
    Shared,
    /// `token_embd` as the file has it, beside another output head: what llama.cpp does; for comparing with it.
    OfFile,
}

/// A loaded model: its weights are resident while it lives.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    source: String,
    cache: CachePrecision,
    rope: Rope,
    table: Matrix,
    embedding: Option<Matrix>,
    output_norm: Vec<f32>,
    blocks: Vec<Block>,
    /// Hidden states of a pass, `[CHUNK, width]`. Held by the pass, which takes the scratch layer by layer.
    hidden: Mutex<Region>,
    scratch: Mutex<Scratch>,
}

#[derive(Debug)]
struct Block {
    attn_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

#[derive(Debug)]
struct Linear {
    weight: Matrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    fn apply(&self, input: &[f32], output: &mut [f32], room: &mut [i32], stop: &StopFlag) -> Result<(), Stopped> {
        Self::apply_all(input, &mut [(self, output)], room, stop)
    }

    /// Several layers of the same inputs at once.
    fn apply_all<const N: usize>(
        input: &[f32],
        layers: &mut [(&Self, &mut [f32]); N],
        room: &mut [i32],
        stop: &StopFlag,
    ) -> Result<(), Stopped> {
        let mut products = layers.each_mut().map(|(layer, output)| Product { weights: layer.weight.view(), output });
        multiply_all(input, &mut products, room, Some(stop))?;
        for (layer, output) in layers {
            let Some(bias) = &layer.bias else { continue };
            for row in output.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
        Ok(())
    }
}

/// What a rung will take, known before it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelBytes {
    /// Weights.
    pub weights: Bytes,
    /// Scratch.
    pub scratch: Bytes,
}

impl Model {
    /// What loading the file at that precision will take.
    pub fn bytes_of(file: &ModelFile, precision: Precision) -> ModelBytes {
        let config = file.config();
        let at = |name: &str, stored: Stored| file.tensor(name).map_or(0, |t| precision::bytes_at(t, stored));
        let mut weights = at(file.shared_table(), precision.table);
        for layer in 0..config.layers {
            for (name, _, _) in ModelFile::linears(config) {
                weights += at(&format!("blk.{layer}.{name}.weight"), precision.linear);
            }
        }
        ModelBytes { weights: Bytes::from(weights), scratch: Bytes::from(Scratch::bytes(file, precision)) }
    }

    /// Loads a file at a precision. `source` is the SHA-256 that the ladder has for the file.
    pub fn load(
        file: &ModelFile,
        source: &str,
        precision: Precision,
        embedding: Embedding,
        ledger: &Ledger,
        stop: &StopFlag,
    ) -> Result<Self, ModelError> {
        Self::load_from(Origin { file, kept: None }, source, precision, embedding, ledger, stop)
    }

    /// Loads a rung, from what was kept of it where there is something.
    pub(crate) fn load_from(
        origin: Origin<'_>,
        source: &str,
        precision: Precision,
        embedding: Embedding,
        ledger: &Ledger,
        stop: &StopFlag,
    ) -> Result<Self, ModelError> {
        let file = origin.file;
        let config = file.config().clone();
        let vector = |name: &str, len: usize| -> Result<Vec<f32>, ModelError> {
            let entry = file.expect(name, 1, len)?;
            let bytes = &file.region().bytes()[entry.range.clone()];
            let weights = Weights::new(entry.format, 1, len, bytes).ok_or_else(|| ModelError::Tensor {
                path: file.path().to_owned(),
                tensor: name.to_owned(),
                reason: "is no whole number of blocks".to_owned(),
            })?;
            let mut values = vec![0.0; len];
            weights.dequantize_row(0, &mut values);
            Ok(values)
        };
        let table = precision::build(origin, file.shared_table(), precision.table, ledger, stop)?;
        let embedding = match embedding {
            Embedding::OfFile if file.shared_table() != "token_embd.weight" => {
                Some(precision::build(origin, "token_embd.weight", Stored::AsStored, ledger, stop)?)
            }
            _ => None,
        };
        let mut blocks = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let linear = |part: &str, rows: usize| -> Result<Linear, ModelError> {
                let bias = format!("blk.{layer}.{part}.bias");
                let bias = if file.tensor(&bias).is_some() { Some(vector(&bias, rows)?) } else { None };
                let name = format!("blk.{layer}.{part}.weight");
                Ok(Linear { weight: precision::build(origin, &name, precision.linear, ledger, stop)?, bias })
            };
            blocks.push(Block {
                attn_norm: vector(&format!("blk.{layer}.attn_norm.weight"), config.width)?,
                ffn_norm: vector(&format!("blk.{layer}.ffn_norm.weight"), config.width)?,
                q: linear("attn_q", config.q_width())?,
                k: linear("attn_k", config.kv_width())?,
                v: linear("attn_v", config.kv_width())?,
                output: linear("attn_output", config.width)?,
                gate: linear("ffn_gate", config.ffn_width)?,
                up: linear("ffn_up", config.ffn_width)?,
                down: linear("ffn_down", config.width)?,
            });
        }
        Ok(Self {
            rope: config.rope(),
            output_norm: vector("output_norm.weight", config.width)?,
            hidden: Mutex::new(Region::new(ledger, Kind::Scratch, Scratch::hidden(&config) * size_of::<f32>())?),
            scratch: Mutex::new(Scratch::new(file, precision, ledger)?),
            source: source.to_owned(),
            cache: CachePrecision::default(),
            table,
            embedding,
            blocks,
            config,
        })
    }

    /// The same, with caches at that precision.
    #[must_use]
    pub fn with_cache(self, cache: CachePrecision) -> Self {
        Self { cache, ..self }
    }

    /// Bytes of weights that decoding one token reads: every linear layer and the output head.
    pub fn bytes_per_token(&self) -> usize {
        let block = |b: &Block| {
            [&b.q, &b.k, &b.v, &b.output, &b.gate, &b.up, &b.down].map(|l| l.weight.bytes()).iter().sum::<usize>()
        };
        self.blocks.iter().map(block).sum::<usize>() + self.table.bytes()
    }

    /// The decoder's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Logits `[vocab]` of the token whose hidden state `[width]` left the last layer, lent to `use_them`.
    pub fn with_logits<T>(&self, hidden: &[f32], use_them: impl FnOnce(&mut [f32]) -> T) -> T {
        let mut scratch = self.scratch.lock();
        let Scratch { logits, room, .. } = &mut *scratch;
        use_them(self.head(hidden, logits, room))
    }

    /// Logits of several tokens `[tokens, width]`, lent to `use_them` one after another with their place; the output
    /// head is read once for every eight.
    pub fn with_each_logits(&self, hidden: &[f32], mut use_them: impl FnMut(usize, &mut [f32])) {
        self.choose_each(hidden, |at, logits, _| use_them(at, logits));
    }

    /// The same for whoever chooses among them, with room for that.
    pub fn choose_each(&self, hidden: &[f32], mut choose: impl FnMut(usize, &mut [f32], &mut Room<'_>)) {
        let mut scratch = self.scratch.lock();
        let Scratch { region, logits, room } = &mut *scratch;
        // No layer computes meanwhile.
        let mut choices = Room::of(region.as_mut_slice(), self.config.vocab);
        for (group, hidden) in hidden.chunks(LOGITS * self.config.width).enumerate() {
            let logits = self.head(hidden, logits, room).chunks_exact_mut(self.config.vocab);
            for (at, logits) in logits.enumerate() {
                choose(group * LOGITS + at, logits, &mut choices);
            }
        }
    }

    /// The output head over at most [`LOGITS`] tokens.
    fn head<'s>(&self, hidden: &[f32], logits: &'s mut Region, room: &mut Region) -> &'s mut [f32] {
        let tokens = hidden.len() / self.config.width;
        let (logits, normed) = logits.as_mut_slice::<f32>().split_at_mut(LOGITS * self.config.vocab);
        let (logits, normed) = (&mut logits[..tokens * self.config.vocab], &mut normed[..hidden.len()]);
        rms_norm(hidden, &self.output_norm, self.config.rms_eps, normed);
        self.table.view().multiply(normed, logits, room.as_mut_slice());
        logits
    }

    /// Reads tokens through all layers and returns the last one's hidden state `[width]`; see
    /// [`Model::read_together`].
    pub fn read(&self, tokens: &[u32], cache: &mut KvCache, stop: &StopFlag) -> Result<Vec<f32>, ModelError> {
        self.read_together(&mut [Part { tokens, cache }], stop)
    }

    /// Reads tokens through all layers and returns every one's hidden state `[tokens, width]`, for whoever judges each
    /// next token. Given up like [`Model::read`].
    pub fn read_all(&self, tokens: &[u32], cache: &mut KvCache, stop: &StopFlag) -> Result<Vec<f32>, ModelError> {
        let before = cache.len();
        let mut all = Vec::with_capacity(tokens.len() * self.config.width);
        let mut hidden = self.hidden.lock();
        for chunk in tokens.chunks(CHUNK) {
            let hidden = &mut hidden.as_mut_slice::<f32>()[..chunk.len() * self.config.width];
            let read = cache.append(chunk).map_err(ModelError::from).and_then(|slots| {
                self.embed(chunk, hidden);
                Ok(self.run_layers(0..self.config.layers, hidden, cache, slots, stop)?)
            });
            if let Err(error) = read {
                cache.truncate(before);
                return Err(error);
            }
            all.extend_from_slice(hidden);
        }
        Ok(all)
    }

    /// Reads tokens and returns what the first `layers` and what all layers make of every one: hidden states
    /// `[tokens, width]` each, for whoever fits or tunes maps.
    pub fn read_halves(
        &self,
        layers: usize,
        tokens: &[u32],
        cache: &mut KvCache,
        stop: &StopFlag,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        let (mut first, mut all) = (Vec::new(), Vec::new());
        let mut hidden = vec![0.0; CHUNK * self.config.width];
        for chunk in tokens.chunks(CHUNK) {
            let (slots, hidden) = (cache.append(chunk)?, &mut hidden[..chunk.len() * self.config.width]);
            self.embed(chunk, hidden);
            self.run_layers(0..layers, hidden, cache, slots.clone(), stop)?;
            first.extend_from_slice(hidden);
            self.run_layers(layers..self.config.layers, hidden, cache, slots, stop)?;
            all.extend_from_slice(hidden);
        }
        Ok((first, all))
    }

    /// Reads tokens of several sequences through all layers, in passes of at most [`CHUNK`] tokens that they share: the
    /// weights are read once for all of them. Returns the last hidden state of each, `[parts, width]`; of one without
    /// tokens, zeros.
    ///
    /// Given up within a part of a product where `stop` is raised, or where a cache is full; every cache is then as it was.
    pub fn read_together(&self, parts: &mut [Part<'_>], stop: &StopFlag) -> Result<Vec<f32>, ModelError> {
        let before: Vec<usize> = parts.iter().map(|part| part.cache.len()).collect();
        let read = self.passes(parts, stop);
        if read.is_err() {
            for (part, before) in parts.iter_mut().zip(before) {
                part.cache.truncate(before);
            }
        }
        read
    }

    fn passes(&self, parts: &mut [Part<'_>], stop: &StopFlag) -> Result<Vec<f32>, ModelError> {
        let width = self.config.width;
        let mut last = vec![0.0; parts.len() * width];
        let mut hidden = self.hidden.lock();
        // Of each part, how many of its tokens have been read.
        let mut read = vec![0; parts.len()];
        loop {
            let (mut segments, mut tokens, mut ends) = (Vec::new(), Vec::new(), Vec::new());
            for (index, (part, read)) in parts.iter_mut().zip(&mut read).enumerate() {
                let count = (part.tokens.len() - *read).min(CHUNK - tokens.len());
                if count == 0 {
                    continue;
                }
                let own = &part.tokens[*read..*read + count];
                let slots = part.cache.append(own)?;
                tokens.extend_from_slice(own);
                *read += count;
                if *read == part.tokens.len() {
                    ends.push((index, tokens.len() - 1));
                }
                segments.push(Segment { cache: &mut *part.cache, stretches: vec![slots], received: None });
            }
            if tokens.is_empty() {
                return Ok(last);
            }
            let hidden = &mut hidden.as_mut_slice::<f32>()[..tokens.len() * width];
            self.embed(&tokens, hidden);
            self.run(0..self.config.layers, hidden, &mut segments, stop)?;
            for (index, token) in ends {
                last[index * width..(index + 1) * width].copy_from_slice(&hidden[token * width..(token + 1) * width]);
            }
        }
    }

    /// Runs layers over hidden states `[tokens, width]` of several sequences, one after another.
    fn run(
        &self,
        layers: Range<usize>,
        hidden: &mut [f32],
        segments: &mut [Segment<'_>],
        stop: &StopFlag,
    ) -> Result<(), Stopped> {
        let c = &self.config;
        let n = hidden.len() / c.width;
        debug_assert!(n <= CHUNK && segments.iter().map(Segment::len).sum::<usize>() == n);
        let mut scratch = self.scratch.lock();
        let Scratch { region, room, .. } = &mut *scratch;
        let (mut rest, room) = (region.as_mut_slice::<f32>(), room.as_mut_slice::<i32>());
        let mut take = |width: usize| -> &mut [f32] {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(n * width);
            rest = after;
            part
        };
        let (normed, q, mixed) = (take(c.width), take(c.q_width()), take(c.q_width()));
        let (k, v) = (take(c.kv_width()), take(c.kv_width()));
        let (gate, up) = (take(c.ffn_width), take(c.ffn_width));
        let mut positions = Vec::with_capacity(n);
        for segment in &*segments {
            let slots = segment.stretches.iter().flat_map(|stretch| &segment.cache.slots()[stretch.clone()]);
            positions.extend(slots.map(|slot| slot.position));
        }
        for layer in layers {
            if stop.is_up() {
                return Err(Stopped);
            }
            let block = &self.blocks[layer];
            rms_norm(hidden, &block.attn_norm, c.rms_eps, normed);
            Linear::apply_all(normed, &mut [(&block.q, q), (&block.k, k), (&block.v, v)], room, stop)?;
            for (at, position) in positions.iter().enumerate() {
                self.rope.turn(&mut q[at * c.q_width()..(at + 1) * c.q_width()], *position, Turn::Forward);
                self.rope.turn(&mut k[at * c.kv_width()..(at + 1) * c.kv_width()], *position, Turn::Forward);
            }
            let (mut first, mut rest) = (0, &mut mixed[..]);
            let mut parts = Vec::with_capacity(segments.len());
            for segment in &mut *segments {
                let own = first..first + segment.len();
                let (keys, queries) =
                    (own.start * c.kv_width()..own.end * c.kv_width(), own.start * c.q_width()..own.end * c.q_width());
                let (mixed, after) = rest.split_at_mut(queries.len());
                parts.push((segment, (&q[queries], &k[keys.clone()], &v[keys]), mixed));
                (first, rest) = (own.end, after);
            }
            let attend =
                |(segment, qkv, mixed): (&mut Segment<'_>, _, &mut [f32])| segment.attend(c, layer, qkv, mixed);
            // All at once: eight lone tokens would have the threads meet eight times.
            match parts.len() {
                1 => parts.into_iter().for_each(attend),
                _ => parts.into_par_iter().for_each(attend),
            }
            if stop.is_up() {
                return Err(Stopped);
            }
            block.output.apply(mixed, normed, room, stop)?;
            hidden.iter_mut().zip(&*normed).for_each(|(h, o)| *h += o);
            rms_norm(hidden, &block.ffn_norm, c.rms_eps, normed);
            Linear::apply_all(normed, &mut [(&block.gate, gate), (&block.up, up)], room, stop)?;
            gate.par_chunks_mut(SILU).zip(up.par_chunks(SILU)).for_each(|(gate, up)| silu_mul(gate, up));
            block.down.apply(gate, normed, room, stop)?;
            hidden.iter_mut().zip(&*normed).for_each(|(h, o)| *h += o);
        }
        Ok(())
    }
}

/// Tokens to read into a cache.
#[derive(Debug)]
pub struct Part<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// The cache, with room for them.
    pub cache: &'a mut KvCache,
}

/// Slots of a cache that a pass fills.
struct Segment<'a> {
    cache: &'a mut KvCache,
    stretches: Vec<Range<usize>>,
    received: Option<&'a mut [f32]>,
}

impl Segment<'_> {
    fn len(&self) -> usize {
        self.stretches.iter().map(ExactSizeIterator::len).sum()
    }

    /// Writes all of its keys and values, and then has each of its queries look at what is cached up to its own slot.
    fn attend(&mut self, config: &ModelConfig, layer: usize, (q, k, v): (&[f32], &[f32], &[f32]), mixed: &mut [f32]) {
        let width = config.kv_width();
        let mut first = 0;
        for stretch in &self.stretches {
            let own = first * width..(first + stretch.len()) * width;
            self.cache.write(layer, stretch.start, &k[own.clone()], &v[own]);
            first += stretch.len();
        }
        // Those that lie apart look together all the same: what they look at is widened once for many of them.
        let slots: Vec<usize> = self.stretches.iter().cloned().flatten().collect();
        attend(config, self.cache, layer, &slots, q, mixed);
        if let Some(received) = self.received.as_deref_mut() {
            add_received(config, self.cache, layer, &slots, q, received);
        }
    }
}

impl Decoder for Model {
    fn cache_shape(&self) -> CacheShape {
        let c = &self.config;
        CacheShape { layers: c.layers, kv_heads: c.kv_heads, head_dim: c.head_dim, precision: self.cache }
    }

    fn rope(&self) -> &Rope {
        &self.rope
    }

    fn width(&self) -> usize {
        self.config.width
    }

    fn source(&self) -> &str {
        &self.source
    }

    fn chunk_limit(&self) -> usize {
        CHUNK
    }

    fn embed(&self, tokens: &[u32], hidden: &mut [f32]) {
        let table = self.embedding.as_ref().unwrap_or(&self.table).view();
        assert_eq!(hidden.len(), tokens.len() * self.config.width, "one hidden state for each token");
        for (token, row) in tokens.iter().zip(hidden.chunks_exact_mut(self.config.width)) {
            // Ids come from the model's own tokenizer and sampler; a foreign one must not bring the engine down.
            let id = usize::try_from(*token).unwrap_or(0).min(self.config.vocab - 1);
            table.dequantize_row(id, row);
        }
    }

    fn run_slots(
        &self,
        layers: Range<usize>,
        hidden: &mut [f32],
        cache: &mut KvCache,
        stretches: &[Range<usize>],
        received: Option<&mut [f32]>,
        stop: &StopFlag,
    ) -> Result<(), Stopped> {
        self.run(layers, hidden, &mut [Segment { cache, stretches: stretches.to_vec(), received }], stop)
    }

    fn multiply(&self, matrix: &Q8Matrix, input: &[f32], output: &mut [f32], room: &mut [i32]) {
        match Weights::new(Format::Q8_0, matrix.rows(), matrix.columns(), matrix.bytes()) {
            Some(weights) => weights.multiply(input, output, room),
            None => unreachable!("a Q8Matrix has the size that its shape says"),
        }
    }

    fn flops(&self, layers: usize, tokens: usize, context: usize) -> f64 {
        // Attention sees half of the tokens of the pass itself on average.
        self.config.flops_per_token(layers, context + tokens / 2) * tokens as f64
    }
}

/// Rows of `input` divided by their root mean square and scaled.
fn rms_norm(input: &[f32], weight: &[f32], eps: f32, output: &mut [f32]) {
    for (row, out) in input.chunks_exact(weight.len()).zip(output.chunks_exact_mut(weight.len())) {
        let square = crate::kernels::dot(row, row) / weight.len() as f32;
        let inverse = (square + eps).sqrt().recip();
        for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
            *out = value * inverse * weight;
        }
    }
}
