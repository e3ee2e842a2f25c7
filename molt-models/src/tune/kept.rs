//! What a tuning has reached, in a file to go on from.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor, safetensors};
use molt_kv::bridge::{Fitted, PlainMap};
use sha2::{Digest as _, Sha256};

use super::TuneSettings;
use crate::error::ModelError;

/// What was reached after some windows.
pub(super) struct Kept {
    pub(super) lessons: usize,
    pub(super) now: Vec<PlainMap>,
    pub(super) best: Vec<PlainMap>,
    /// The step after which they were the best.
    pub(super) best_step: usize,
}

/// What tells one tuning from another: where it began, and how it goes on. How far it is to go may change on the way.
pub(super) fn identity(fitted: &Fitted, settings: &TuneSettings) -> String {
    let mut digest = Sha256::new();
    for map in fitted.maps() {
        digest.update(bytemuck::cast_slice::<f32, u8>(&map.weight));
        digest.update(bytemuck::cast_slice::<f32, u8>(&map.bias));
    }
    let TuneSettings { lessons: _, cuts, together, learning_rate } = settings;
    digest.update(format!("{cuts} {together} {learning_rate}"));
    hex::encode(digest.finalize())
}

const IDENTITY: &str = "identity";
const REACHED: &str = "reached";

pub(super) fn write(path: &Path, identity: &str, kept: &Kept) -> Result<(), ModelError> {
    let mut tensors = HashMap::new();
    for (name, maps) in [("now", &kept.now), ("best", &kept.best)] {
        for (at, map) in maps.iter().enumerate() {
            tensors.insert(format!("{name}.{at}.weight"), Tensor::new(map.weight.as_slice(), &Device::Cpu)?);
            tensors.insert(format!("{name}.{at}.bias"), Tensor::new(map.bias.as_slice(), &Device::Cpu)?);
        }
    }
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let reached = [count(kept.lessons), count(kept.best_step)];
    tensors.insert(REACHED.to_owned(), Tensor::new(&reached, &Device::Cpu)?);
    tensors.insert(IDENTITY.to_owned(), Tensor::new(identity.as_bytes(), &Device::Cpu)?);
    let error = |source| ModelError::KeepTuning { path: path.to_owned(), source };
    // Whole or not at all: an interrupt comes when it will.
    let partial = path.with_extension("part");
    safetensors::save(&tensors, &partial)?;
    std::fs::rename(&partial, path).map_err(error)
}

/// What stands in the file; nothing where there is none.
pub(super) fn read(path: &Path, identity: &str) -> Result<Option<Kept>, ModelError> {
    if !path.exists() {
        return Ok(None);
    }
    let other = |reason: &str| ModelError::Tuning { path: path.to_owned(), reason: reason.to_owned() };
    let tensors = safetensors::load(path, &Device::Cpu).map_err(|error| other(&error.to_string()))?;
    let get = |name: &str| tensors.get(name).ok_or_else(|| other(&format!("has no tensor named {name}")));
    if get(IDENTITY)?.to_vec1::<u8>()? != identity.as_bytes() {
        return Err(other("is of another bridge, or of other settings"));
    }
    let reached = get(REACHED)?.to_vec1::<u32>()?;
    let [lessons, best_step] = reached[..] else { return Err(other("is cut short")) };
    let maps = |name: &str| {
        let of = |at: usize| -> Result<PlainMap, ModelError> {
            Ok(PlainMap {
                weight: get(&format!("{name}.{at}.weight"))?.to_vec1()?,
                bias: get(&format!("{name}.{at}.bias"))?.to_vec1()?,
            })
        };
        (0..).take_while(|at| tensors.contains_key(&format!("{name}.{at}.weight"))).map(of).collect::<Result<_, _>>()
    };
    let count = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
    let (lessons, best_step) = (count(lessons), count(best_step));
    Ok(Some(Kept { lessons, now: maps("now")?, best: maps("best")?, best_step }))
}
