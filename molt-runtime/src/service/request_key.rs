//! What a client calls its request by, so that sending it once more is no second request: the header `Idempotency-Key`.
//!
//! A stream tells its client what the answer is called; who waits for a whole answer hears nothing until it is complete, and so
//! could never ask for it again. With a key of its own it can: the same request with the same key is the same answer.

use axum::http::HeaderMap;
use sha2::{Digest as _, Sha256};

use crate::state::Owner;

/// The header.
const HEADER: &str = "idempotency-key";
/// Longest key.
const LONGEST: usize = 255;

/// A key that a client chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestKey(String);

impl RequestKey {
    /// The key of a request, if it has one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, String> {
        let Some(value) = headers.get(HEADER) else { return Ok(None) };
        let key = value.to_str().ok().filter(|key| !key.is_empty() && key.len() <= LONGEST);
        let wrong = || format!("{HEADER}: must be 1 to {LONGEST} printable characters");
        key.map(|key| Some(Self(key.to_owned()))).ok_or_else(wrong)
    }

    /// What the answer is called: the same for the same key of the same owner, and for nobody else to be guessed.
    pub(super) fn name(&self, owner: &Owner, secret: &[u8]) -> String {
        let Owner { token, user } = owner;
        let mut hasher = Sha256::new();
        hasher.update(secret);
        // Whoever has a token is known by it alone, from whichever user it is sent.
        match (token, user) {
            (Some(token), _) => hasher.update([&b"t"[..], token.as_bytes()].concat()),
            (None, Some(user)) => hasher.update([&b"u"[..], &user.to_le_bytes()].concat()),
            (None, None) => {}
        }
        hasher.update([0]);
        hasher.update(&self.0);
        hex::encode(&hasher.finalize()[..16])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Result<Option<RequestKey>, String> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, axum::http::HeaderValue::from_bytes(text.as_bytes()).unwrap());
        RequestKey::of(&headers)
    }

    #[test]
    fn keys_are_short_and_printable() {
        assert_eq!(RequestKey::of(&HeaderMap::new()), Ok(None));
        let check = |text: &str, good: bool| assert_eq!(key(text).is_ok_and(|key| key.is_some()), good, "{text}");
        check("a", true);
        check("8e03978e-40d5-43dd-bc93-6894a57f9324", true);
        check(&"k".repeat(255), true);
        check("", false);
        check(&"k".repeat(256), false);
        check("é", false);
    }

    #[test]
    fn a_name_is_of_one_owner_and_one_key() {
        let owner = |token: Option<&str>, user| Owner { token: token.map(str::to_owned), user };
        let name = |text: &str, owner: &Owner| key(text).unwrap().unwrap().name(owner, b"secret");
        let mine = name("a", &owner(None, Some(1)));
        assert_eq!((mine.len(), &mine), (32, &name("a", &owner(None, Some(1)))));
        for other in [owner(None, Some(2)), owner(Some("x"), Some(1)), owner(Some("y"), Some(1))] {
            assert_ne!(name("a", &other), mine);
        }
        assert_ne!(name("b", &owner(None, Some(1))), mine);
        assert_eq!(name("a", &owner(Some("x"), Some(1))), name("a", &owner(Some("x"), None)));
        assert_ne!(key("a").unwrap().unwrap().name(&owner(None, Some(1)), b"other"), mine);
    }
}
