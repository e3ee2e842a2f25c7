//! Where seams are: windows of held-out documents, and prefixes of each window.

use super::metrics::AFTER;

/// Seams of one window, which share its native reads.
pub(super) const SEAMS_A_WINDOW: usize = 4;

/// Tokens of a document that are read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    /// The document's name.
    pub(crate) document: String,
    /// Its first token there.
    pub(crate) start: usize,
    /// A context, what comes after it, and the token that the last position should foretell.
    pub(crate) tokens: Vec<u32>,
}

/// Tokens that seams after `context` tokens need.
pub(crate) const fn window_tokens(context: usize) -> usize {
    context + AFTER + 1
}

/// How many windows serve so many seams.
pub(super) const fn windows_for(seams: usize) -> usize {
    seams.div_ceil(SEAMS_A_WINDOW)
}

/// The prefixes at which a window is cut, longest first: the whole context, and up to three sixteenths less.
pub(super) fn prefixes(context: usize) -> [usize; SEAMS_A_WINDOW] {
    std::array::from_fn(|at| context - at * context / 16)
}

/// `count` windows of `length` tokens, round and round over the documents that are long enough and spread evenly inside
/// each. The same for the same documents: a run can be taken up again.
pub(crate) fn windows(documents: &[(String, Vec<u32>)], count: usize, length: usize) -> Vec<Window> {
    let usable: Vec<_> = documents.iter().filter(|(_, tokens)| tokens.len() >= length).collect();
    let mut windows = Vec::new();
    for index in 0..count {
        let Some((name, tokens)) = usable.get(index % usable.len().max(1)) else { break };
        let own = (count - index % usable.len()).div_ceil(usable.len());
        let start = (tokens.len() - length) * (2 * (index / usable.len()) + 1) / (2 * own);
        let window = Window { document: name.clone(), start, tokens: tokens[start..start + length].to_vec() };
        // A document without room for another window gives the same one again.
        if !windows.contains(&window) {
            windows.push(window);
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_round_the_documents() {
        let document = |name: &str, tokens: u32| (name.to_owned(), (0..tokens).collect::<Vec<_>>());
        let documents = [document("a", 20), document("short", 9), document("b", 10)];
        let check = |count: usize, expected: &[(&str, usize)]| {
            let found = windows(&documents, count, 10);
            let places: Vec<_> = found.iter().map(|w| (w.document.as_str(), w.start)).collect();
            assert_eq!(places, expected);
            assert!(found.iter().all(|w| w.tokens.len() == 10 && w.tokens[0] as usize == w.start));
        };
        check(0, &[]);
        check(1, &[("a", 5)]);
        check(2, &[("a", 5), ("b", 0)]);
        check(4, &[("a", 2), ("b", 0), ("a", 7)]);
        assert_eq!(windows(&documents[1..2], 3, 10), []);
    }

    #[test]
    fn prefixes_fall_and_end_in_the_window() {
        for context in [64, 240, 512, 4_096] {
            let prefixes = prefixes(context);
            assert_eq!(prefixes[0], context);
            assert!(prefixes.is_sorted_by(|a, b| a > b), "{prefixes:?}");
            assert_eq!(prefixes[0] + AFTER + 1, window_tokens(context));
        }
    }
}
