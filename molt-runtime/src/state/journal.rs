//! The journal of an answer: what was asked, and then each token as it is chosen, before its reader hears of it.
//!
//! Tokens are small entries with a checksum each, written behind one another. What a crash leaves half written is cut off:
//! the same tokens are chosen again. The disk has them when the system writes them, or when a record of the answer's cache is
//! put in its place (`records.rs`): to wait for it at each token would be slower than the models are.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use molt_kv::faults::{Boundary, pass};
use molt_models::GrammarSpec;
use molt_models::sampling::SamplingSettings;
use molt_scheduler::units::Tokens;
use serde::{Deserialize, Serialize};

use crate::service::{Kind, User};

/// What every journal begins with; the last byte is the version.
const MAGIC: [u8; 8] = *b"MOLTAN\0\x01";
/// Most bytes of a head: a prompt of numbers and a schema.
const HEAD: u32 = 64 << 20;
/// Bytes of an entry: a number and its checksum.
const ENTRY: usize = 8;
/// The number that says that the model has ended the answer; no token has it.
const ENDED: u32 = u32::MAX;

/// Whose an answer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// The digest of the tenant's token; none of the default tenant.
    pub token: Option<String>,
    /// The user who asked.
    pub user: User,
}

impl Owner {
    /// Whether that is the same owner: whoever has the token, or else the same user, where the system says who that is.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.token, &other.token) {
            (Some(own), Some(other)) => own == other,
            (None, None) => self.user.is_some() && self.user == other.user,
            _ => false,
        }
    }
}

/// What an answer began with: all that is needed to go on with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerHead {
    /// Its name on the wire.
    pub id: String,
    /// When it was asked for, in seconds since 1970.
    pub created: u64,
    /// Whose it is.
    pub owner: Owner,
    /// SHA-256 of the model files of the ladder, so that tokens are not taken for those of another vocabulary.
    pub sources: Vec<String>,
    /// The route that it was asked on.
    pub kind: Kind,
    /// Whether a stream of it ends with a chunk of usage.
    pub include_usage: bool,
    /// Whether calls of tools are looked for in it.
    pub tools: bool,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens at its front that shedding never touches.
    pub pinned: Tokens,
    /// Most tokens of the answer.
    pub answer: Tokens,
    /// How tokens are chosen.
    pub sampling: SamplingSettings,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// What it must be.
    pub grammar: Option<GrammarSpec>,
    /// Whether each token is told with its likelihood, and with how many others.
    pub likelihoods: Option<usize>,
}

impl AnswerHead {
    /// Whether another request asks for the same. One that leaves the seed open is content with any.
    pub fn is_asked_by(&self, other: &Self, any_seed: bool) -> bool {
        // What it is called and how it is told is no part of what is asked.
        let Self {
            id: _, created: _, owner: _, sources: _, include_usage: _, kind, tools, prompt, pinned, answer, ..
        } = other;
        let Self { sampling, stop, grammar, likelihoods, .. } = other;
        let sampling = match any_seed {
            true => SamplingSettings { seed: self.sampling.seed, ..*sampling },
            false => *sampling,
        };
        (self.kind, self.tools, self.pinned, self.answer, self.sampling, self.likelihoods)
            == (*kind, *tools, *pinned, *answer, sampling, *likelihoods)
            && (&self.prompt, &self.stop, &self.grammar) == (prompt, stop, grammar)
    }
}

/// Why a journal is not used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The disk refused.
    #[error("the answer {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("the answer {} is broken: {reason}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What shows it.
        reason: String,
    },
}

/// A journal that is being written.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    /// Of the head: an entry of another answer is none of this one.
    seed: u32,
    entries: u32,
}

/// What a journal holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) head: AnswerHead,
    pub(super) tokens: Vec<u32>,
    /// Whether the model has ended the answer.
    pub(super) ended: bool,
}

