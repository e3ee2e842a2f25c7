//! What ended conversations leave, on its way from one daemon to the next: written when a daemon is told to stop, and gone on
//! with by whoever comes back to the daemon that starts after it.
//!
//! It stays in its file until somebody goes on with it, so it takes no memory and no lever knows of it. The same holds as in
//! memory: it never crosses owners, and it is the rung's that has read it.

use std::collections::BTreeSet;
use std::io::{self, BufWriter};
use std::path::Path;

use molt_kv::faults::{Boundary, pass};
use molt_kv::keepsake::Keepsake;
use molt_kv::record;
use molt_models::Rung;
use molt_scheduler::units::{Bytes, RungIdx};
use molt_scheduler::{SequenceId, TenantId};
use tempfile::NamedTempFile;

use crate::engine::prefix::{Kept, Owner, native};
use crate::engine::sequence::Sequence;
use crate::engine::{Engine, chain};
use crate::event::TroubleKind;

/// Most conversations that are left: each is an open file of the next daemon.
pub(crate) const MOST: usize = 64;
/// Most bytes that are left: a second or so of a daemon that stops.
const MOST_BYTES: Bytes = Bytes::mib(512);
/// Bytes that are gathered before they are written.
const GATHERED: usize = 1 << 20;

/// A conversation that has ended in an earlier daemon: all exact, and without gaps.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) owner: Owner,
    pub(super) rung: RungIdx,
    pub(super) kept: Keepsake,
}

/// A conversation that has ended, with its cache: in a file that is written, or in a record that was opened.
#[derive(Debug)]
pub struct LeftPrefix<C> {
    /// Whose it is.
    pub tenant: TenantId,
    /// And of which user.
    pub user: Option<u32>,
    /// Of the rung that has read it: the record knows the model, and not at which precision it was.
    pub precision: String,
    /// Its cache.
    pub cache: C,
}

/// What a prefix is written through.
type Out = BufWriter<NamedTempFile>;

impl LeftPrefix<NamedTempFile> {
    fn of((tenant, user): Owner, rung: &Rung, out: Out) -> io::Result<Self> {
        Ok(Self { tenant, user, precision: rung.precision().to_string(), cache: out.into_inner()? })
    }
}

/// What is left of all that could be.
#[derive(Debug, Default)]
struct Chosen {
    owners: BTreeSet<Owner>,
    bytes: Bytes,
}

impl Chosen {
    /// Whether a conversation of that size is the owner's first, and there is room for it.
    fn takes(&mut self, owner: Owner, size: Bytes) -> bool {
        let takes = self.owners.len() < MOST && self.bytes + size <= MOST_BYTES && self.owners.insert(owner);
        self.bytes += if takes { size } else { Bytes::ZERO };
        takes
    }
}

