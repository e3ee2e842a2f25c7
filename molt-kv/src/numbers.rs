//! The numbers of a cache as they are kept.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use serde::{Deserialize, Serialize};

/// At what precision a cache keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CachePrecision {
    /// Two bytes a number.
    #[default]
    F16,
    /// Four: nothing is rounded on its way into the cache, at twice the memory.
    F32,
}

impl CachePrecision {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => size_of::<f16>(),
            Self::F32 => size_of::<f32>(),
        }
    }
}

/// Keys or values as they are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Numbers<'a> {
    /// As [`CachePrecision::F16`].
    F16(&'a [f16]),
    /// As [`CachePrecision::F32`].
    F32(&'a [f32]),
}

impl<'a> Numbers<'a> {
    /// The numbers that lie in those bytes, which are aligned for them.
    pub(crate) fn of(bytes: &'a [u8], precision: CachePrecision) -> Self {
        match precision {
            CachePrecision::F16 => Self::F16(bytemuck::cast_slice(bytes)),
            CachePrecision::F32 => Self::F32(bytemuck::cast_slice(bytes)),
        }
    }

    /// How many there are.
    pub fn len(self) -> usize {
        match self {
            Self::F16(numbers) => numbers.len(),
            Self::F32(numbers) => numbers.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Some of them.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F16(numbers) => Self::F16(&numbers[range]),
            Self::F32(numbers) => Self::F32(&numbers[range]),
        }
    }

    /// All of them at f32, into a slice of their number.
    pub fn widen(self, out: &mut [f32]) {
        match self {
            Self::F16(numbers) => numbers.convert_to_f32_slice(out),
            Self::F32(numbers) => out.copy_from_slice(numbers),
        }
    }

    /// All of them at f32.
    pub fn to_f32(self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.widen(&mut out);
        out
    }

    /// Where the first stands that is infinite or no number.
    pub(crate) fn first_not_finite(self) -> Option<usize> {
        match self {
            Self::F16(numbers) => numbers.iter().position(|number| !number.is_finite()),
            Self::F32(numbers) => numbers.iter().position(|number| !number.is_finite()),
        }
    }
}

/// Keeps numbers in as many bytes as they need, which are aligned for them.
pub(crate) fn keep(numbers: &[f32], bytes: &mut [u8], precision: CachePrecision) {
    match precision {
        CachePrecision::F16 => bytemuck::cast_slice_mut::<u8, f16>(bytes).convert_from_f32_slice(numbers),
        CachePrecision::F32 => bytemuck::cast_slice_mut(bytes).copy_from_slice(numbers),
    }
}
