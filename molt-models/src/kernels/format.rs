//! The block formats of GGUF files (ggml's `block_*` structures) in one common form.
//!
//! Every format is seen as runs of 32 weights: `weight = d * scales[half] * q - dmin * offset`, with signed 8-bit `q`, two
//! floats for the whole block and whole numbers for each half of the run. That is exact for all of them, and lets one
//! definition of the dot product serve them all.

/// How the weights of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4-byte floats.
    F32,
    /// 2-byte floats.
    F16,
    /// 2-byte floats with the range of 4-byte ones.
    Bf16,
    /// 32 weights of 4 bits, one scale.
    Q4_0,
    /// 32 weights of 4 bits, a scale and an offset.
    Q4_1,
    /// 32 weights of 5 bits, one scale.
    Q5_0,
    /// 32 weights of 8 bits, one scale.
    Q8_0,
    /// 256 weights of 4 bits, 6-bit scales and offsets for each 32.
    Q4K,
    /// 256 weights of 6 bits, 8-bit scales for each 16.
    Q6K,
}

/// Weights in a run.
pub const RUN: usize = 32;

impl Format {
    /// Weights in a block.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `columns` weights; `None` where they are no whole number of blocks.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        match columns.is_multiple_of(self.block_len()) {
            true => (columns / self.block_len()).checked_mul(self.block_bytes()),
            false => None,
        }
    }

    /// Whether something is subtracted from every weight of a block.
    pub(super) fn has_offset(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q4K)
    }

    /// Whether rows are runs of blocks rather than plain floats.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// Scales and where the quants of a run lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame<'a> {
    pub(super) quants: Quants<'a>,
    /// The block's scale.
    pub(super) d: f32,
    /// The block's scale of offsets.
    pub(super) dmin: f32,
    /// What `d` is multiplied with, for each half of the run.
    pub(super) scales: [i32; 2],
    /// What `dmin` is multiplied with.
    pub(super) offset: i32,
}

