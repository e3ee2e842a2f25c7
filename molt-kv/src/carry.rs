//! Carrying a sequence's cache to another model: a transaction that leaves the source untouched until the new cache
//! has been checked.
//!
//! With a bridge, in this order: the first tokens are read natively through all layers (exact, because attention is
//! causal); the destination's first layers run natively over the rest of the context (exact there too); the
//! remaining layers of the context are mapped; the last window is read natively over what was mapped.

use std::ops::Range;

use molt_scheduler::units::{Bytes, Tokens};
use serde::{Deserialize, Serialize};

use crate::bridge::{Bridge, BridgeError, Shape, features};
use crate::cache::{CacheError, KvCache, Provenance, Slot};
use crate::chosen::{chunks_of, most_looked_at};
use crate::decoder::{Decoder, StopFlag, Stopped};
use crate::faults::{Boundary, pass};
use crate::keepsake::{Keepsake, KeepsakeError};
use crate::ledger::{Kind, Ledger};
use crate::region::{Region, RegionError};
use crate::rope::{Rope, Turn};

/// How a cache came to another rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// Same weights at another precision: the cache is taken as it is.
    Identity,
    /// Mapped by a bridge, at least in part.
    Bridge,
    /// Restored from the keepsake; what was written since is read natively.
    Keepsake,
    /// Read ahead on the destination while the sequence was elsewhere; the last tokens are read natively.
    ReadAhead,
    /// All of it read again, natively.
    Reread,
}

/// What is done natively during a carry, beside the bridge's native layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CarrySettings {
    /// First tokens that are read natively: attention sinks, system prompt.
    pub exact_first: Tokens,
    /// Last tokens that are read natively over the mapped ones.
    pub fed_window: Tokens,
    /// Neither of the two is more than the context divided by this, so that a short context is cheap to carry too.
    pub native_share: usize,
    /// Of the mapped tokens so many in a hundred are read natively over the others: those to which the window pays most
    /// attention (arXiv 2405.16444 chooses by other means). The window is then read again.
    pub chosen_percent: usize,
    /// Tokens mapped at a time.
    pub block: Tokens,
}

impl CarrySettings {
    const fn native(exact_first: u64, fed_window: u64, native_share: usize) -> Self {
        let (exact_first, fed_window) = (Tokens::new(exact_first), Tokens::new(fed_window));
        Self { exact_first, fed_window, native_share, chosen_percent: 0, block: Tokens::new(256) }
    }

    /// With so many in a hundred of the mapped tokens chosen to be read natively.
    pub const fn choosing(self, chosen_percent: usize) -> Self {
        Self { chosen_percent, ..self }
    }

    /// Hardly more than the maps.
    pub const FAST: Self = Self::native(4, 16, 8);
    /// Some tokens at both ends natively: what is done where nobody knows how fast this machine is.
    pub const BALANCED: Self = Self::native(64, 64, 8);
    /// Much read natively: of the mapped tokens nearly a third.
    pub const FAITHFUL: Self = Self::BALANCED.choosing(30);
    /// Everything read again: nothing is mapped, and nothing is lost.
    pub const EXACT: Self = Self::native(u64::MAX, 0, 1);
    /// From fast to exact: each reads more natively than the one before and diverges less.
    pub const EFFORTS: [Self; 7] = [
        Self::FAST,
        Self::native(16, 32, 8),
        Self::BALANCED,
        Self::BALANCED.choosing(8),
        Self::BALANCED.choosing(15),
        Self::FAITHFUL,
        Self::EXACT,
    ];

    /// The most faithful of [`CarrySettings::EFFORTS`] that takes at most `flops` operations for so many tokens, and no more
    /// than reading them again, which is exact; the fastest where none does. What it leaves undone is left to healing.
    pub fn within(flops: f64, bridge: &Bridge, destination: &dyn Decoder, tokens: Tokens) -> Self {
        let reread = destination.flops(destination.cache_shape().layers, usize::from(tokens), 0);
        let flops = flops.min(reread);
        let fits = |settings: &&Self| foretold_flops(bridge, destination, tokens, **settings) <= flops;
        *Self::EFFORTS.iter().rev().find(fits).unwrap_or(&Self::FAST)
    }
}

