//! Who asks for what, and when: a file of tenants, claimed and checked.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use molt_scheduler::units::{RungIdx, Time, Tokens};
use molt_scheduler::{Class, TenantSpec};
use serde::Deserialize;

use crate::rung_name;

/// Tenants as they are written down.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantsFile {
    name: String,
    #[serde(rename = "tenant")]
    tenants: Vec<TenantClaim>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantClaim {
    name: String,
    class: Class,
    #[serde(default = "one")]
    weight: u64,
    #[serde(default, deserialize_with = "rung_name::optional")]
    floor: Option<RungIdx>,
    #[serde(default, deserialize_with = "rung_name::optional")]
    ceiling: Option<RungIdx>,
    context_limit: u64,
    quota: Option<u64>,
    /// So many tenants alike.
    #[serde(default = "one")]
    count: u64,
    /// Each of them that much later than the one before.
    #[serde(default)]
    every_ms: u64,
    #[serde(rename = "request", default)]
    requests: Vec<RequestClaim>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestClaim {
    #[serde(default)]
    at_ms: u64,
    prompt: u64,
    #[serde(default)]
    pinned: u64,
    answer: u64,
    #[serde(default = "one")]
    count: u64,
    #[serde(default)]
    every_ms: u64,
}

const fn one() -> u64 {
    1
}

/// Tenants with their requests, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenants {
    /// The file's own name.
    pub name: String,
    /// Each with a name of its own.
    pub tenants: Vec<Profile>,
}

/// One tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// What it registers with.
    pub spec: TenantSpec,
    /// What it asks for, in order of time.
    pub requests: Vec<Arrival>,
}

/// A request and its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// When it comes.
    pub at: Time,
    /// Tokens of its prompt.
    pub prompt: Tokens,
    /// Of them, what is never shed.
    pub pinned: Tokens,
    /// Tokens that will be written.
    pub answer: Tokens,
}

/// What is wrong with a file of tenants.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// It cannot be read.
    #[error("cannot read the tenants {}; built in are {known}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What there is without a file.
        known: String,
        /// The reason.
        source: std::io::Error,
    },
    /// It cannot be parsed; the message names the key.
    #[error("the tenants {file}: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// What the parser says.
        reason: String,
    },
    /// A value that makes no sense.
    #[error("the tenants {file}: {key} of {tenant:?} {reason}")]
    Value {
        /// The file.
        file: String,
        /// Whose.
        tenant: String,
        /// Where it stands.
        key: String,
        /// Why not.
        reason: String,
    },
}

/// Built-in profiles, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("phone", include_str!("../../../tenants/profiles/phone.toml")),
    ("thousand", include_str!("../../../tenants/profiles/thousand.toml")),
];

/// What one file may hold, so that a slip of the pen does not fill the machine.
const TENANTS_MAX: usize = 100_000;
const REQUESTS_MAX: usize = 1_000_000;

impl Tenants {
    /// A profile that is built in, or the file at that path.
    pub fn find(name: &str) -> Result<Self, TenantsError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(own, _)| *own == name) {
            return Self::parse(name, text);
        }
        let text = std::fs::read_to_string(Path::new(name)).map_err(|source| {
            let known = BUILT_IN.iter().map(|(own, _)| *own).collect::<Vec<_>>().join(", ");
            TenantsError::Read { path: PathBuf::from(name), known, source }
        })?;
        Self::parse(name, &text)
    }

    /// Parses and checks.
    pub fn parse(file: &str, text: &str) -> Result<Self, TenantsError> {
        let claim: TenantsFile =
            toml::from_str(text).map_err(|e| TenantsError::Syntax { file: file.to_owned(), reason: e.to_string() })?;
        let (mut tenants, mut names, mut requests) = (Vec::new(), BTreeSet::new(), 0);
        for tenant in &claim.tenants {
            let wrong = |key: &str, reason: &str| TenantsError::Value {
                file: file.to_owned(),
                tenant: tenant.name.clone(),
                key: key.to_owned(),
                reason: reason.to_owned(),
            };
            if tenant.name.is_empty() || !names.insert(tenant.name.as_str()) {
                return Err(wrong("name", "must be there, once only"));
            }
            let spec = tenant.spec(&wrong)?;
            let count = usize::try_from(tenant.count).ok().filter(|count| (1..=TENANTS_MAX).contains(count));
            let count = count.filter(|count| tenants.len() + count <= TENANTS_MAX);
            let count = count.ok_or_else(|| wrong("count", "makes no tenant, or more than 100,000"))?;
            for (nth, later) in (0..count).zip(0u64..) {
                let offset = later.saturating_mul(tenant.every_ms);
                let own = tenant.arrivals(offset, REQUESTS_MAX - requests, &wrong)?;
                requests += own.len();
                let name = if count == 1 { tenant.name.clone() } else { format!("{}-{}", tenant.name, nth + 1) };
                tenants.push(Profile { name, spec: spec.clone(), requests: own });
            }
        }
        Ok(Self { name: claim.name, tenants })
    }

    /// The longest sequence that anybody asks for.
    pub fn context(&self) -> Tokens {
        let all = self.tenants.iter().flat_map(|tenant| &tenant.requests);
        all.map(|request| request.prompt + request.answer).max().unwrap_or(Tokens::ZERO)
    }
}

