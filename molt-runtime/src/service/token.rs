//! Tokens of tenants, and what is kept of them: a digest under a secret, so that nobody outside can compute it, how long a
//! lookup takes says nothing about any token, and what is read out of memory or off the disk opens nothing.

use rand::{CryptoRng, Rng as _};
use sha2::{Digest as _, Sha256};

/// Every token of ours begins so; an API key that does not is a client's filler, and its request the default tenant's.
pub(super) const PREFIX: &str = "molt-";

/// A token that nobody can guess: 128 bits of a generator that is made for secrets.
pub(super) fn new_token(random: &mut impl CryptoRng) -> String {
    format!("{PREFIX}{:032x}", random.random::<u128>())
}

/// The digest of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TokenDigest([u8; 32]);

impl TokenDigest {
    pub(super) fn to_hex(self) -> String {
        hex::encode(self.0)
    }

    pub(super) fn from_hex(text: &str) -> Option<Self> {
        let mut digest = [0; 32];
        hex::decode_to_slice(text, &mut digest).ok()?;
        Some(Self(digest))
    }
}

/// What digests of tokens are made with: of this process, or of the state folder where there is one.
pub(super) struct Secret([u8; 32]);

impl Secret {
    /// One that nobody has.
    pub(super) fn new() -> Self {
        Self(rand::rng().random())
    }

    /// One that is kept.
    pub(super) fn of(kept: [u8; 32]) -> Self {
        Self(kept)
    }

    pub(super) fn digest(&self, token: &str) -> TokenDigest {
        TokenDigest(Sha256::new().chain_update(self.0).chain_update(token).finalize().into())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tokens_differ_and_their_digests_are_of_one_secret() {
        let mut random = rand::rng();
        let tokens: BTreeSet<String> = (0..1_000).map(|_| new_token(&mut random)).collect();
        assert_eq!(tokens.len(), 1_000);
        let (one, other) = (Secret::new(), Secret::new());
        for token in &tokens {
            let digits = token.strip_prefix(PREFIX).unwrap();
            assert!(digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()), "{token}");
            assert_ne!(one.digest(token), other.digest(token));
        }
        assert!(!format!("{one:?}").contains(char::is_numeric));
    }

    #[test]
    fn a_digest_comes_back_from_its_digits() {
        let check = |text: &str, expected: bool| {
            let found = TokenDigest::from_hex(text);
            assert_eq!(found.is_some(), expected, "{text}");
            assert!(found.is_none_or(|digest| digest.to_hex() == text));
        };
        let whole = Secret::of([7; 32]).digest("molt-0").to_hex();
        check(&whole, true);
        check(&whole[1..], false);
        check(&format!("{whole}0"), false);
        check(&"x".repeat(64), false);
        check(&"é".repeat(32), false);
        check("", false);
    }
}
