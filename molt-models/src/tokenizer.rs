//! Text to tokens and back. The tokenizer is built from the model file's own vocabulary and merges.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ahash::AHashMap;
use sha2::{Digest as _, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, AddedVocabulary, Model as _, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizer as _,
    Tokenizer as Bpe,
};

use crate::error::ModelError;
use crate::pretokenize;

/// Text is taken as it is.
const NO_NORMALIZER: Option<&NormalizerWrapper> = None;

/// The parts of a byte-level BPE tokenizer, as a model file carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    pub(crate) tokens: Vec<String>,
    pub(crate) merges: Vec<String>,
    pub(crate) pre_tokenizer: String,
    /// Tokens matched as a whole that steer the model: they print as nothing.
    pub(crate) control: Vec<u32>,
    /// Tokens matched as a whole that are text.
    pub(crate) whole: Vec<u32>,
    pub(crate) end: Vec<u32>,
    pub(crate) bos: Option<u32>,
    pub(crate) chat_template: Option<String>,
}

impl Vocabulary {
    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The chat template, where the file has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The first thing that makes the other one another tokenizer; nothing where [`Vocabulary::fingerprint`] is equal.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let Self { tokens, merges, pre_tokenizer, control, whole, end: _, bos: _, chat_template: _ } = self;
        for (what, own, others) in [("tokens", tokens, &other.tokens), ("merges", merges, &other.merges)] {
            if own.len() != others.len() {
                return Some(format!("{} {what} instead of {}", others.len(), own.len()));
            }
            if let Some(at) = (0..own.len()).find(|at| own[*at] != others[*at]) {
                return Some(format!("{what} number {at} is {:?} instead of {:?}", others[at], own[at]));
            }
        }
        if *pre_tokenizer != other.pre_tokenizer {
            return Some(format!("text is split as {:?} instead of {pre_tokenizer:?}", other.pre_tokenizer));
        }
        let whole_tokens = (control, whole) == (&other.control, &other.whole);
        (!whole_tokens).then(|| "other tokens are matched as a whole".to_owned())
    }

    /// A digest of everything that decides which text becomes which tokens; equal for equal tokenizers.
    pub fn fingerprint(&self) -> [u8; 32] {
        let Self { tokens, merges, pre_tokenizer, control, whole, end: _, bos: _, chat_template: _ } = self;
        let mut hasher = Sha256::new();
        for part in [tokens, merges] {
            for text in part {
                // The length first, so that no two lists run together to the same bytes.
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text);
            }
            hasher.update((part.len() as u64).to_le_bytes());
        }
        for ids in [control, whole] {
            hasher.update((ids.len() as u64).to_le_bytes());
            ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
        }
        hasher.update(pre_tokenizer);
        hasher.finalize().into()
    }
}

/// A tokenizer, ready to use.
#[derive(Debug)]
pub struct Tokenizer {
    bpe: Bpe,
    /// The texts of control tokens, and what finds them.
    controls: Vec<String>,
    control_finder: AddedVocabulary,
    /// What finds the other tokens that are matched as a whole.
    whole_finder: AddedVocabulary,
    /// The bytes of each token; nothing for control tokens.
    bytes: Vec<Vec<u8>>,
    longest: usize,
    special: Vec<bool>,
    end: Vec<u32>,
    bos: Option<String>,
    path: PathBuf,
}

impl Tokenizer {
    /// Builds it; `path` is named in errors.
    pub fn new(vocabulary: &Vocabulary, path: &Path) -> Result<Self, ModelError> {
        let error = |reason: String| ModelError::Tokenizer { path: path.to_owned(), reason };
        let v = vocabulary;
        let pre = pretokenize::by_name(&v.pre_tokenizer).ok_or_else(|| {
            let (found, known) = (&v.pre_tokenizer, pretokenize::KNOWN.join(", "));
            error(format!("its pre-tokenizer is {found}; Molt knows {known}"))
        })?;
        let ids = v.tokens.iter().cloned().zip(0u32..).collect();
        let merges = v
            .merges
            .iter()
            .map(|merge| {
                let pair = merge.split_once(' ').ok_or_else(|| error(format!("the merge {merge:?} is no pair")))?;
                Ok((pair.0.to_owned(), pair.1.to_owned()))
            })
            .collect::<Result<_, ModelError>>()?;
        let model = BPE::builder().vocab_and_merges::<AHashMap<String, u32>>(ids, merges);
        let mut bpe = Bpe::new(model.build().map_err(|e| error(e.to_string()))?);
        bpe.with_pre_tokenizer(Some(pre));
        let token = |id: &u32| usize::try_from(*id).ok().and_then(|id| v.tokens.get(id));
        let added = |ids: &[u32], special: bool| -> Vec<AddedToken> {
            ids.iter().filter_map(token).map(|t| AddedToken::from(t.as_str(), special)).collect()
        };
        let finder = |ids: &[u32], special: bool| {
            let mut finder = AddedVocabulary::new();
            let added = finder.add_tokens(added(ids, special), bpe.get_model(), NO_NORMALIZER);
            added.map(|_| finder).map_err(|e| error(e.to_string()))
        };
        let (control_finder, whole_finder) = (finder(&v.control, true)?, finder(&v.whole, false)?);
        let controls: Vec<String> =
            v.control.iter().filter_map(token).filter(|text| !text.is_empty()).cloned().collect();
        bpe.add_special_tokens(added(&v.control, true)).map_err(|e| error(e.to_string()))?;
        bpe.add_tokens(added(&v.whole, false)).map_err(|e| error(e.to_string()))?;
        let mut special = vec![false; v.tokens.len()];
        for id in &v.control {
            if let Some(flag) = usize::try_from(*id).ok().and_then(|id| special.get_mut(id)) {
                *flag = true;
            }
        }
        let byte_of = byte_alphabet();
        let bytes = v
            .tokens
            .iter()
            .zip(&special)
            .map(|(token, special)| match special {
                true => Vec::new(),
                false => token.chars().filter_map(|c| byte_of.get(&c).copied()).collect(),
            })
            .collect();
        let mut bytes: Vec<Vec<u8>> = bytes;
        for id in &v.whole {
            // Written as they are, not in the byte alphabet.
            let at = usize::try_from(*id).ok();
            if let Some((bytes, token)) = at.and_then(|at| bytes.get_mut(at)).zip(token(id)) {
                *bytes = token.clone().into_bytes();
            }
        }
        // A chat may also end with the marker that closes a turn, which some files do not name as their end.
        let mut end = v.end.clone();
        let turns = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"];
        end.extend(turns.iter().filter_map(|t| bpe.token_to_id(t)));
        end.sort_unstable();
        end.dedup();
        let bos = v.bos.as_ref().and_then(token).cloned();
        let longest = v.tokens.iter().map(String::len).max().unwrap_or(0);
        let path = path.to_owned();
        Ok(Self { bpe, controls, control_finder, whole_finder, bytes, longest, special, end, bos, path })
    }

