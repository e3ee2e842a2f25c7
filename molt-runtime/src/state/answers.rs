//! The answers that are kept: which there are, who is reading which, and when one goes.
//!
//! An answer is begun, written by the engine's thread, and then ended or given up. One whose daemon stopped in between waits
//! for its owner; so does one that has ended, for its end may not have reached whoever reads. What nobody asks for within
//! the grace time goes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use molt_kv::cache::CacheShape;
use molt_kv::keepsake::Keepsake;
use molt_kv::record;

use crate::state::journal::{AnswerHead, Held, Journal, JournalError, Owner};
use crate::state::{State, What, replace};

/// Where they lie.
pub(super) const FOLDER: &str = "answers";
/// How the names of their files end.
const JOURNAL: &str = "answer";
const RECORD: &str = "cache";
/// Most answers at a time; the oldest that nobody writes go first.
const ANSWERS: usize = 1_024;

/// An answer that is kept.
#[derive(Debug)]
pub(super) struct Answer {
    owner: Owner,
    /// Since when nobody reads it; none while somebody does.
    waits: Option<Instant>,
}

/// Why an answer is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotTaken {
    /// There is none of that name for whoever asks.
    Unknown,
    /// Somebody reads it at this moment.
    InUse,
}

/// An answer that is being written and kept. Dropped, it waits for its owner.
#[derive(Debug)]
pub struct Keeping {
    state: Arc<State>,
    id: String,
    /// None once it could not be written.
    journal: Option<Journal>,
    /// The records of its caches: source hash, and the position that the next token of each gets.
    pub(super) records: BTreeMap<String, u32>,
    /// How many tokens had been read when one was last written.
    pub(super) recorded: usize,
    /// Raised when its files are gone.
    pub(super) gone: Arc<AtomicBool>,
    /// Raised while records of it are on their way to the disk.
    pub(super) busy: Arc<AtomicBool>,
}

/// An answer that was left by an earlier daemon, or has ended: its owner takes it up again.
#[derive(Debug)]
pub struct Taken {
    /// What it began with.
    pub head: AnswerHead,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Whether the model has ended it.
    pub ended: bool,
    /// Its caches, as far as they are sound and of models of the ladder.
    pub caches: Vec<Keepsake>,
    /// To go on with.
    pub keeping: Keeping,
}

impl State {
    fn path(&self, id: &str, ending: &str) -> PathBuf {
        self.folder.join(FOLDER).join(format!("{id}.{ending}"))
    }

    /// Where answers lie.
    pub(super) fn answers_folder(&self) -> PathBuf {
        self.folder.join(FOLDER)
    }

    pub(super) fn record_path(&self, id: &str, source: &str) -> PathBuf {
        // As much of the hash as tells the models of a ladder apart; all of it is in the record.
        let short: String = source.chars().take(16).collect();
        self.path(id, &format!("{short}.{RECORD}"))
    }

