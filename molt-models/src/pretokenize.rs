//! How each family cuts text before byte-pair merging; the names are the ones that GGUF files carry in
//! `tokenizer.ggml.pre`.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

/// The pre-tokenizers that Molt knows by GGUF name.
pub const KNOWN: &[&str] = &["qwen2", "llama-bpe", "smollm", "gpt-2"];

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of that GGUF name, or `None` where Molt does not know it.
pub fn by_name(name: &str) -> Option<PreTokenizerWrapper> {
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map(PreTokenizerWrapper::Split)
            .ok()
    };
    let bytes = |use_regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, use_regex));
    let steps = match name {
        "qwen2" => vec![split(QWEN2)?, bytes(false)],
        "llama-bpe" => vec![split(LLAMA3)?, bytes(false)],
        "smollm" => vec![PreTokenizerWrapper::Digits(Digits::new(true)), bytes(true)],
        "gpt-2" => vec![bytes(true)],
        _ => return None,
    };
    Some(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
}