    /// Text to tokens; control tokens written in the text count as such (templates write them).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let error = |e: tokenizers::Error| ModelError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        Ok(self.bpe.encode_fast(text, false).map_err(error)?.get_ids().to_vec())
    }

    /// Text to tokens, none of them a control token.
    pub fn encode_said(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let error = |e: tokenizers::Error| ModelError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        let mut parts = self.whole_finder.extract_and_normalize(NO_NORMALIZER, text);
        if let Some(pre_tokenizer) = self.bpe.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut parts).map_err(error)?;
        }
        parts.tokenize(|part| self.bpe.get_model().tokenize(part.get())).map_err(error)?;
        Ok(parts.into_encoding(None, 0, OffsetType::None).map_err(error)?.get_ids().to_vec())
    }

    /// Text to tokens: what is written as a control token is one, and what stands between two is said, once `restore` has
    /// given it its own characters.
    pub(crate) fn encode_between(
        &self,
        text: &str,
        restore: impl Fn(&str) -> Cow<'_, str>,
    ) -> Result<Vec<u32>, ModelError> {
        let parts = self.control_finder.extract_and_normalize(NO_NORMALIZER, text);
        let mut ids = Vec::new();
        for (part, _, control) in parts.get_splits(OffsetReferential::Original, OffsetType::None) {
            match control {
                Some(control) => ids.extend(control.iter().map(|token| token.id)),
                None => ids.extend(self.encode_said(&restore(part))?),
            }
        }
        Ok(ids)
    }

    /// The texts of its control tokens.
    pub(crate) fn controls(&self) -> &[String] {
        &self.controls
    }

    /// Bytes of text that no token is longer than.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// Tokens to text; bytes that are no UTF-8 become the replacement character, control tokens nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.token_bytes(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        usize::try_from(id).ok().and_then(|id| self.bytes.get(id)).map_or(&[], Vec::as_slice)
    }

    /// Whether an answer ends with this token.
    pub fn is_end(&self, id: u32) -> bool {
        self.end.contains(&id)
    }

    /// The tokens that end an answer.
    pub fn ends(&self) -> &[u32] {
        &self.end
    }

    /// Whether it is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        usize::try_from(id).ok().and_then(|id| self.special.get(id)).copied().unwrap_or(false)
    }

    /// The tokenizer in the JSON of the tokenizers library.
    pub fn to_json(&self) -> Result<String, ModelError> {
        let error = |e: tokenizers::Error| ModelError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        self.bpe.to_string(false).map_err(error)
    }

    /// The token that opens a text, where there is one.
    pub fn bos(&self) -> Option<&str> {
        self.bos.as_deref()
    }

    /// How many tokens there are.
    pub fn vocab(&self) -> usize {
        self.bytes.len()
    }
}

/// Turns a stream of tokens into text that is never cut inside a character.
#[derive(Debug, Default, Clone)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// The text that is complete once this token has come; often empty, never half a character.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.pending.extend_from_slice(tokenizer.token_bytes(id));
        let mut complete = 0;
        while let Err(error) = std::str::from_utf8(&self.pending[complete..]) {
            complete += error.valid_up_to();
            match error.error_len() {
                // Bytes that never will be a character; what follows them may.
                Some(wrong) => complete += wrong,
                // Up to three bytes that may still become one.
                None => break,
            }
        }
        if std::str::from_utf8(&self.pending[complete..]).is_ok() {
            complete = self.pending.len();
        }
        let rest = self.pending.split_off(complete);
        String::from_utf8_lossy(&std::mem::replace(&mut self.pending, rest)).into_owned()
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Which character stands for which byte in byte-level BPE (GPT-2): printable ones for themselves, the rest from U+0100.
fn byte_alphabet() -> HashMap<char, u8> {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut moved = 0x100u32;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let code = if plain(byte) { u32::from(byte) } else { moved };
            moved += u32::from(!plain(byte));
            Some((char::from_u32(code)?, byte))
        })
        .collect()
}
