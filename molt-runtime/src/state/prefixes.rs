//! What ended conversations leave for their next turn, from one daemon to the next one.
//!
//! It is written when a daemon is told to stop, and taken by the one that starts after it, which takes the names away: no file of
//! an ended conversation can be opened while a daemon runs. Nobody waits for the disk: a daemon that stops is in a hurry, and
//! what a loss of power leaves half written has checksums that do not hold.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use molt_kv::keepsake::Keepsake;
use molt_kv::record;
use molt_scheduler::TenantId;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::engine::{LeftPrefix, MOST_LEFT, chain};
use crate::state::{Owner, State, What, summed};

/// Where they lie.
const FOLDER: &str = "conversations";
/// The list of them.
const INDEX: &str = "index";
/// Most bytes of the list.
const INDEX_BYTES: u64 = 1 << 20;

/// One of them in the list.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// A number, which is the name of its file.
    file: u32,
    owner: Owner,
    /// Of the rung that has read it: the record knows the model, and not at which precision it was.
    precision: String,
}

impl State {
    fn prefixes(&self) -> PathBuf {
        self.folder.join(FOLDER)
    }

    /// Keeps what `write` puts into a folder. What cannot be written is told.
    pub fn keep_prefixes(&self, write: impl FnOnce(&Path) -> io::Result<Vec<LeftPrefix<NamedTempFile>>>) {
        let folder = self.prefixes();
        let kept = empty(&folder).and_then(|()| {
            let mut entries = Vec::new();
            for (file, left) in (0..).zip(write(&folder)?) {
                let LeftPrefix { tenant, user, precision, cache } = left;
                // Of a tenant that has no name outside of this process nobody could ask for it.
                let Some(token) = self.token_of(tenant) else { continue };
                cache.persist(folder.join(format!("{file}.cache"))).map_err(|error| error.error)?;
                entries.push(Entry { file, owner: Owner { token, user }, precision });
            }
            let mut bytes = serde_json::to_vec(&entries)?;
            super::add_sum(&mut bytes);
            std::fs::write(folder.join(INDEX), bytes)
        });
        self.judge(What::Conversations, &folder, kept);
    }

    /// Takes what an earlier daemon has left: it is there for this one alone. What is not sound is told.
    pub fn take_prefixes(&self) -> Vec<LeftPrefix<Keepsake>> {
        let folder = self.prefixes();
        let index = folder.join(INDEX);
        let read = std::fs::metadata(&index).and_then(|found| match found.len() <= INDEX_BYTES {
            true => std::fs::read(&index),
            false => Err(io::Error::other("it is too long")),
        });
        let entries = read.and_then(|bytes| Ok(serde_json::from_slice::<Vec<Entry>>(summed(&bytes)?)?));
        let taken = match entries {
            Ok(entries) => {
                entries.into_iter().take(MOST_LEFT).filter_map(|entry| self.take_prefix(&folder, entry)).collect()
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    self.tell(format!("conversations are read again: {}: {error}", index.display()));
                }
                Vec::new()
            }
        };
        // Open files are there until they are closed.
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.tell(format!("{} cannot be removed: {error}", folder.display()));
            }
            _ => {}
        }
        taken
    }

    fn take_prefix(&self, folder: &Path, Entry { file, owner, precision }: Entry) -> Option<LeftPrefix<Keepsake>> {
        let tenant = self.tenant_of(&owner.token)?;
        match record::open(&folder.join(format!("{file}.cache"))) {
            Ok(cache) => Some(LeftPrefix { tenant, user: owner.user, precision, cache }),
            Err(error) => {
                self.tell(format!("a conversation is read again: {}", chain(&error)));
                None
            }
        }
    }

    /// A tenant is called so outside of this process: by the digest of its token, or, the default tenant, by none.
    pub fn name_tenant(&self, tenant: TenantId, token: Option<String>) {
        self.tenants.lock().insert(tenant, token);
    }

    /// The tenant has left.
    pub fn forget_tenant(&self, tenant: TenantId) {
        self.tenants.lock().remove(&tenant);
    }

    fn token_of(&self, tenant: TenantId) -> Option<Option<String>> {
        self.tenants.lock().get(&tenant).cloned()
    }

    fn tenant_of(&self, token: &Option<String>) -> Option<TenantId> {
        self.tenants.lock().iter().find_map(|(tenant, known)| (known == token).then_some(*tenant))
    }
}