impl TenantClaim {
    fn spec(&self, wrong: &impl Fn(&str, &str) -> TenantsError) -> Result<TenantSpec, TenantsError> {
        let ceiling = self.ceiling.unwrap_or(RungIdx::TOP);
        let floor = self.floor.unwrap_or(RungIdx::new(RungIdx::LIMIT - 1));
        if floor < ceiling {
            return Err(wrong("floor", &format!("is {floor}, above its ceiling {ceiling}")));
        }
        let weight = u16::try_from(self.weight).ok().and_then(NonZeroU16::new);
        Ok(TenantSpec {
            class: self.class,
            weight: weight.ok_or_else(|| wrong("weight", "must be 1 to 65535"))?,
            floor,
            ceiling,
            context_limit: Tokens::new(self.context_limit),
            quota: self.quota.map(Tokens::new),
        })
    }

    fn arrivals(
        &self,
        offset_ms: u64,
        most: usize,
        wrong: &impl Fn(&str, &str) -> TenantsError,
    ) -> Result<Vec<Arrival>, TenantsError> {
        let mut arrivals = Vec::new();
        for (index, request) in self.requests.iter().enumerate() {
            let key = |key: &str| format!("request[{index}].{key}");
            if request.prompt == 0 {
                return Err(wrong(&key("prompt"), "must be at least one token"));
            }
            if request.pinned > request.prompt {
                return Err(wrong(&key("pinned"), "is more than the prompt"));
            }
            let count = usize::try_from(request.count).ok().filter(|count| *count >= 1);
            let count = count.filter(|count| arrivals.len() + count <= most);
            let count = count.ok_or_else(|| wrong(&key("count"), "makes no request, or more than 1,000,000"))?;
            for (_, later) in (0..count).zip(0u64..) {
                let at = later.saturating_mul(request.every_ms).saturating_add(request.at_ms);
                arrivals.push(Arrival {
                    at: Time::from_millis(at.saturating_add(offset_ms)),
                    prompt: Tokens::new(request.prompt),
                    pinned: Tokens::new(request.pinned),
                    answer: Tokens::new(request.answer),
                });
            }
        }
        arrivals.sort_by_key(|arrival| arrival.at);
        Ok(arrivals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_are_what_they_say() {
        let (phone, thousand) = (Tenants::find("phone").unwrap(), Tenants::find("thousand").unwrap());
        assert_eq!((phone.tenants.len(), thousand.tenants.len()), (3, 1_000));
        let class = |class: Class| phone.tenants.iter().filter(move |tenant| tenant.spec.class == class).count();
        assert_eq!((class(Class::Foreground), class(Class::Batch)), (1, 2));
    }

    #[test]
    fn tenants_that_make_no_sense_are_refused_by_file_and_key() {
        let plain = "name = \"f\"\n[[tenant]]\nname = \"mail\"\nclass = \"batch\"\ncontext_limit = 9\n";
        let request = "[[tenant.request]]\nprompt = 3\nanswer = 4\n";
        let check = |more: &str, expected: Result<usize, &[&str]>| {
            let text = format!("{plain}{more}");
            match (Tenants::parse("f.toml", &text), expected) {
                (Ok(found), Ok(requests)) => assert_eq!(found.tenants[0].requests.len(), requests),
                (Err(error), Err(named)) => {
                    let reason = error.to_string();
                    assert!(named.iter().chain(&["f.toml"]).all(|part| reason.contains(part)), "{reason}");
                }
                (found, expected) => panic!("{text}: {found:?} instead of {expected:?}"),
            }
        };
        check("", Ok(0));
        check(&format!("{request}count = 5\nevery_ms = 2"), Ok(5));
        check("weight = 0", Err(&["weight", "mail"]));
        check("weight = 70000", Err(&["weight", "mail"]));
        check("floor = \"tier0\"\nceiling = \"tier1\"", Err(&["floor", "tier1"]));
        check("floor = \"low\"", Err(&["floor", "low"]));
        check("speed = 3", Err(&["speed"]));
        check("count = 0", Err(&["count"]));
        check("count = 100001", Err(&["count"]));
        check("[[tenant.request]]\nprompt = 0\nanswer = 1", Err(&["request[0].prompt"]));
        check(&format!("{request}pinned = 4"), Err(&["request[0].pinned"]));
        check(&format!("{request}count = 1000001"), Err(&["request[0].count"]));
        check("[[tenant]]\nname = \"mail\"\nclass = \"batch\"\ncontext_limit = 9", Err(&["name", "mail"]));
    }
}
