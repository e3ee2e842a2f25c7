//! Many short texts in one piece of memory. A vocabulary has some hundred thousand of them, and as many allocations would
//! take most of the time and several times the memory.

use ahash::RandomState;

/// Texts by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Texts {
    all: String,
    ends: Vec<usize>,
}

impl Texts {
    /// Room for so many texts of so many bytes in all.
    pub(crate) fn with_capacity(count: usize, bytes: usize) -> Self {
        Self { all: String::with_capacity(bytes), ends: Vec::with_capacity(count) }
    }

    pub(crate) fn push(&mut self, text: &str) {
        self.all.push_str(text);
        self.ends.push(self.all.len());
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&str> {
        let end = *self.ends.get(at)?;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.all[start..end])
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|at| self.get(at))
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        self.all.len()
    }
}

impl<T: AsRef<str>> FromIterator<T> for Texts {
    fn from_iter<I: IntoIterator<Item = T>>(texts: I) -> Self {
        let mut own = Self::default();
        texts.into_iter().for_each(|text| own.push(text.as_ref()));
        own
    }
}

/// The numbers of texts, to be found by what they say. It knows the texts' places and not the texts.
#[derive(Debug)]
pub(crate) struct Index {
    /// A number plus one, at the first free place from where its hash points to; 0 where there is none.
    slots: Vec<u32>,
    hasher: RandomState,
}

impl Index {
    /// Of texts; of those that say the same the last is found, as in a map. `None` where there are more than numbers.
    pub(crate) fn new(texts: &Texts) -> Option<Self> {
        let count = u32::try_from(texts.len()).ok().filter(|count| *count < u32::MAX)?;
        // At most half full, so that looking ends soon.
        let places = texts.len().max(1).checked_mul(2)?.checked_next_power_of_two()?;
        let mut own = Self { slots: vec![0; places], hasher: RandomState::with_seeds(1, 2, 3, 4) };
        for (number, text) in (1..=count).zip(texts.iter()) {
            let slot = own.slot(texts, text);
            own.slots[slot] = number;
        }
        Some(own)
    }

    /// The number of the text that says this.
    pub(crate) fn find(&self, texts: &Texts, text: &str) -> Option<u32> {
        self.slots[self.slot(texts, text)].checked_sub(1)
    }

    /// Where a text stands, or would.
    fn slot(&self, texts: &Texts, text: &str) -> usize {
        let mask = self.slots.len() - 1;
        // The low bits of the hash are as good as any.
        let mut at = usize::try_from(self.hasher.hash_one(text) & mask as u64).unwrap_or(0);
        loop {
            let found = self.slots[at].checked_sub(1).map(|number| texts.get(number as usize));
            match found {
                None => return at,
                Some(found) if found == Some(text) => return at,
                Some(_) => at = (at + 1) & mask,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_by_number_and_numbers_by_text() {
        let words = ["", "a", "ab", "grün", "a", "b", ""];
        let texts: Texts = words.into_iter().collect();
        assert_eq!(texts.iter().collect::<Vec<_>>(), words);
        assert_eq!((texts.len(), texts.get(3), texts.get(7)), (7, Some("grün"), None));
        let index = Index::new(&texts).unwrap();
        let find = |text| index.find(&texts, text);
        assert_eq!([find(""), find("a"), find("ab"), find("grün"), find("b")], [6, 4, 2, 3, 5].map(Some));
        assert_eq!([find("abc"), find("g"), find(" ")], [None; 3]);
        let none = Texts::default();
        assert_eq!(Index::new(&none).unwrap().find(&none, ""), None);
    }

    #[test]
    fn thousands_of_texts_are_told_apart() {
        let texts: Texts = (0..5_000).map(|number| format!("{:x}", number * 7)).collect();
        let index = Index::new(&texts).unwrap();
        for (number, text) in (0..).zip(texts.iter()) {
            assert_eq!(index.find(&texts, text), Some(number));
            assert_eq!(index.find(&texts, &format!("{text}-")), None);
        }
    }
}
