//! What an answer must look like: a grammar that rules tokens out while they are chosen.
//!
//! A grammar comes from whoever asks. Making one takes a bounded number of steps, and so does each token; one that takes
//! more is an error. Its state belongs to an answer and knows nothing of models, so that it survives a change of rung.

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use molt_kv::region::heap_in_use;
use molt_scheduler::units::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::tokenizer::Tokenizer;

/// White space between two parts of a JSON text: one space, or a line and its indentation. With more, a small model gets lost
/// in it.
const JSON_SPACE: &str = r"\x20|\x0A\x20{0,12}";

/// What an answer must be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema allows.
    JsonSchema(Value),
    /// JSON that this schema allows, between two texts.
    Between {
        /// What the answer begins with.
        open: String,
        /// The schema of what stands between.
        schema: Value,
        /// What it ends with.
        close: String,
    },
}

/// What is wrong with a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It cannot be made.
    #[error("{0}")]
    Unusable(String),
    /// It cannot go on; the answer ends here.
    #[error("the answer left what its grammar can follow: {0}")]
    Lost(String),
}

/// Makes grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    bytes: Bytes,
}

/// What the tables are taken to hold for each token where the allocator does not say: a guess that nobody has measured.
const BYTES_PER_TOKEN: usize = 100;

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

/// Our tokenizer as the grammar library wants to see it.
struct Tokens {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| {
            // What is text here must not become a control token.
            let ids = self.tokenizer.encode(text).unwrap_or_default();
            let plain = !ids.is_empty() && !ids.iter().any(|id| self.tokenizer.is_special(*id));
            if plain { ids } else { self.trie.greedy_tokenize(text.as_bytes()) }
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }
}

impl Grammars {
    /// Sorts the tokenizer's tokens by their bytes.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Self, GrammarError> {
        let unusable = |error: String| GrammarError::Unusable(error);
        let before = heap_in_use();
        let count = u32::try_from(tokenizer.vocab()).map_err(|error| unusable(error.to_string()))?;
        // Control tokens have no bytes, and so no grammar can lead to them.
        let words: Vec<Vec<u8>> = (0..count).map(|id| tokenizer.token_bytes(id).to_vec()).collect();
        let ends = tokenizer.ends();
        let end = ends.first().copied().unwrap_or(llguidance::toktrie::INVALID_TOKEN);
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &words).with_eos_tokens(ends);
        let env: TokEnv = Arc::new(Tokens { trie, tokenizer: tokenizer.clone() });
        let slices = llguidance::earley::SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| unusable(format!("{error:#}")))?;
        factory.quiet().limits_mut().verbose_errors = false;
        // What others take or give back meanwhile is counted, too: they have little on the heap.
        drop(words);
        let grown = heap_in_use().zip(before).map(|(now, before)| now.saturating_sub(before));
        let bytes = Bytes::from(grown.unwrap_or(BYTES_PER_TOKEN * tokenizer.vocab()));
        Ok(Self { factory, bytes })
    }

    /// Bytes that the tables take on the heap.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The beginning of an answer that must be so.
    pub fn start(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let spaced = |schema: &Value| {
            let mut schema = match schema {
                Value::Bool(true) => json!({}),
                other => other.clone(),
            };
            match schema.as_object_mut() {
                Some(fields) => {
                    fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
                    Ok(schema)
                }
                None => Err(GrammarError::Unusable("the schema is no JSON object".to_owned())),
            }
        };
        let grammar = match spec {
            GrammarSpec::JsonObject => TopLevelGrammar::from_json_schema(spaced(&json!({"type": "object"}))?),
            GrammarSpec::JsonSchema(schema) => TopLevelGrammar::from_json_schema(spaced(schema)?),
            GrammarSpec::Between { open, schema, close } => {
                let (open, close) = (Value::from(open.as_str()), Value::from(close.as_str()));
                TopLevelGrammar::from_lark(format!("start: {open} inner {close}\ninner: %json {}", spaced(schema)?))
            }
        };
        let unusable = |error: String| GrammarError::Unusable(one_line(&error));
        let parser = self.factory.create_parser(grammar).map_err(|error| unusable(format!("{error:#}")))?;
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            None => Ok(Grammar(Box::new(matcher))),
            Some(error) => Err(unusable(error)),
        }
    }
}

