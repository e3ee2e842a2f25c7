//! Products of inputs with whole matrices, on all threads.
//!
//! Output columns are made in tiles: some rows of weights are unpacked into a form that suits the processor and all
//! tokens pass by them. A token's result is the same to the last bit whatever other tokens there are: a prompt that is
//! read in other chunks, or beside other sequences, gives the same.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use molt_kv::decoder::{StopFlag, Stopped};
use rayon::prelude::*;

use crate::kernels::activations::{Activations, block_len, words};
#[cfg(target_arch = "x86_64")]
use crate::kernels::avx2::{self, dots::Dots};
#[cfg(target_arch = "x86_64")]
use crate::kernels::avx512;
use crate::kernels::columns::Columns;
use crate::kernels::{Format, ISA, Isa, Left, RUN, Weights, panel, portable};

/// Rows of quantised weights in a tile.
const QUANTIZED_LANES: usize = 8;
/// Rows of quantised weights in a tile where vectors are wide and tokens several.
const WIDE_LANES: usize = 16;
/// Rows of plain floats in a tile.
pub(super) const FLOAT_LANES: usize = 16;
/// Columns of such a tile that are unpacked at a time: they and their transpose stay in the first-level cache.
const FLOAT_COLUMNS: usize = 256;
/// Tokens that pass by such a tile at a time.
const FLOAT_TOKENS: usize = 256;
/// A thread takes this part of its share of what is left at a time.
const PART: usize = 3;
/// Of products with many tokens, whose parts take long and could not be given up in their middle.
const PART_OF_MANY: usize = 12;
/// So many tokens are many.
const MANY: usize = 8;

/// One of several products of the same inputs.
#[derive(Debug)]
pub struct Product<'w, 'o> {
    /// Weights `[rows, columns]`.
    pub weights: Weights<'w>,
    /// `[m, rows]`.
    pub output: &'o mut [f32],
}

impl Weights<'_> {
    /// `input [m, columns] -> output [m, rows]`, on all threads of the current pool. With quantised weights, inputs are
    /// rounded to 8 bits. The room is as large as [`room`] says.
    ///
    /// # Panics
    /// Where `input` and `output` do not hold the same number of rows, or the room is too small.
    pub fn multiply(&self, input: &[f32], output: &mut [f32], room: &mut [i32]) {
        // Nobody can stop it.
        let _done = multiply_all(input, &mut [Product { weights: *self, output }], room, None);
    }
}

/// Words of room that products of `tokens` rows of `columns` inputs with matrices of these formats take. Who computes
/// lends it, so that it is somebody's in the books.
pub fn room(tokens: usize, columns: usize, formats: &[Format]) -> usize {
    let of = |narrow: bool| {
        let quantized = formats.iter().filter(|format| format.is_quantized());
        let block = quantized.map(|format| block_len(*format)).find(|block| (*block == RUN) == narrow);
        block.map_or(0, |block| words(tokens, columns, block))
    };
    let floats = tokens > 1 && formats.iter().any(|format| !format.is_quantized());
    of(true) + of(false) + if floats { tokens * columns } else { 0 }
}

/// Inputs `[m, columns]` in the form that a matrix takes.
#[derive(Debug, Clone, Copy)]
enum Inputs<'a> {
    /// See [`in_stretches`].
    Floats(&'a [f32]),
    Rounded(&'a Activations<'a>),
}

struct Job<'a> {
    weights: Weights<'a>,
    inputs: Inputs<'a>,
    output: Columns<'a>,
}

/// `input [m, columns] -> output [m, rows]` for several matrices of the same width: inputs are rounded once, and all
/// threads meet once.
///
/// # Panics
/// Where an output does not hold as many rows as `input`, the matrices differ in width, or the room is smaller than
/// [`room`] says.
///
/// # Errors
/// Where `stop` was raised before the last part was begun: the outputs are then of no use.
pub fn multiply_all(
    input: &[f32],
    products: &mut [Product<'_, '_>],
    room: &mut [i32],
    stop: Option<&StopFlag>,
) -> Result<(), Stopped> {
    let width = products.first().map_or(0, |product| product.weights.columns);
    // Rounded inputs are shared: a narrower matrix would be read past the end of its rows.
    assert!(products.iter().all(|product| product.weights.columns == width), "matrices of different widths");
    let floats = products.iter().any(|product| !product.weights.format.is_quantized());
    let (floats, mut room) = if floats { in_stretches(input, width, room) } else { (input, room) };
    let (mut narrow, mut wide): (Option<Activations<'_>>, Option<Activations<'_>>) = (None, None);
    for Product { weights, output } in &*products {
        let m = input.len() / weights.columns;
        assert!(input.len() == m * weights.columns && output.len() == m * weights.rows, "shapes do not fit");
        let block = block_len(weights.format);
        let kept = if block == RUN { &mut narrow } else { &mut wide };
        if weights.format.is_quantized() && kept.is_none() {
            let (rounded, rest) = Activations::new(input, weights.columns, block, room);
            (*kept, room) = (Some(rounded), rest);
        }
    }
    let mut jobs = Vec::with_capacity(products.len());
    for Product { weights, output } in products {
        let rounded = if block_len(weights.format) == RUN { &narrow } else { &wide };
        let inputs = match (weights.format.is_quantized(), rounded) {
            (true, Some(rounded)) => Inputs::Rounded(rounded),
            _ => Inputs::Floats(floats),
        };
        jobs.push(Job { weights: *weights, inputs, output: Columns::new(output, weights.rows) });
    }
    let tiles: usize = jobs.iter().map(Job::tiles).sum();
    if tiles == 0 || input.is_empty() {
        return Ok(());
    }
    let part = if input.len() / width > MANY { PART_OF_MANY } else { PART };
    share_out(tiles, part, stop, |own| {
        let mut passed = 0;
        for job in &jobs {
            let end = passed + job.tiles();
            for tile in own.start.max(passed)..own.end.min(end) {
                job.tile(tile - passed);
            }
            passed = end;
        }
    })
}

