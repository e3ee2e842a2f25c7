//! Kernels for x86-64 with AVX-512 and its products of bytes (VNNI): what is done for many tokens at once, in vectors of 512
//! bits. A lone token waits for memory, and goes the way of AVX2. Only called where the processor was asked for them.
//!
//! Whole numbers are exact, and floats are rounded in the same places and order as in vectors of 256 bits: results are equal
//! to the last bit.

use std::sync::LazyLock;

use crate::kernels::held_to;

pub(super) mod panel;
pub(super) mod tile;

/// Whether these kernels are used: the processor has what they take, and nobody holds it to less.
pub(super) fn used() -> bool {
    static USED: LazyLock<bool> =
        LazyLock::new(|| !held_to("portable") && !held_to("avx2") && !held_to("vnni") && able());
    *USED
}

/// Whether the processor has what they take.
pub(super) fn able() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}
