//! A matrix of weights in memory of ours: blocks in place in a mapped file, or built into a region.

use molt_kv::region::{FilePart, Region};

use crate::kernels::{Format, Weights};

/// Weights `[rows, columns]` and where they live.
#[derive(Debug)]
pub struct Matrix {
    format: Format,
    rows: usize,
    columns: usize,
    bytes: usize,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    Mapped(FilePart),
    Own(Region),
}

impl Matrix {
    /// Blocks in place in a file; `None` where the part has not the size of such a matrix.
    pub fn mapped(format: Format, rows: usize, columns: usize, part: FilePart) -> Option<Self> {
        let bytes = Weights::new(format, rows, columns, part.bytes())?.byte_len();
        Some(Self { format, rows, columns, bytes, storage: Storage::Mapped(part) })
    }

    /// A matrix in a region of at least its size; `None` where the region is smaller or rows are no whole blocks.
    pub fn own(format: Format, rows: usize, columns: usize, region: Region) -> Option<Self> {
        let bytes = format.row_bytes(columns)?.checked_mul(rows)?;
        Weights::new(format, rows, columns, region.as_slice::<u8>().get(..bytes)?)?;
        Some(Self { format, rows, columns, bytes, storage: Storage::Own(region) })
    }

    /// The weights, to compute with.
    pub fn view(&self) -> Weights<'_> {
        let bytes = match &self.storage {
            Storage::Mapped(part) => part.bytes(),
            Storage::Own(region) => &region.as_slice()[..self.bytes],
        };
        match Weights::new(self.format, self.rows, self.columns, bytes) {
            Some(weights) => weights,
            None => unreachable!("the shape was checked when the matrix was made"),
        }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// How the weights are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