impl Journal {
    /// Begins one.
    pub(super) fn begin(path: &Path, head: &AnswerHead) -> io::Result<Self> {
        let head = serde_json::to_vec(head)?;
        let length = u32::try_from(head.len()).ok().filter(|length| *length <= HEAD);
        let length = length.ok_or_else(|| io::Error::other("what was asked is too long to be kept"))?;
        let seed = crc32fast::hash(&head);
        let mut bytes = Vec::with_capacity(head.len() + 16);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&seed.to_le_bytes());
        bytes.extend_from_slice(&head);
        pass(Boundary::WriteState)?;
        // Until the head is whole there is nothing to go on with, so a torn one is no loss.
        let mut file = File::options().create_new(true).append(true).read(true).open(path)?;
        file.write_all(&bytes)?;
        Ok(Self { file, seed, entries: 0 })
    }

    /// Reads one, cuts off what is half written, and goes on with it.
    pub(super) fn open(path: &Path) -> Result<(Self, Held), JournalError> {
        let failed = |source| JournalError::File { path: path.to_owned(), source };
        let mut file = File::options().append(true).read(true).open(path).map_err(failed)?;
        let (head, seed, whole) = read_head(&mut file, path)?;
        let mut told = Vec::new();
        file.read_to_end(&mut told).map_err(failed)?;
        let (mut tokens, mut ended, mut entries) = (Vec::new(), false, 0);
        for entry in told.chunks_exact(ENTRY) {
            let number = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            if ended || entry != self::entry(seed, entries, number) {
                break;
            }
            entries += 1;
            ended = number == ENDED;
            tokens.extend((!ended).then_some(number));
        }
        let good = u64::from(entries) * 8 + whole;
        file.set_len(good).map_err(failed)?;
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok((Self { file, seed, entries }, Held { head, tokens, ended }))
    }

    /// Reads what an answer began with.
    pub(super) fn head(path: &Path) -> Result<AnswerHead, JournalError> {
        let failed = |source| JournalError::File { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        read_head(&mut file, path).map(|(head, ..)| head)
    }

    /// The file, once more; none where descriptors are out.
    pub(super) fn file(&self) -> Option<File> {
        self.file.try_clone().ok()
    }

    /// Writes the tokens that are new among all of an answer.
    pub(super) fn write(&mut self, answered: &[u32]) -> io::Result<()> {
        let known = usize::try_from(self.entries).unwrap_or(usize::MAX);
        self.append(answered.get(known..).unwrap_or_default())
    }

    /// The model has ended the answer.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.append(&[ENDED])
    }

    fn append(&mut self, numbers: &[u32]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(numbers.len() * ENTRY);
        let mut entries = self.entries;
        for number in numbers {
            bytes.extend_from_slice(&entry(self.seed, entries, *number));
            entries += 1;
        }
        pass(Boundary::WriteState)?;
        self.file.write_all(&bytes)?;
        self.entries = entries;
        Ok(())
    }
}

fn entry(seed: u32, nth: u32, number: u32) -> [u8; ENTRY] {
    let mut sum = crc32fast::Hasher::new_with_initial(seed);
    sum.update(&nth.to_le_bytes());
    sum.update(&number.to_le_bytes());
    let ([a, b, c, d], [e, f, g, h]) = (number.to_le_bytes(), sum.finalize().to_le_bytes());
    [a, b, c, d, e, f, g, h]
}

