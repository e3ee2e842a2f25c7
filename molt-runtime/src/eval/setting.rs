//! The ways in which a cache comes to the destination that are judged.

use std::time::{Duration, Instant};

use molt_kv::background::heal;
use molt_kv::cache::KvCache;
use molt_kv::carry::{CarrySettings, carry, restore, take_over};
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::keepsake::Keepsake;
use molt_scheduler::units::Tokens;
use serde::{Deserialize, Serialize};

use super::error::EvalError;
use super::pair::Pair;
use crate::engine::Effort;

/// A way to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    /// A bridge with as little read natively as will do.
    Fast,
    /// What the engine does: a bridge with as much read natively as its reader waits for, or all of it.
    Default,
    /// A bridge with 64 first and 64 last tokens read natively, and none chosen.
    Balanced,
    /// As balanced, and 8 of every 100 mapped tokens read natively: those to which the last ones pay most attention.
    #[value(name = "chosen-8")]
    Chosen8,
    /// The same with 15 of every 100.
    #[value(name = "chosen-15")]
    Chosen15,
    /// A bridge with much read natively.
    Faithful,
    /// As balanced, and then everything read again, left to right, into the same slots.
    Healed,
    /// Read ahead on the destination while the conversation was elsewhere, but for the last tokens, which are read natively.
    Shadowed,
    /// The destination's own cache, restored; the last tokens, written elsewhere in between, are read natively.
    Keepsake,
    /// As faithful, but no first token is read natively.
    WithoutFirst,
    /// As faithful, but no last token is read natively over the mapped ones, and so none is chosen by what it looks at.
    WithoutWindow,
    /// As faithful, but no mapped token is read natively for being looked at.
    WithoutChosen,
}

/// Tokens that a shadow does not hold yet when it is taken over, at most: the engine reads eight at a time.
const NOT_SHADOWED: usize = 8;

/// Tokens that a keepsake does not hold yet when it is restored, at most; and at most a quarter of the context.
const WRITTEN_SINCE: usize = 64;

impl Setting {
    /// Those that the engine uses, in the order of the tables.
    pub const ALL: [Self; 6] =
        [Self::Fast, Self::Default, Self::Faithful, Self::Shadowed, Self::Healed, Self::Keepsake];
    /// The most faithful carry, and the same with one of its means taken away.
    pub const ABLATIONS: [Self; 4] = [Self::Faithful, Self::WithoutFirst, Self::WithoutWindow, Self::WithoutChosen];

    /// Whether it goes over a bridge.
    pub fn is_bridged(self) -> bool {
        !matches!(self, Self::Shadowed | Self::Keepsake)
    }

    /// Whether the destination then has what its own reading would have given it.
    pub fn is_exact(self) -> bool {
        matches!(self, Self::Shadowed | Self::Healed | Self::Keepsake)
    }

    /// What is read natively beside the map of so many tokens; nothing for what needs no bridge, or where there is none.
    pub(super) fn carry_settings(self, pair: &Pair, tokens: usize) -> Option<CarrySettings> {
        let bridge = pair.bridge.as_ref()?;
        match self {
            Self::Fast => Some(CarrySettings::FAST),
            Self::Default => {
                let tokens = Tokens::from(tokens);
                Some(Effort::default().settings(Some(pair.pace), bridge, &pair.destination, tokens))
            }
            Self::Balanced | Self::Healed => Some(CarrySettings::BALANCED),
            Self::Chosen8 => Some(CarrySettings::BALANCED.choosing(8)),
            Self::Chosen15 => Some(CarrySettings::BALANCED.choosing(15)),
            Self::Faithful => Some(CarrySettings::FAITHFUL),
            Self::Shadowed | Self::Keepsake => None,
            Self::WithoutFirst => Some(CarrySettings { exact_first: Tokens::ZERO, ..CarrySettings::FAITHFUL }),
            Self::WithoutWindow => Some(CarrySettings { fed_window: Tokens::ZERO, ..CarrySettings::FAITHFUL }),
            Self::WithoutChosen => Some(CarrySettings { chosen_percent: 0, ..CarrySettings::FAITHFUL }),
        }
    }

    /// Its name in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Default => "default",
            Self::Balanced => "balanced",
            Self::Chosen8 => "chosen-8",
            Self::Chosen15 => "chosen-15",
            Self::Faithful => "faithful",
            Self::Healed => "healed",
            Self::Shadowed => "shadowed",
            Self::Keepsake => "keepsake",
            Self::WithoutFirst => "without-first",
            Self::WithoutWindow => "without-window",
            Self::WithoutChosen => "without-chosen",
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
        if self == Self::Shadowed {
            own.truncate(source.len() - NOT_SHADOWED.min(source.len() / 4));
            let shadow = own.prefix(own.len(), source.limit(), &pair.ledger)?;
            let start = Instant::now();
            let (cache, _) = take_over(shadow, source.slots(), &pair.destination, &pair.ledger, &stop)?;
            return Ok((cache, start.elapsed()));
        }
        if !self.is_bridged() {
            own.truncate(source.len() - WRITTEN_SINCE.min(source.len() / 4));
            let mut keepsake = Keepsake::save(own, pair.destination.source(), &std::env::temp_dir())?;
            let start = Instant::now();
            let (cache, _) =
                restore(&mut keepsake, source.slots(), source.limit(), &pair.destination, &pair.ledger, &stop)?;
            return Ok((cache, start.elapsed()));
        }
        let settings = self.carry_settings(pair, source.len());
        let (settings, bridge) =
            settings.zip(pair.bridge.as_ref()).ok_or_else(|| EvalError::NoBridge { pair: pair.name() })?;
        let start = Instant::now();
        let ends = (source, pair.source.rope());
        let (mut cache, _) = carry(bridge, ends, None, &pair.destination, settings, &pair.ledger, &stop)?;
        if self == Self::Healed {
            while heal(&mut cache, &pair.destination, Tokens::MAX, &pair.ledger, &stop)? > Tokens::ZERO {}
        }
        Ok((cache, start.elapsed()))
    }
}
