//! Answers that were begun before a restart: brought back to where they stood, and their caches taken from records.
//!
//! A resumed answer is a request like any other, whose prompt is all of its tokens so far; the scheduler knows nothing else of
//! it. Where the rung that it is let in to has no record, or a broken one, it is read again like any prompt.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use molt_kv::cache::KvCache;
use molt_kv::decoder::Decoder as _;
use molt_kv::faults::{Boundary, pass};
use molt_kv::keepsake::Keepsake;
use molt_kv::record;
use molt_models::{GrammarError, Tokenizer};
use molt_scheduler::SequenceId;
use molt_scheduler::units::{RungIdx, Tokens};
use tempfile::NamedTempFile;

use crate::engine::wording::Wording;
use crate::engine::{AnswerRequest, Engine, chain};
use crate::event::{FinishReason, TroubleKind};

/// Bytes that are gathered before they are written.
const GATHERED: usize = 1 << 18;

/// An answer that was begun before.
#[derive(Debug)]
pub struct Begun {
    pub(super) wording: Wording,
    /// Its tokens so far.
    pub(super) answered: Vec<u32>,
    /// Its caches, each of another model.
    pub(super) caches: Vec<Keepsake>,
}

/// What had been said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The text that was shown with each token, and at last what was left when the model ended the answer.
    pub texts: Vec<String>,
    /// Why it ended, if it has.
    pub finished: Option<FinishReason>,
    /// Its tokens.
    pub tokens: Tokens,
}

impl Begun {
    /// Says again what these tokens of an answer said, the model having ended it or not.
    ///
    /// # Errors
    /// Where the tokens are none that the request's grammar allows.
    pub fn again(
        request: &AnswerRequest,
        answered: &[u32],
        ended: bool,
        tokenizer: &Tokenizer,
    ) -> Result<(Self, Said), GrammarError> {
        let (mut wording, mut texts, mut finished) = (Wording::new(request), Vec::new(), None);
        let mut taken = Vec::new();
        for token in answered {
            let (text, reason) = wording.accept(*token, tokenizer)?;
            texts.push(text);
            taken.push(*token);
            finished = reason;
            if finished.is_some() {
                break;
            }
        }
        if ended && finished.is_none() {
            texts.push(wording.end());
            finished = Some(FinishReason::Stop);
        }
        let tokens = Tokens::from(taken.len());
        Ok((Self { wording, answered: taken, caches: Vec::new() }, Said { texts, finished, tokens }))
    }

    /// With these caches of it.
    #[must_use]
    pub fn with_caches(self, caches: Vec<Keepsake>) -> Self {
        Self { caches, ..self }
    }
}

impl Engine {
    /// The tokens of an answer so far; none of a sequence that is gone.
    pub fn answer_of(&self, id: SequenceId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |sequence| sequence.answer())
    }

    /// How many tokens of a sequence have been read.
    pub fn read_of(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |sequence| sequence.read)
    }

    /// Writes the caches of a sequence as records into files of that folder that have no names of their own yet, each with the
    /// source hash of its model and the position that its next token gets. `known` are those that need not be written again.
    ///
    /// # Errors
    /// The disk's.
    pub fn write_records(
        &mut self,
        id: SequenceId,
        known: &BTreeMap<String, u32>,
        folder: &Path,
    ) -> io::Result<Vec<(String, u32, NamedTempFile)>> {
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(Vec::new()) };
        pass(Boundary::WriteState)?;
        let mut written = Vec::new();
        let source = self.ladder.rung(sequence.rung).map(molt_models::Rung::source);
        if let (Some(cache), Some(source)) = (&sequence.cache, source)
            && !cache.is_empty()
            && known.get(source) != Some(&cache.next_position())
        {
            let mut out = BufWriter::with_capacity(GATHERED, NamedTempFile::new_in(folder)?);
            record::write(cache, source, &mut out)?;
            written.push((source.to_owned(), cache.next_position(), out.into_inner()?));
        }
        for kept in &mut sequence.keepsakes {
            let newer = known.get(kept.source()).is_none_or(|known| *known < kept.next_position());
            if source == Some(kept.source()) || !newer || kept.slots().is_empty() {
                continue;
            }
            let mut out = BufWriter::with_capacity(GATHERED, NamedTempFile::new_in(folder)?);
            kept.write_record(&mut out)?;
            out.flush()?;
            written.push((kept.source().to_owned(), kept.next_position(), out.into_inner()?));
        }
        Ok(written)
    }

    /// Begins a resumed sequence that is let in with the record of its cache on that rung, if it has one and there is memory
    /// for it. Returns the tokens that need not be read again.
    pub(super) fn adopt(&mut self, id: SequenceId, rung: RungIdx) -> Tokens {
        let (Some(sequence), Some(loaded)) = (self.sequences.get_mut(&id), self.loaded.get(&rung)) else {
            return Tokens::ZERO;
        };
        if sequence.cache.is_some() || sequence.read > 0 {
            return Tokens::ZERO;
        }
        let (source, shape) = (loaded.model.source(), loaded.model.cache_shape());
        let fits = |kept: &Keepsake| kept.source() == source && kept.shape() == shape && kept.is_of(&sequence.tokens);
        let Some(at) = sequence.keepsakes.iter().position(fits) else { return Tokens::ZERO };
        let bytes = shape.charge(sequence.keepsakes[at].slots().len());
        // What ended conversations have left goes first, as for any lever.
        let before = self.prefixes.bytes();
        while bytes > self.spare + (before - self.prefixes.bytes()) && self.prefixes.forget_oldest() {}
        self.spare += before - self.prefixes.bytes();
        if bytes > self.spare {
            return Tokens::ZERO;
        }
        let mut kept = sequence.keepsakes.remove(at);
        // The last token is read in any case: what comes after it is what is asked for.
        let most = sequence.tokens.len().saturating_sub(1);
        let restored = kept.restore_until(most, sequence.limit(), &self.ledger).map_err(|error| chain(&error));
        let checked = restored.and_then(|cache: KvCache| {
            cache.check_finite(0..cache.len()).map(|()| cache).map_err(|error| chain(&error))
        });
        match checked {
            Ok(cache) => {
                let read = usize::try_from(cache.next_position()).unwrap_or(most);
                self.spare -= shape.charge(cache.len());
                sequence.read = read;
                sequence.cache = Some(cache);
                // Which precision of the weights has read it, the record does not say.
                sequence.mixed = true;
                Tokens::from(read)
            }
            Err(error) => {
                self.trouble(TroubleKind::State, format!("a conversation is read again: {error}"));
                Tokens::ZERO
            }
        }
    }
}