/// The head of a file, its checksum, and the bytes up to where entries begin.
fn read_head(file: &mut File, path: &Path) -> Result<(AnswerHead, u32, u64), JournalError> {
    let failed = |source| JournalError::File { path: path.to_owned(), source };
    let broken = |reason: &str| JournalError::Broken { path: path.to_owned(), reason: reason.to_owned() };
    let cut = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => broken("it ends too soon"),
        _ => failed(error),
    };
    let holds = file.metadata().map_err(failed)?.len();
    let (mut magic, mut length, mut seed) = ([0; MAGIC.len()], [0; 4], [0; 4]);
    for part in [&mut magic[..], &mut length, &mut seed] {
        file.read_exact(part).map_err(cut)?;
    }
    let (length, seed) = (u32::from_le_bytes(length), u32::from_le_bytes(seed));
    if magic != MAGIC {
        return Err(broken("it is no answer of this version"));
    }
    let begin = 16 + u64::from(length);
    if length > HEAD || begin > holds {
        return Err(broken("it does not hold what it claims"));
    }
    let mut head = vec![0; usize::try_from(length).map_err(|_| broken("its head is too long"))?];
    file.read_exact(&mut head).map_err(cut)?;
    if crc32fast::hash(&head) != seed {
        return Err(broken("a checksum does not hold"));
    }
    let head = serde_json::from_slice(&head).map_err(|error| broken(&error.to_string()))?;
    Ok((head, seed, begin))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::state) fn head(id: &str) -> AnswerHead {
        AnswerHead {
            id: id.to_owned(),
            created: 1,
            owner: Owner { token: None, user: Some(7) },
            sources: vec!["abc".to_owned()],
            kind: Kind::Chat,
            include_usage: false,
            tools: false,
            prompt: vec![1, 2, 3],
            pinned: Tokens::ZERO,
            answer: Tokens::new(9),
            sampling: SamplingSettings { temperature: 0.7, ..SamplingSettings::default() },
            stop: vec!["END".to_owned()],
            grammar: Some(GrammarSpec::JsonObject),
            likelihoods: None,
        }
    }

    #[test]
    fn a_journal_goes_on_where_it_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.answer");
        let mut journal = Journal::begin(&path, &head("a")).unwrap();
        journal.write(&[5]).unwrap();
        journal.write(&[5, 6, 7]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let begin = whole.len() - 3 * ENTRY;
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            match Journal::open(&path) {
                Err(error) => {
                    assert!(length < begin && error.to_string().contains("a.answer"), "{length}: {error}");
                }
                Ok((mut journal, held)) => {
                    let tokens = (length - begin) / ENTRY;
                    assert_eq!((held.head, held.ended), (head("a"), false));
                    assert_eq!(held.tokens, [5, 6, 7][..tokens]);
                    journal.write(&[5, 6, 7, 8]).unwrap();
                    journal.end().unwrap();
                    let (_, held) = Journal::open(&path).unwrap();
                    assert_eq!((held.tokens, held.ended), (vec![5, 6, 7, 8], true), "cut at {length}");
                }
            }
        }
    }

    #[test]
    fn an_altered_journal_is_refused_or_loses_what_follows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.answer");
        Journal::begin(&path, &head("a")).unwrap().write(&[5, 6, 7]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let begin = whole.len() - 3 * ENTRY;
        for at in 0..whole.len() {
            let mut altered = whole.clone();
            altered[at] ^= 0x10;
            std::fs::write(&path, &altered).unwrap();
            match Journal::open(&path) {
                Err(error) => assert!(at < begin && error.to_string().contains("a.answer"), "{at}: {error}"),
                Ok((_, held)) => assert_eq!(held.tokens, [5, 6, 7][..(at - begin) / ENTRY], "{at}"),
            }
        }
    }

    #[test]
    fn owners_are_told_apart() {
        let owner = |token: Option<&str>, user| Owner { token: token.map(str::to_owned), user };
        let check = |a: &Owner, b: &Owner, same: bool| assert_eq!(a.is(b), same, "{a:?} {b:?}");
        check(&owner(None, Some(1)), &owner(None, Some(1)), true);
        check(&owner(None, Some(1)), &owner(None, Some(2)), false);
        check(&owner(None, None), &owner(None, None), false);
        check(&owner(Some("a"), Some(1)), &owner(Some("a"), None), true);
        check(&owner(Some("a"), Some(1)), &owner(Some("b"), Some(1)), false);
        check(&owner(Some("a"), Some(1)), &owner(None, Some(1)), false);
    }
}