    /// The records of an answer that lie there.
    fn records_of(&self, id: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.answers_folder()).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|path| name_of(path) == Some((id, RECORD))).collect()
    }

    /// Finds what an earlier daemon left. What belongs to no answer, or to one that makes no sense, goes.
    pub(super) fn look_through(&self) -> std::io::Result<()> {
        let mut answers = self.answers.lock();
        let paths: Vec<PathBuf> =
            std::fs::read_dir(self.answers_folder())?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        for path in paths.iter().filter(|path| name_of(path).is_some_and(|(_, ending)| ending == JOURNAL)) {
            match Journal::head(path) {
                Ok(head) if Some(head.id.as_str()) == name_of(path).map(|(id, _)| id) => {
                    answers.insert(head.id, Answer { owner: head.owner, waits: Some(Instant::now()) });
                }
                Ok(_) => self.tell(format!("{} is another answer's, and is dropped", path.display())),
                Err(error) => self.tell(format!("{error}; it is dropped")),
            }
        }
        for path in paths {
            let unfinished = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(replace::UNFINISHED.as_bytes()));
            if unfinished || name_of(&path).is_some_and(|(id, _)| !answers.contains_key(id)) {
                // Where it cannot be removed, nothing can be written either, and that is told.
                let _stays = std::fs::remove_file(&path);
            }
        }
        Ok(())
    }

    /// Begins to keep an answer; none where it cannot be kept, which is told.
    ///
    /// # Errors
    /// Where there is one of that name already, which somebody reads.
    pub fn begin(self: &Arc<Self>, head: &AnswerHead) -> Result<Option<Keeping>, NotTaken> {
        self.make_room();
        match self.answers.lock().entry(head.id.clone()) {
            Entry::Occupied(_) => return Err(NotTaken::InUse),
            // The name is taken before the file is made: another request of that name must not find half of one.
            Entry::Vacant(place) => place.insert(Answer { owner: head.owner.clone(), waits: None }),
        };
        let path = self.path(&head.id, JOURNAL);
        let journal = self.judge(What::Answers, &path, Journal::begin(&path, head));
        if journal.is_none() {
            self.answers.lock().remove(&head.id);
            let _not_there = std::fs::remove_file(&path);
            return Ok(None);
        }
        Ok(Some(self.keeping(&head.id, journal)))
    }

    fn keeping(self: &Arc<Self>, id: &str, journal: Option<Journal>) -> Keeping {
        let (gone, busy) = (Arc::default(), Arc::default());
        let (state, id) = (self.clone(), id.to_owned());
        Keeping { state, id, journal, records: BTreeMap::new(), recorded: 0, gone, busy }
    }

    /// Takes an answer up again. `models` are those of the ladder, by source hash.
    ///
    /// # Errors
    /// Why not, or what is wrong with it: then it is gone.
    pub fn take(
        self: &Arc<Self>,
        id: &str,
        owner: &Owner,
        models: &[(&str, CacheShape)],
    ) -> Result<Result<Taken, JournalError>, NotTaken> {
        {
            let mut answers = self.answers.lock();
            let answer = answers.get_mut(id).filter(|answer| answer.owner.is(owner)).ok_or(NotTaken::Unknown)?;
            answer.waits.take().ok_or(NotTaken::InUse)?;
        }
        let mut keeping = self.keeping(id, None);
        let path = self.path(id, JOURNAL);
        let opened = Journal::open(&path).and_then(|(journal, held)| {
            let known = held.head.sources.iter().any(|source| models.iter().any(|(model, _)| model == source));
            match known {
                true => Ok((journal, held)),
                false => {
                    let reason = "it is of models that this ladder does not have".to_owned();
                    Err(JournalError::Broken { path, reason })
                }
            }
        });
        let (journal, Held { head, tokens, ended }) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.tell(format!("{error}; it is dropped"));
                keeping.forget();
                return Ok(Err(error));
            }
        };
        keeping.journal = Some(journal);
        let all = [head.prompt.as_slice(), &tokens].concat();
        let mut caches = Vec::new();
        for path in self.records_of(id) {
            match usable(&path, &all, models) {
                Ok(cache) => {
                    keeping.records.insert(cache.source().to_owned(), cache.next_position());
                    keeping.recorded = keeping.recorded.max(usize::try_from(cache.next_position()).unwrap_or(0));
                    caches.push(cache);
                }
                Err(reason) => {
                    self.tell(format!("a conversation is read again: {reason}"));
                    let _stays = std::fs::remove_file(&path);
                }
            }
        }
        Ok(Ok(Taken { head, tokens, ended, caches, keeping }))
    }

    /// Drops what nobody has asked for within the grace time.
    pub fn expire(&self) {
        let grace = self.settings.grace;
        let over = |answer: &Answer| answer.waits.is_some_and(|since| since.elapsed() >= grace);
        let gone: Vec<String> =
            self.answers.lock().extract_if(.., |_, answer| over(answer)).map(|(id, _)| id).collect();
        gone.iter().for_each(|id| self.remove_files(id));
    }

    /// Drops the oldest that nobody writes until there is room for one more.
    fn make_room(&self) {
        let mut answers = self.answers.lock();
        while answers.len() >= ANSWERS {
            let waiting = answers.iter().filter_map(|(id, answer)| Some((answer.waits?, id.clone())));
            let Some((_, oldest)) = waiting.min() else { return };
            answers.remove(&oldest);
            self.remove_files(&oldest);
        }
    }

    fn remove_files(&self, id: &str) {
        // What cannot be removed is found by the next daemon, and goes then.
        let _stays = std::fs::remove_file(self.path(id, JOURNAL));
        self.remove_records(id);
    }

    fn remove_records(&self, id: &str) {
        for path in self.records_of(id) {
            let _stays = std::fs::remove_file(path);
        }
    }
}

