//! Dot products of bytes, by the instruction that multiplies four unsigned bytes with four signed ones and adds them to 32
//! bits (VNNI), where the processor has it. It stands in two instruction sets: AVX-512 on servers, AVX-VNNI on laptops.
//! Whole numbers are exact whichever way they are made, so results are those of [`Dots::Pairs`] to the last bit.

use std::arch::x86_64::*;
use std::sync::LazyLock;

use crate::kernels::held_to;

/// How products of bytes are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernels) enum Dots {
    /// Two at a time, added in 16 bits.
    Pairs,
    /// Four at a time, by AVX-VNNI.
    FoursVex,
    /// Four at a time, by AVX-512 VNNI in vectors of 256 bits.
    FoursEvex,
}

impl Dots {
    /// What this processor does best.
    pub(in crate::kernels) fn best() -> Self {
        static BEST: LazyLock<Dots> = LazyLock::new(|| match held_to("avx2") {
            true => Dots::Pairs,
            false => Dots::all().last().unwrap_or(Dots::Pairs),
        });
        *BEST
    }

    /// What this processor can do, the best last.
    pub(in crate::kernels) fn all() -> impl Iterator<Item = Self> {
        let can = |dots: &Self| match dots {
            Self::Pairs => true,
            Self::FoursVex => is_x86_feature_detected!("avxvnni"),
            Self::FoursEvex => is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl"),
        };
        [Self::Pairs, Self::FoursVex, Self::FoursEvex].into_iter().filter(can)
    }

    /// Its name, for those who ask what the kernels use.
    pub(in crate::kernels) fn name(self) -> &'static str {
        match self {
            Self::Pairs => "avx2",
            Self::FoursVex => "avx2 and avx-vnni",
            Self::FoursEvex => "avx2 and avx512-vnni",
        }
    }
}

macro_rules! fours {
    ($module:ident, $features:literal, $dot:ident) => {
        pub(super) mod $module {
            use std::arch::x86_64::*;

            /// The product of `N` vectors of four columns each.
            #[target_feature(enable = $features)]
            #[inline]
            fn dot<const N: usize>(weights: &[__m256i; N], x: &[i32; N]) -> __m256i {
                let mut sum = _mm256_setzero_si256();
                for (weights, x) in weights.iter().zip(x) {
                    sum = $dot(sum, *weights, _mm256_set1_epi32(*x));
                }
                sum
            }

            /// Products of unsigned weights with every token's inputs.
            #[target_feature(enable = $features)]
            #[inline(never)]
            pub(super) fn each(weights: &[__m256i; 8], x: &[[i32; 8]], out: &mut [__m256i]) {
                let weights = *weights;
                for (x, out) in x.iter().zip(out) {
                    *out = dot(&weights, x);
                }
            }

            /// The same, times `scale` (a word each), added to the tokens' sums.
            #[target_feature(enable = $features)]
            #[inline(never)]
            pub(super) fn scaled(weights: &[__m256i; 8], scale: __m256i, x: &[[i32; 8]], sums: &mut [__m256i]) {
                let weights = *weights;
                for (x, sum) in x.iter().zip(sums) {
                    *sum = _mm256_add_epi32(*sum, _mm256_mullo_epi32(dot(&weights, x), scale));
                }
            }

            /// The same where the last 16 columns have a scale of their own.
            #[target_feature(enable = $features)]
            #[inline(never)]
            pub(super) fn scaled_halves(
                weights: &[__m256i; 8],
                scales: [__m256i; 2],
                x: &[[i32; 8]],
                sums: &mut [__m256i],
            ) {
                let halves = *weights.as_chunks::<4>().0.first_chunk::<2>().expect("eight are two fours");
                for (x, sum) in x.iter().zip(sums) {
                    for ((weights, x), scale) in halves.iter().zip(x.as_chunks::<4>().0).zip(scales) {
                        *sum = _mm256_add_epi32(*sum, _mm256_mullo_epi32(dot(weights, x), scale));
                    }
                }
            }
        }
    };
}

fours!(vex, "avx2,avxvnni", _mm256_dpbusd_avx_epi32);
fours!(evex, "avx2,avx512vnni,avx512vl", _mm256_dpbusd_epi32);

/// Products of unsigned weights with every token's inputs. False where they are to be made in pairs.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn each(dots: Dots, weights: &[__m256i; 8], x: &[[i32; 8]], out: &mut [__m256i]) -> bool {
    match dots {
        Dots::Pairs => return false,
        // SAFETY: the variant is only made where the processor was asked for these instructions.
        Dots::FoursVex => unsafe { vex::each(weights, x, out) },
        // SAFETY: as above.
        Dots::FoursEvex => unsafe { evex::each(weights, x, out) },
    }
    true
}

/// The same, added to the tokens' sums; of `scales` (of the first and of the last 16 columns) both 16-bit halves of a word
/// are alike. `SAME` says that so are the two.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn scaled<const SAME: bool>(
    dots: Dots,
    weights: &[__m256i; 8],
    scales: [__m256i; 2],
    x: &[[i32; 8]],
    sums: &mut [__m256i],
) -> bool {
    let wide = scales.map(|scale| _mm256_srai_epi32::<16>(scale));
    match (dots, SAME) {
        (Dots::Pairs, _) => return false,
        // SAFETY: the variant is only made where the processor was asked for these instructions.
        (Dots::FoursVex, true) => unsafe { vex::scaled(weights, wide[0], x, sums) },
        // SAFETY: as above.
        (Dots::FoursVex, false) => unsafe { vex::scaled_halves(weights, wide, x, sums) },
        // SAFETY: as above.
        (Dots::FoursEvex, true) => unsafe { evex::scaled(weights, wide[0], x, sums) },
        // SAFETY: as above.
        (Dots::FoursEvex, false) => unsafe { evex::scaled_halves(weights, wide, x, sums) },
    }
    true
}
