//! Who may ask: tenants that registered, each with a token, and the default tenant of everybody else.
//!
//! A token is a client's API key. One that was registered over the Unix socket serves only the user who registered it. A
//! registration is a lease: it ends when nothing was asked with its token for the grace time, and with it whatever of
//! the tenant's still runs.
//! Tokens themselves are not kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use molt_scheduler::units::{RungIdx, Tokens};
use molt_scheduler::{Class, TenantId, TenantSpec};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::rung_name;
use crate::service::rate::Bucket;
use crate::service::token::{PREFIX, Secret, TokenDigest, new_token};
use crate::state::{Owner, State};

/// What a tenant asks for, and what a profile says.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TenantClaim {
    /// Its name, for people and logs.
    pub name: String,
    /// `foreground` or `batch`.
    #[serde(default = "batch")]
    pub class: Class,
    /// Its share among tenants of its class.
    #[serde(default = "one")]
    pub weight: std::num::NonZeroU16,
    /// The smallest rung that it accepts while anything else is left; 15 is any.
    #[serde(default = "any", deserialize_with = "rung_name::number_or_name")]
    pub floor: RungIdx,
    /// The biggest rung that it may use.
    #[serde(default = "top", deserialize_with = "rung_name::number_or_name")]
    pub ceiling: RungIdx,
    /// Most tokens of one sequence; the service's own limit where not given.
    #[serde(default)]
    pub context_limit: Option<Tokens>,
    /// Most tokens of cache over all its sequences.
    #[serde(default)]
    pub quota: Option<Tokens>,
}

fn batch() -> Class {
    Class::Batch
}

fn one() -> std::num::NonZeroU16 {
    std::num::NonZeroU16::MIN
}

fn any() -> RungIdx {
    RungIdx::new(RungIdx::LIMIT - 1)
}

fn top() -> RungIdx {
    RungIdx::TOP
}

/// Longest name.
const NAME: usize = 64;

impl TenantClaim {
    /// Most tokens of one sequence, by its own context and quota.
    fn longest(&self) -> Tokens {
        self.context_limit.unwrap_or(Tokens::MAX).min(self.quota.unwrap_or(Tokens::MAX))
    }

    /// What the scheduler is told, with the service's limit of a sequence.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn check(&self, context: Tokens) -> Result<TenantSpec, (&'static str, String)> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.name.is_empty() || self.name.len() > NAME || !self.name.chars().all(plain) {
            return Err(("name", format!("must be 1 to {NAME} letters, digits, dots, dashes or underscores")));
        }
        if self.floor < self.ceiling {
            return Err(("floor", format!("{} is bigger than the ceiling {}", self.floor, self.ceiling)));
        }
        let context_limit = self.context_limit.unwrap_or(context);
        if context_limit > context {
            return Err(("context_limit", format!("{context_limit} is over the service's limit of {context}")));
        }
        let &Self { class, weight, floor, ceiling, quota, .. } = self;
        Ok(TenantSpec { class, weight, floor, ceiling, context_limit, quota })
    }
}

/// Limits on registrations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantLimits {
    /// Registrations at once.
    pub registrations: usize,
    /// Of one user.
    pub registrations_per_user: usize,
    /// Requests of one tenant that may be answered or wait at once.
    pub requests_in_flight: usize,
    /// Requests of one tenant in a minute, where there is such a limit.
    pub requests_per_minute: Option<u64>,
    /// Tokens of one tenant in a minute, read and written, where there is such a limit.
    pub tokens_per_minute: Option<u64>,
    /// Seconds without a request until a registration ends.
    pub grace_s: u64,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            registrations: 64,
            registrations_per_user: 16,
            requests_in_flight: 32,
            requests_per_minute: None,
            tokens_per_minute: None,
            grace_s: 300,
        }
    }
}

/// The user at the other end of a Unix socket; `None` over TCP.
pub type User = Option<u32>;

#[derive(Debug)]
struct Registered {
    id: TenantId,
    claim: TenantClaim,
    user: User,
    in_flight: usize,
    last_used: Instant,
    /// Of requests and of tokens; made with the first limit that it is held to.
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

impl Registered {
    fn new(id: TenantId, claim: TenantClaim, user: User) -> Self {
        let last_used = Instant::now();
        Self { id, claim, user, in_flight: 0, last_used, requests: None, tokens: None }
    }

