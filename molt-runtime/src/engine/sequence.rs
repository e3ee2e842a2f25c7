//! One conversation in the engine: its tokens, its cache, and how its next token is chosen.

use std::time::Instant;

use molt_kv::cache::KvCache;
use molt_kv::keepsake::Keepsake;
use molt_models::sampling::{Distribution, Room, Sampler, SamplingSettings};
use molt_models::{Grammar, GrammarError, Tokenizer};
use molt_scheduler::units::{RungIdx, Tokens};
use molt_scheduler::{Class, Progress, SequenceId, TenantId};

use crate::engine::background::Healing;
use crate::engine::prefix::Owner;
use crate::engine::resume::Begun;
use crate::engine::wording::Wording;
use crate::event::{FinishReason, Likelihood};

/// What a client asks for.
#[derive(Debug, Clone)]
pub struct AnswerRequest {
    /// The user who asks, where that is known: an answer never builds on another user's conversation.
    pub user: Option<u32>,
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
    /// What the answer must be, before its first token.
    pub grammar: Option<Grammar>,
    /// Whether each token is told with its likelihood, and with how many that were likelier or nearly so.
    pub likelihoods: Option<usize>,
    /// Whether the prompt may be taken from an earlier conversation, and what is left kept for a later one.
    pub reuse: bool,
    /// Never choose a token that ends the answer (for measuring and for demonstrations).
    pub ignore_end: bool,
}

/// A token that was chosen.
pub(super) struct Chosen {
    /// The text that it completes.
    pub(super) text: String,
    /// Whether it ended the answer and is no part of it.
    pub(super) end: bool,
    /// How likely it was, where that is asked for and it is no end.
    pub(super) likelihood: Option<Likelihood>,
}

/// A sequence that the engine holds.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) owner: Owner,
    pub(super) tenant: String,
    pub(super) class: Class,
    /// When it was asked for.
    pub(super) asked: Instant,
    /// When its last token was chosen; until there is one, when it was asked for.
    pub(super) last_token: Instant,
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
    prompt: usize,
    /// Tokens of the answer that were there when it was submitted; to the scheduler they are of the prompt.
    resumed: usize,
    answer: usize,
    ignore_end: bool,
    likelihoods: Option<usize>,
    pub(super) reuse: bool,
    /// Whether its cache may hold tokens that another precision of the same weights has read.
    pub(super) mixed: bool,
    /// How many of `tokens` have been read into the cache (some of them may have been shed since).
    pub(super) read: usize,
    /// Empty until the sequence is admitted.
    pub(super) cache: Option<KvCache>,
    /// The rung that the cache belongs to.
    pub(super) rung: RungIdx,
    /// What it left behind on bigger models, biggest first.
    pub(super) keepsakes: Vec<Keepsake>,
    sampler: Sampler,
    wording: Wording,
    pub(super) finished: Option<FinishReason>,
    /// Of the cache, since it was carried.
    pub(super) healing: Healing,
}

impl Sequence {
    pub(super) fn new(
        owner: TenantId,
        tenant: String,
        class: Class,
        request: AnswerRequest,
        begun: Option<Begun>,
    ) -> Self {
        let asked = Instant::now();
        let fresh = || Begun { wording: Wording::new(&request), answered: Vec::new(), caches: Vec::new() };
        let Begun { wording, answered, caches } = begun.unwrap_or_else(fresh);
        let mut sampler = Sampler::new(request.sampling);
        sampler.skip(answered.len());
        Self {
            owner: (owner, request.user),
            tenant,
            class,
            asked,
            last_token: asked,
            prompt: request.prompt.len(),
            resumed: answered.len(),
            tokens: [request.prompt, answered].concat(),
            answer: usize::from(request.answer),
            ignore_end: request.ignore_end,
            likelihoods: request.likelihoods,
            reuse: request.reuse,
            mixed: false,
            read: 0,
            cache: None,
            rung: RungIdx::TOP,
            keepsakes: caches,
            sampler,
            wording,
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

    /// Chooses the next token. On an error the sequence is as it was, and can only be given up.
    pub(super) fn sample(
        &mut self,
        logits: &mut [f32],
        room: &mut Room<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Chosen, GrammarError> {
        if self.likelihoods.is_some() {
            // Told is what the model thinks, not what is left of it.
            room.logits.copy_from_slice(logits);
        }
        if self.ignore_end {
            // Taken out beforehand: a model that goes on after its own end writes nonsense.
            for end in tokenizer.ends().iter().filter_map(|id| usize::try_from(*id).ok()) {
                if let Some(logit) = logits.get_mut(end) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(grammar) = &mut self.wording.grammar {
            grammar.rule_out(logits)?;
        }
        let answered = &self.tokens[self.prompt..];
        let token = self.sampler.sample(logits, answered, room.candidates);
        if tokenizer.is_end(token) {
            self.finished = Some(FinishReason::Stop);
            return Ok(Chosen { text: self.wording.end(), end: true, likelihood: None });
        }
        let (text, finished) = self.wording.accept(token, tokenizer)?;
        self.tokens.push(token);
        self.finished = finished;
        let likelihood = self.likelihoods.map(|top| {
            let bytes = |id| tokenizer.token_bytes(id).to_vec();
            let thought = Distribution::of(room.logits);
            let top = thought.top(top, room.candidates).into_iter().map(|(id, logprob)| (bytes(id), logprob)).collect();
            Likelihood { token: bytes(token), logprob: thought.logprob(token), top }
        });
        Ok(Chosen { text, end: false, likelihood })
    }

    /// Why it ended, if it has.
    pub(super) fn finished(&self) -> Option<FinishReason> {
        self.finished
    }

    /// The answer so far.
    pub(super) fn answer(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    /// Tokens of the answer so far.
    pub(super) fn answered(&self) -> Tokens {
        Tokens::from(self.tokens.len() - self.prompt)
    }

    /// As the scheduler wants to know it.
    pub(super) fn progress(&self, sequence: SequenceId, ahead: Option<RungIdx>) -> Progress {
        Progress {
            sequence,
            ahead,
            cached: self.cached(),
            // The last sampled token waits to be read with the next step; it is no prompt.
            prompt_left: Tokens::from((self.tokens.len() - self.read).saturating_sub(usize::from(self.decoding()))),
            answered: self.answered() - Tokens::from(self.resumed),
            finished: self.finished.is_some(),
        }
    }

    /// Tokens of the answer that may still come.
    pub(super) fn answer_left(&self) -> Tokens {
        Tokens::from(self.answer) - self.answered()
    }

    /// Tokens in its cache.
    pub(super) fn cached(&self) -> Tokens {
        Tokens::from(self.cache.as_ref().map_or(0, KvCache::len))
    }

    fn decoding(&self) -> bool {
        self.tokens.len() > self.prompt + self.resumed
    }
}