impl Engine {
    /// Writes what the last conversation of each owner has left into files of that folder that have no names of their own yet,
    /// newest first and not more than a daemon that stops has time for. `tell` hears what is broken and not passed on.
    ///
    /// # Errors
    /// The disk's.
    pub fn write_prefixes(
        &mut self,
        folder: &Path,
        mut tell: impl FnMut(String),
    ) -> io::Result<Vec<LeftPrefix<NamedTempFile>>> {
        // No round comes any more that would see that they have ended.
        let ended: Vec<Sequence> =
            self.sequences.extract_if(.., |_, s| s.finished().is_some()).map(|(_, ended)| ended).collect();
        ended.into_iter().for_each(|ended| self.keep_prefix(ended));
        let (mut chosen, mut written) = (Chosen::default(), Vec::new());
        let new = || {
            pass(Boundary::WriteState)?;
            Ok::<_, io::Error>(Out::with_capacity(GATHERED, NamedTempFile::new_in(folder)?))
        };
        for Kept { owner, rung, cache } in self.prefixes.kept.iter().rev() {
            let Some(rung) = self.ladder.rung(*rung) else { continue };
            if chosen.takes(*owner, cache.shape().charge(cache.len())) {
                let mut out = new()?;
                record::write(cache, rung.source(), &mut out)?;
                written.push(LeftPrefix::of(*owner, rung, out)?);
            }
        }
        // Who has said nothing since keeps what was left before.
        for Left { owner, rung, kept } in &mut self.prefixes.left {
            let Some(rung) = self.ladder.rung(*rung) else { continue };
            if chosen.takes(*owner, kept.bytes()) {
                let mut out = new()?;
                match kept.write_record(&mut out) {
                    Ok(()) => written.push(LeftPrefix::of(*owner, rung, out)?),
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        tell(format!("a conversation is read again: {error}"));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(written)
    }

    /// Takes over what a conversation has left to this daemon, if it is of a rung and is what a native read makes. If not, that
    /// is told.
    pub fn adopt_prefix(&mut self, LeftPrefix { tenant, user, precision, cache: kept }: LeftPrefix<Keepsake>) {
        if !self.prefixes.keeps() {
            return;
        }
        let mut rungs = self.ladder.rungs().iter().zip(self.ladder.cost().rungs());
        let own = |rung: &Rung| {
            let same = rung.source() == kept.source() && rung.cache_shape() == kept.shape();
            same && rung.precision().to_string() == precision
        };
        let found = rungs.find(|(rung, _)| own(rung)).map(|(_, (rung, _))| rung);
        drop(rungs);
        match found {
            Some(rung) if native(kept.slots()) == kept.slots().len() => {
                self.prefixes.left.push(Left { owner: (tenant, user), rung, kept });
            }
            _ => {
                let source = kept.source();
                self.trouble(
                    TroubleKind::State,
                    format!(
                        "a conversation is read again: no rung makes such a cache as {source} at {precision} has left"
                    ),
                );
            }
        }
    }

    /// Begins a sequence with the first tokens of what a conversation has left to this daemon. False where there is no memory
    /// for it, or where it is broken, which is told.
    pub(super) fn reuse_left(&mut self, id: SequenceId, at: usize, common: usize) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let kept = &mut self.prefixes.left[at].kept;
        // All of it is there for a moment.
        let bytes = kept.shape().charge(kept.slots().len());
        if bytes > self.spare || kept.slots().len() > usize::from(sequence.limit()) {
            return false;
        }
        let restored = kept.restore_until(common, sequence.limit(), &self.ledger).map_err(|error| chain(&error));
        let checked = restored
            .and_then(|cache| cache.check_finite(0..cache.len()).map(|()| cache).map_err(|error| chain(&error)));
        match checked {
            Ok(cache) => {
                sequence.cache = Some(cache);
                sequence.read = common;
                self.spare -= bytes;
                true
            }
            Err(error) => {
                self.prefixes.left.remove(at);
                self.trouble(TroubleKind::State, format!("a conversation is read again: {error}"));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_owner_leaves_one_and_all_together_no_more_than_there_is_room_for() {
        let tenant: TenantId = serde_json::from_value(json!({"slot": 0, "generation": 0})).unwrap();
        let check = |asked: &[(u32, u64)], expected: &[u32]| {
            let mut chosen = Chosen::default();
            let taken = asked.iter().filter(|(user, mib)| chosen.takes((tenant, Some(*user)), Bytes::mib(*mib)));
            let taken: Vec<u32> = taken.map(|(user, _)| *user).collect();
            assert_eq!(taken, expected, "{asked:?}");
        };
        check(&[(1, 10), (2, 10), (1, 10)], &[1, 2]);
        check(&[(1, 400), (2, 113), (3, 112), (4, 1)], &[1, 3]);
        check(&[(1, 513), (1, 512), (2, 1)], &[1]);
        let many: Vec<(u32, u64)> = (0..100).map(|user| (user, 0)).collect();
        check(&many, &(0..64).collect::<Vec<_>>());
    }
}