    /// Counts one request more, where every limit allows it.
    fn enter(&mut self, limits: TenantLimits) -> Result<TenantId, NotServed> {
        let (name, now) = (&self.claim.name, Instant::now());
        if self.in_flight >= limits.requests_in_flight {
            return Err(NotServed::InFlight { name: name.clone(), limit: limits.requests_in_flight });
        }
        for (what, limit, bucket) in [
            ("tokens", limits.tokens_per_minute, &mut self.tokens),
            ("requests", limits.requests_per_minute, &mut self.requests),
        ] {
            let Some(limit) = limit else { continue };
            let held = bucket.get_or_insert_with(|| Bucket::full(limit, now)).holds(1.0, limit, now);
            if let Err(wait) = held {
                // A whole second at least: whoever comes back a moment too early has come in vain.
                let retry_after_s = wait.as_secs() + 1;
                return Err(NotServed::Rate { name: name.clone(), what, limit, retry_after_s });
            }
        }
        if let (Some(limit), Some(bucket)) = (limits.requests_per_minute, &mut self.requests) {
            bucket.take(1.0, limit, now);
        }
        self.in_flight += 1;
        self.last_used = now;
        Ok(self.id)
    }
}

/// A registration as it is kept.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptRegistration {
    token: String,
    claim: TenantClaim,
    user: User,
}

/// All registrations.
#[derive(Debug)]
pub struct Tenants {
    limits: RwLock<TenantLimits>,
    default: Mutex<Registered>,
    by_token: Mutex<BTreeMap<TokenDigest, Registered>>,
    secret: Secret,
    /// Where registrations outlive the process, if they do.
    state: Option<Arc<State>>,
}

/// Why somebody is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// A token that nobody has.
    #[error("the token is not, or no longer, registered")]
    UnknownToken,
    /// A token of somebody else.
    #[error("the token belongs to another user")]
    OtherUser,
    /// Too much at once.
    #[error("{name} has {limit} requests in flight, which is its limit")]
    InFlight {
        /// Who.
        name: String,
        /// The limit.
        limit: usize,
    },
    /// Too much in a minute.
    #[error("{name} may use {limit} {what} in a minute; ask again in {retry_after_s} s")]
    Rate {
        /// Who.
        name: String,
        /// `requests` or `tokens`.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// When there will be room again.
        retry_after_s: u64,
    },
    /// No more registrations.
    #[error("there are {limit} registrations already{}", if *.of_user { " of this user" } else { "" })]
    Registrations {
        /// The limit.
        limit: usize,
        /// Whether it is the user's own.
        of_user: bool,
    },
}

/// A request that counts against its tenant until it is dropped.
#[derive(Debug)]
pub struct InFlight {
    tenants: std::sync::Arc<Tenants>,
    /// `None` for the default tenant.
    token: Option<TokenDigest>,
    /// Whose it is.
    pub tenant: TenantId,
    /// Most tokens that the tenant may have in one sequence.
    pub longest: Tokens,
}

impl InFlight {
    /// Whether it came with a token, and so belongs to whoever registered.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whose an answer to it is, asked for by that user.
    pub fn owner(&self, user: User) -> Owner {
        Owner { token: self.token.map(TokenDigest::to_hex), user }
    }

