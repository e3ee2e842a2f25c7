//! The attention state of one sequence on one rung.
//!
//! Keys (after RoPE) and values of every layer lie in one region of ours, as f16 or, by option, as f32. Room for the whole
//! context limit is reserved; only what is cached is touched, resident and charged.
//!
//! Provenance is relative to what is kept: a token read natively over all that a shed cache still holds is exact, for a
//! truncated re-read would give the same.
//!
//! Position convention: a token keeps the position it was read at for ever. Shedding leaves gaps, the counter goes on,
//! and nothing is ever rotated again; the model's trained context therefore bounds the positions, not the tokens kept.

use molt_scheduler::units::{Bytes, Tokens};
use serde::{Deserialize, Serialize};

use crate::faults::{Boundary, pass};
use crate::ledger::{Kind, Ledger};
use crate::numbers::{CachePrecision, Numbers, keep};
use crate::region::{Region, RegionError, page_size};

/// What shapes a model's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Decoder blocks.
    pub layers: usize,
    /// Key/value heads a layer.
    pub kv_heads: usize,
    /// Components of a head.
    pub head_dim: usize,
    /// At what precision they are kept.
    pub precision: CachePrecision,
}

impl CacheShape {
    /// Components of one token's keys (or values) in one layer: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of one token's keys (or values) in one layer.
    fn row_bytes(&self) -> usize {
        self.kv_width() * self.precision.bytes()
    }

    /// Bytes of so many tokens' keys (or values) in one layer.
    pub(crate) fn plane_bytes(&self, tokens: usize) -> usize {
        tokens * self.row_bytes()
    }

    /// Bytes of one token over all layers.
    pub fn bytes_per_token(&self) -> Bytes {
        Bytes::from(self.layers * 2 * self.row_bytes())
    }

    /// Bytes that so many tokens are charged with: whole pages, for every plane ends in the middle of one.
    pub fn charge(&self, tokens: usize) -> Bytes {
        Bytes::from(2 * self.layers * (tokens * self.row_bytes()).next_multiple_of(page_size()))
    }
}

/// How a cached token came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// Read natively over a prefix that is all exact.
    Exact,
    /// Read natively over a prefix that is not all exact.
    OverMapped,
    /// Carried by a bridge.
    Mapped,
}

/// One cached token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its id.
    pub token: u32,
    /// The position it was read at.
    pub position: u32,
    /// How its keys and values came to be.
    pub provenance: Provenance,
}

/// Whether `slots` begin with the same tokens at the same positions, however these came to be.
pub(crate) fn is_prefix(first: &[Slot], slots: &[Slot]) -> bool {
    let same = |(a, b): (&Slot, &Slot)| a.token == b.token && a.position == b.position;
    first.len() <= slots.len() && first.iter().zip(slots).all(same)
}

/// What is wrong with a cache or a request on it.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// More tokens than there is room for.
    #[error("the cache holds {held} of at most {limit}; {more} more do not fit")]
    Full {
        /// Tokens cached.
        held: Tokens,
        /// Its limit.
        limit: Tokens,
        /// Tokens asked for.
        more: Tokens,
    },
    /// A value that is no finite number.
    #[error("{what} of layer {layer}, token {token} are not finite")]
    NotFinite {
        /// Keys or values.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The slot.
        token: usize,
    },
    /// Tokens that do not follow each other.
    #[error("a range of tokens {from}..{to} that the cache of {held} does not hold")]
    Range {
        /// First slot.
        from: usize,
        /// One past the last.
        to: usize,
        /// Slots held.
        held: usize,
    },
    /// No memory.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// The cache of one sequence.
#[derive(Debug)]
pub struct KvCache {
    shape: CacheShape,
    slots: Vec<Slot>,
    limit: usize,
    next_position: u32,
    /// Bytes from one plane (the keys or the values of a layer) to the next; whole pages.
    plane: usize,
    region: Region,
}

impl KvCache {
    /// An empty cache with room for `limit` tokens.
    pub fn new(shape: CacheShape, limit: Tokens, ledger: &Ledger) -> Result<Self, CacheError> {
        let limit = usize::from(limit);
        let plane = (limit * shape.row_bytes()).next_multiple_of(page_size());
        let region = Region::reserved(ledger, Kind::Cache, plane * shape.layers * 2)?;
        Ok(Self { shape, slots: Vec::new(), limit, next_position: 0, plane, region })
    }

