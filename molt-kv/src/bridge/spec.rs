//! What a bridge is: which features of the source feed which layer of the destination.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::cache::CacheShape;

/// The format that this version writes and reads.
pub const FORMAT: &str = "molt-bridge-1";

/// The frame of a bridge, stored as JSON in the file's metadata.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BridgeSpec {
    /// [`FORMAT`].
    pub format: String,
    /// SHA-256 of the file that the source's weights come from.
    pub source: String,
    /// SHA-256 of the file that the destination's weights come from.
    pub destination: String,
    /// Shape of the source's cache.
    pub source_shape: Shape,
    /// Shape of the destination's cache.
    pub destination_shape: Shape,
    /// Width of the destination's residual stream.
    pub destination_width: usize,
    /// First layers of the destination that run natively over the whole context; the hidden state that leaves them,
    /// RMS-normalised, is a feature of every map.
    pub native_layers: usize,
    /// Source layers whose keys and values feed one destination layer.
    pub window: usize,
    /// Tokens that the maps were fitted on.
    pub calibration_tokens: u64,
    /// Steps for which the maps were tuned by the destination's output after they were fitted.
    #[serde(default)]
    pub tuning_steps: u64,
    /// Residuals of the fit on text that the maps have not seen, one a mapped layer.
    pub residuals: Vec<Residual>,
}

/// [`CacheShape`] as it is written down: maps do not care at what precision a cache is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Decoder blocks.
    pub layers: usize,
    /// Key/value heads a layer.
    pub kv_heads: usize,
    /// Components of a head.
    pub head_dim: usize,
}

impl From<CacheShape> for Shape {
    fn from(s: CacheShape) -> Self {
        Self { layers: s.layers, kv_heads: s.kv_heads, head_dim: s.head_dim }
    }
}

impl Shape {
    /// Components of one token's keys (or values) in one layer: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Root mean square of the error over that of the centred target: 0 is perfect, 1 no better than the mean.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// Destination layer.
    pub layer: usize,
    /// Of its keys before RoPE.
    pub keys: f64,
    /// Of its values.
    pub values: f64,
}

impl BridgeSpec {
    /// The source layers that feed a destination layer: `window` of them around its place in the source's depth.
    pub fn source_layers(&self, layer: usize) -> RangeInclusive<usize> {
        let (from, to) = (self.source_shape.layers - 1, (self.destination_shape.layers - 1).max(1));
        let middle = (layer * from + to / 2) / to;
        let reach = self.window / 2;
        middle.saturating_sub(reach)..=(middle + reach).min(from)
    }

    /// The destination layers that are mapped.
    pub fn mapped_layers(&self) -> std::ops::Range<usize> {
        self.native_layers..self.destination_shape.layers
    }

    /// Features of one source layer: its keys before RoPE and its values.
    pub fn group_width(&self) -> usize {
        2 * self.source_shape.kv_width()
    }

    /// Features of a token in all: every source layer, then the hidden state.
    pub fn features(&self) -> usize {
        self.source_shape.layers * self.group_width() + self.destination_width
    }

    /// Outputs of one map: the destination layer's keys before RoPE and its values.
    pub fn outputs(&self) -> usize {
        2 * self.destination_shape.kv_width()
    }

    /// Inputs of the map of a layer.
    pub fn inputs(&self, layer: usize) -> usize {
        self.source_layers(layer).count() * self.group_width() + self.destination_width
    }

    /// Where the inputs of a layer's map lie among a token's features.
    pub fn input_ranges(&self, layer: usize) -> [std::ops::Range<usize>; 2] {
        let (layers, group) = (self.source_layers(layer), self.group_width());
        let hidden = self.source_shape.layers * group;
        [layers.start() * group..(layers.end() + 1) * group, hidden..hidden + self.destination_width]
    }
}