/// Floating-point operations that a carry of so many tokens will take.
pub fn foretold_flops(bridge: &Bridge, destination: &dyn Decoder, tokens: Tokens, settings: CarrySettings) -> f64 {
    let (spec, tokens) = (bridge.spec(), usize::from(tokens));
    let (first, window) = split(tokens, settings);
    let (layers, mapped) = (destination.cache_shape().layers, tokens - first - window);
    let maps = spec.mapped_layers().filter_map(|layer| bridge.map(layer)).map(|map| map.weight.columns());
    let maps = 2.0 * (maps.sum::<usize>() * spec.outputs() * mapped) as f64;
    let fed = destination.flops(layers, window, tokens - window);
    let native =
        destination.flops(layers, first, 0) + fed + destination.flops(spec.native_layers, mapped, first) + maps;
    match chosen(mapped, window, settings) {
        0 => native,
        // They may lie anywhere, and so in the middle on average.
        count => native + destination.flops(layers, 1, tokens / 2) * count as f64 + fed,
    }
}

/// How many mapped tokens are read natively because the window looks at them.
fn chosen(mapped: usize, window: usize, settings: CarrySettings) -> usize {
    if window == 0 { 0 } else { mapped * settings.chosen_percent.min(100) / 100 }
}

/// Attention sinks: so many first tokens may be read natively however short the context (arXiv 2309.17453).
const SINKS: usize = 4;

impl Default for CarrySettings {
    fn default() -> Self {
        Self::BALANCED
    }
}

/// Why a carry failed. The source cache is still whole.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The bridge is for other models.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// There is no room, or what came out is not finite.
    #[error("the carried cache is not usable")]
    Cache(#[from] CacheError),
    /// Given up as asked.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// No memory for its buffers.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The keepsake is not usable.
    #[error(transparent)]
    Keepsake(#[from] KeepsakeError),
    /// A keepsake of another model, or of another conversation.
    #[error("the keepsake does not belong here: {reason}")]
    OtherKeepsake {
        /// What differs.
        reason: &'static str,
    },
    /// What was read ahead is another conversation's.
    #[error("what was read ahead is no beginning of this conversation")]
    OtherConversation,
    /// One end of the carry has another shape than the bridge expects.
    #[error("the {end} has {found} layers of {found_width}, the bridge expects {expected} of {expected_width}")]
    Shape {
        /// `source` or `destination`.
        end: &'static str,
        /// Layers of the model.
        found: usize,
        /// Width of its keys.
        found_width: usize,
        /// Layers that the bridge expects.
        expected: usize,
        /// Width that it expects.
        expected_width: usize,
    },
}

/// What a carry did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CarryReport {
    /// How.
    pub route: Route,
    /// Tokens in the new cache, by provenance.
    pub exact: Tokens,
    /// Read natively over mapped ones.
    pub over_mapped: Tokens,
    /// Mapped.
    pub mapped: Tokens,
    /// Floating-point operations that it took.
    pub flops: f64,
    /// Floating-point operations that reading everything again would have taken.
    pub reread_flops: f64,
}

impl CarryReport {
    fn of(route: Route, cache: &KvCache, flops: f64, reread_flops: f64) -> Self {
        let count = |p| Tokens::from(cache.slots().iter().filter(|s| s.provenance == p).count());
        let (exact, over_mapped) = (count(Provenance::Exact), count(Provenance::OverMapped));
        Self { route, exact, over_mapped, mapped: count(Provenance::Mapped), flops, reread_flops }
    }

    /// Tokens in the new cache.
    pub fn tokens(&self) -> Tokens {
        self.exact + self.over_mapped + self.mapped
    }

    /// The report of a cache that moves to another precision of the same weights.
    pub fn identity(cache: &KvCache, destination: &dyn Decoder) -> Self {
        let layers = destination.cache_shape().layers;
        Self::of(Route::Identity, cache, 0.0, destination.flops(layers, cache.len(), 0))
    }
}

impl Route {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Identity, Self::Bridge, Self::Keepsake, Self::ReadAhead, Self::Reread];
}