/// Inputs `[m, columns]` as tiles of floats read them: for each stretch of [`FLOAT_COLUMNS`] columns `[m, stretch]`. As
/// rows they would be read in short pieces, each on a page of its own. Returns what is left of the room, too.
fn in_stretches<'a>(input: &'a [f32], columns: usize, room: &'a mut [i32]) -> (&'a [f32], &'a mut [i32]) {
    if input.len() <= columns {
        return (input, room);
    }
    let m = input.len() / columns;
    let (stretches, rest) = room.split_at_mut(input.len());
    let stretches: &mut [f32] = bytemuck::cast_slice_mut(stretches);
    let all = stretches.par_chunks_mut(m * FLOAT_COLUMNS).zip((0..columns).into_par_iter().step_by(FLOAT_COLUMNS));
    all.for_each(|(stretch, start)| {
        let width = FLOAT_COLUMNS.min(columns - start);
        for (to, row) in stretch.chunks_exact_mut(width).zip(input.chunks_exact(columns)) {
            to.copy_from_slice(&row[start..start + width]);
        }
    });
    (stretches, rest)
}

/// Shares `count` pieces out among the threads of the pool. Each takes a part of what is left until nothing is (guided
/// self-scheduling): parts get smaller towards the end, so that all end at about the same time, also where one of them is
/// held up by another program. Once `stop` is raised nobody begins another part.
fn share_out(
    count: usize,
    part: usize,
    stop: Option<&StopFlag>,
    work: impl Fn(Range<usize>) + Sync,
) -> Result<(), Stopped> {
    let threads = rayon::current_num_threads();
    let (taken, given_up) = (AtomicUsize::new(0), AtomicBool::new(false));
    (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
        let part = |taken: usize| (taken < count).then(|| taken + (count - taken).div_ceil(part * threads));
        while let Ok(start) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, part) {
            // Noted, for the flag may be lowered before anybody looks again.
            if stop.is_some_and(StopFlag::is_up) {
                given_up.store(true, Ordering::Relaxed);
                return;
            }
            // What was taken is a function of where it starts.
            work(start..part(start).unwrap_or(start));
        }
    });
    if given_up.into_inner() { Err(Stopped) } else { Ok(()) }
}

