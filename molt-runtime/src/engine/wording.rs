//! How the tokens of an answer become text, and what in it ends the answer. It knows nothing of models, so that an answer
//! that was begun before a restart is brought back to where it stood from its tokens alone.

use molt_models::{Grammar, GrammarError, TextStream, Tokenizer};

use crate::engine::AnswerRequest;
use crate::engine::stop::StopText;
use crate::event::FinishReason;

/// Where an answer stands in its text and in what it must be.
#[derive(Debug)]
pub(super) struct Wording {
    text: TextStream,
    stop: StopText,
    /// It takes a token when one is chosen, so that a step that is given up or a change of rung leaves it as it is.
    pub(super) grammar: Option<Grammar>,
    /// Tokens that the answer may still have.
    left: usize,
}

impl Wording {
    /// Of an answer that has no token yet.
    pub(super) fn new(request: &AnswerRequest) -> Self {
        Self {
            text: TextStream::default(),
            stop: StopText::new(request.stop.clone()),
            grammar: request.grammar.clone(),
            left: usize::from(request.answer),
        }
    }

    /// Takes a token that was chosen. Returns the text that may be shown with it, and why the answer ends with it, if it does.
    pub(super) fn accept(
        &mut self,
        token: u32,
        tokenizer: &Tokenizer,
    ) -> Result<(String, Option<FinishReason>), GrammarError> {
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(token)?;
        }
        self.left = self.left.saturating_sub(1);
        let complete = self.grammar.as_ref().is_some_and(Grammar::is_complete);
        let full = self.left == 0;
        let mut text = self.text.push(tokenizer, token);
        if full || complete {
            text += &self.text.finish();
        }
        let (mut text, stopped) = self.stop.push(&text);
        if !stopped && (full || complete) {
            text += &self.stop.finish();
        }
        let finished = match (stopped || complete, full) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Length),
            (false, false) => None,
        };
        Ok((text, finished))
    }

    /// The model ends the answer: the text that is left.
    pub(super) fn end(&mut self) -> String {
        let (text, stopped) = self.stop.push(&self.text.finish());
        if stopped { text } else { text + &self.stop.finish() }
    }
}