    /// Tokens were read or written for it.
    pub fn charge(&self, tokens: u64) {
        let Some(limit) = self.tenants.limits.read().tokens_per_minute else { return };
        let now = Instant::now();
        let take = |registered: &mut Registered| {
            registered.tokens.get_or_insert_with(|| Bucket::full(limit, now)).take(tokens as f64, limit, now);
        };
        match &self.token {
            None => take(&mut self.tenants.default.lock()),
            Some(token) => {
                self.tenants.by_token.lock().get_mut(token).map(take);
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let ended = |registered: &mut Registered| {
            registered.in_flight = registered.in_flight.saturating_sub(1);
            registered.last_used = Instant::now();
        };
        match &self.token {
            None => ended(&mut self.tenants.default.lock()),
            Some(token) => {
                self.tenants.by_token.lock().get_mut(token).map(ended);
            }
        }
    }
}

impl Tenants {
    /// Nobody but the default tenant.
    pub fn new(default: TenantId, claim: TenantClaim, limits: TenantLimits) -> Self {
        let default = Mutex::new(Registered::new(default, claim, None));
        let secret = Secret::new();
        Self { limits: RwLock::new(limits), default, by_token: Mutex::default(), secret, state: None }
    }

    /// Has registrations outlive the process, and takes over those of an earlier one. `register` makes a tenant of what was asked
    /// for; where that makes no sense any more, it makes none.
    #[must_use]
    pub fn with_state(self, state: Arc<State>, mut register: impl FnMut(&TenantClaim) -> Option<TenantId>) -> Self {
        let kept: Vec<KeptRegistration> = state.registrations();
        state.name_tenant(self.default.lock().id, None);
        let restored = kept.into_iter().filter_map(|KeptRegistration { token, claim, user }| {
            let (digest, id) = (TokenDigest::from_hex(&token)?, register(&claim)?);
            state.name_tenant(id, Some(digest.to_hex()));
            Some((digest, Registered::new(id, claim, user)))
        });
        let by_token = Mutex::new(restored.collect());
        Self { by_token, secret: Secret::of(state.secret()), state: Some(state), ..self }
    }

    /// Keeps who is registered now. It is done with the lock held, so that the last to write is the last to change.
    fn keep(&self, all: &BTreeMap<TokenDigest, Registered>) {
        let Some(state) = &self.state else { return };
        let kept = all.iter().map(|(token, Registered { claim, user, .. })| KeptRegistration {
            token: token.to_hex(),
            claim: claim.clone(),
            user: *user,
        });
        state.keep_registrations(&kept.collect::<Vec<_>>());
    }

    /// From now on these limits hold. Who is over one of them already stays, and gets no further.
    pub fn set_limits(&self, limits: TenantLimits) {
        *self.limits.write() = limits;
    }

    /// Keeps a registration, if one more is allowed, and returns its token. Counted and kept under one lock, so that no
    /// number of registrations at the same time passes the limits.
    pub fn register(&self, id: TenantId, claim: TenantClaim, user: User) -> Result<String, NotServed> {
        let mut all = self.by_token.lock();
        let TenantLimits { registrations, registrations_per_user, .. } = *self.limits.read();
        if all.len() >= registrations {
            return Err(NotServed::Registrations { limit: registrations, of_user: false });
        }
        // Those whom nobody names share one allowance.
        let own = all.values().filter(|registered| registered.user == user).count();
        if own >= registrations_per_user {
            return Err(NotServed::Registrations { limit: registrations_per_user, of_user: true });
        }
        let token = new_token(&mut rand::rng());
        let digest = self.secret.digest(&token);
        if let Some(state) = &self.state {
            state.name_tenant(id, Some(digest.to_hex()));
        }
        all.insert(digest, Registered::new(id, claim, user));
        self.keep(&all);
        Ok(token)
    }

    /// Takes a registration out.
    pub fn leave(&self, key: Option<&str>, user: User) -> Result<TenantId, NotServed> {
        let mut all = self.by_token.lock();
        let key = &self.secret.digest(key.unwrap_or_default());
        check_user(all.get(key).ok_or(NotServed::UnknownToken)?, user)?;
        let left = all.remove(key).map(|registered| registered.id).ok_or(NotServed::UnknownToken)?;
        self.forget_names(&[left]);
        self.keep(&all);
        Ok(left)
    }

    /// Whose request that is. The count of requests in flight goes down when what is returned is dropped.
    pub fn enter(self: &std::sync::Arc<Self>, key: Option<&str>, user: User) -> Result<InFlight, NotServed> {
        let limits = *self.limits.read();
        let token = key.filter(|key| key.starts_with(PREFIX)).map(|key| self.secret.digest(key));
        let enter = |registered: &mut Registered| Ok((registered.enter(limits)?, registered.claim.longest()));
        let (tenant, longest) = match &token {
            None => enter(&mut self.default.lock())?,
            Some(token) => {
                let mut all = self.by_token.lock();
                let registered = all.get_mut(token).ok_or(NotServed::UnknownToken)?;
                check_user(registered, user)?;
                enter(registered)?
            }
        };
        Ok(InFlight { tenants: self.clone(), token, tenant, longest })
    }

    /// Takes out every registration whose grace time is over.
    pub fn expired(&self) -> Vec<TenantId> {
        let grace = Duration::from_secs(self.limits.read().grace_s);
        let over = |_: &TokenDigest, own: &mut Registered| own.in_flight == 0 && own.last_used.elapsed() >= grace;
        let mut all = self.by_token.lock();
        let gone: Vec<TenantId> = all.extract_if(.., over).map(|(_, registered)| registered.id).collect();
        if !gone.is_empty() {
            self.forget_names(&gone);
            self.keep(&all);
        }
        gone
    }

    /// Nothing is kept any more for those who have left.
    fn forget_names(&self, gone: &[TenantId]) {
        for (state, tenant) in self.state.iter().flat_map(|state| gone.iter().map(move |tenant| (state, tenant))) {
            state.forget_tenant(*tenant);
        }
    }

    /// Everybody, without tokens: what was asked for, and the requests in flight.
    pub fn list(&self) -> Vec<(TenantClaim, usize)> {
        let of = |registered: &Registered| (registered.claim.clone(), registered.in_flight);
        let mut all = vec![of(&self.default.lock())];
        all.extend(self.by_token.lock().values().map(of));
        all
    }
}

/// Over TCP nobody says which user asks, and the token alone speaks for it.
fn check_user(registered: &Registered, user: User) -> Result<(), NotServed> {
    match user.is_none() || registered.user.is_none() || registered.user == user {
        true => Ok(()),
        false => Err(NotServed::OtherUser),
    }
}

#[cfg(test)]
mod tests {
    use molt_scheduler::{Config, LadderCost, RungCost, Scheduler, units::Bytes};

    use super::*;
    use crate::state::StateSettings;

    fn claim(text: &str) -> TenantClaim {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn claims_are_checked_by_name() {
        let check = |text: &str, field: Option<&str>| {
            let found = claim(text).check(Tokens::new(1_000)).map_err(|(field, _)| field);
            assert_eq!(found.err(), field, "{text}");
        };
        check(r#"{"name": "mail"}"#, None);
        check(r#"{"name": "a", "class": "foreground", "weight": 3, "floor": 2, "ceiling": 1, "quota": 50}"#, None);
        check(r#"{"name": "a", "floor": "tier2", "ceiling": "tier1"}"#, None);
        check(r#"{"name": ""}"#, Some("name"));
        assert!(serde_json::from_str::<TenantClaim>(r#"{"name": "a", "floor": "low"}"#).is_err());
        check(r#"{"name": "x y"}"#, Some("name"));
        check(r#"{"name": "a", "floor": 0, "ceiling": 1}"#, Some("floor"));
        check(r#"{"name": "a", "context_limit": 1001}"#, Some("context_limit"));
        assert!(serde_json::from_str::<TenantClaim>(r#"{"name": "a", "colour": 1}"#).is_err());
        assert!(serde_json::from_str::<TenantClaim>(r#"{"name": "a", "weight": 0}"#).is_err());
    }

    /// Identities as the scheduler gives them.
    fn identities(own: TenantClaim) -> impl FnMut() -> TenantId {
        let cost = RungCost { weights: Bytes::new(9), cache_per_token: Bytes::new(1), scratch: Bytes::ZERO };
        let mut scheduler = Scheduler::new(LadderCost::new(vec![cost]).unwrap(), Config::default());
        move || scheduler.register(own.check(Tokens::new(10)).unwrap())
    }

    #[test]
    fn nothing_keeps_tokens_and_nothing_near_one_is_one() {
        let own = claim(r#"{"name": "mail"}"#);
        let mut id = identities(own.clone());
        let mut made = || Arc::new(Tenants::new(id(), own.clone(), TenantLimits::default()));
        let (tenants, others) = (made(), made());
        let token = tenants.register(id(), own.clone(), None).unwrap();
        let digits = token.strip_prefix(PREFIX).unwrap();
        let in_flight = tenants.enter(Some(&token), None).unwrap();
        for kept in [format!("{tenants:?}"), format!("{in_flight:?}"), format!("{:?}", tenants.list())] {
            assert!(!kept.contains(digits), "{kept}");
        }
        assert_ne!(tenants.secret.digest(&token), others.secret.digest(&token), "a digest is of one process");
        // Nothing near a token is one.
        for other in
            [&token[..token.len() - 1], &format!("{token}0"), &token.to_uppercase(), &format!("{PREFIX}{token}")]
        {
            let served = tenants.enter(Some(other), None).map(|entered| entered.has_token());
            assert!(matches!(served, Err(NotServed::UnknownToken) | Ok(false)), "{other}");
        }
    }

    #[test]
    fn registrations_outlive_the_process_and_tokens_are_not_among_them() {
        let folder = tempfile::tempdir().unwrap();
        let settings = StateSettings { every_tokens: 8, grace: Duration::from_secs(60) };
        let own = claim(r#"{"name": "mail", "class": "foreground", "weight": 3}"#);
        let mut id = identities(own.clone());
        let mut start = || {
            let state = State::open(folder.path(), settings).unwrap();
            let tenants = Tenants::new(id(), own.clone(), TenantLimits::default());
            Arc::new(tenants.with_state(state, |claim| (claim.name == "mail").then(&mut id)))
        };
        let tenants = start();
        let mut others = identities(own.clone());
        let token = tenants.register(others(), own.clone(), Some(1)).unwrap();
        let left = tenants.register(others(), own.clone(), Some(1)).unwrap();
        tenants.leave(Some(&left), Some(1)).unwrap();
        let owner = tenants.enter(Some(&token), Some(1)).unwrap().owner(Some(1));
        for file in ["tenants.json", "secret"] {
            let kept = std::fs::read(folder.path().join(file)).unwrap();
            assert!(!String::from_utf8_lossy(&kept).contains(&token[PREFIX.len()..]), "{file} holds the token");
        }
        drop(tenants);
        let tenants = start();
        assert_eq!(tenants.list().len(), 2);
        assert_eq!(tenants.list()[1].0, own);
        assert!(tenants.enter(Some(&token), Some(1)).unwrap().owner(None).is(&owner));
        assert_eq!(tenants.enter(Some(&token), Some(2)).unwrap_err(), NotServed::OtherUser);
        assert_eq!(tenants.enter(Some(&left), Some(1)).unwrap_err(), NotServed::UnknownToken);
    }

    #[test]
    fn tokens_serve_who_registered_them() {
        let own = claim(r#"{"name": "mail"}"#);
        let mut id = identities(own.clone());
        let limits = TenantLimits {
            registrations: 3,
            registrations_per_user: 2,
            requests_in_flight: 2,
            grace_s: 0,
            ..TenantLimits::default()
        };
        let tenants = Arc::new(Tenants::new(id(), own.clone(), limits));
        let (mail, alice, bob) = (id(), Some(1), Some(2));
        let token = tenants.register(mail, own.clone(), alice).unwrap();
        let enter = |key: Option<&str>, user| tenants.enter(key, user);
        // A filler of a key is the default tenant's, as is none.
        assert_ne!(enter(Some("EMPTY"), bob).unwrap().tenant, mail);
        assert_ne!(enter(None, None).unwrap().tenant, mail);
        assert_eq!(enter(Some("molt-0"), alice).unwrap_err(), NotServed::UnknownToken);
        assert_eq!(enter(Some(&token), bob).unwrap_err(), NotServed::OtherUser);
        assert_eq!(enter(Some(&token), None).unwrap().tenant, mail, "over TCP the token speaks for itself");
        tenants.set_limits(TenantLimits { requests_per_minute: Some(1), tokens_per_minute: Some(10), ..limits });
        drop(enter(Some(&token), alice).unwrap());
        assert!(matches!(
            enter(Some(&token), alice),
            Err(NotServed::Rate { what: "requests", retry_after_s: 60.., .. })
        ));
        assert_ne!(enter(None, None).unwrap().tenant, mail, "another tenant has limits of its own");
        tenants.set_limits(TenantLimits { tokens_per_minute: Some(10), ..limits });
        enter(Some(&token), alice).unwrap().charge(30);
        assert!(matches!(
            enter(Some(&token), alice),
            Err(NotServed::Rate { what: "tokens", retry_after_s: 120.., .. })
        ));
        tenants.set_limits(limits);
        let requests: Vec<InFlight> = (0..2).map(|_| enter(Some(&token), alice).unwrap()).collect();
        assert!(matches!(enter(Some(&token), alice), Err(NotServed::InFlight { limit: 2, .. })));
        assert_eq!(tenants.expired(), [], "not while something is in flight");
        drop(requests);
        assert_eq!(enter(Some(&token), alice).unwrap().tenant, mail);
        let second = tenants.register(id(), own.clone(), alice).unwrap();
        let refused = tenants.register(id(), own.clone(), alice).unwrap_err();
        assert!(matches!(refused, NotServed::Registrations { of_user: true, .. }));
        tenants.register(id(), own.clone(), bob).unwrap();
        let refused = tenants.register(id(), own, bob).unwrap_err();
        assert!(matches!(refused, NotServed::Registrations { of_user: false, .. }));
        assert_eq!(tenants.leave(Some(&second), bob), Err(NotServed::OtherUser));
        tenants.leave(Some(&second), alice).unwrap();
        assert_eq!(tenants.list().len(), 3);
        assert_eq!(tenants.expired().len(), 2);
        assert_eq!(enter(Some(&token), alice).unwrap_err(), NotServed::UnknownToken);
    }
}
