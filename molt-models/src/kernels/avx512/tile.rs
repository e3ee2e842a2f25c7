//! Products of quantised weights: sixteen rows at a time, each in a lane of its own.
//!
//! Rows are unpacked eight at a time as for AVX2 (`avx2/tile.rs`, `avx2/k_quants.rs`) and joined; then the tokens pass, and
//! four of their inputs at once meet sixteen rows.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::activations::Activations;
use crate::kernels::avx2::k_quants::{four_bit_head, nibbles, pair_of, signed_bytes, six_bit_quants};
use crate::kernels::avx2::tile::{self as eight, Q4_0, Q4_1, Q5_0, Q8_0, Runs, floats, unpack};
use crate::kernels::format::Format;

/// Rows of a tile.
pub(in crate::kernels) const LANES: usize = 16;

/// Sums of sixteen rows for each of at most `T` tokens.
pub(in crate::kernels) type Sums<const T: usize> = [[f32; LANES]; T];

/// Sixteen rows of the same matrix, one after another.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct Rows<'a> {
    low: eight::Rows<'a>,
    high: eight::Rows<'a>,
}

impl<'a> Rows<'a> {
    /// Sixteen rows of `row_bytes` each.
    ///
    /// # Panics
    /// Where there are fewer than sixteen.
    pub(in crate::kernels) fn new(bytes: &'a [u8], row_bytes: usize) -> Self {
        let high = eight::Rows::new(&bytes[row_bytes * eight::LANES..], row_bytes);
        Self { low: eight::Rows::new(bytes, row_bytes), high }
    }

    #[inline(always)]
    fn prefetch(&self, at: usize, bytes: usize) {
        self.low.prefetch(at, bytes);
        self.high.prefetch(at, bytes);
    }
}

/// Some tokens' inputs.
#[derive(Debug, Clone, Copy)]
struct Inputs<'a> {
    x: &'a Activations<'a>,
    first: usize,
    count: usize,
}

