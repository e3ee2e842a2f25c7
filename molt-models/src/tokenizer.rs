//! Text to tokens and back. The tokenizer is built from the model file's own vocabulary and merges.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ahash::AHashMap;
use sha2::{Digest as _, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, AddedVocabulary, DecoderWrapper, Model, NormalizerWrapper, OffsetReferential, OffsetType,
    PostProcessorWrapper, PreTokenizer as _, PreTokenizerWrapper, TokenizerImpl,
};

use crate::error::ModelError;
use crate::merges::Merges;
use crate::pretokenize;
use crate::texts::Texts;

/// Text is taken as it is.
const NO_NORMALIZER: Option<&NormalizerWrapper> = None;

/// The parts of a byte-level BPE tokenizer, as a model file carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    pub(crate) tokens: Texts,
    pub(crate) merges: Texts,
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

    /// A token's text.
    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(usize::try_from(id).ok()?)
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
            if own == others {
                continue;
            }
            let differ = own.iter().zip(others.iter()).enumerate().find(|(_, (own, other))| own != other);
            if let Some((at, (own, other))) = differ {
                return Some(format!("{what} number {at} is {other:?} instead of {own:?}"));
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
            for text in part.iter() {
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

/// A tokenizer with that model in the frame of the tokenizers library.
type Framed<M> = TokenizerImpl<M, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A tokenizer, ready to use.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Arc<Vocabulary>,
    bpe: Framed<Merges>,
    /// The texts of control tokens, and what finds them.
    controls: Vec<String>,
    control_finder: AddedVocabulary,
    /// What finds the other tokens that are matched as a whole.
    whole_finder: AddedVocabulary,
    bytes: TokenBytes,
    longest: usize,
    special: Vec<bool>,
    end: Vec<u32>,
    bos: Option<String>,
    path: PathBuf,
}

/// The bytes of each token; nothing for control tokens.
#[derive(Debug)]
struct TokenBytes {
    all: Vec<u8>,
    ends: Vec<usize>,
}

impl Tokenizer {
    /// Builds it; `path` is named in errors.
    pub fn new(vocabulary: &Arc<Vocabulary>, path: &Path) -> Result<Self, ModelError> {
        let error = |reason: String| ModelError::Tokenizer { path: path.to_owned(), reason };
        let v = &**vocabulary;
        let bpe = framed(Merges::new(vocabulary).map_err(error)?, v, path)?;
        let finder = |ids: &[u32], special: bool| {
            let mut finder = AddedVocabulary::new();
            let added = finder.add_tokens(added(v, ids, special), bpe.get_model(), NO_NORMALIZER);
            added.map(|_| finder).map_err(|e| error(e.to_string()))
        };
        let (control_finder, whole_finder) = (finder(&v.control, true)?, finder(&v.whole, false)?);
        let controls = v.control.iter().filter_map(|id| v.token(*id)).filter(|text| !text.is_empty());
        let controls = controls.map(str::to_owned).collect();
        let mut special = vec![false; v.tokens.len()];
        for id in &v.control {
            if let Some(flag) = usize::try_from(*id).ok().and_then(|id| special.get_mut(id)) {
                *flag = true;
            }
        }
        let bytes = TokenBytes::new(v, &special);
        // A chat may also end with the marker that closes a turn, which some files do not name as their end.
        let mut end = v.end.clone();
        let turns = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"];
        end.extend(turns.iter().filter_map(|t| bpe.token_to_id(t)));
        end.sort_unstable();
        end.dedup();
        let bos = v.bos.and_then(|id| v.token(id)).map(str::to_owned);
        let longest = v.tokens.iter().map(str::len).max().unwrap_or(0);
        let (vocabulary, path) = (vocabulary.clone(), path.to_owned());
        Ok(Self { vocabulary, bpe, controls, control_finder, whole_finder, bytes, longest, special, end, bos, path })
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
        usize::try_from(id).ok().and_then(|id| self.bytes.get(id)).unwrap_or(&[])
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
        self.library()?.to_string(false).map_err(error)
    }

    /// The same with the library's own model: for its JSON, and to be held against.
    fn library(&self) -> Result<tokenizers::Tokenizer, ModelError> {
        let v = &*self.vocabulary;
        let ids = v.tokens.iter().map(str::to_owned).zip(0u32..).collect();
        let pair = |merge: &str| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
        let merges = v.merges.iter().filter_map(pair).collect();
        let model = BPE::builder().vocab_and_merges::<AHashMap<String, u32>>(ids, merges).build();
        let error = |e: tokenizers::Error| ModelError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        framed(model.map_err(error)?, v, &self.path).map(tokenizers::Tokenizer::from)
    }

    /// The token that opens a text, where there is one.
    pub fn bos(&self) -> Option<&str> {
        self.bos.as_deref()
    }

    /// How many tokens there are.
    pub fn vocab(&self) -> usize {
        self.vocabulary.tokens()
    }
}

impl TokenBytes {
    /// Of a vocabulary with these control tokens.
    fn new(vocabulary: &Vocabulary, special: &[bool]) -> Self {
        let byte_of = byte_alphabet();
        let mut whole = vec![false; special.len()];
        for id in &vocabulary.whole {
            if let Some(flag) = usize::try_from(*id).ok().and_then(|id| whole.get_mut(id)) {
                *flag = true;
            }
        }
        let tokens = &vocabulary.tokens;
        let mut own = Self { all: Vec::with_capacity(tokens.bytes()), ends: Vec::with_capacity(tokens.len()) };
        for ((token, special), whole) in tokens.iter().zip(special).zip(whole) {
            if whole {
                // Written as they are, not in the byte alphabet.
                own.all.extend_from_slice(token.as_bytes());
            } else if !special {
                own.all.extend(token.chars().filter_map(|c| byte_of.get(c as usize).copied().flatten()));
            }
            own.ends.push(own.all.len());
        }
        own
    }

    fn get(&self, at: usize) -> Option<&[u8]> {
        let end = *self.ends.get(at)?;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.all[start..end])
    }
}

