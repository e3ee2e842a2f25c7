//! Contexts that are nothing but facts, so that one can ask for each: who keeps which animal. Everybody keeps another one,
//! so the animals of the others are what an answer could be instead.

use std::ops::Range;

use molt_models::{ModelError, Tokenizer};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

const NAMES: [&str; 48] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo", "Maria", "Noah",
    "Olga", "Peter", "Ruth", "Simon", "Tina", "Victor", "Wendy", "Zoe", "Adam", "Bella", "Carl", "Diana", "Eric",
    "Flora", "George", "Helen", "Igor", "Julia", "Kevin", "Laura", "Martin", "Nina", "Oscar", "Paula", "Robert",
    "Sarah", "Thomas", "Vera", "Walter", "Alice", "Bruno", "Cora", "Daniel", "Edith",
];

/// None begins with a vowel: "keeps a" goes before each.
const ANIMALS: [&str; 48] = [
    "cat", "dog", "horse", "cow", "pig", "goat", "sheep", "duck", "goose", "hen", "rabbit", "fox", "wolf", "bear",
    "lion", "tiger", "monkey", "camel", "donkey", "mouse", "rat", "bat", "frog", "snake", "lizard", "turtle", "parrot",
    "pigeon", "crow", "swan", "hawk", "robin", "deer", "moose", "zebra", "panda", "beaver", "seal", "whale", "dolphin",
    "shark", "salmon", "spider", "beetle", "bee", "wasp", "snail", "crab",
];

/// Where somebody lives is not asked: it makes sentences longer and more alike.
const TOWNS: [&str; 12] = [
    "Ashford", "Milton", "Redhill", "Kingston", "Newbury", "Stafford", "Burnham", "Weston", "Selby", "Marlow", "Dover",
    "Lincoln",
];

/// A fact and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fact {
    /// Its tokens in the context.
    pub(super) place: Range<usize>,
    /// What is asked, as tokens: a sentence that only lacks the animal.
    pub(super) asked: Vec<u32>,
    /// The animal.
    pub(super) animal: &'static str,
}

/// A context full of facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// All of it.
    pub(super) tokens: Vec<u32>,
    /// The facts, in order.
    pub(super) facts: Vec<Fact>,
    /// What could be answered, as tokens: the animals of all facts, in their order.
    pub(super) candidates: Vec<Vec<u32>>,
}

impl Facts {
    /// As many facts as `tokens` hold, drawn from a seed; fewer where there are no more, for nobody is named twice.
    pub(super) fn draw(tokenizer: &Tokenizer, tokens: usize, seed: u64) -> Result<Self, ModelError> {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut names, mut animals) = (NAMES, ANIMALS);
        names.shuffle(&mut random);
        animals.shuffle(&mut random);
        let mut drawn =
            Self { tokens: tokenizer.encode("Who keeps which animal:")?, facts: Vec::new(), candidates: Vec::new() };
        for ((name, animal), town) in names.into_iter().zip(animals).zip(TOWNS.into_iter().cycle()) {
            let sentence = tokenizer.encode(&format!("\n{name}, who lives in {town}, keeps a {animal}."))?;
            let place = drawn.tokens.len()..drawn.tokens.len() + sentence.len();
            if place.end > tokens {
                break;
            }
            drawn.tokens.extend(sentence);
            let asked = tokenizer.encode(&format!("\nAs it says above, {name} keeps a"))?;
            drawn.facts.push(Fact { place, asked, animal });
            drawn.candidates.push(tokenizer.encode(&format!(" {animal}"))?);
        }
        Ok(drawn)
    }
}

/// Whether an answer begins with the word.
pub(super) fn says(answer: &str, word: &str) -> bool {
    let first = answer.split(|c: char| !c.is_alphanumeric()).find(|part| !part.is_empty());
    first.is_some_and(|first| first.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use molt_models::Ladder;

    use super::*;

    #[test]
    fn nobody_is_named_twice_and_no_animal_is_kept_twice() {
        for words in [NAMES, ANIMALS] {
            assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len());
        }
        assert!(ANIMALS.iter().all(|animal| !animal.starts_with(['a', 'e', 'i', 'o', 'u'])));
    }

    #[test]
    fn facts_stand_where_they_say() {
        let ladder = Ladder::open("pocket", Path::new("unused")).unwrap();
        let tokenizer = ladder.tokenizer();
        let drawn = Facts::draw(tokenizer, 200, 3).unwrap();
        assert!(drawn.tokens.len() <= 200 && drawn.facts.len() >= 5, "{}", drawn.facts.len());
        assert_eq!(drawn.candidates.len(), drawn.facts.len());
        for (fact, candidate) in drawn.facts.iter().zip(&drawn.candidates) {
            let text = tokenizer.decode(&drawn.tokens[fact.place.clone()]);
            assert!(text.ends_with(&format!(" {}.", fact.animal)), "{text:?}");
            assert!(says(&tokenizer.decode(candidate), fact.animal));
            let asked = tokenizer.decode(&fact.asked);
            assert!(asked.contains(text.trim().split(',').next().unwrap()), "{asked:?} asks for another than {text:?}");
        }
        assert_eq!(drawn, Facts::draw(tokenizer, 200, 3).unwrap());
        assert_ne!(drawn, Facts::draw(tokenizer, 200, 4).unwrap());
    }

    #[test]
    fn an_answer_is_its_first_word() {
        let check = |answer: &str, word: &str, expected: bool| assert_eq!(says(answer, word), expected, "{answer:?}");
        check(" cat.", "cat", true);
        check(" Cat\nBen", "cat", true);
        check(" catfish", "cat", false);
        check(" small cat", "cat", false);
        check("", "cat", false);
    }
}