/// Makes a folder that has nothing in it: an index of an earlier daemon must never be of files of this one.
fn empty(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(folder)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use molt_kv::cache::{CacheShape, KvCache};
    use molt_kv::ledger::Ledger;
    use molt_kv::numbers::CachePrecision;
    use molt_scheduler::units::Tokens;
    use serde_json::json;

    use super::*;
    use crate::state::StateSettings;

    const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 1, head_dim: 4, precision: CachePrecision::F16 };
    const LIMIT: Tokens = Tokens::new(40);

    fn tenant(slot: u32) -> TenantId {
        serde_json::from_value(json!({"slot": slot, "generation": 0})).unwrap()
    }

    /// A folder whose tenants are the default one and one with a token; in each daemon they have other numbers.
    fn open(folder: &Path, first: u32) -> Arc<State> {
        let settings = StateSettings { every_tokens: 8, grace: Duration::from_secs(60) };
        let state = State::open(folder, settings).unwrap();
        state.name_tenant(tenant(first), None);
        state.name_tenant(tenant(first + 1), Some("ab".repeat(32)));
        state
    }

    fn cache(from: u32) -> KvCache {
        let mut cache = KvCache::new(SHAPE, LIMIT, &Ledger::new()).unwrap();
        let slots = cache.append(&(from..from + 20).collect::<Vec<_>>()).unwrap();
        let values: Vec<f32> = (0u8..80).map(|i| (f32::from(i) * 0.37).sin()).collect();
        cache.write(0, slots.start, &values, &values);
        cache
    }

    fn written(folder: &Path, tenant: TenantId, from: u32) -> LeftPrefix<NamedTempFile> {
        let mut file = NamedTempFile::new_in(folder).unwrap();
        record::write(&cache(from), "abc", &mut file).unwrap();
        LeftPrefix { tenant, user: Some(7), precision: "q8_0".to_owned(), cache: file }
    }

    /// Leaves a conversation of each tenant, and one of a tenant that has no name.
    fn leave(folder: &Path) {
        let state = open(folder, 3);
        state.keep_prefixes(|folder| {
            Ok([(3, 100), (4, 200), (9, 300)].map(|(t, from)| written(folder, tenant(t), from)).into())
        });
        assert_eq!(state.troubles(), Vec::<String>::new());
    }

    /// The first token of what each tenant gets, and what was told.
    fn taken(folder: &Path) -> (Vec<(TenantId, u32)>, Vec<String>) {
        let state = open(folder, 5);
        let (mut found, mut told) = (Vec::new(), Vec::new());
        for LeftPrefix { tenant, user, precision, cache: mut kept } in state.take_prefixes() {
            assert_eq!((user, precision.as_str(), kept.source()), (Some(7), "q8_0", "abc"));
            match kept.restore(LIMIT, &Ledger::new()) {
                Ok(back) => {
                    let whole = cache(back.slots()[0].token);
                    assert_eq!(
                        (back.slots(), back.keys(0), back.values(0)),
                        (whole.slots(), whole.keys(0), whole.values(0))
                    );
                    found.push((tenant, back.slots()[0].token));
                }
                Err(error) => told.push(chain(&error)),
            }
        }
        assert!(!state.prefixes().exists(), "it is for one daemon alone");
        assert!(state.take_prefixes().is_empty());
        told.extend(state.troubles());
        (found, told)
    }

    #[test]
    fn what_is_left_is_of_its_owner_and_for_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(taken(folder.path()), (Vec::new(), Vec::new()), "nobody has left anything");
        leave(folder.path());
        assert_eq!(taken(folder.path()), (vec![(tenant(5), 100), (tenant(6), 200)], Vec::new()));
        // Who has left since gets nothing, nor does anybody else.
        leave(folder.path());
        let state = open(folder.path(), 5);
        state.forget_tenant(tenant(6));
        assert_eq!(state.take_prefixes().iter().map(|left| left.tenant).collect::<Vec<_>>(), [tenant(5)]);
    }

    #[test]
    fn what_is_harmed_is_refused_by_name_and_nobody_gets_what_is_of_another() {
        let made = tempfile::tempdir().unwrap();
        leave(made.path());
        let names = ["0.cache", "1.cache", INDEX];
        let image = names.map(|name| (name, std::fs::read(made.path().join(FOLDER).join(name)).unwrap()));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(taken(folder.path()), (Vec::new(), Vec::new()));
        let own = [(tenant(5), 100), (tenant(6), 200)];
        let check = |harmed: &str, bytes: &[u8], how: &str| {
            std::fs::create_dir(folder.path().join(FOLDER)).unwrap();
            for (name, whole) in &image {
                std::fs::write(folder.path().join(FOLDER).join(name), if *name == harmed { bytes } else { whole })
                    .unwrap();
            }
            let (found, told) = taken(folder.path());
            assert!(found.iter().all(|found| own.contains(found)), "{harmed} {how}: {found:?}");
            let lost = if harmed == INDEX { 2 } else { 1 };
            assert_eq!(found.len(), 2 - lost, "{harmed} {how}: {told:?}");
            assert!(told.len() == 1 && told[0].contains(harmed), "{harmed} {how}: {told:?}");
        };
        for (name, whole) in &image {
            for at in 0..whole.len() {
                check(name, &whole[..at], &format!("cut off at {at}"));
                let mut altered = whole.clone();
                altered[at] ^= 1 << (at % 8);
                check(name, &altered, &format!("altered at {at}"));
            }
        }
    }

    #[test]
    fn what_cannot_be_written_is_told_and_leaves_nothing_of_before() {
        let folder = tempfile::tempdir().unwrap();
        leave(folder.path());
        let state = open(folder.path(), 3);
        // The files have their names, the index does not: that of before would give them to others.
        state.keep_prefixes(|folder| {
            let left = vec![written(folder, tenant(4), 400)];
            std::fs::create_dir(folder.join(INDEX))?;
            Ok(left)
        });
        let told = state.troubles();
        assert!(told.len() == 1 && told[0].contains(FOLDER), "{told:?}");
        drop(state);
        assert_eq!(taken(folder.path()).0, []);
        // Nor is the disk in the way of who goes on.
        leave(folder.path());
        let state = open(folder.path(), 3);
        state.keep_prefixes(|_| Err(io::Error::other("the disk is full")));
        let told = state.troubles();
        assert!(told.len() == 1 && told[0].contains("the disk is full"), "{told:?}");
        drop(state);
        assert_eq!(taken(folder.path()), (Vec::new(), Vec::new()));
    }
}
