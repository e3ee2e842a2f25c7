//! Records: a cache as a file that outlives the process, so that a conversation need not be read again after a restart.
//!
//! A record is written once and replaced as a whole. Opened, it is a [`Keepsake`] of the model that it names: whoever goes
//! to that model takes the cache from it. It must never be believed: every claim is held against the length of the file
//! before anything is made of it, and every part has a checksum.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};

use molt_scheduler::units::Tokens;
use serde::{Deserialize, Serialize};

use crate::cache::{CacheShape, KvCache, Provenance, Slot};
use crate::keepsake::Keepsake;
use crate::ledger::Ledger;
use crate::numbers::CachePrecision;

/// What every record begins with; the last byte is the version.
const MAGIC: [u8; 8] = *b"MOLTKV\0\x01";
/// Most bytes of a head, which are some two hundred.
const HEAD: u32 = 4_096;
/// Bytes of a slot: token, position, provenance.
const SLOT: usize = 9;
/// Bytes of a checksum.
pub(crate) const SUM: usize = 4;

/// Why a record could not be written or is not used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The disk refused.
    #[error("the record {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// It is not what was written: cut off, altered, or no record at all.
    #[error("the record {} is broken: {reason}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What shows it.
        reason: String,
    },
}

/// What a record says of itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    /// SHA-256 of the model file.
    source: String,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    precision: CachePrecision,
    slots: usize,
    next_position: u32,
}

/// The checksum of a part; its number is in it, so that parts cannot stand for one another.
pub(crate) fn sum(part: usize, bytes: &[u8]) -> [u8; SUM] {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&part.to_le_bytes());
    sum.update(bytes);
    sum.finalize().to_le_bytes()
}

/// Number of the head, of the slots, and of the first plane.
const HEAD_PART: usize = 0;
const SLOTS_PART: usize = 1;
pub(crate) const FIRST_PLANE: usize = 2;

/// Writes a cache of the model with that source hash.
///
/// # Errors
/// The disk's.
pub fn write(cache: &KvCache, source: &str, out: &mut impl Write) -> io::Result<()> {
    let planes = (0..2 * cache.shape().layers).map(|plane| Ok(cache.plane(plane)));
    write_parts((cache.shape(), cache.slots(), cache.next_position()), source, planes, out)
}

/// Writes head, slots and planes.
pub(crate) fn write_parts<B: AsRef<[u8]>>(
    (shape, slots, next_position): (CacheShape, &[Slot], u32),
    source: &str,
    planes: impl Iterator<Item = io::Result<B>>,
    out: &mut impl Write,
) -> io::Result<()> {
    let CacheShape { layers, kv_heads, head_dim, precision } = shape;
    let source = source.to_owned();
    let head = Head { source, layers, kv_heads, head_dim, precision, slots: slots.len(), next_position };
    let head = serde_json::to_vec(&head)?;
    let length = u32::try_from(head.len()).map_err(io::Error::other)?;
    out.write_all(&MAGIC)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&head)?;
    out.write_all(&sum(HEAD_PART, &head))?;
    let mut told = Vec::with_capacity(slots.len() * SLOT);
    for slot in slots {
        told.extend_from_slice(&slot.token.to_le_bytes());
        told.extend_from_slice(&slot.position.to_le_bytes());
        told.push(match slot.provenance {
            Provenance::Exact => 0,
            Provenance::OverMapped => 1,
            Provenance::Mapped => 2,
        });
    }
    out.write_all(&told)?;
    out.write_all(&sum(SLOTS_PART, &told))?;
    for (part, plane) in (FIRST_PLANE..).zip(planes) {
        let plane = plane?;
        out.write_all(plane.as_ref())?;
        out.write_all(&sum(part, plane.as_ref()))?;
    }
    Ok(())
}