    /// The shape.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Tokens cached.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Most tokens that fit.
    pub fn limit(&self) -> Tokens {
        Tokens::from(self.limit)
    }

    /// The cached tokens, oldest first.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The position of the next token.
    pub fn next_position(&self) -> u32 {
        self.next_position
    }

    /// Bytes of the tokens cached. The books hold whole pages, some more.
    pub fn bytes(&self) -> Bytes {
        self.shape.bytes_per_token().times(Tokens::from(self.len()))
    }

    /// Whether `slots` begin with exactly the tokens that it holds, where they stood.
    pub fn is_prefix_of(&self, slots: &[Slot]) -> bool {
        is_prefix(&self.slots, slots)
    }

    /// Makes room for tokens at the next positions and returns their slots. Keys and values are then written layer by
    /// layer; whoever gives up in between truncates back.
    pub fn append(&mut self, tokens: &[u32]) -> Result<std::ops::Range<usize>, CacheError> {
        let start = self.len();
        self.check_room(tokens.len())?;
        let provenance = self.native_provenance();
        for token in tokens {
            self.slots.push(Slot { token: *token, position: self.next_position, provenance });
            self.next_position += 1;
        }
        self.recharge();
        Ok(start..self.len())
    }

    /// Makes room for tokens that stand where they stood in another cache, with that provenance.
    pub fn append_at(&mut self, slots: &[Slot], provenance: Provenance) -> Result<std::ops::Range<usize>, CacheError> {
        let start = self.len();
        self.check_room(slots.len())?;
        self.slots.extend(slots.iter().map(|slot| Slot { provenance, ..*slot }));
        if let Some(last) = slots.last() {
            self.next_position = last.position + 1;
        }
        self.recharge();
        Ok(start..self.len())
    }

    fn check_room(&self, more: usize) -> Result<(), CacheError> {
        match self.len() + more <= self.limit {
            true => Ok(()),
            false => {
                let (held, limit, more) = (Tokens::from(self.len()), self.limit(), Tokens::from(more));
                Err(CacheError::Full { held, limit, more })
            }
        }
    }

    /// Sets the provenance of slots.
    pub fn mark(&mut self, slots: std::ops::Range<usize>, provenance: Provenance) {
        for slot in &mut self.slots[slots] {
            slot.provenance = provenance;
        }
    }

    /// Sets the position that the next token gets (after a carry of a cache with gaps).
    pub fn set_next_position(&mut self, position: u32) {
        self.next_position = position;
    }

    /// A copy of the first slots, with room for `limit` tokens.
    pub fn prefix(&self, len: usize, limit: Tokens, ledger: &Ledger) -> Result<Self, CacheError> {
        let Some(slots) = self.slots.get(..len) else {
            return Err(CacheError::Range { from: 0, to: len, held: self.len() });
        };
        let mut copy = Self::new(self.shape, limit, ledger)?;
        copy.append_at(slots, Provenance::Exact)?;
        copy.slots.copy_from_slice(slots);
        let part = len * self.shape.row_bytes();
        for (plane, to) in copy.planes_mut().enumerate() {
            to.copy_from_slice(&self.plane(plane)[..part]);
        }
        Ok(copy)
    }

