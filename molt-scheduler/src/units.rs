//! Units of their own types, so that a count of tokens is never added to a count of bytes.
//!
//! Every other crate of the workspace uses these; they live here because this crate is at the bottom.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

macro_rules! count {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Nothing.
            pub const ZERO: Self = Self(0);
            /// As many as can be counted.
            pub const MAX: Self = Self(u64::MAX);

            /// That many.
            pub const fn new(count: u64) -> Self {
                Self(count)
            }

            /// The plain number.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// `self - other`, or zero where that would be negative.
            pub const fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }

            /// `self + other`, or `None` past the largest count.
            pub const fn checked_add(self, other: Self) -> Option<Self> {
                match self.0.checked_add(other.0) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }
        }

        impl From<usize> for $name {
            fn from(count: usize) -> Self {
                // No supported target has a `usize` wider than 64 bits.
                Self(u64::try_from(count).unwrap_or(u64::MAX))
            }
        }

        impl From<$name> for usize {
            fn from(count: $name) -> Self {
                usize::try_from(count.0).unwrap_or(usize::MAX)
            }
        }

        /// Saturates: a sum past the largest count is the largest count, which fits no budget.
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        /// Saturates at zero.
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                self.saturating_sub(other)
            }
        }

        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, Add::add)
            }
        }
    };
}

count!(
    /// Bytes of memory.
    Bytes
);
count!(
    /// Tokens of a text or of a cache.
    Tokens
);

impl Bytes {
    /// That many MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// This many bytes for each of `tokens`.
    pub const fn times(self, tokens: Tokens) -> Self {
        Self(self.0.saturating_mul(tokens.0))
    }

    /// In MiB, for people.
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / f64::from(1 << 20)
    }
}

/// Bytes for people: `12.5 MiB`, `740 KiB`, `96 B`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.0} KiB", self.0 as f64 / 1024.0),
            _ => write!(f, "{:.1} MiB", self.as_mib()),
        }
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.0)
    }
}

/// A rung of the ladder, counted from the biggest (0) down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RungIdx(u8);

impl RungIdx {
    /// The biggest rung.
    pub const TOP: Self = Self(0);
    /// More rungs than a ladder may have.
    pub const LIMIT: u8 = 16;

    /// The rung with that index.
    pub const fn new(index: u8) -> Self {
        Self(index)
    }

    /// The plain index.
    pub const fn index(self) -> u8 {
        self.0
    }

    /// For indexing.
    pub const fn get(self) -> usize {
        self.0 as usize
    }

    /// The next smaller rung, whether or not the ladder has it.
    pub const fn below(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The next bigger rung, or `None` from the top.
    pub const fn above(self) -> Option<Self> {
        match self.0 {
            0 => None,
            n => Some(Self(n - 1)),
        }
    }
}

impl fmt::Display for RungIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tier{}", self.0)
    }
}

/// A point in time, in microseconds since the caller's own start. The scheduler never asks a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(u64);

impl Time {
    /// The start.
    pub const START: Self = Self(0);

    /// That many microseconds after the start.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// That many milliseconds after the start.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Microseconds since the start.
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// From `earlier` to this, zero where it is later.
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Time {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

/// A length of time in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(u64);

impl Span {
    /// No time.
    pub const ZERO: Self = Self(0);

    /// That many microseconds.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// That many milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Microseconds.
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// That many times as long.
    pub const fn times(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

/// Saturates at the longest span there is.
impl Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}