/// Opens a record: its head and slots are checked, and its length. The planes are checked when they are restored.
///
/// # Errors
/// What is wrong with the file, and its name.
pub fn open(path: &Path) -> Result<Keepsake, RecordError> {
    let failed = |source| RecordError::File { path: path.to_owned(), source };
    let broken = |reason: &str| RecordError::Broken { path: path.to_owned(), reason: reason.to_owned() };
    let cut = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => broken("it ends too soon"),
        _ => failed(error),
    };
    let file = File::open(path).map_err(failed)?;
    let holds = file.metadata().map_err(failed)?.len();
    let mut reader = BufReader::new(&file);
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic).map_err(cut)?;
    if magic != MAGIC {
        return Err(broken("it is no record of this version"));
    }
    let mut number = [0; SUM];
    reader.read_exact(&mut number).map_err(cut)?;
    let length = u32::from_le_bytes(number);
    if length > HEAD || u64::from(length) > holds {
        return Err(broken("its head claims to be longer than heads are"));
    }
    let mut checked = |part: usize, length: usize| {
        let (mut bytes, mut told) = (vec![0; length], [0; SUM]);
        reader.read_exact(&mut bytes).and_then(|()| reader.read_exact(&mut told)).map_err(cut)?;
        match told == sum(part, &bytes) {
            true => Ok(bytes),
            false => Err(broken("a checksum does not hold")),
        }
    };
    let head = checked(HEAD_PART, usize::try_from(length).map_err(|_| broken("its head is too long"))?)?;
    let head: Head = serde_json::from_slice(&head).map_err(|error| broken(&error.to_string()))?;
    let Head { source, layers, kv_heads, head_dim, precision, slots: count, next_position } = head;
    let shape = CacheShape { layers, kv_heads, head_dim, precision };
    let slots_at = MAGIC.len() + 2 * SUM + usize::try_from(length).unwrap_or(usize::MAX);
    // Nothing is made for what the file does not hold.
    let planes_at =
        slots_at.checked_add(count.checked_mul(SLOT).and_then(|slots| slots.checked_add(SUM)).unwrap_or(usize::MAX));
    let plane = kv_heads.checked_mul(head_dim).and_then(|width| width.checked_mul(precision.bytes()));
    let plane = plane.and_then(|row| row.checked_mul(count)).and_then(|plane| plane.checked_add(SUM));
    let planes = layers.checked_mul(2).zip(plane).and_then(|(planes, plane)| planes.checked_mul(plane));
    let whole = planes_at.zip(planes).and_then(|(at, planes)| at.checked_add(planes));
    if whole.and_then(|whole| u64::try_from(whole).ok()) != Some(holds) {
        return Err(broken("it is not as long as it claims"));
    }
    if [layers, kv_heads, head_dim].contains(&0) {
        return Err(broken("it is the cache of no model"));
    }
    let mut slots = Vec::with_capacity(count);
    for told in checked(SLOTS_PART, count * SLOT)?.chunks_exact(SLOT) {
        let number = |at: usize| u32::from_le_bytes([told[at], told[at + 1], told[at + 2], told[at + 3]]);
        let provenance = match told[8] {
            0 => Provenance::Exact,
            1 => Provenance::OverMapped,
            2 => Provenance::Mapped,
            _ => return Err(broken("a token came to be in no way that is known")),
        };
        slots.push(Slot { token: number(0), position: number(4), provenance });
    }
    let in_order = slots.windows(2).all(|pair| pair[0].position < pair[1].position);
    if !in_order || slots.last().is_none_or(|last| last.position >= next_position) {
        return Err(broken("its tokens do not follow each other"));
    }
    let at = u64::try_from(slots_at + count * SLOT + SUM).map_err(|_| broken("it is too long"))?;
    Ok(Keepsake::of_record(file, path, source, (shape, slots, next_position), at))
}

/// Reads the planes of a record, which begin there, into a cache.
pub(crate) fn read_planes(file: &File, path: &Path, at: u64, cache: &mut KvCache) -> Result<(), RecordError> {
    let failed = |source| RecordError::File { path: path.to_owned(), source };
    let mut reader = BufReader::new(file);
    reader.seek(SeekFrom::Start(at)).map_err(failed)?;
    for (part, plane) in (FIRST_PLANE..).zip(cache.planes_mut()) {
        let mut told = [0; SUM];
        reader.read_exact(plane).and_then(|()| reader.read_exact(&mut told)).map_err(failed)?;
        hold(path, part, plane, told)?;
    }
    Ok(())
}

/// Holds a part against its checksum.
pub(crate) fn hold(path: &Path, part: usize, bytes: &[u8], told: [u8; SUM]) -> Result<(), RecordError> {
    let broken = || RecordError::Broken { path: path.to_owned(), reason: "a checksum does not hold".to_owned() };
    (told == sum(part, bytes)).then_some(()).ok_or_else(broken)
}

impl Keepsake {
    /// Whether it holds the tokens of a conversation, each where it stood, as far as both go.
    pub fn is_of(&self, tokens: &[u32]) -> bool {
        let there = |slot: &Slot| usize::try_from(slot.position).ok().and_then(|at| tokens.get(at));
        self.slots().iter().all(|slot| there(slot).is_none_or(|token| *token == slot.token))
    }