/// Around a model: how text is cut into words, and which tokens are matched as a whole before that.
fn framed<M: Model>(model: M, vocabulary: &Vocabulary, path: &Path) -> Result<Framed<M>, ModelError> {
    let error = |reason: String| ModelError::Tokenizer { path: path.to_owned(), reason };
    let pre = pretokenize::by_name(&vocabulary.pre_tokenizer).ok_or_else(|| {
        let (found, known) = (&vocabulary.pre_tokenizer, pretokenize::KNOWN.join(", "));
        error(format!("its pre-tokenizer is {found}; Molt knows {known}"))
    })?;
    let mut framed = Framed::new(model);
    framed.with_pre_tokenizer(Some(pre));
    let control = added(vocabulary, &vocabulary.control, true);
    framed.add_special_tokens(control).map_err(|e| error(e.to_string()))?;
    framed.add_tokens(added(vocabulary, &vocabulary.whole, false)).map_err(|e| error(e.to_string()))?;
    Ok(framed)
}

/// Tokens that are matched as a whole, as the library takes them.
fn added(vocabulary: &Vocabulary, ids: &[u32], special: bool) -> Vec<AddedToken> {
    ids.iter().filter_map(|id| vocabulary.token(*id)).map(|text| AddedToken::from(text, special)).collect()
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

/// Which byte a character stands for in byte-level BPE (GPT-2), by its code: printable ones for themselves, the rest from
/// U+0100.
fn byte_alphabet() -> [Option<u8>; 0x180] {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut moved = 0x100;
    let mut bytes = [None; 0x180];
    for byte in 0..=u8::MAX {
        let code = if plain(byte) { usize::from(byte) } else { moved };
        moved += usize::from(!plain(byte));
        bytes[code] = Some(byte);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Ladder;

    /// Tokenizers of the ladders whose files are here, `pocket`'s at least.
    fn tokenizers() -> Vec<Arc<Tokenizer>> {
        let models = std::env::var_os("MOLT_MODELS").map_or_else(|| PathBuf::from("/nowhere"), PathBuf::from);
        let open = |name: &str| Ladder::open(name, &models).ok().map(|ladder| ladder.tokenizer().clone());
        let found: Vec<_> = ["pocket", "qwen2.5-coder", "smollm2"].into_iter().filter_map(open).collect();
        assert!(!found.is_empty(), "pocket is part of the program");
        eprintln!("{} tokenizers are held against the library's", found.len());
        found
    }

    fn check(tokenizer: &Tokenizer, library: &tokenizers::Tokenizer, text: &str) {
        let expected = library.encode_fast(text, false).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), expected.get_ids(), "{text:?}");
    }

    #[test]
    fn texts_become_the_tokens_of_the_library() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let files = [
            "texts/held-out/address-1909.txt",
            "README.md",
            "molt-models/src/tokenizer.rs",
            "molt-runtime/src/service/openapi.json",
        ];
        let texts = files.map(|file| std::fs::read_to_string(root.join(file)).unwrap());
        for tokenizer in tokenizers() {
            let library = tokenizer.library().unwrap();
            for text in &texts {
                check(&tokenizer, &library, text);
            }
            let said = [
                "",
                " ",
                "\u{0}\u{1}\u{7f}",
                "grün 🦀🦀 日本語",
                "a\r\n\r\n  b\t\tc ",
                "<|im_start|>user\nhi<|im_end|>",
            ];
            said.iter().for_each(|text| check(&tokenizer, &library, text));
            // One word, far longer than any token.
            check(&tokenizer, &library, &"ab".repeat(5_000));
            check(&tokenizer, &library, &"=".repeat(5_000));
        }
    }

    #[test]
    fn so_does_whatever_anybody_writes() {
        for tokenizer in tokenizers() {
            let library = tokenizer.library().unwrap();
            let mut runner = proptest::test_runner::TestRunner::deterministic();
            let text = prop_oneof!["\\PC{0,60}", "[a-zA-Z '.,=_(){}\\t\\n0-9]{0,200}", any::<String>()];
            let same = |text: String| {
                let expected = library.encode_fast(text.as_str(), false).unwrap();
                prop_assert_eq!(tokenizer.encode(&text).unwrap(), expected.get_ids());
                Ok(())
            };
            runner.run(&text, same).unwrap();
        }
    }

    #[test]
    fn what_is_no_merge_is_named() {
        let vocabulary = |merges: &[&str]| Vocabulary {
            tokens: ["a", "b", "ab"].into_iter().collect(),
            merges: merges.iter().collect(),
            pre_tokenizer: "gpt-2".to_owned(),
            control: Vec::new(),
            whole: Vec::new(),
            end: Vec::new(),
            bos: None,
            chat_template: None,
        };
        let check = |merges: &[&str], part: &str| {
            let made = Tokenizer::new(&Arc::new(vocabulary(merges)), Path::new("model.gguf"));
            let said = made.map(|own| format!("{:?}", own.encode("abba").unwrap())).unwrap_or_else(|e| e.to_string());
            assert!(said.contains(part), "{merges:?}: {said}");
        };
        check(&["a b"], "[2, 1, 0]");
        check(&[], "[0, 1, 1, 0]");
        check(&["ab"], "the merge \"ab\" is no pair");
        check(&["a c"], "\"c\" is no token");
        check(&["b a"], "\"ba\" is no token");
    }
}