impl<'a> Inputs<'a> {
    fn of<V>(&self, all: &'a [V], index: usize) -> &'a [V] {
        &all[index * self.x.tokens() + self.first..][..self.count]
    }
}

/// Products of sixteen rows with at most `T` tokens of the inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(in crate::kernels) fn multiply<const T: usize>(
    format: Format,
    rows: &Rows<'_>,
    x: &Activations<'_>,
    tokens: Range<usize>,
    out: &mut Sums<T>,
) {
    let x = Inputs { x, first: tokens.start, count: tokens.len() };
    let out = &mut out[..x.count];
    out.fill([0.0; LANES]);
    match format {
        Format::Q4_0 => runs::<Q4_0>(rows, x, out),
        Format::Q4_1 => runs::<Q4_1>(rows, x, out),
        Format::Q5_0 => runs::<Q5_0>(rows, x, out),
        Format::Q8_0 => runs::<Q8_0>(rows, x, out),
        Format::Q4K => q4_k::<T>(rows, x, out),
        Format::Q6K => q6_k::<T>(rows, x, out),
        Format::F32 | Format::F16 | Format::Bf16 => unreachable!("plain floats have no runs"),
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn join(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn join_floats(low: __m256, high: __m256) -> __m512 {
    _mm512_castsi512_ps(join(_mm256_castps_si256(low), _mm256_castps_si256(high)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn join_all<const N: usize>(low: [__m256i; N], high: [__m256i; N]) -> [__m512i; N] {
    let mut joined = [_mm512_setzero_si512(); N];
    for ((joined, low), high) in joined.iter_mut().zip(low).zip(high) {
        *joined = join(low, high);
    }
    joined
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(sums: &[f32; LANES]) -> __m512 {
    // SAFETY: reads the sixteen floats of the array; the load needs no alignment.
    unsafe { _mm512_loadu_ps(sums.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(sums: &mut [f32; LANES], value: __m512) {
    // SAFETY: writes the sixteen floats of the array; the store needs no alignment.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), value) }
}

/// `start` and the products of `N` vectors of four columns each, unsigned, with as many inputs.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn dot<const N: usize>(start: __m512i, weights: &[__m512i; N], x: &[i32; N]) -> __m512i {
    let mut sum = start;
    for (weights, x) in weights.iter().zip(x) {
        sum = _mm512_dpbusd_epi32(sum, *weights, _mm512_set1_epi32(*x));
    }
    sum
}

/// Formats whose blocks are runs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn runs<F: Runs>(rows: &Rows<'_>, x: Inputs<'_>, out: &mut [[f32; LANES]]) {
    let (bias, ones) = (_mm512_set1_epi16(-F::BIAS), _mm512_set1_epi16(1));
    for run in 0..x.x.runs() {
        let at = run * F::BYTES;
        rows.prefetch(at, F::BYTES);
        let ((low_scale, low_offset, low), (high_scale, high_offset, high)) =
            (unpack::<F>(&rows.low, at), unpack::<F>(&rows.high, at));
        let weights = join_all(low, high);
        let (scale, offset) = (join_floats(low_scale, high_scale), join_floats(low_offset, high_offset));
        let inputs = x.of(x.x.quants(), run).iter().zip(x.of(x.x.sums(), run)).zip(x.of(x.x.scales(), run));
        for (((x, sum), dx), out) in inputs.zip(&mut *out) {
            let (sum, dx) = (_mm512_set1_epi32(*sum), _mm512_set1_ps(*dx));
            // What is subtracted from every quant comes off with the inputs' sums.
            let integers = dot(_mm512_madd_epi16(bias, sum), &weights, x);
            let mut total = _mm512_fmadd_ps(_mm512_mul_ps(scale, dx), _mm512_cvtepi32_ps(integers), load(out));
            if F::OFFSET {
                let inputs = _mm512_cvtepi32_ps(_mm512_madd_epi16(ones, sum));
                total = _mm512_fmadd_ps(_mm512_mul_ps(offset, dx), inputs, total);
            }
            store(out, total);
        }
    }
}

/// Blocks of 256 weights of four bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn q4_k<const T: usize>(rows: &Rows<'_>, x: Inputs<'_>, out: &mut [[f32; LANES]]) {
    let mut sums = [_mm512_setzero_si512(); T];
    for block in 0..x.x.blocks() {
        let at = block * 144;
        rows.prefetch(at, 144);
        let (low, high) = (four_bit_head(&rows.low, at), four_bit_head(&rows.high, at));
        let scale = join_floats(low.scale, high.scale);
        let offset_scale = join_floats(low.offset_scale, high.offset_scale);
        sums[..x.count].fill(_mm512_setzero_si512());
        for pair in 0..4 {
            let [lows, highs] = {
                let ([a, b], [c, d]) = (nibbles(&rows.low, at, pair), nibbles(&rows.high, at, pair));
                [join_all(a, c), join_all(b, d)]
            };
            let scale = |run| _mm512_srai_epi32::<16>(of_run(&low.scales, &high.scales, run));
            let scales = [scale(2 * pair), scale(2 * pair + 1)];
            let run = 8 * block + 2 * pair;
            two_runs(&lows, &highs, scales, x.of(x.x.quants(), run), x.of(x.x.quants(), run + 1), &mut sums);
        }
        let mut offsets = [_mm512_setzero_si512(); 8];
        for (run, offsets) in offsets.iter_mut().enumerate() {
            *offsets = of_run(&low.offsets, &high.offsets, run);
        }
        for (at, out) in out.iter_mut().enumerate() {
            let offset = of_sums(&offsets, &x, block, at);
            let dx = _mm512_set1_ps(x.of(x.x.scales(), block)[at]);
            let total = _mm512_fmadd_ps(_mm512_mul_ps(scale, dx), _mm512_cvtepi32_ps(sums[at]), load(out));
            let offset_scale = _mm512_mul_ps(offset_scale, dx);
            store(out, _mm512_fnmadd_ps(offset_scale, _mm512_cvtepi32_ps(offset), total));
        }
    }
}

/// A run's byte of every row, twice as 16 bits.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_run(low: &[__m256i; 2], high: &[__m256i; 2], run: usize) -> __m512i {
    let (low, high) = (low[run / 4], high[run / 4]);
    match run % 4 {
        0 => join(pair_of(low, 0), pair_of(high, 0)),
        1 => join(pair_of(low, 1), pair_of(high, 1)),
        2 => join(pair_of(low, 2), pair_of(high, 2)),
        _ => join(pair_of(low, 3), pair_of(high, 3)),
    }
}

/// Adds two runs' products, each times its scale. Sixteen vectors of weights and two of scales stay in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline(never)]
fn two_runs(
    first: &[__m512i; 8],
    second: &[__m512i; 8],
    scales: [__m512i; 2],
    x: &[[i32; 8]],
    y: &[[i32; 8]],
    sums: &mut [__m512i],
) {
    let (first, second, zero) = (*first, *second, _mm512_setzero_si512());
    for ((x, y), sum) in x.iter().zip(y).zip(sums) {
        let (a, b) = (dot(zero, &first, x), dot(zero, &second, y));
        let (a, b) = (_mm512_mullo_epi32(a, scales[0]), _mm512_mullo_epi32(b, scales[1]));
        *sum = _mm512_add_epi32(*sum, _mm512_add_epi32(a, b));
    }
}

/// `sum over the block's runs of factors[run] . sums of the run's halves`.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn of_sums(factors: &[__m512i; 8], x: &Inputs<'_>, block: usize, at: usize) -> __m512i {
    let mut total = _mm512_setzero_si512();
    for (run, factors) in factors.iter().enumerate() {
        let sum = x.of(x.x.sums(), 8 * block + run)[at];
        total = _mm512_dpwssd_epi32(total, *factors, _mm512_set1_epi32(sum));
    }
    total
}

/// Blocks of 256 weights of six bits; eight bits of scale for each 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn q6_k<const T: usize>(rows: &Rows<'_>, x: Inputs<'_>, out: &mut [[f32; LANES]]) {
    let mut sums = [_mm512_setzero_si512(); T];
    for block in 0..x.x.blocks() {
        let at = block * 210;
        rows.prefetch(at, 210);
        let (low, high) = (rows.low.words(at + 192), rows.high.words(at + 192));
        // The block's float is its last two bytes.
        let (_, low_scale) = floats(rows.low.words(at + 194)[3]);
        let (_, high_scale) = floats(rows.high.words(at + 194)[3]);
        let scale = join_floats(low_scale, high_scale);
        sums[..x.count].fill(_mm512_setzero_si512());
        for side in 0..2 {
            let scales = [2 * side, 2 * side + 1].map(|word| (low[word], high[word]));
            let place = (at, side, 8 * block + 4 * side);
            six_bits::<0>(rows, place, scales[0], x, &mut sums);
            six_bits::<1>(rows, place, scales[0], x, &mut sums);
            six_bits::<2>(rows, place, scales[1], x, &mut sums);
            six_bits::<3>(rows, place, scales[1], x, &mut sums);
        }
        let mut factors = [_mm512_setzero_si512(); 8];
        for (word, factors) in factors.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *factors = [
                join(signed_bytes(low[word], 0, 1), signed_bytes(high[word], 0, 1)),
                join(signed_bytes(low[word], 2, 3), signed_bytes(high[word], 2, 3)),
            ];
        }
        for (at, out) in out.iter_mut().enumerate() {
            // 32 is subtracted from every quant.
            let bias = _mm512_slli_epi32::<5>(of_sums(&factors, &x, block, at));
            let integers = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[at], bias));
            let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x.of(x.x.scales(), block)[at]));
            store(out, _mm512_fmadd_ps(scale, integers, load(out)));
        }
    }
}