/// The packed quants of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Quants<'a> {
    /// Signed bytes.
    Bytes(&'a [u8; 32]),
    /// Low nibbles are weights 0 to 15, high ones 16 to 31; `bias` is subtracted.
    Split { nibbles: &'a [u8; 16], bias: i8 },
    /// As `Split`, with a fifth bit each, and 16 subtracted.
    SplitHigh { nibbles: &'a [u8; 16], high: u32 },
    /// One nibble of each of 32 bytes.
    Nibbles { bytes: &'a [u8; 32], high: bool },
    /// One nibble of each of 32 bytes and two bits (from bit `shift`) of each of 32 others, 32 subtracted.
    Six { low: &'a [u8; 32], high_nibble: bool, top: &'a [u8; 32], shift: u8 },
}

/// A 2-byte float, widened without asking the processor what it can do: that question, twice for every 32 weights, costs
/// more than the answer. Right for every finite number; an infinite scale, which no file has, reads as 65,536.
#[inline(always)]
pub(super) fn half_at(bytes: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    // Exponent and mantissa move into place; 2^112 corrects the bias, for subnormal numbers as well.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[inline(always)]
fn array<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    match bytes[at..].first_chunk() {
        Some(array) => array,
        None => unreachable!("a block is shorter than its format says"),
    }
}

/// The frame of run `run` of a row.
#[inline(always)]
pub(super) fn frame(format: Format, row: &[u8], run: usize) -> Frame<'_> {
    let runs = format.block_len() / RUN;
    let block = &row[run / runs * format.block_bytes()..][..format.block_bytes()];
    let single = |quants, d, dmin| Frame { quants, d, dmin, scales: [1; 2], offset: 1 };
    match format {
        Format::Q8_0 => single(Quants::Bytes(array(block, 2)), half_at(block, 0), 0.0),
        Format::Q4_0 => single(Quants::Split { nibbles: array(block, 2), bias: 8 }, half_at(block, 0), 0.0),
        Format::Q4_1 => {
            single(Quants::Split { nibbles: array(block, 4), bias: 0 }, half_at(block, 0), -half_at(block, 2))
        }
        Format::Q5_0 => {
            let high = u32::from_le_bytes(*array(block, 2));
            single(Quants::SplitHigh { nibbles: array(block, 6), high }, half_at(block, 0), 0.0)
        }
        Format::Q4K => {
            let (sub, scales) = (run % runs, &block[4..16]);
            // Six bits each of eight scales and eight offsets in twelve bytes.
            let (scale, offset) = if sub < 4 {
                (scales[sub] & 63, scales[sub + 4] & 63)
            } else {
                let low = scales[sub + 4];
                ((low & 15) | (scales[sub - 4] >> 6 << 4), (low >> 4) | (scales[sub] >> 6 << 4))
            };
            let quants = Quants::Nibbles { bytes: array(block, 16 + sub / 2 * 32), high: sub % 2 == 1 };
            let (d, dmin) = (half_at(block, 0), half_at(block, 2));
            Frame { quants, d, dmin, scales: [i32::from(scale); 2], offset: i32::from(offset) }
        }
        Format::Q6K => {
            let sub = run % runs;
            let (side, part) = (sub / 4, sub % 4);
            let scale = |at: usize| i32::from(i8::from_le_bytes([block[192 + 8 * side + 2 * part + at]]));
            let quants = Quants::Six {
                low: array(block, 64 * side + 32 * (part % 2)),
                high_nibble: part >= 2,
                top: array(block, 128 + 32 * side),
                shift: [0, 2, 4, 6][part],
            };
            Frame { quants, d: half_at(block, 208), dmin: 0.0, scales: [scale(0), scale(1)], offset: 0 }
        }
        Format::F32 | Format::F16 | Format::Bf16 => unreachable!("plain floats have no runs"),
    }
}

impl Frame<'_> {
    /// The scale of each half of the run.
    #[inline(always)]
    pub(super) fn float_scales(&self) -> [f32; 2] {
        [self.d * self.scales[0] as f32, self.d * self.scales[1] as f32]
    }

    /// What is subtracted from every weight of the run.
    #[inline(always)]
    pub(super) fn float_offset(&self) -> f32 {
        self.dmin * self.offset as f32
    }

    /// The signed quants.
    #[inline(always)]
    pub(super) fn unpack(&self) -> [i8; RUN] {
        let mut q = [0i8; RUN];
        let signed = |value: u8, bias: i8| value.cast_signed() - bias;
        match self.quants {
            Quants::Bytes(bytes) => {
                for (q, byte) in q.iter_mut().zip(bytes) {
                    *q = byte.cast_signed();
                }
            }
            Quants::Split { nibbles, bias } => {
                for (i, byte) in nibbles.iter().enumerate() {
                    (q[i], q[i + 16]) = (signed(byte & 15, bias), signed(byte >> 4, bias));
                }
            }
            Quants::SplitHigh { nibbles, high } => {
                let bit = |i: usize| if high >> i & 1 == 1 { 16 } else { 0 };
                for (i, byte) in nibbles.iter().enumerate() {
                    (q[i], q[i + 16]) = (signed(byte & 15 | bit(i), 16), signed(byte >> 4 | bit(i + 16), 16));
                }
            }
            Quants::Nibbles { bytes, high } => {
                for (q, byte) in q.iter_mut().zip(bytes) {
                    *q = signed(if high { byte >> 4 } else { byte & 15 }, 0);
                }
            }
            Quants::Six { low, high_nibble, top, shift } => {
                for ((q, low), top) in q.iter_mut().zip(low).zip(top) {
                    let nibble = if high_nibble { low >> 4 } else { low & 15 };
                    *q = signed(nibble | (top >> shift & 3) << 4, 32);
                }
            }
        }
        q
    }
}
