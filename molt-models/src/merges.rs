//! Byte-pair merging: which tokens a word becomes.
//!
//! The tokenizers library, which does everything around it (what is matched as a whole, how text is cut into words), has a
//! model of its own for this. That one is made of maps from text to text, which take an eighth of a second and many times the
//! vocabulary's memory to make; here pairs of numbers lead to numbers. Tests hold the two against each other.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ahash::AHashMap;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

use crate::texts::Index;
use crate::tokenizer::Vocabulary;

/// Two tokens become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Merge {
    /// The least goes first.
    rank: u32,
    into: u32,
}

/// The merges of a vocabulary.
#[derive(Debug)]
pub(crate) struct Merges {
    vocabulary: Arc<Vocabulary>,
    index: Index,
    /// Of the characters below U+0180, among which are all that stand for bytes.
    characters: Vec<Option<u32>>,
    pairs: AHashMap<(u32, u32), Merge>,
}

/// A part of a word, in a list of those that are left.
#[derive(Debug, Clone, Copy)]
struct Part {
    token: u32,
    /// Bytes of the word; 0 for a part that has become one with the part before it.
    bytes: usize,
    before: usize,
    after: usize,
}

/// No part.
const NONE: usize = usize::MAX;

impl Merges {
    /// Of a vocabulary.
    ///
    /// # Errors
    /// The merge that is none.
    pub(crate) fn new(vocabulary: &Arc<Vocabulary>) -> Result<Self, String> {
        let Vocabulary { tokens, merges, .. } = &**vocabulary;
        let index = Index::new(tokens).ok_or("it has more tokens than can be numbered")?;
        let mut pairs = AHashMap::with_capacity(merges.len());
        let mut merged = String::new();
        for (rank, merge) in (0u32..).zip(merges.iter()) {
            let (left, right) = merge.split_once(' ').ok_or_else(|| format!("the merge {merge:?} is no pair"))?;
            let known = |text: &str| {
                index.find(tokens, text).ok_or_else(|| format!("the merge {merge:?}: {text:?} is no token"))
            };
            merged.clear();
            merged.extend([left, right]);
            pairs.insert((known(left)?, known(right)?), Merge { rank, into: known(&merged)? });
        }
        let characters = (0..0x180).map(|code| {
            let character = char::from_u32(code)?;
            index.find(tokens, character.encode_utf8(&mut [0; 4]))
        });
        let characters = characters.collect();
        Ok(Self { vocabulary: vocabulary.clone(), index, characters, pairs })
    }

    /// The parts that a word is made of at first: its characters. What is no token is left out.
    fn parts(&self, word: &str) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::with_capacity(word.len());
        for character in word.chars() {
            let found = match self.characters.get(character as usize) {
                Some(found) => *found,
                None => self.index.find(&self.vocabulary.tokens, character.encode_utf8(&mut [0; 4])),
            };
            if let Some(token) = found {
                let at = parts.len();
                parts.push(Part { token, bytes: character.len_utf8(), before: at.wrapping_sub(1), after: at + 1 });
            }
        }
        if let Some(last) = parts.last_mut() {
            last.after = NONE;
        }
        parts
    }

    /// Merges until no two neighbours are a pair: the pair of the least rank first, of equals the leftmost.
    fn merge(&self, parts: &mut Vec<Part>) {
        let mut waiting = BinaryHeap::with_capacity(parts.len());
        let pair = |left: u32, right: u32, at: usize| {
            self.pairs.get(&(left, right)).map(|merge| Reverse((merge.rank, at, merge.into)))
        };
        waiting.extend(parts.windows(2).enumerate().filter_map(|(at, two)| pair(two[0].token, two[1].token, at)));
        while let Some(Reverse((_, at, into))) = waiting.pop() {
            let left = parts[at];
            let Some(right) = parts.get(left.after).copied().filter(|_| left.bytes > 0) else { continue };
            // One of the two may have become something else since they were put in line.
            if self.pairs.get(&(left.token, right.token)).is_none_or(|merge| merge.into != into) {
                continue;
            }
            parts[left.after].bytes = 0;
            parts[at] = Part { token: into, bytes: left.bytes + right.bytes, after: right.after, ..left };
            if let Some(next) = parts.get_mut(right.after) {
                next.before = at;
                waiting.extend(pair(into, next.token, at));
            }
            if let Some(previous) = parts.get(left.before) {
                waiting.extend(pair(previous.token, into, left.before));
            }
        }
        parts.retain(|part| part.bytes > 0);
    }
}

impl Model for Merges {
    /// Nobody trains it.
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        let mut parts = self.parts(word);
        self.merge(&mut parts);
        let mut at = 0;
        let tokens = parts.iter().map(|part| {
            let from = at;
            at += part.bytes;
            // Nobody asks for the text of a token, and each would be an allocation.
            Token::new(part.token, String::new(), (from, at))
        });
        Ok(tokens.collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.index.find(&self.vocabulary.tokens, token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.vocabulary.tokens.get(usize::try_from(id).ok()?).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.vocabulary.tokens.iter().map(str::to_owned).zip(0..).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocabulary.tokens()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("it is made of a model file, which has all of it".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