/// Where an answer stands in its grammar.
#[derive(Clone)]
pub struct Grammar(Box<Matcher>);

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl Grammar {
    /// Rules out, in `logits [vocab]`, every token that may not come next. Changes nothing in the grammar.
    pub fn rule_out(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let allowed = self.0.compute_mask_or_eos().map_err(|error| lost(&error))?;
        for (id, logit) in logits.iter_mut().enumerate() {
            // A model may have more rows in its head than there are tokens.
            if id >= allowed.len() || !allowed.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Takes the token that was chosen.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.0.consume_token(token).map_err(|error| lost(&error))
    }

    /// Whether nothing more can come.
    pub fn is_complete(&self) -> bool {
        self.0.is_stopped()
    }
}

fn lost(error: &impl fmt::Display) -> GrammarError {
    GrammarError::Lost(one_line(&error.to_string()))
}

/// Longest reason, in characters; a library may put a whole grammar into one.
const REASON: usize = 300;

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(REASON).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Ladder;
    use crate::sampling::{Room, Sampler, SamplingSettings};

    /// Writes an answer with a model that likes every token as much as any other, until it ends or is too long.
    fn write(ladder: &Ladder, spec: &GrammarSpec, seed: u64) -> Option<String> {
        let tokenizer = ladder.tokenizer();
        let mut grammar = ladder.grammars().unwrap().start(spec).unwrap();
        let settings = SamplingSettings { temperature: 1.0, top_k: 0, top_p: 1.0, seed, ..SamplingSettings::default() };
        let mut sampler = Sampler::new(settings);
        let mut written = Vec::new();
        // The head of a model may be longer than the vocabulary.
        let vocab = tokenizer.vocab() + 3;
        let mut words = vec![0.0; Room::words(vocab)];
        let Room { candidates, logits } = Room::of(&mut words, vocab);
        for _ in 0..2_000 {
            logits.fill(0.0);
            grammar.rule_out(logits).unwrap();
            let token = sampler.sample(logits, &written, candidates);
            if tokenizer.is_end(token) {
                return Some(tokenizer.decode(&written));
            }
            written.push(token);
            grammar.accept(token).unwrap();
            if grammar.is_complete() {
                return Some(tokenizer.decode(&written));
            }
        }
        None
    }

    #[test]
    fn whatever_is_chosen_obeys() {
        let ladder = Ladder::open("pocket", Path::new("/nowhere")).unwrap();
        let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age"],
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"$ref": "#/$defs/age"}},
            "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 150}}});
        let check_person = |text: &str| {
            let found: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(found["name"].is_string() && found["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
            assert_eq!(found.as_object().map(serde_json::Map::len), Some(2), "{text}");
        };
        for seed in 0..8 {
            let text = write(&ladder, &GrammarSpec::JsonSchema(schema.clone()), seed).expect("so little has an end");
            check_person(&text);
            let between = GrammarSpec::Between {
                open: "<call>\n\"".to_owned(),
                schema: schema.clone(),
                close: "\\</call>".to_owned(),
            };
            let text = write(&ladder, &between, seed).expect("so little has an end");
            let inner = text.strip_prefix("<call>\n\"").and_then(|text| text.strip_suffix("\\</call>"));
            check_person(inner.unwrap_or_else(|| panic!("{text:?} is not between its two texts")));
            if let Some(text) = write(&ladder, &GrammarSpec::JsonObject, seed) {
                assert!(serde_json::from_str::<Value>(&text).is_ok_and(|found| found.is_object()), "{text}");
            }
        }
    }

    #[test]
    fn what_is_no_schema_is_refused_with_a_reason() {
        let ladder = Ladder::open("pocket", Path::new("/nowhere")).unwrap();
        let check = |schema: Value, named: &str| {
            let error = ladder.grammars().unwrap().start(&GrammarSpec::JsonSchema(schema)).unwrap_err().to_string();
            assert!(error.contains(named) && error.lines().count() == 1, "{error}");
        };
        check(json!([]), "no JSON object");
        check(json!(3), "no JSON object");
        check(json!({"type": "nothing"}), "nothing");
        check(json!({"$ref": "#/$defs/none"}), "none");
        check(json!({"type": "string", "pattern": "("}), "(");
        check(json!({"not": {"type": "string"}}), "not");
    }
}