    /// Drops everything from slot `len` on and gives its pages back.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        self.next_position = self.slots[len].position;
        self.slots.truncate(len);
        self.trim();
    }

    /// Drops the slots of a range from the middle; what follows moves up and keeps its positions.
    pub fn shed(&mut self, slots: std::ops::Range<usize>) -> Result<(), CacheError> {
        if slots.start > slots.end || slots.end > self.len() {
            return Err(CacheError::Range { from: slots.start, to: slots.end, held: self.len() });
        }
        let row = self.shape.row_bytes();
        for plane in self.planes_mut() {
            plane.copy_within(slots.end * row.., slots.start * row);
        }
        self.slots.drain(slots);
        self.trim();
        Ok(())
    }

    fn trim(&mut self) {
        let used = self.len() * self.shape.row_bytes();
        for plane in 0..self.shape.layers * 2 {
            self.region.discard(plane * self.plane + used..(plane + 1) * self.plane);
        }
        self.recharge();
    }

    fn recharge(&mut self) {
        let charge = self.shape.charge(self.len());
        self.region.set_charge(usize::try_from(charge.get()).unwrap_or(usize::MAX));
    }

    /// Keys of a layer after RoPE, `[len, kv_heads, head_dim]`.
    pub fn keys(&self, layer: usize) -> Numbers<'_> {
        Numbers::of(self.plane(2 * layer), self.shape.precision)
    }

    /// Values of a layer, `[len, kv_heads, head_dim]`.
    pub fn values(&self, layer: usize) -> Numbers<'_> {
        Numbers::of(self.plane(2 * layer + 1), self.shape.precision)
    }

    /// The keys or the values of a layer as they are kept: layer after layer, keys before values.
    pub(crate) fn plane(&self, plane: usize) -> &[u8] {
        &self.region.as_slice()[plane * self.plane..][..self.len() * self.shape.row_bytes()]
    }

    /// Writes keys (after RoPE) and values of slots `from..`, each `[tokens, kv_heads, head_dim]`.
    pub fn write(&mut self, layer: usize, from: usize, keys: &[f32], values: &[f32]) {
        let (width, precision) = (self.shape.kv_width(), self.shape.precision);
        for (plane, source) in [(2 * layer, keys), (2 * layer + 1, values)] {
            assert!(from * width + source.len() <= self.len() * width, "a write outside the slots made room for");
            let at = plane * self.plane + from * self.shape.row_bytes();
            keep(source, &mut self.region.as_mut_slice()[at..at + source.len() * precision.bytes()], precision);
        }
    }

    /// Room for the keys and for the values of all slots as they are kept, in the order of [`KvCache::plane`].
    pub(crate) fn planes_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let used = self.len() * self.shape.row_bytes();
        let planes = self.region.as_mut_slice().chunks_exact_mut(self.plane.max(1)).take(2 * self.shape.layers);
        planes.map(move |plane| &mut plane[..used])
    }

    /// Keys and values of some slots as they are kept, to be put back.
    pub(crate) fn copy_of(&self, slots: std::ops::Range<usize>, ledger: &Ledger) -> Result<Region, RegionError> {
        let (row, planes) = (self.shape.row_bytes(), 2 * self.shape.layers);
        let part = slots.len() * row;
        let mut copy = Region::new(ledger, Kind::Scratch, planes * part)?;
        for (plane, to) in copy.as_mut_slice::<u8>().chunks_exact_mut(part.max(1)).take(planes).enumerate() {
            to.copy_from_slice(&self.plane(plane)[slots.start * row..slots.end * row]);
        }
        Ok(copy)
    }

    /// Puts back what [`KvCache::copy_of`] copied from the same slots.
    pub(crate) fn put_back(&mut self, slots: std::ops::Range<usize>, copy: &Region) {
        let row = self.shape.row_bytes();
        let parts = copy.as_slice::<u8>().chunks_exact((slots.len() * row).max(1));
        for (plane, part) in self.planes_mut().zip(parts) {
            plane[slots.start * row..slots.end * row].copy_from_slice(part);
        }
    }

    /// What a token is that is read natively after what is cached.
    pub fn native_provenance(&self) -> Provenance {
        match self.is_exact() {
            true => Provenance::Exact,
            false => Provenance::OverMapped,
        }
    }

    /// Whether all slots are exact.
    pub fn is_exact(&self) -> bool {
        self.slots.iter().all(|s| s.provenance == Provenance::Exact)
    }

    /// Looks at every value of some slots.
    pub fn check_finite(&self, slots: std::ops::Range<usize>) -> Result<(), CacheError> {
        if pass(Boundary::CheckCache).is_err() {
            return Err(CacheError::NotFinite { what: "keys", layer: 0, token: slots.start });
        }
        let width = self.shape.kv_width();
        for layer in 0..self.shape.layers {
            for (what, values) in [("keys", self.keys(layer)), ("values", self.values(layer))] {
                let part = values.slice(slots.start * width..slots.end * width);
                if let Some(bad) = part.first_not_finite() {
                    return Err(CacheError::NotFinite { what, layer, token: slots.start + bad / width });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: CacheShape = CacheShape { layers: 2, kv_heads: 1, head_dim: 4, precision: CachePrecision::F16 };

    fn filled(ledger: &Ledger, tokens: u32) -> KvCache {
        let mut cache = KvCache::new(SHAPE, Tokens::new(5_000), ledger).unwrap();
        let ids: Vec<u32> = (0..tokens).collect();
        let slots = cache.append(&ids).unwrap();
        let numbers: Vec<f32> = ids.iter().flat_map(|t| [*t as f32; 4]).collect();
        for layer in 0..SHAPE.layers {
            cache.write(layer, slots.start, &numbers, &numbers);
        }
        cache
    }

    fn check(cache: &KvCache, ledger: &Ledger, expected: &[u32]) {
        let tokens: Vec<u32> = cache.slots().iter().map(|s| s.token).collect();
        assert_eq!(tokens, expected);
        for layer in 0..SHAPE.layers {
            for plane in [cache.keys(layer), cache.values(layer)] {
                let held: Vec<f32> = plane.to_f32().chunks(4).map(|c| c[3]).collect();
                assert_eq!(held, expected.iter().map(|t| *t as f32).collect::<Vec<_>>());
            }
        }
        let plane = expected.len() * SHAPE.row_bytes();
        let pages = 2 * SHAPE.layers * plane.next_multiple_of(page_size());
        assert_eq!(ledger.used(Kind::Cache), Bytes::from(pages), "the pages that the tokens lie on");
    }

    #[test]
    fn shedding_keeps_positions_and_truncating_gives_back() {
        let ledger = Ledger::new();
        let mut cache = filled(&ledger, 2_000);
        cache.shed(4..1_990).unwrap();
        let kept: Vec<u32> = (0..4).chain(1_990..2_000).collect();
        check(&cache, &ledger, &kept);
        assert_eq!(cache.slots()[4].position, 1_990);
        assert_eq!(cache.next_position(), 2_000);
        cache.truncate(6);
        check(&cache, &ledger, &[0, 1, 2, 3, 1_990, 1_991]);
        assert_eq!(cache.next_position(), 1_992);
        drop(cache);
        assert_eq!(ledger.total(), Bytes::ZERO);
    }

    #[test]
    fn a_prefix_is_a_copy_with_room_of_its_own() {
        let (ledger, copied) = (Ledger::new(), Ledger::new());
        let mut cache = filled(&ledger, 50);
        cache.mark(5..6, Provenance::Mapped);
        let copy = cache.prefix(20, Tokens::new(9_000), &copied).unwrap();
        check(&copy, &copied, &(0..20).collect::<Vec<_>>());
        assert_eq!((copy.slots(), copy.next_position()), (&cache.slots()[..20], 20));
        assert_eq!(copy.limit(), Tokens::new(9_000));
        check(&cache, &ledger, &(0..50).collect::<Vec<_>>());
        assert!(matches!(cache.prefix(51, Tokens::new(60), &copied), Err(CacheError::Range { .. })));
        assert!(matches!(cache.prefix(20, Tokens::new(19), &copied), Err(CacheError::Full { .. })));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let ledger = Ledger::new();
        let mut cache = filled(&ledger, 4_999);
        assert!(matches!(cache.append(&[1, 2]), Err(CacheError::Full { .. })));
        assert!(matches!(cache.shed(10..6_000), Err(CacheError::Range { .. })));
        assert_eq!(cache.len(), 4_999);
    }

    #[test]
    fn a_value_that_is_no_number_is_found() {
        let ledger = Ledger::new();
        let mut cache = filled(&ledger, 10);
        cache.check_finite(0..10).unwrap();
        cache.write(1, 7, &[f32::NAN; 4], &[0.0; 4]);
        assert!(matches!(cache.check_finite(0..10), Err(CacheError::NotFinite { layer: 1, token: 7, .. })));
    }

    #[test]
    fn what_follows_a_mapped_token_is_over_mapped() {
        let ledger = Ledger::new();
        let mut cache = filled(&ledger, 3);
        assert!(cache.is_exact());
        cache.mark(1..2, Provenance::Mapped);
        cache.append(&[9]).unwrap();
        assert_eq!(cache.slots()[3].provenance, Provenance::OverMapped);
    }
}
