//! Precisions of a rung, and building weights at a precision from what the file holds.

use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use molt_kv::blocks;
use molt_kv::decoder::StopFlag;
use molt_kv::faults::{self, Boundary};
use molt_kv::ledger::{Kind, Ledger};
use molt_kv::region::Region;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::ModelError;
use crate::file::{ModelFile, TensorEntry};
use crate::kept::KeptRung;
use crate::kernels::{Format, RUN, Weights};
use crate::matrix::Matrix;

/// How weights are kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stored {
    /// In place in the mapped file.
    AsStored,
    /// 4-byte floats.
    F32,
    /// 2-byte floats.
    F16,
    /// 8-bit blocks of 32.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 4-bit blocks of 32.
    #[serde(rename = "q4_0")]
    Q4_0,
}

impl Stored {
    fn format(self, of_file: Format) -> Format {
        match self {
            Self::AsStored => of_file,
            Self::F32 => Format::F32,
            Self::F16 => Format::F16,
            Self::Q8_0 => Format::Q8_0,
            Self::Q4_0 => Format::Q4_0,
        }
    }
}

/// The precision of a rung: linear layers and the table that is embedding and output head apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "PrecisionText")]
pub struct Precision {
    /// Linear layers.
    pub linear: Stored,
    /// The token table.
    pub table: Stored,
}

impl Precision {
    /// Everything in place in the file.
    pub const AS_STORED: Self = Self { linear: Stored::AsStored, table: Stored::AsStored };
}