/// Adds the products of run `PART` of half a block; that half begins with run `first` of the inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn six_bits<const PART: usize>(
    rows: &Rows<'_>,
    (at, side, first): (usize, usize, usize),
    scales: (__m256i, __m256i),
    x: Inputs<'_>,
    sums: &mut [__m512i],
) {
    let of = |rows: &eight::Rows<'_>| {
        let low = rows.run(at + 64 * side + 32 * (PART % 2));
        six_bit_quants::<PART>(&low, &rows.run(at + 128 + 32 * side))
    };
    let weights = join_all(of(&rows.low), of(&rows.high));
    let byte = if PART.is_multiple_of(2) { 0 } else { 2 };
    let scale = |byte| {
        let both = join(signed_bytes(scales.0, byte, byte), signed_bytes(scales.1, byte, byte));
        _mm512_srai_epi32::<16>(both)
    };
    run_in_halves(&weights, [scale(byte), scale(byte + 1)], x.of(x.x.quants(), first + PART), sums);
}

/// Adds a run's products where its last 16 columns have a scale of their own.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline(never)]
fn run_in_halves(weights: &[__m512i; 8], scales: [__m512i; 2], x: &[[i32; 8]], sums: &mut [__m512i]) {
    let [a, b, c, d, e, f, g, h] = *weights;
    let (first, second, zero) = ([a, b, c, d], [e, f, g, h], _mm512_setzero_si512());
    for (x, sum) in x.iter().zip(sums) {
        let [a, b, c, d, e, f, g, h] = *x;
        let (a, b) = (dot(zero, &first, &[a, b, c, d]), dot(zero, &second, &[e, f, g, h]));
        let (a, b) = (_mm512_mullo_epi32(a, scales[0]), _mm512_mullo_epi32(b, scales[1]));
        *sum = _mm512_add_epi32(*sum, _mm512_add_epi32(a, b));
    }
}