/// The id and the ending of a file of an answer.
fn name_of(path: &Path) -> Option<(&str, &str)> {
    let name = path.file_name()?.to_str()?;
    let (id, rest) = name.split_once('.')?;
    let ending = rest.rsplit('.').next()?;
    [JOURNAL, RECORD].contains(&ending).then_some((id, ending))
}

/// A record, if it is sound and of that conversation and one of those models.
fn usable(path: &Path, tokens: &[u32], models: &[(&str, CacheShape)]) -> Result<Keepsake, String> {
    let cache = record::open(path).map_err(|error| crate::engine::chain(&error))?;
    let name = path.display();
    match models.iter().find(|(source, _)| *source == cache.source()) {
        None => Err(format!("the record {name} is of a model that this ladder does not have")),
        Some((_, shape)) if *shape != cache.shape() => {
            Err(format!("the record {name} is of another shape than its model's caches"))
        }
        // Its journal may have lost its end: what the record has more is cut off when it is used.
        Some(_) if !cache.is_of(tokens) => Err(format!("the record {name} is of another conversation")),
        Some(_) => Ok(cache),
    }
}

impl Keeping {
    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Writes down what is new of the answer, before anybody hears of it.
    pub fn write(&mut self, answered: &[u32]) {
        let Some(journal) = &mut self.journal else { return };
        let written = journal.write(answered);
        self.judge(written);
    }

    /// The answer is complete: whoever was cut off at its end may still ask for it.
    pub fn finish(mut self, answered: &[u32], ended: bool) {
        self.write(answered);
        if let (true, Some(journal)) = (ended, &mut self.journal) {
            let written = journal.end();
            self.judge(written);
        }
        // It is not gone on with.
        self.gone.store(true, Ordering::Relaxed);
        self.state.remove_records(&self.id);
    }

    /// Nobody wants it any more.
    pub fn forget(self) {
        self.drop_files();
    }

    /// Whether it still is kept.
    pub fn is_kept(&self) -> bool {
        self.journal.is_some()
    }

    /// The journal's file, for whoever waits for the disk.
    pub(super) fn journal_file(&self) -> Option<std::fs::File> {
        self.journal.as_ref().and_then(Journal::file)
    }

    pub(super) fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// What cannot be written is not kept any more: half of it would be wrong.
    fn judge(&mut self, written: std::io::Result<()>) {
        if self.state.judge(What::Answers, &self.state.path(&self.id, JOURNAL), written).is_none() {
            self.journal = None;
            self.drop_files();
        }
    }