/// `precision = "f32"` or `precision = { linear = "q8_0", table = "f32" }`.
#[derive(Deserialize)]
#[serde(untagged)]
enum PrecisionText {
    Both(Stored),
    Apart(Apart),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Apart {
    linear: Stored,
    table: Stored,
}

impl From<PrecisionText> for Precision {
    fn from(text: PrecisionText) -> Self {
        match text {
            PrecisionText::Both(stored) => Self { linear: stored, table: stored },
            PrecisionText::Apart(Apart { linear, table }) => Self { linear, table },
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |s| match s {
            Stored::AsStored => "as stored",
            Stored::F32 => "f32",
            Stored::F16 => "f16",
            Stored::Q8_0 => "q8_0",
            Stored::Q4_0 => "q4_0",
        };
        match self.linear == self.table {
            true => f.write_str(name(self.linear)),
            false => write!(f, "{} linear, {} table", name(self.linear), name(self.table)),
        }
    }
}

/// Bytes of a tensor at a precision; a row that is no whole number of blocks stays at f16.
pub(crate) fn bytes_at(entry: &TensorEntry, stored: Stored) -> usize {
    let format = format_at(entry, stored);
    format.row_bytes(entry.columns).unwrap_or(0) * entry.rows
}

pub(crate) fn format_at(entry: &TensorEntry, stored: Stored) -> Format {
    let format = stored.format(entry.format);
    if format.row_bytes(entry.columns).is_some() { format } else { Format::F16 }
}

/// Where the weights of a rung come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin<'a> {
    /// The model file.
    pub(crate) file: &'a ModelFile,
    /// What was built from it before, where that was kept.
    pub(crate) kept: Option<&'a KeptRung>,
}

/// The matrix of a tensor at a precision: mapped in place, or built in a region of ours on all threads.
pub(crate) fn build(
    Origin { file, kept }: Origin<'_>,
    name: &str,
    stored: Stored,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<Matrix, ModelError> {
    let error = |reason: &str| ModelError::Tensor {
        path: file.path().to_owned(),
        tensor: name.to_owned(),
        reason: reason.to_owned(),
    };
    let entry = file.tensor(name).ok_or_else(|| error("is missing"))?;
    faults::pass(Boundary::ReadWeights).map_err(|source| ModelError::Read { path: file.path().to_owned(), source })?;
    let format = format_at(entry, stored);
    if format == entry.format {
        let part = file.region().part(ledger, Kind::Weights, entry.range.clone());
        let matrix = part.and_then(|part| Matrix::mapped(format, entry.rows, entry.columns, part));
        return matrix.ok_or_else(|| error("does not lie in the file as its header says"));
    }
    if let Some(matrix) = kept.and_then(|kept| kept.matrix(name, entry, stored, ledger)) {
        return Ok(matrix);
    }
    let bytes = bytes_at(entry, stored);
    let mut region = Region::huge(ledger, Kind::Weights, bytes)?;
    let stored_bytes = &file.region().bytes()[entry.range.clone()];
    let whole = fill(entry, stored_bytes, stored, &mut region.as_mut_slice::<u8>()[..bytes], stop);
    // The stored blocks have served; they would only count twice.
    file.region().release(entry.range.clone());
    match whole {
        None => return Err(error("is no whole number of blocks")),
        Some(false) => return Err(molt_kv::decoder::Stopped.into()),
        Some(true) => {}
    }
    Matrix::own(format, entry.rows, entry.columns, region).ok_or_else(|| error("does not fit its region"))
}

/// Builds a tensor from its `bytes` in the file into `target`, on all threads. Says whether it was built to its end;
/// `None` where its rows are no whole blocks.
pub(crate) fn fill(
    entry: &TensorEntry,
    bytes: &[u8],
    stored: Stored,
    target: &mut [u8],
    stop: &StopFlag,
) -> Option<bool> {
    let format = format_at(entry, stored);
    let source = Weights::new(entry.format, entry.rows, entry.columns, bytes)?;
    let row_bytes = format.row_bytes(entry.columns)?;
    // Some rows at a time, so that a stop is noticed soon also in the table of 150,000 rows.
    const ROWS: usize = 256;
    // Noted by whoever skips work: the flag itself may be lowered again before it is looked at below.
    let given_up = AtomicBool::new(false);
    target.par_chunks_mut(ROWS * row_bytes).enumerate().for_each(|(group, rows)| {
        if stop.is_up() {
            given_up.store(true, Ordering::Relaxed);
            return;
        }
        let mut wide = vec![0.0f32; entry.columns];
        for (at, out) in rows.chunks_exact_mut(row_bytes).enumerate() {
            source.dequantize_row(group * ROWS + at, &mut wide);
            encode(format, &wide, out);
        }
    });
    Some(!given_up.into_inner())
}

fn encode(format: Format, row: &[f32], out: &mut [u8]) {
    match format {
        Format::F32 => {
            for (bytes, value) in out.chunks_exact_mut(4).zip(row) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        Format::F16 => match bytemuck::try_cast_slice_mut::<u8, f16>(out) {
            Ok(halves) => halves.convert_from_f32_slice(row),
            Err(_) => out
                .chunks_exact_mut(2)
                .zip(row)
                .for_each(|(bytes, value)| bytes.copy_from_slice(&f16::from_f32(*value).to_le_bytes())),
        },
        Format::Q8_0 => blocks::quantize_row(row, out),
        Format::Q4_0 => quantize_q4_0(row, out),
        _ => unreachable!("rungs are built at f32, f16, q8_0 or q4_0"),
    }
}

/// As llama.cpp rounds: the value of largest magnitude becomes -8.
fn quantize_q4_0(row: &[f32], out: &mut [u8]) {
    for (values, block) in row.chunks_exact(RUN).zip(out.chunks_exact_mut(18)) {
        let largest = values.iter().fold(0.0f32, |m, v| if v.abs() > m.abs() { *v } else { m });
        let scale = largest / -8.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        let nibble = |value: f32| -> u8 {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to four bits")]
            let nibble = (value * inverse + 8.5).clamp(0.0, 15.0) as u8;
            nibble
        };
        for (i, byte) in block[2..].iter_mut().enumerate() {
            *byte = nibble(values[i]) | nibble(values[i + 16]) << 4;
        }
    }
}
