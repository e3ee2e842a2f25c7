//! Names of tenants and sequences. Each carries a generation, so that a late word about a sequence that is gone can
//! never touch the one that took its place.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name {
            slot: u32,
            generation: u32,
        }

        impl $name {
            pub(crate) const fn new(slot: u32, generation: u32) -> Self {
                Self { slot, generation }
            }

            pub(crate) const fn parts(self) -> (u32, u32) {
                (self.slot, self.generation)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}.{}"), self.slot, self.generation)
            }
        }
    };
}

id!(
    /// A registered tenant.
    TenantId,
    "t"
);
id!(
    /// A sequence: one conversation of a tenant, from its request to its last token.
    SequenceId,
    "s"
);

impl TenantId {
    /// For counting by tenant.
    pub(crate) fn slot(self) -> usize {
        usize::try_from(self.slot).unwrap_or(usize::MAX)
    }
}