/// Carries `source` (a cache of the model with that `rope`) to `destination` through the bridge. Where the first tokens have
/// been read there already (`begun`, exact and a prefix of the source), only the rest is carried.
pub fn carry(
    bridge: &Bridge,
    (source, source_rope): (&KvCache, &Rope),
    begun: Option<KvCache>,
    destination: &dyn Decoder,
    settings: CarrySettings,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<(KvCache, CarryReport), CarryError> {
    let spec = bridge.spec();
    for (end, found, expected) in [
        ("source", source.shape(), spec.source_shape),
        ("destination", destination.cache_shape(), spec.destination_shape),
    ] {
        let found = Shape::from(found);
        if found != expected || destination.width() != spec.destination_width {
            let (found_width, expected_width) = (found.kv_width(), expected.kv_width());
            let (found, expected) = (found.layers, expected.layers);
            return Err(CarryError::Shape { end, found, found_width, expected, expected_width });
        }
    }
    let slots = source.slots();
    let (first, window) = split(slots.len(), settings);
    let mut cache = match begun.filter(|begun| begun.is_exact() && begun.is_prefix_of(slots)) {
        Some(begun) => begun,
        None => KvCache::new(destination.cache_shape(), source.limit(), ledger)?,
    };
    let first = first.max(cache.len());
    let window = window.min(slots.len() - first);
    let layers = destination.cache_shape().layers;
    let mut buffers = Buffers::new(destination, Some(bridge), ledger)?;
    let unread = &slots[cache.len()..first];
    let mut flops = read(destination, &mut cache, unread, None, &mut buffers, stop)?;
    for block in blocks(first..slots.len() - window, usize::from(settings.block).min(destination.chunk_limit())) {
        let into = cache.append_at(&slots[block.clone()], Provenance::Mapped)?;
        let ids: Vec<u32> = slots[block.clone()].iter().map(|s| s.token).collect();
        let (hidden, rest) = buffers.split(ids.len() * destination.width());
        destination.embed(&ids, hidden);
        destination.run_layers(0..spec.native_layers, hidden, &mut cache, into.clone(), stop)?;
        flops += destination.flops(spec.native_layers, block.len(), block.start);
        for rows in blocks(0..block.len(), MAPPED) {
            let hidden = &hidden[rows.start * destination.width()..rows.end * destination.width()];
            let (from, to) = (block.start + rows.start..block.start + rows.end, into.start + rows.start);
            flops += map_rows(bridge, (source, source_rope), destination, from, hidden, (&mut cache, to), rest, stop)?;
        }
    }
    let fed = slots.len() - window..slots.len();
    if chosen(fed.start - first, window, settings) > 0 {
        let mut received = vec![0.0; slots.len()];
        cache.append_at(&slots[fed.clone()], cache.native_provenance())?;
        let looked = std::slice::from_ref(&fed);
        flops += read_over(destination, &mut cache, looked, Some(&mut received), &mut buffers, stop)?;
        let count = chosen(fed.start - first, window, settings);
        let stretches = most_looked_at(&received[first..fed.start], first, count);
        flops += read_over(destination, &mut cache, &stretches, None, &mut buffers, stop)?;
        stretches.into_iter().for_each(|stretch| cache.mark(stretch, Provenance::OverMapped));
        flops += read_over(destination, &mut cache, looked, None, &mut buffers, stop)?;
    } else if window > 0 {
        flops += read(destination, &mut cache, &slots[fed], None, &mut buffers, stop)?;
    }
    cache.set_next_position(source.next_position());
    cache.check_finite(0..cache.len())?;
    let route = if cache.is_exact() { Route::Reread } else { Route::Bridge };
    let report = CarryReport::of(route, &cache, flops, destination.flops(layers, slots.len(), 0));
    Ok((cache, report))
}

/// Reads all of a sequence's tokens again, natively.
pub fn reread(
    slots: &[Slot],
    limit: Tokens,
    destination: &dyn Decoder,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<(KvCache, CarryReport), CarryError> {
    let mut cache = KvCache::new(destination.cache_shape(), limit, ledger)?;
    let mut buffers = Buffers::new(destination, None, ledger)?;
    let flops = read(destination, &mut cache, slots, Some(Provenance::Exact), &mut buffers, stop)?;
    cache.check_finite(0..cache.len())?;
    let report = CarryReport::of(Route::Reread, &cache, flops, flops);
    Ok((cache, report))
}

/// Restores a keepsake of the destination and reads natively what the sequence has gained since. `slots` are the
/// sequence's tokens now; they begin with those of the keepsake.
pub fn restore(
    keepsake: &mut Keepsake,
    slots: &[Slot],
    limit: Tokens,
    destination: &dyn Decoder,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<(KvCache, CarryReport), CarryError> {
    if keepsake.source() != destination.source() {
        return Err(CarryError::OtherKeepsake { reason: "it is of another model" });
    }
    if !keepsake.is_prefix_of(slots) {
        return Err(CarryError::OtherKeepsake { reason: "the conversation does not begin with it" });
    }
    read_rest(keepsake.restore(limit, ledger)?, Route::Keepsake, slots, destination, ledger, stop)
}

/// Reads natively what a cache that was read ahead lacks of the sequence's tokens, of which it holds the first.
pub fn take_over(
    ahead: KvCache,
    slots: &[Slot],
    destination: &dyn Decoder,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<(KvCache, CarryReport), CarryError> {
    if !ahead.is_prefix_of(slots) {
        return Err(CarryError::OtherConversation);
    }
    read_rest(ahead, Route::ReadAhead, slots, destination, ledger, stop)
}

fn read_rest(
    mut cache: KvCache,
    route: Route,
    slots: &[Slot],
    destination: &dyn Decoder,
    ledger: &Ledger,
    stop: &StopFlag,
) -> Result<(KvCache, CarryReport), CarryError> {
    let mut buffers = Buffers::new(destination, None, ledger)?;
    let rest = &slots[cache.len()..];
    let flops = read(destination, &mut cache, rest, None, &mut buffers, stop)?;
    cache.check_finite(0..cache.len())?;
    let layers = destination.cache_shape().layers;
    let report = CarryReport::of(route, &cache, flops, destination.flops(layers, slots.len(), 0));
    Ok((cache, report))
}

/// How many first tokens are read natively and how many last ones are fed.
fn split(tokens: usize, settings: CarrySettings) -> (usize, usize) {
    let share = (tokens / settings.native_share.max(1)).max(SINKS);
    let first = usize::from(settings.exact_first).min(share).min(tokens);
    let window = usize::from(settings.fed_window).min(share).min(tokens - first);
    (first, window)
}

fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size.max(1)).map(move |start| start..(start + size.max(1)).min(end))
}

/// Reads tokens natively through all layers, in chunks.
fn read(
    destination: &dyn Decoder,
    cache: &mut KvCache,
    slots: &[Slot],
    provenance: Option<Provenance>,
    buffers: &mut Buffers,
    stop: &StopFlag,
) -> Result<f64, CarryError> {
    let layers = destination.cache_shape().layers;
    let mut flops = 0.0;
    for block in blocks(0..slots.len(), destination.chunk_limit()) {
        let native = provenance.unwrap_or(cache.native_provenance());
        let ids: Vec<u32> = slots[block.clone()].iter().map(|s| s.token).collect();
        flops += destination.flops(layers, block.len(), cache.len());
        let into = cache.append_at(&slots[block], native)?;
        let (hidden, _) = buffers.split(ids.len() * destination.width());
        destination.embed(&ids, hidden);
        destination.run_layers(0..layers, hidden, cache, into, stop)?;
    }
    Ok(flops)
}

/// Reads slots that are in the cache natively through all layers, in chunks: over whatever is cached before each.
fn read_over(
    destination: &dyn Decoder,
    cache: &mut KvCache,
    stretches: &[Range<usize>],
    mut received: Option<&mut [f32]>,
    buffers: &mut Buffers,
    stop: &StopFlag,
) -> Result<f64, CarryError> {
    let layers = destination.cache_shape().layers;
    let mut flops = 0.0;
    for chunk in chunks_of(stretches, destination.chunk_limit()) {
        let ids: Vec<u32> = chunk.iter().flat_map(|s| &cache.slots()[s.clone()]).map(|slot| slot.token).collect();
        flops += chunk.iter().map(|s| destination.flops(layers, s.len(), s.start)).sum::<f64>();
        let (hidden, _) = buffers.split(ids.len() * destination.width());
        destination.embed(&ids, hidden);
        destination.run_slots(0..layers, hidden, cache, &chunk, received.as_deref_mut(), stop)?;
    }
    Ok(flops)
}

/// Tokens that pass through the maps at a time: their features are wide, and more of them make no product faster.
const MAPPED: usize = 64;

/// What a carry computes in, in one region: hidden states of a chunk, and of some tokens the features, the inputs and
/// outputs of a map, and room for its product.
struct Buffers(Region);

impl Buffers {
    fn new(destination: &dyn Decoder, bridge: Option<&Bridge>, ledger: &Ledger) -> Result<Self, RegionError> {
        let hidden = destination.chunk_limit() * destination.width();
        let floats = hidden + bridge.map_or(0, map_floats);
        Region::new(ledger, Kind::Scratch, floats * size_of::<f32>()).map(Self)
    }

    /// Hidden states, and all the rest.
    fn split(&mut self, hidden: usize) -> (&mut [f32], &mut [f32]) {
        self.0.as_mut_slice::<f32>().split_at_mut(hidden)
    }
}

/// Bytes of buffers that a carry over the bridge takes while it lasts, to a model that reads so many tokens at a time.
pub fn buffer_bytes(bridge: &Bridge, chunk_limit: usize) -> Bytes {
    let hidden = chunk_limit * bridge.spec().destination_width;
    Bytes::from((hidden + map_floats(bridge)) * size_of::<f32>())
}

fn map_floats(bridge: &Bridge) -> usize {
    let (spec, weights) = (bridge.spec(), || bridge.spec().mapped_layers().filter_map(|layer| bridge.map(layer)));
    let columns = weights().map(|map| map.weight.columns()).max().unwrap_or(0);
    let room = weights().map(|map| map.weight.room(MAPPED)).max().unwrap_or(0);
    MAPPED * (spec.features() + 2 * spec.outputs() + columns) + room
}

#[expect(clippy::too_many_arguments, reason = "the ends of a carry, once")]
fn map_rows(
    bridge: &Bridge,
    (source, source_rope): (&KvCache, &Rope),
    destination: &dyn Decoder,
    from: Range<usize>,
    hidden: &[f32],
    (cache, into): (&mut KvCache, usize),
    buffers: &mut [f32],
    stop: &StopFlag,
) -> Result<f64, CarryError> {
    let (spec, rows) = (bridge.spec(), from.len());
    let (outputs, half) = (spec.outputs(), spec.outputs() / 2);
    let (all, buffers) = buffers.split_at_mut(rows * spec.features());
    let (mapped, buffers) = buffers.split_at_mut(rows * outputs);
    let (keys, buffers) = buffers.split_at_mut(rows * half);
    let (values, buffers) = buffers.split_at_mut(rows * half);
    let positions: Vec<u32> = source.slots()[from.clone()].iter().map(|s| s.position).collect();
    features(spec, source, source_rope, from, hidden, all);
    bridge.normalise(all);
    let mut flops = 0.0;
    for layer in spec.mapped_layers() {
        if stop.is_up() {
            return Err(Stopped.into());
        }
        let Some(map) = bridge.map(layer) else { continue };
        let columns = map.weight.columns();
        let (input, room) = buffers.split_at_mut(rows * columns);
        for (row, input) in all.chunks_exact(spec.features()).zip(input.chunks_exact_mut(columns)) {
            let mut filled = 0;
            for range in spec.input_ranges(layer) {
                input[filled..filled + range.len()].copy_from_slice(&row[range.clone()]);
                filled += range.len();
            }
            // The map's rows are padded to whole blocks.
            input[filled..].fill(0.0);
        }
        destination.multiply(&map.weight, input, mapped, bytemuck::cast_slice_mut(room));
        if pass(Boundary::ApplyBridge).is_err() {
            mapped.fill(f32::NAN);
        }
        flops += 2.0 * (rows * outputs * columns) as f64;
        for (at, (row, position)) in mapped.chunks_exact_mut(outputs).zip(&positions).enumerate() {
            for (value, bias) in row.iter_mut().zip(&map.bias) {
                *value += bias;
            }
            let (k, v) = row.split_at_mut(half);
            destination.rope().turn(k, *position, Turn::Forward);
            keys[at * half..(at + 1) * half].copy_from_slice(k);
            values[at * half..(at + 1) * half].copy_from_slice(v);
        }
        cache.write(layer, into, keys, values);
    }
    Ok(flops)
}