impl Job<'_> {
    fn lanes(&self) -> usize {
        match self.inputs {
            Inputs::Floats(_) => FLOAT_LANES,
            Inputs::Rounded(x) if self.is_wide(x) => WIDE_LANES,
            Inputs::Rounded(_) => QUANTIZED_LANES,
        }
    }

    /// Whether sixteen rows are multiplied at once.
    #[cfg(target_arch = "x86_64")]
    fn is_wide(&self, x: &Activations<'_>) -> bool {
        x.tokens() > 1 && self.weights.rows >= WIDE_LANES && avx512::used()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_wide(&self, _: &Activations<'_>) -> bool {
        false
    }

    fn tiles(&self) -> usize {
        self.weights.rows.div_ceil(self.lanes())
    }

    fn tile(&self, tile: usize) {
        let lanes = self.lanes();
        let rows = tile * lanes..((tile + 1) * lanes).min(self.weights.rows);
        match self.inputs {
            Inputs::Floats(input) => self.floats(rows, input),
            #[cfg(target_arch = "x86_64")]
            Inputs::Rounded(x) if self.is_wide(x) => match x.tokens() {
                2..=8 => self.wide::<8>(rows, x),
                _ => self.wide::<64>(rows, x),
            },
            Inputs::Rounded(x) => match x.tokens() {
                1 => self.quantized::<1>(rows, x),
                2..=8 => self.quantized::<8>(rows, x),
                _ => self.quantized::<64>(rows, x),
            },
        }
    }

    /// Some rows of quantised weights, `T` tokens at a time.
    fn quantized<const T: usize>(&self, rows: Range<usize>, x: &Activations<'_>) {
        let weights = &self.weights;
        let mut sums = [[0.0f32; QUANTIZED_LANES]; T];
        for first in (0..x.tokens()).step_by(T) {
            let tokens = first..(first + T).min(x.tokens());
            // The lane of the tile's first row.
            let mut lane = 0;
            match *ISA {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 if T == 1 && matches!(weights.format, Format::Q4K | Format::Q6K) => {
                    let bytes = &weights.bytes[rows.start * weights.row_bytes..rows.end * weights.row_bytes];
                    let (four, sums) = (weights.format == Format::Q4K, &mut sums[0][..rows.len()]);
                    // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
                    unsafe {
                        if four { avx2::k_alone::q4_k(bytes, x, sums) } else { avx2::k_alone::q6_k(bytes, x, sums) }
                    };
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 if weights.rows >= QUANTIZED_LANES => {
                    // Where a matrix ends in the middle of a tile, the tile begins in the middle of the one before.
                    let start = rows.start.min(weights.rows - QUANTIZED_LANES);
                    lane = rows.start - start;
                    let bytes = &weights.bytes[start * weights.row_bytes..];
                    let eight = avx2::tile::Rows::new(bytes, weights.row_bytes);
                    // SAFETY: `Isa::Avx2` is only chosen where the processor has AVX2, FMA and F16C.
                    unsafe {
                        avx2::tile::multiply(weights.format, &eight, (x, Dots::best()), tokens.clone(), &mut sums)
                    };
                }
                _ => {
                    for (token, sums) in tokens.clone().zip(&mut sums) {
                        for (row, sum) in rows.clone().zip(sums) {
                            *sum = portable::dot_quantized(weights.format, weights.row(row), x, token);
                        }
                    }
                }
            }
            for (token, sums) in tokens.zip(&sums) {
                // SAFETY: every tile is one task's, and no other tile has these columns.
                unsafe { self.output.write(token, rows.start, &sums[lane..lane + rows.len()]) };
            }
        }
    }

    /// Some rows of quantised weights in wide vectors, `T` tokens at a time.
    #[cfg(target_arch = "x86_64")]
    fn wide<const T: usize>(&self, rows: Range<usize>, x: &Activations<'_>) {
        let weights = &self.weights;
        // Where a matrix ends in the middle of a tile, the tile begins in the middle of the one before.
        let start = rows.start.min(weights.rows - WIDE_LANES);
        let lane = rows.start - start;
        let sixteen = avx512::tile::Rows::new(&weights.bytes[start * weights.row_bytes..], weights.row_bytes);
        let mut sums = [[0.0f32; WIDE_LANES]; T];
        for first in (0..x.tokens()).step_by(T) {
            let tokens = first..(first + T).min(x.tokens());
            // SAFETY: only called where `avx512::used`, and so where the processor has what they take.
            unsafe { avx512::tile::multiply(weights.format, &sixteen, x, tokens.clone(), &mut sums) };
            for (token, sums) in tokens.zip(&sums) {
                // SAFETY: every tile is one task's, and no other tile has these columns.
                unsafe { self.output.write(token, rows.start, &sums[lane..lane + rows.len()]) };
            }
        }
    }

    /// Some rows of plain floats; inputs lie in stretches.
    fn floats(&self, rows: Range<usize>, input: &[f32]) {
        let weights = &self.weights;
        let columns = weights.columns;
        let m = input.len() / columns;
        if m == 1
            && let Some(sums) = weights.alone(rows.clone(), input)
        {
            // SAFETY: every tile is one task's, and no other tile has these columns.
            unsafe { self.output.write(0, rows.start, &sums[..rows.len()]) };
            return;
        }
        let mut packed = [0.0f32; FLOAT_COLUMNS * FLOAT_LANES];
        let mut sums = vec![0.0f32; m.min(FLOAT_TOKENS) * FLOAT_LANES];
        for first in (0..m).step_by(FLOAT_TOKENS) {
            let tokens = FLOAT_TOKENS.min(m - first);
            let sums = &mut sums[..tokens * FLOAT_LANES];
            sums.fill(0.0);
            for start in (0..columns).step_by(FLOAT_COLUMNS) {
                let width = FLOAT_COLUMNS.min(columns - start);
                weights.pack(rows.clone(), start..start + width, &mut packed);
                let values = &input[start * m + first * width..][..tokens * width];
                let left = Left { values, rows: tokens, width, stride: width };
                panel(left, &packed[..width * FLOAT_LANES], FLOAT_LANES, sums);
            }
            for (token, sums) in sums.as_chunks::<FLOAT_LANES>().0.iter().enumerate() {
                // SAFETY: every tile is one task's, and no other tile has these columns.
                unsafe { self.output.write(first + token, rows.start, &sums[..rows.len()]) };
            }
        }
    }
}
