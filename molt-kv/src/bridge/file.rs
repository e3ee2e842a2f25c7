//! Reading and writing bridges. A file is a claim; a [`Bridge`] is a claim that has been checked.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest as _, Sha256};

use crate::blocks::{BLOCK, Q8Matrix, quantize_row};
use crate::bridge::features::normalise;
use crate::bridge::spec::{BridgeSpec, FORMAT};
use crate::ledger::{Kind, Ledger};
use crate::region::{FileRegion, RegionError};

/// What is wrong with a bridge.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// It cannot be read.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// It cannot be written.
    #[error("cannot write the bridge {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It is no safetensors file, or a damaged one.
    #[error("{} is not a bridge: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Its content is not what was written: a damaged file, or one changed without writing a new digest.
    #[error("the bridge {} has been altered: its content has digest {found}, it was written with {expected}", path.display())]
    Altered {
        /// The file.
        path: PathBuf,
        /// The digest in its metadata.
        expected: String,
        /// The digest of its content.
        found: String,
    },
    /// It belongs to other models.
    #[error("the bridge {} is for another {role}: it was fitted for {expected}, the model loaded is {found}", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// `source` or `destination`.
        role: &'static str,
        /// The hash it was fitted for.
        expected: String,
        /// The hash of the model.
        found: String,
    },
}

/// The map of one destination layer: `[K before RoPE | V] = weight * (features - mean) / scale + bias`.
#[derive(Debug)]
pub struct LayerMap {
    /// `[spec.outputs(), inputs]`, inputs rounded up to whole blocks.
    pub weight: Q8Matrix,
    /// `[spec.outputs()]`.
    pub bias: Vec<f32>,
}

/// A bridge whose digest, shapes and numbers have been checked.
#[derive(Debug)]
pub struct Bridge {
    path: PathBuf,
    digest: String,
    spec: BridgeSpec,
    mean: Vec<f32>,
    inverse_scale: Vec<f32>,
    maps: Vec<LayerMap>,
}

impl Bridge {
    /// Maps and checks a bridge file. The maps stay in the file's pages and are charged while the bridge lives.
    pub fn open(path: &Path, ledger: &Ledger) -> Result<Self, BridgeError> {
        Self::check(&FileRegion::open(path)?, ledger)
    }

    /// Checks a bridge that is mapped already.
    pub fn check(file: &Arc<FileRegion>, ledger: &Ledger) -> Result<Self, BridgeError> {
        let path = file.path();
        let malformed = |reason: String| BridgeError::Malformed { path: path.to_owned(), reason };
        let (_, metadata) = SafeTensors::read_metadata(file.bytes()).map_err(|e| malformed(e.to_string()))?;
        let tensors = SafeTensors::deserialize(file.bytes()).map_err(|e| malformed(e.to_string()))?;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let text = metadata.get("bridge").ok_or_else(|| malformed("its metadata has no `bridge`".into()))?;
        let spec: BridgeSpec = serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?;
        if spec.format != FORMAT {
            return Err(malformed(format!("its format is {}, this version reads {FORMAT}", spec.format)));
        }
        // Each number is bounded before any two are multiplied.
        let (s, d) = (spec.source_shape, spec.destination_shape);
        let small =
            [s.layers, s.kv_heads, s.head_dim, d.layers, d.kv_heads, d.head_dim, spec.native_layers, spec.window];
        let plausible = small.iter().all(|n| (1..=1 << 12).contains(n))
            && (1..=1 << 16).contains(&spec.destination_width)
            && spec.native_layers < d.layers
            && spec.window % 2 == 1
            && spec.window <= s.layers
            && s.head_dim % 2 == 0
            && d.head_dim % 2 == 0;
        if !plausible {
            return Err(malformed("its shapes contradict each other".into()));
        }
        let expected = metadata.get("digest").cloned().unwrap_or_default();
        let found = digest(text, tensors.iter().map(|(name, view)| (name.to_owned(), view.data())));
        if expected != found {
            return Err(BridgeError::Altered { path: path.to_owned(), expected, found });
        }
        let floats = |name: &str, count: usize| -> Result<Vec<f32>, BridgeError> {
            let view = tensors.tensor(name).map_err(|e| malformed(format!("tensor {name}: {e}")))?;
            if view.dtype() != Dtype::F32 || view.shape() != [count] {
                return Err(malformed(format!("tensor {name} is not {count} f32 values")));
            }
            let values: Vec<f32> =
                view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            match values.iter().all(|v| v.is_finite()) {
                true => Ok(values),
                false => Err(malformed(format!("tensor {name} has a value that is not finite"))),
            }
        };
        let base = file.bytes().as_ptr().addr();
        let maps = spec
            .mapped_layers()
            .map(|layer| {
                let name = format!("blk.{layer}.weight");
                let view = tensors.tensor(&name).map_err(|e| malformed(format!("tensor {name}: {e}")))?;
                let start = view.data().as_ptr().addr() - base;
                let inputs = spec.inputs(layer).next_multiple_of(BLOCK);
                let weight = file
                    .part(ledger, Kind::Bridge, start..start + view.data().len())
                    .and_then(|part| Q8Matrix::mapped(spec.outputs(), inputs, part))
                    .ok_or_else(|| malformed(format!("tensor {name} is not {} x {inputs} blocks", spec.outputs())))?;
                Ok(LayerMap { weight, bias: floats(&format!("blk.{layer}.bias"), spec.outputs())? })
            })
            .collect::<Result<_, BridgeError>>()?;
        let (mean, inverse_scale) = (floats("mean", spec.features())?, floats("inverse_scale", spec.features())?);
        Ok(Self { path: path.to_owned(), digest: found, spec, mean, inverse_scale, maps })
    }

