//! Opening a model file: GGUF, or safetensors with `config.json` and `tokenizer.json` beside it. A file's header is a
//! claim; a [`ModelFile`] has been checked against the bytes that are there.

mod gguf;
mod header;
mod safetensors;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use molt_kv::region::FileRegion;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::kernels::{Format, Weights};
use crate::tokenizer::Vocabulary;

/// A tensor of a model file, by its GGUF name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// How its numbers are stored.
    pub format: Format,
    /// Rows (1 for a vector).
    pub rows: usize,
    /// Numbers in a row.
    pub columns: usize,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}

/// A model file whose header has been read and checked.
#[derive(Debug)]
pub struct ModelFile {
    region: Arc<FileRegion>,
    config: ModelConfig,
    tensors: BTreeMap<String, TensorEntry>,
    vocabulary: Arc<Vocabulary>,
}

impl ModelFile {
    /// Opens a file by its ending: `.gguf` or `.safetensors`.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::read(FileRegion::open(path)?)
    }

    /// Reads the header of a file that is mapped already.
    pub fn read(region: Arc<FileRegion>) -> Result<Self, ModelError> {
        let file = match region.path().extension().and_then(|e| e.to_str()) {
            Some("safetensors") => safetensors::read(region)?,
            _ => gguf::read(region)?,
        };
        file.check()?;
        Ok(file)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.region.path()
    }

    /// The mapping.
    pub fn region(&self) -> &Arc<FileRegion> {
        &self.region
    }

    /// The decoder's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tokenizer's parts.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Takes another file's vocabulary for its own where they are the same, so that one of them can go.
    pub(crate) fn share_vocabulary(&mut self, other: &Arc<Vocabulary>) {
        if self.vocabulary == *other {
            self.vocabulary = other.clone();
        }
    }

    /// A tensor by its GGUF name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Those that the decoder reads: where a file carries embedding and output head apart, one of the two serves as both.
    pub fn read_tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        let spare = if self.shared_table() == "output.weight" { "token_embd.weight" } else { "output.weight" };
        self.tensors().filter(move |(name, _)| *name != spare)
    }

    /// Numbers in the matrices and vectors that the decoder reads.
    pub fn parameters(&self) -> u64 {
        self.read_tensors().map(|(_, tensor)| tensor.rows as u64 * tensor.columns as u64).sum()
    }

    /// The table that serves as embedding and output head: the finer of the two where a file carries it twice.
    pub fn shared_table(&self) -> &'static str {
        let size = |name: &str| self.tensors.get(name).map_or(0, |t| t.range.len());
        if size("output.weight") > size("token_embd.weight") { "output.weight" } else { "token_embd.weight" }
    }

    pub(crate) fn expect(&self, name: &str, rows: usize, columns: usize) -> Result<&TensorEntry, ModelError> {
        let error = |reason: String| ModelError::Tensor { path: self.path().into(), tensor: name.into(), reason };
        let entry = self.tensors.get(name).ok_or_else(|| error("is missing".into()))?;
        if (entry.rows, entry.columns) != (rows, columns) {
            let (r, c) = (entry.rows, entry.columns);
            return Err(error(format!("is {r} x {c}, the header calls for {rows} x {columns}")));
        }
        Ok(entry)
    }

    /// Every linear layer of a block: name, rows, columns.
    pub(crate) fn linears(config: &ModelConfig) -> [(&'static str, usize, usize); 7] {
        let c = config;
        [
            ("attn_q", c.q_width(), c.width),
            ("attn_k", c.kv_width(), c.width),
            ("attn_v", c.kv_width(), c.width),
            ("attn_output", c.width, c.q_width()),
            ("ffn_gate", c.ffn_width, c.width),
            ("ffn_up", c.ffn_width, c.width),
            ("ffn_down", c.width, c.ffn_width),
        ]
    }

    fn check(&self) -> Result<(), ModelError> {
        let c = &self.config;
        let malformed = |reason: String| ModelError::Malformed { path: self.path().into(), reason };
        let sizes = [c.layers, c.width, c.heads, c.kv_heads, c.head_dim, c.ffn_width, c.vocab, c.trained_context];
        if sizes.iter().any(|n| *n == 0 || *n > 1 << 24) {
            return Err(malformed(format!("its dimensions {sizes:?} are not all between 1 and 2^24")));
        }
        if !c.heads.is_multiple_of(c.kv_heads) || !c.head_dim.is_multiple_of(2) {
            let (heads, kv, dim) = (c.heads, c.kv_heads, c.head_dim);
            return Err(malformed(format!("{heads} heads of {dim} over {kv} key/value heads do not divide")));
        }
        if !(c.rope_base > 1.0 && c.rope_base.is_finite() && c.rms_eps > 0.0 && c.rms_eps < 1.0) {
            return Err(malformed(format!("rope base {} or epsilon {} is no usable number", c.rope_base, c.rms_eps)));
        }
        if self.vocabulary.tokens() != c.vocab {
            let (tokens, rows) = (self.vocabulary.tokens(), c.vocab);
            return Err(malformed(format!("its tokenizer has {tokens} tokens, its table {rows} rows")));
        }
        self.expect(self.shared_table(), c.vocab, c.width)?;
        self.expect("output_norm.weight", 1, c.width)?;
        for layer in 0..c.layers {
            for (name, rows, columns) in Self::linears(c) {
                self.expect(&format!("blk.{layer}.{name}.weight"), rows, columns)?;
            }
            for name in ["attn_norm", "ffn_norm"] {
                self.expect(&format!("blk.{layer}.{name}.weight"), 1, c.width)?;
            }
            for (name, rows, _) in Self::linears(c) {
                let bias = format!("blk.{layer}.{name}.bias");
                if self.tensors.contains_key(&bias) {
                    self.expect(&bias, 1, rows)?;
                }
            }
        }
        self.expect("token_embd.weight", c.vocab, c.width)?;
        self.check_tied()
    }

    /// One table serves as embedding and output head. Where the file carries two, they must be the same table at two
    /// precisions: some rows of both are compared.
    fn check_tied(&self) -> Result<(), ModelError> {
        let c = &self.config;
        if !self.tensors.contains_key("output.weight") {
            return Ok(());
        }
        let view = |name: &str| -> Result<Weights<'_>, ModelError> {
            let entry = self.expect(name, c.vocab, c.width)?;
            let error = || ModelError::Tensor {
                path: self.path().into(),
                tensor: name.to_owned(),
                reason: "is no whole number of blocks".to_owned(),
            };
            let bytes = &self.region.bytes()[entry.range.clone()];
            Weights::new(entry.format, entry.rows, entry.columns, bytes).ok_or_else(error)
        };
        let (embedding, head) = (view("token_embd.weight")?, view("output.weight")?);
        let (mut a, mut b) = (vec![0.0f32; c.width], vec![0.0f32; c.width]);
        let (mut error, mut total) = (0.0f64, 0.0f64);
        for row in (0..c.vocab).step_by(c.vocab.div_ceil(32)) {
            embedding.dequantize_row(row, &mut a);
            head.dequantize_row(row, &mut b);
            error += a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            total += b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
        }
        // Four bits are off by a tenth at most.
        if error <= 0.04 * total {
            return Ok(());
        }
        let reason = "is another table than token_embd.weight; Molt runs models that tie the two".to_owned();
        Err(ModelError::Tensor { path: self.path().into(), tensor: "output.weight".to_owned(), reason })
    }
}

