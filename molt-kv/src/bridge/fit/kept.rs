//! The sums of a fit in a file: what has been read need not be read again after an interrupt.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use bytemuck::Pod;
use safetensors::tensor::{Dtype, SafeTensors, View};

use super::{BridgeFit, FitError};

/// What tells one fit from another, and how far it came.
const IDENTITY: &str = "identity";
const WINDOWS: &str = "windows";

/// A list of numbers as it lies in memory: such a file is gone on from where it was written.
struct Numbers<'a>(Dtype, usize, &'a [u8]);

impl View for Numbers<'_> {
    fn dtype(&self) -> Dtype {
        self.0
    }

    fn shape(&self) -> &[usize] {
        std::slice::from_ref(&self.1)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.2)
    }

    fn data_len(&self) -> usize {
        self.2.len()
    }
}

impl BridgeFit {
    /// Keeps the sums over the first `windows` windows of the fit that `identity` names.
    ///
    /// # Errors
    /// Where the file cannot be written; one that was there is whole.
    pub fn keep(&self, path: &Path, identity: &str, windows: usize) -> Result<(), FitError> {
        let doubles = |values: &'_ [f64]| (Dtype::F64, values.len(), bytemuck::cast_slice::<f64, u8>(values).to_vec());
        let floats = |values: &[f32]| (Dtype::F32, values.len(), bytemuck::cast_slice::<f32, u8>(values).to_vec());
        let rows = [self.rows];
        let small = [
            ("rows", (Dtype::U64, 1, bytemuck::cast_slice::<u64, u8>(&rows).to_vec())),
            ("shift", floats(&self.shift)),
            ("target_shift", floats(&self.target_shift)),
            ("feature_sum", doubles(&self.feature_sum)),
            ("target_sum", doubles(&self.target_sum)),
        ];
        let mut all: Vec<(String, Numbers<'_>)> = small
            .iter()
            .map(|(name, (dtype, len, bytes))| ((*name).to_owned(), Numbers(*dtype, *len, bytes)))
            .collect();
        for (name, products) in [("gram", &self.grams), ("cross", &self.crosses)] {
            for (at, product) in products.iter().enumerate() {
                let bytes = bytemuck::cast_slice(&product.sum);
                all.push((format!("{name}.{at}"), Numbers(Dtype::F64, product.sum.len(), bytes)));
            }
        }
        let metadata =
            HashMap::from([(IDENTITY.to_owned(), identity.to_owned()), (WINDOWS.to_owned(), windows.to_string())]);
        let error = |source| FitError::Keep { path: path.to_owned(), source };
        let part = path.with_extension("part");
        safetensors::serialize_to_file(all, Some(metadata), &part).map_err(|e| error(std::io::Error::other(e)))?;
        std::fs::rename(&part, path).map_err(error)
    }

    /// Takes up the sums of a file; over how many windows they are. Nothing where there is no file.
    ///
    /// # Errors
    /// Where it is damaged, or of another fit.
    pub fn resume(&mut self, path: &Path, identity: &str) -> Result<Option<usize>, FitError> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(FitError::Keep { path: path.to_owned(), source }),
        };
        let other = |reason: String| FitError::Resume { path: path.to_owned(), reason };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| other(format!("is damaged ({e})")))?;
        let said = header.metadata().clone().unwrap_or_default();
        if said.get(IDENTITY).map(String::as_str) != Some(identity) {
            return Err(other("is of another fit".to_owned()));
        }
        let windows = said.get(WINDOWS).and_then(|text| text.parse().ok());
        let windows = windows.ok_or_else(|| other("does not say how far it came".to_owned()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| other(format!("is damaged ({e})")))?;
        let get = |name: &str| match tensors.tensor(name) {
            Ok(view) => Ok(view.data().to_vec()),
            Err(e) => Err(other(format!("is damaged ({e})"))),
        };
        let short = || other("is cut short".to_owned());
        self.shift = list(&get("shift")?);
        self.target_shift = list(&get("target_shift")?);
        self.rows = list(&get("rows")?).first().copied().ok_or_else(short)?;
        let fill = |name: &str, into: &mut Vec<f64>| {
            let found: Vec<f64> = list(&get(name)?);
            if found.len() != into.len() {
                return Err(short());
            }
            *into = found;
            Ok(())
        };
        fill("feature_sum", &mut self.feature_sum)?;
        fill("target_sum", &mut self.target_sum)?;
        for (name, products) in [("gram", &mut self.grams), ("cross", &mut self.crosses)] {
            for (at, product) in products.iter_mut().enumerate() {
                fill(&format!("{name}.{at}"), &mut product.sum)?;
            }
        }
        Ok(Some(windows))
    }
}

/// Numbers as they lay in memory, wherever the bytes lie.
fn list<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