    fn drop_files(&self) {
        self.gone.store(true, Ordering::Relaxed);
        self.state.answers.lock().remove(&self.id);
        self.state.remove_files(&self.id);
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if let Some(answer) = self.state.answers.lock().get_mut(&self.id) {
            answer.waits = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use molt_kv::cache::KvCache;
    use molt_kv::ledger::Ledger;
    use molt_kv::numbers::CachePrecision;
    use molt_scheduler::units::Tokens;

    use super::*;
    use crate::state::StateSettings;
    use crate::state::journal::tests::head;

    const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 1, head_dim: 4, precision: CachePrecision::F16 };

    fn open(folder: &Path, grace: Duration) -> Arc<State> {
        State::open(folder, StateSettings { every_tokens: 8, grace }).unwrap()
    }

    fn record(state: &State, id: &str, source: &str, tokens: &[u32]) {
        let mut cache = KvCache::new(SHAPE, Tokens::new(20), &Ledger::new()).unwrap();
        cache.append(tokens).unwrap();
        let mut bytes = Vec::new();
        record::write(&cache, source, &mut bytes).unwrap();
        std::fs::write(state.record_path(id, source), bytes).unwrap();
    }

    const LONG: Duration = Duration::from_secs(60);
    const MODELS: &[(&str, CacheShape)] = &[("abc", SHAPE), ("def", SHAPE)];

    #[test]
    fn an_answer_is_taken_up_by_its_owner_alone_and_once() {
        let folder = tempfile::tempdir().unwrap();
        let state = open(folder.path(), LONG);
        let (mine, other) = (head("a").owner, Owner { token: None, user: Some(8) });
        state.begin(&head("a")).unwrap().unwrap().write(&[4, 5]);
        drop(state);
        // What belongs to nobody goes.
        let answers = folder.path().join(FOLDER);
        for name in [".tmp123", "b.abc.cache", "c.answer"] {
            std::fs::write(answers.join(name), b"x").unwrap();
        }
        let state = open(folder.path(), LONG);
        assert_eq!(std::fs::read_dir(&answers).unwrap().count(), 1);
        assert!(state.troubles().iter().all(|told| told.contains("c.answer")));
        assert_eq!(state.take("a", &other, MODELS).err(), Some(NotTaken::Unknown));
        assert_eq!(state.take("../secret", &mine, MODELS).err(), Some(NotTaken::Unknown));
        let taken = state.take("a", &mine, MODELS).unwrap().unwrap();
        assert_eq!((&taken.head, &taken.tokens, taken.ended), (&head("a"), &vec![4, 5], false));
        assert_eq!(state.take("a", &mine, MODELS).err(), Some(NotTaken::InUse));
        taken.keeping.finish(&[4, 5, 6], true);
        let taken = state.take("a", &mine, MODELS).unwrap().unwrap();
        assert_eq!((&taken.tokens, taken.ended), (&vec![4, 5, 6], true));
        taken.keeping.forget();
        assert_eq!(state.take("a", &mine, MODELS).err(), Some(NotTaken::Unknown));
        assert_eq!(std::fs::read_dir(&answers).unwrap().count(), 0);
    }

    #[test]
    fn records_of_other_models_or_conversations_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let state = open(folder.path(), LONG);
        let mine = head("a").owner;
        state.begin(&head("a")).unwrap().unwrap().write(&[4, 5]);
        let check = |source: &str, tokens: &[u32], models: &[(&str, CacheShape)], named: Option<&str>| {
            record(&state, "a", source, tokens);
            let taken = state.take("a", &mine, models).unwrap().unwrap();
            let told = state.troubles();
            assert_eq!(taken.caches.len(), usize::from(named.is_none()), "{told:?}");
            assert_eq!(told.len(), usize::from(named.is_some()), "{told:?}");
            for named in named.into_iter().chain(named.map(|_| "a.")) {
                assert!(told[0].contains(named), "{told:?}");
            }
            state.remove_records("a");
        };
        check("abc", &[1, 2, 3, 4], MODELS, None);
        check("def", &[1, 2, 3, 4, 5, 6], MODELS, None);
        check("ghi", &[1, 2, 3, 4], MODELS, Some("a.ghi.cache is of a model that this ladder does not have"));
        check("abc", &[1, 2, 4, 4], MODELS, Some("another conversation"));
        let wide = CacheShape { precision: CachePrecision::F32, ..SHAPE };
        check("abc", &[1, 2, 3, 4], &[("abc", wide)], Some("another shape"));
        // Tokens of another vocabulary are none of ours.
        let refused = state.take("a", &mine, &[("xyz", SHAPE)]).unwrap().unwrap_err().to_string();
        assert!(refused.contains("a.answer") && refused.contains("models"), "{refused}");
        assert_eq!(state.take("a", &mine, MODELS).err(), Some(NotTaken::Unknown), "it is gone");
    }

    #[test]
    fn what_nobody_asks_for_in_time_goes() {
        let folder = tempfile::tempdir().unwrap();
        let state = open(folder.path(), Duration::ZERO);
        let mut written = state.begin(&head("a")).unwrap().unwrap();
        state.begin(&head("b")).unwrap().unwrap().finish(&[4], true);
        state.expire();
        let mine = head("a").owner;
        assert_eq!(state.take("b", &mine, MODELS).err(), Some(NotTaken::Unknown));
        assert_eq!(state.take("a", &mine, MODELS).err(), Some(NotTaken::InUse), "not while it is written");
        written.write(&[4]);
        drop(written);
        state.expire();
        assert_eq!(std::fs::read_dir(folder.path().join(FOLDER)).unwrap().count(), 0);
    }
}
