//! One conversation in the engine: its tokens, its cache, and how its next token is chosen.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::keepsake::Keepsake;
use molt_models::sampling::{Sampler, SamplingSettings};
use molt_models::{TextStream, Tokenizer};
use molt_scheduler::units::{RungIdx, Tokens};
use molt_scheduler::{Class, Progress, SequenceId};

use crate::engine::heal::Healing;
use crate::engine::stop::StopText;
use crate::event::FinishReason;

/// What a client asks for.
#[derive(Debug, Clone)]
pub struct AnswerRequest {
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
    /// Never choose a token that ends the answer (for measuring and for demonstrations).
    pub ignore_end: bool,
}

/// A sequence that the engine holds.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) tenant: String,
    pub(super) class: Class,
    /// When it was asked for.
    pub(super) asked: Instant,
    /// When its last token was chosen; until there is one, when it was asked for.
    pub(super) last_token: Instant,
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
    prompt: usize,
    answer: usize,
    ignore_end: bool,
    /// How many of `tokens` have been read into the cache (some of them may have been shed since).
    pub(super) read: usize,
    /// Empty until the sequence is admitted.
    pub(super) cache: Option<KvCache>,
    /// The rung that the cache belongs to.
    pub(super) rung: RungIdx,
    /// What it left behind on bigger models, biggest first.
    pub(super) keepsakes: Vec<Keepsake>,
    sampler: Sampler,
    text: TextStream,
    stop: StopText,
    pub(super) finished: Option<FinishReason>,
    /// Of the cache, since it was carried.
    pub(super) healing: Healing,
}

impl Sequence {
    pub(super) fn new(tenant: String, class: Class, request: AnswerRequest) -> Self {
        let asked = Instant::now();
        Self {
            tenant,
            class,
            asked,
            last_token: asked,
            prompt: request.prompt.len(),
            tokens: request.prompt,
            answer: usize::from(request.answer),
            ignore_end: request.ignore_end,
            read: 0,
            cache: None,
            rung: RungIdx::TOP,
            keepsakes: Vec::new(),
            sampler: Sampler::new(request.sampling),
            text: TextStream::default(),
            stop: StopText::new(request.stop),
            finished: None,
            healing: Healing::default(),
        }
    }

    /// Most tokens that it can ever hold.
    pub(super) fn limit(&self) -> Tokens {
        Tokens::from(self.prompt + self.answer)
    }

    /// The tokens to read next, at most `count`.
    pub(super) fn next_tokens(&self, count: Tokens) -> &[u32] {
        let end = self.tokens.len().min(self.read + usize::from(count));
        &self.tokens[self.read..end]
    }

    /// Whether everything so far has been read, so that a token can be chosen.
    pub(super) fn may_sample(&self) -> bool {
        self.read == self.tokens.len() && self.finished.is_none()
    }

    /// Chooses the next token; returns the text that it completes.
    pub(super) fn sample(&mut self, logits: &mut [f32], tokenizer: &Tokenizer) -> String {
        if self.ignore_end {
            // Taken out beforehand: a model that goes on after its own end writes nonsense.
            for end in tokenizer.ends().iter().filter_map(|id| usize::try_from(*id).ok()) {
                if let Some(logit) = logits.get_mut(end) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let answered = &self.tokens[self.prompt..];
        let token = self.sampler.sample(logits, answered);
        if tokenizer.is_end(token) {
            self.finished = Some(FinishReason::Stop);
            let (text, stopped) = self.stop.push(&self.text.finish());
            return if stopped { text } else { text + &self.stop.finish() };
        }
        self.tokens.push(token);
        let mut text = self.text.push(tokenizer, token);
        let full = self.tokens.len() - self.prompt >= self.answer;
        if full {
            text += &self.text.finish();
        }
        let (text, stopped) = self.stop.push(&text);
        match (stopped, full) {
            (true, _) => {
                self.finished = Some(FinishReason::Stop);
                text
            }
            (false, true) => {
                self.finished = Some(FinishReason::Length);
                text + &self.stop.finish()
            }
            (false, false) => text,
        }
    }

    /// Why it ended, if it has.
    pub(super) fn finished(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Tokens of the answer so far.
    pub(super) fn answered(&self) -> Tokens {
        Tokens::from(self.tokens.len() - self.prompt)
    }

    /// As the scheduler wants to know it.
    pub(super) fn progress(&self, sequence: SequenceId) -> Progress {
        Progress {
            sequence,
            cached: Tokens::from(self.cache.as_ref().map_or(0, KvCache::len)),
            // The last sampled token waits to be read with the next step; it is no prompt.
            prompt_left: Tokens::from((self.tokens.len() - self.read).saturating_sub(usize::from(self.decoding()))),
            answered: self.answered(),
            finished: self.finished.is_some(),
        }
    }

    fn decoding(&self) -> bool {
        self.tokens.len() > self.prompt
    }
}
