//! The shape of a decoder, read from GGUF metadata and checked once.

use molt_kv::rope::Rope;
pub use molt_kv::rope::RopePairing;

/// The hyper-parameters of a Qwen2 or Llama decoder, all checked: dimensions divide, counts are positive.
///
/// Both families share one block: RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU.
/// They differ in the biases of the query, key and value projections (Qwen2 has them) and in how the two
/// halves of a head are paired by the rotation, which [`RopePairing`] names.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Number of decoder blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Inner width of the feed-forward block.
    pub ffn_width: usize,
    /// Rows of the token table.
    pub vocab: usize,
    /// The context length the model was trained for, in tokens.
    pub trained_context: usize,
    /// Base of the rotary frequencies (theta).
    pub rope_base: f32,
    /// How the rotation pairs the components of a head.
    pub rope_pairing: RopePairing,
    /// Added to the mean square under the root of RMSNorm.
    pub rms_eps: f32,
}

impl ModelConfig {
    /// Its rotation.
    pub fn rope(&self) -> Rope {
        Rope::new(self.head_dim, self.rope_base, self.rope_pairing)
    }

    /// Width of all keys (or all values) of one token in one layer.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of all queries of one token in one layer.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Parameters of the linear layers of all blocks, without norms and the token table.
    pub fn block_parameters(&self) -> usize {
        let attention = self.width * (2 * self.q_width() + 2 * self.kv_width());
        self.layers * (attention + 3 * self.width * self.ffn_width)
    }

    /// Floating-point operations that reading one token through `layers` blocks costs at `context` cached tokens:
    /// two per weight, and two per cached component for scores and for values.
    pub fn flops_per_token(&self, layers: usize, context: usize) -> f64 {
        let weights = (self.block_parameters() / self.layers * layers) as f64;
        let attention = (layers * context * self.q_width()) as f64;
        2.0 * weights + 4.0 * attention
    }
}
