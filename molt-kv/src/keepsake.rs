//! Keepsakes: the cache that a sequence leaves behind on the model it came from, in an unlinked file, so that going back
//! up is exact. Its pages are the system's to drop; they are not charged to the books.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};

use molt_scheduler::units::{Bytes, Tokens};

use crate::cache::{CacheError, CacheShape, KvCache, Slot, is_prefix};
use crate::faults::{Boundary, pass};
use crate::ledger::Ledger;
use crate::record::{self, RecordError};

/// A cache in a file that nobody else can see and that vanishes with the process; or in a record, which stays.
#[derive(Debug)]
pub struct Keepsake {
    file: File,
    source: String,
    shape: CacheShape,
    slots: Vec<Slot>,
    next_position: u32,
    /// The record's path, and where in it the planes begin.
    record: Option<(PathBuf, u64)>,
}

/// Why a keepsake could not be kept or restored.
#[derive(Debug, thiserror::Error)]
pub enum KeepsakeError {
    /// The disk refused.
    #[error("the keepsake's file")]
    File(#[from] std::io::Error),
    /// There is no room to restore it.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The record is not what was written.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Keepsake {
    /// Writes a cache of the model with that source hash to an unlinked file in `folder`.
    pub fn save(cache: &KvCache, source: &str, folder: &Path) -> Result<Self, KeepsakeError> {
        pass(Boundary::WriteKeepsake)?;
        let mut file = tempfile::tempfile_in(folder)?;
        let mut writer = BufWriter::new(&mut file);
        for plane in 0..2 * cache.shape().layers {
            writer.write_all(cache.plane(plane))?;
        }
        writer.flush()?;
        drop(writer);
        let (slots, next_position) = (cache.slots().to_vec(), cache.next_position());
        Ok(Self { file, source: source.to_owned(), shape: cache.shape(), slots, next_position, record: None })
    }

    /// What lies in a record whose head and slots have been checked.
    pub(crate) fn of_record(
        file: File,
        path: &Path,
        source: String,
        (shape, slots, next_position): (CacheShape, Vec<Slot>, u32),
        at: u64,
    ) -> Self {
        Self { file, source, shape, slots, next_position, record: Some((path.to_owned(), at)) }
    }

    /// Writes it as a record.
    ///
    /// # Errors
    /// The disk's; or, as [`io::ErrorKind::InvalidData`], that it lies in a record whose checksums do not hold. With new ones
    /// nobody would see that.
    pub fn write_record(&mut self, out: &mut impl Write) -> io::Result<()> {
        let mut reader = BufReader::new(&self.file);
        reader.seek(SeekFrom::Start(self.record.as_ref().map_or(0, |(_, at)| *at)))?;
        let length = self.shape.plane_bytes(self.slots.len());
        let planes = (record::FIRST_PLANE..).take(2 * self.shape.layers).map(|part| {
            let mut plane = vec![0; length];
            reader.read_exact(&mut plane)?;
            if let Some((path, _)) = &self.record {
                let mut told = [0; record::SUM];
                reader.read_exact(&mut told)?;
                record::hold(path, part, &plane, told).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
            }
            Ok(plane)
        });
        record::write_parts((self.shape, &self.slots, self.next_position), &self.source, planes, out)
    }

    /// The position of the next token.
    pub fn next_position(&self) -> u32 {
        self.next_position
    }

    /// The shape of the cache.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// SHA-256 of the model file that the cache belongs to.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The tokens it holds.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> Bytes {
        self.shape.bytes_per_token().times(Tokens::from(self.slots.len()))
    }

    /// Whether `slots` begin with exactly the tokens that it holds, where they stood.
    pub fn is_prefix_of(&self, slots: &[Slot]) -> bool {
        is_prefix(&self.slots, slots)
    }

    /// The cache as it was, bit for bit.
    pub fn restore(&mut self, limit: Tokens, ledger: &Ledger) -> Result<KvCache, KeepsakeError> {
        let mut cache = KvCache::new(self.shape, limit, ledger)?;
        for slot in &self.slots {
            cache.append_at(&[*slot], slot.provenance)?;
        }
        cache.set_next_position(self.next_position);
        pass(Boundary::ReadKeepsake)?;
        if let Some((path, at)) = &self.record {
            record::read_planes(&self.file, path, *at, &mut cache)?;
            return Ok(cache);
        }
        self.file.rewind()?;
        let mut reader = BufReader::new(&self.file);
        // Straight into the cache: a long one's buffers would be megabytes that no books know.
        for plane in cache.planes_mut() {
            reader.read_exact(plane)?;
        }
        Ok(cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Provenance;
    use crate::numbers::CachePrecision;

    #[test]
    fn a_cache_comes_back_bit_for_bit() {
        check(CachePrecision::F16);
        check(CachePrecision::F32);
    }

    fn check(precision: CachePrecision) {
        let ledger = Ledger::new();
        let shape = CacheShape { layers: 3, kv_heads: 2, head_dim: 4, precision };
        let mut cache = KvCache::new(shape, Tokens::new(100), &ledger).unwrap();
        let slots = cache.append(&(0..40).collect::<Vec<_>>()).unwrap();
        for layer in 0..3 {
            let values: Vec<f32> = (0..40 * 8).map(|i| (i as f32 * 0.37 + layer as f32).sin()).collect();
            cache.write(layer, slots.start, &values, &values);
        }
        cache.shed(4..10).unwrap();
        cache.mark(5..9, Provenance::Mapped);
        let mut keepsake = Keepsake::save(&cache, "abc", &std::env::temp_dir()).unwrap();
        let back = keepsake.restore(Tokens::new(100), &ledger).unwrap();
        assert_eq!((back.slots(), back.next_position()), (cache.slots(), cache.next_position()));
        for layer in 0..3 {
            assert_eq!((back.keys(layer), back.values(layer)), (cache.keys(layer), cache.values(layer)));
        }
        assert!(keepsake.is_prefix_of(cache.slots()));
        cache.truncate(20);
        assert!(!keepsake.is_prefix_of(cache.slots()), "more than the conversation has");
    }
}
