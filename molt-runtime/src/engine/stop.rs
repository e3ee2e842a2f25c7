//! Stop sequences: an answer ends before the first of them. Text that may still become one is held back.

/// Looks for stop sequences in text that comes in pieces.
#[derive(Debug, Clone, Default)]
pub(super) struct StopText {
    stops: Vec<String>,
    /// The end of the text so far that some stop sequence begins with.
    held: String,
}

impl StopText {
    /// Empty sequences stop nothing.
    pub(super) fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Takes a piece; returns what may be shown, and whether a stop sequence was found. What follows one is dropped.
    pub(super) fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (piece.to_owned(), false);
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let may_become = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let starts = self.held.char_indices().map(|(at, _)| at);
        let keep = starts.into_iter().find(may_become).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back and became nothing.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_before_its_stop_sequence_however_the_pieces_fall() {
        let check = |stops: &[&str], pieces: &[&str], shown: &str, found: bool| {
            let mut stop = StopText::new(stops.iter().map(|s| (*s).to_owned()).collect());
            let (mut text, mut hit) = (String::new(), false);
            for piece in pieces {
                let (more, now) = stop.push(piece);
                text += &more;
                if now {
                    hit = true;
                    break;
                }
            }
            if !hit {
                text += &stop.finish();
            }
            assert_eq!((text.as_str(), hit), (shown, found), "{stops:?} in {pieces:?}");
        };
        check(&[], &["a", "b"], "ab", false);
        check(&[""], &["a"], "a", false);
        check(&["\n"], &["one", "\n", "two"], "one", true);
        check(&["END"], &["the E", "N", "D of it"], "the ", true);
        check(&["END"], &["the EN", "ter"], "the ENter", false);
        check(&["b", "ab"], &["xa", "b"], "x", true);
        check(&["aab"], &["aa", "ab"], "a", true);
        check(&["ü!"], &["grü", "ü", "!"], "grü", true);
        check(&["long one"], &["a long", " on"], "a long on", false);
    }
}
