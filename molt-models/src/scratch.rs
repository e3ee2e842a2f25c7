//! What a pass of the decoder computes in: regions of ours, as large as the largest pass needs, made with the model.

use molt_kv::ledger::{Kind, Ledger};
use molt_kv::region::Region;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::file::ModelFile;
use crate::kernels::{Format, room};
use crate::precision::{self, Precision};
use crate::sampling::Room;

/// Most tokens that one pass reads: enough to spread the widening of weights, small enough for the scratch.
pub const CHUNK: usize = 256;

/// Tokens whose logits are made together.
pub(crate) const LOGITS: usize = 8;

/// Buffers of a pass, cut for the tokens at hand.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `[CHUNK]` rows of everything that a layer makes; between layers, room for choices.
    pub(crate) region: Region,
    /// `[LOGITS]` rows of logits and of what they are made from.
    pub(crate) logits: Region,
    /// Where products round their inputs.
    pub(crate) room: Region,
}

impl Scratch {
    fn floats(config: &ModelConfig) -> usize {
        let layers = CHUNK * (config.width + 2 * config.q_width() + 2 * config.kv_width() + 2 * config.ffn_width);
        layers.max(Room::words(config.vocab))
    }

    fn logits(config: &ModelConfig) -> usize {
        LOGITS * (config.vocab + config.width)
    }

    /// Floats of the hidden states of a pass.
    pub(crate) fn hidden(config: &ModelConfig) -> usize {
        CHUNK * config.width
    }

    /// Words of room that the largest of a pass's products takes.
    fn room(file: &ModelFile, precision: Precision) -> usize {
        let config = file.config();
        let format = |name: &str, stored| file.tensor(name).map(|t| precision::format_at(t, stored));
        let head: Vec<Format> = format(file.shared_table(), precision.table).into_iter().collect();
        let mut most = room(LOGITS, config.width, &head);
        // Those that share their inputs.
        for (parts, columns) in [
            (&["attn_q", "attn_k", "attn_v"][..], config.width),
            (&["attn_output"], config.q_width()),
            (&["ffn_gate", "ffn_up"], config.width),
            (&["ffn_down"], config.ffn_width),
        ] {
            for layer in 0..config.layers {
                let formats =
                    parts.iter().filter_map(|part| format(&format!("blk.{layer}.{part}.weight"), precision.linear));
                most = most.max(room(CHUNK, columns, &formats.collect::<Vec<_>>()));
            }
        }
        most
    }

    /// Of a whole model, hidden states included.
    pub(crate) fn bytes(file: &ModelFile, precision: Precision) -> usize {
        let config = file.config();
        let floats = Self::floats(config) + Self::logits(config) + Self::hidden(config);
        floats * size_of::<f32>() + Self::room(file, precision) * size_of::<i32>()
    }

    /// Maps all of it.
    pub(crate) fn new(file: &ModelFile, precision: Precision, ledger: &Ledger) -> Result<Self, ModelError> {
        let words = |words: usize| Region::new(ledger, Kind::Scratch, words * size_of::<f32>());
        let config = file.config();
        let (region, logits) = (words(Self::floats(config))?, words(Self::logits(config))?);
        Ok(Self { region, logits, room: words(Self::room(file, precision))? })
    }
}