    /// The cache as it was, but for what comes after the first `most` tokens of the conversation.
    ///
    /// # Errors
    /// What is wrong with the file, or that there is no room.
    pub fn restore_until(
        &mut self,
        most: usize,
        limit: Tokens,
        ledger: &Ledger,
    ) -> Result<KvCache, crate::keepsake::KeepsakeError> {
        let mut cache = self.restore(limit, ledger)?;
        let within = |slot: &&Slot| usize::try_from(slot.position).is_ok_and(|position| position < most);
        cache.truncate(cache.slots().iter().take_while(within).count());
        Ok(cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(precision: CachePrecision) -> KvCache {
        let shape = CacheShape { layers: 2, kv_heads: 2, head_dim: 4, precision };
        let mut cache = KvCache::new(shape, Tokens::new(40), &Ledger::new()).unwrap();
        let slots = cache.append(&(100..112).collect::<Vec<_>>()).unwrap();
        for layer in 0..2 {
            let values: Vec<f32> = (0..12 * 8).map(|i| (i as f32 * 0.37 + layer as f32).sin()).collect();
            cache.write(layer, slots.start, &values, &values);
        }
        cache.shed(4..6).unwrap();
        cache.mark(7..9, Provenance::Mapped);
        cache
    }

    fn bytes_of(cache: &KvCache) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(cache, "abc", &mut bytes).unwrap();
        bytes
    }

    /// The cache that a file with those bytes gives, or why it gives none.
    fn read(path: &Path, bytes: &[u8]) -> Result<(Keepsake, KvCache), String> {
        std::fs::write(path, bytes).unwrap();
        let mut kept = open(path).map_err(|error| error.to_string())?;
        let cache = kept.restore(Tokens::new(40), &Ledger::new()).map_err(|error| error.to_string())?;
        Ok((kept, cache))
    }

    fn assert_same(a: &KvCache, b: &KvCache) {
        assert_eq!((a.shape(), a.slots(), a.next_position()), (b.shape(), b.slots(), b.next_position()));
        for layer in 0..a.shape().layers {
            assert_eq!((a.keys(layer), a.values(layer)), (b.keys(layer), b.values(layer)));
        }
    }

    #[test]
    fn a_record_comes_back_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.cache");
        for precision in [CachePrecision::F16, CachePrecision::F32] {
            let cache = filled(precision);
            let (mut kept, back) = read(&path, &bytes_of(&cache)).unwrap();
            assert_same(&cache, &back);
            assert_eq!(kept.source(), "abc");
            let tokens: Vec<u32> = (100..115).collect();
            assert!(kept.is_of(&tokens) && kept.is_of(&tokens[..11]) && !kept.is_of(&tokens[1..]));
            let part = kept.restore_until(9, Tokens::new(40), &Ledger::new()).unwrap();
            assert_eq!((part.len(), part.next_position()), (7, 9));
            // What a conversation left behind in an unlinked file makes the same record.
            let mut again = Vec::new();
            Keepsake::save(&cache, "abc", folder.path()).unwrap().write_record(&mut again).unwrap();
            assert!(again == bytes_of(&cache));
            again.clear();
            kept.write_record(&mut again).unwrap();
            assert!(again == bytes_of(&cache));
        }
    }

    #[test]
    fn a_record_that_was_cut_off_or_altered_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.cache");
        let whole = bytes_of(&filled(CachePrecision::F16));
        for length in 0..whole.len() {
            let error = read(&path, &whole[..length]).map(|_| length).unwrap_err();
            assert!(error.contains("case.cache"), "{error}");
        }
        for at in 0..whole.len() {
            for flip in [1u8, 0x80, 0xff] {
                let mut altered = whole.clone();
                altered[at] ^= flip;
                let error = read(&path, &altered).map(|_| at).unwrap_err();
                assert!(error.contains("case.cache"), "{error}");
            }
        }
        let error = read(&path, &[&whole[..], &[0]].concat()).map(|_| ()).unwrap_err();
        assert!(error.contains("not as long"), "{error}");
    }

    #[test]
    fn what_is_broken_gets_no_new_checksums() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.cache");
        let whole = bytes_of(&filled(CachePrecision::F16));
        let planes = whole.len() - 4 * (filled(CachePrecision::F16).shape().plane_bytes(10) + SUM);
        for at in planes..whole.len() {
            let mut altered = whole.clone();
            altered[at] ^= 1;
            std::fs::write(&path, &altered).unwrap();
            let error = open(&path).unwrap().write_record(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "altered at {at}");
            assert!(error.to_string().contains("case.cache"), "{error}");
        }
    }

    #[test]
    fn what_a_record_claims_is_checked_before_anything_is_made_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.cache");
        let check = |layers: usize, slots: usize, part: &str| {
            let head = Head {
                source: "abc".to_owned(),
                layers,
                kv_heads: 1 << 20,
                head_dim: 1 << 20,
                precision: CachePrecision::F32,
                slots,
                next_position: 5,
            };
            let head = serde_json::to_vec(&head).unwrap();
            let length = u32::try_from(head.len()).unwrap().to_le_bytes();
            let bytes = [&MAGIC[..], &length, &head, &sum(HEAD_PART, &head)].concat();
            let error = read(&path, &bytes).map(|_| ()).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check(1, 1, "not as long");
        check(usize::MAX, 1, "not as long");
        check(1, usize::MAX, "not as long");
        check(1, usize::MAX / SLOT, "not as long");
        check(0, 0, "not as long");
    }
}