/// A tensor's place in a file of `len` bytes, checked. One of no bytes is refused: it could claim any number of rows.
fn place(path: &Path, name: &str, start: u64, bytes: u64, len: usize) -> Result<Range<usize>, ModelError> {
    if bytes == 0 {
        let reason = "holds nothing".to_owned();
        return Err(ModelError::Tensor { path: path.to_owned(), tensor: name.to_owned(), reason });
    }
    let has = len as u64;
    let needs = start.saturating_add(bytes);
    let range = usize::try_from(start).ok().zip(usize::try_from(needs).ok());
    match range {
        Some((start, end)) if needs <= has => Ok(start..end),
        _ => Err(ModelError::Truncated { path: PathBuf::from(path), tensor: name.to_owned(), needs, has }),
    }
}

/// Refuses tensors that share bytes: no writer makes them, and a file of a few bytes could claim any number of them.
fn apart(path: &Path, tensors: &BTreeMap<String, TensorEntry>) -> Result<(), ModelError> {
    let mut places: Vec<_> = tensors.iter().collect();
    places.sort_by_key(|(_, tensor)| tensor.range.start);
    match places.windows(2).find(|pair| pair[1].1.range.start < pair[0].1.range.end) {
        None => Ok(()),
        Some(pair) => Err(ModelError::Tensor {
            path: path.to_owned(),
            tensor: pair[1].0.clone(),
            reason: format!("lies over tensor {}", pair[0].0),
        }),
    }
}