    /// The digest of its frame and numbers: figures that were measured with it belong to no other.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Refuses models that the bridge was not fitted for.
    pub fn check_models(&self, source: &str, destination: &str) -> Result<(), BridgeError> {
        for (role, expected, found) in
            [("source", &self.spec.source, source), ("destination", &self.spec.destination, destination)]
        {
            if expected != found {
                let (expected, found) = (expected.clone(), found.to_owned());
                return Err(BridgeError::OtherModel { path: self.path.clone(), role, expected, found });
            }
        }
        Ok(())
    }

    /// Its frame.
    pub fn spec(&self) -> &BridgeSpec {
        &self.spec
    }

    /// The map of a mapped destination layer.
    pub fn map(&self, layer: usize) -> Option<&LayerMap> {
        self.maps.get(layer.checked_sub(self.spec.native_layers)?)
    }

    /// Scales features `[rows, spec.features()]` in place to what the maps expect.
    pub fn normalise(&self, features: &mut [f32]) {
        normalise(features, &self.mean, &self.inverse_scale);
    }

    /// What features are scaled by: their mean and the inverse of their spread.
    pub(super) fn scales(&self) -> (&[f32], &[f32]) {
        (&self.mean, &self.inverse_scale)
    }
}

/// The numbers of a bridge before they are written.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) spec: BridgeSpec,
    pub(super) mean: Vec<f32>,
    pub(super) inverse_scale: Vec<f32>,
    /// One a mapped layer: weight `[outputs, inputs]` and bias `[outputs]`.
    pub(super) maps: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Parts {
    /// Writes the file under a temporary name beside `path` and renames it.
    pub(super) fn write(&self, path: &Path) -> Result<(), BridgeError> {
        let error = |source| BridgeError::Write { path: path.to_owned(), source };
        let spec = serde_json::to_string(&self.spec).map_err(|e| error(e.into()))?;
        let bytes_of = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let features = self.spec.features();
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![
            ("mean".into(), Dtype::F32, vec![features], bytes_of(&self.mean)),
            ("inverse_scale".into(), Dtype::F32, vec![features], bytes_of(&self.inverse_scale)),
        ];
        for (layer, (weight, bias)) in self.spec.mapped_layers().zip(&self.maps) {
            let (inputs, outputs) = (self.spec.inputs(layer), self.spec.outputs());
            let padded = inputs.next_multiple_of(BLOCK);
            let row_bytes = padded / BLOCK * crate::blocks::BLOCK_BYTES;
            let mut blocks = vec![0; outputs * row_bytes];
            let mut row = vec![0.0; padded];
            for (values, blocks) in weight.chunks_exact(inputs).zip(blocks.chunks_exact_mut(row_bytes)) {
                row[..inputs].copy_from_slice(values);
                quantize_row(&row, blocks);
            }
            tensors.push((format!("blk.{layer}.weight"), Dtype::U8, vec![outputs, row_bytes], blocks));
            tensors.push((format!("blk.{layer}.bias"), Dtype::F32, vec![outputs], bytes_of(bias)));
        }
        let digest = digest(&spec, tensors.iter().map(|(name, _, _, data)| (name.clone(), data.as_slice())));
        let metadata = HashMap::from([("bridge".to_owned(), spec), ("digest".to_owned(), digest)]);
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), data)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|e| error(std::io::Error::other(e)))?;
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| error(std::io::Error::other(e)))?;
        let part = path.with_extension("part");
        let mut file = std::fs::File::create(&part).map_err(error)?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(error)?;
        std::fs::rename(&part, path).map_err(error)
    }
}

/// SHA-256 over the frame and every tensor in the order of their names.
fn digest<'a>(spec: &str, tensors: impl Iterator<Item = (String, &'a [u8])>) -> String {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort();
    let mut hasher = Sha256::new();
    hasher.update(spec);
    for (name, data) in tensors {
        hasher.update(name);
        hasher.update(data);
    }
    hex::encode(hasher.finalize())
}
