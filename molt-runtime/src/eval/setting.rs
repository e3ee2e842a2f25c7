//! The ways in which a cache comes to the destination that are judged.

use std::time::{Duration, Instant};

use molt_kv::cache::KvCache;
use molt_kv::carry::{CarrySettings, carry, restore};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::heal::heal;
use molt_kv::keepsake::Keepsake;
use molt_scheduler::units::Tokens;
use serde::{Deserialize, Serialize};

use super::error::EvalError;
use super::pair::Pair;

/// A way to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    /// A bridge with as little read natively as will do.
    Fast,
    /// A bridge as the engine uses it.
    Default,
    /// A bridge with much read natively.
    Faithful,
    /// A bridge, and then everything read again, left to right, into the same slots.
    Healed,
    /// The destination's own cache, restored; the last tokens, written elsewhere in between, are read natively.
    Keepsake,
}

/// Tokens that a keepsake does not hold yet when it is restored, at most; and at most a quarter of the context.
const WRITTEN_SINCE: usize = 64;

impl Setting {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 5] = [Self::Fast, Self::Default, Self::Faithful, Self::Healed, Self::Keepsake];

    /// What is read natively beside the map; nothing for what needs no bridge.
    pub fn carry_settings(self) -> Option<CarrySettings> {
        match self {
            Self::Fast => Some(CarrySettings::FAST),
            Self::Default | Self::Healed => Some(CarrySettings::default()),
            Self::Faithful => Some(CarrySettings::FAITHFUL),
            Self::Keepsake => None,
        }
    }

    /// Its name in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Default => "default",
            Self::Faithful => "faithful",
            Self::Healed => "healed",
            Self::Keepsake => "keepsake",
        }
    }

    /// The destination's cache after `source` came over, and how long that took. `own` is the destination's native cache
    /// of the same tokens or more; a keepsake is made from its beginning, and it is cut to that.
    pub(super) fn bring(
        self,
        pair: &Pair,
        source: &KvCache,
        own: &mut KvCache,
    ) -> Result<(KvCache, Duration), EvalError> {
        let stop = StopFlag::new();
        let Some(settings) = self.carry_settings() else {
            own.truncate(source.len() - WRITTEN_SINCE.min(source.len() / 4));
            let mut keepsake = Keepsake::save(own, pair.destination.source(), &std::env::temp_dir())?;
            let start = Instant::now();
            let (cache, _) =
                restore(&mut keepsake, source.slots(), source.limit(), &pair.destination, &pair.ledger, &stop)?;
            return Ok((cache, start.elapsed()));
        };
        let bridge = pair.bridge.as_ref().ok_or_else(|| EvalError::NoBridge { pair: pair.name() })?;
        let start = Instant::now();
        let ends = (source, pair.source.rope());
        let (mut cache, _) = carry(bridge, ends, &pair.destination, settings, &pair.ledger, &stop)?;
        if self == Self::Healed {
            while heal(&mut cache, &pair.destination, Tokens::MAX, &pair.ledger, &stop)? > Tokens::ZERO {}
        }
        Ok((cache, start.elapsed()))
    }
}
