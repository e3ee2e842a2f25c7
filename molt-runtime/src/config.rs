//! The configuration file of `moltd`. Every key has a default; an unknown one is an error that names it.

mod engine;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use molt_kv::carry::CarrySettings;
use molt_kv::numbers::CachePrecision;
use molt_scheduler::units::{Bytes, Span, Tokens};
use serde::Deserialize;

pub use engine::{Always, Carry, Heal, Keepsakes, ReadAhead, Reuse, Scheduling};

use crate::alarm::Alarm;
use crate::budget::{BudgetSource, CgroupBudget, HostBudget, PressureBudget, SystemdBudget, WatchError};
use crate::engine::{AheadSettings, Effort, EngineSettings, HealSettings};
use crate::service::{LogLevel, TenantClaim, TenantLimits, loopback};
use crate::state::StateSettings;
use crate::workers::Workers;

/// What `moltd` is told.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServiceConfig {
    /// The socket.
    pub socket: PathBuf,
    /// Its permissions, in octal.
    pub socket_mode: Mode,
    /// A loopback port beside it, for clients that speak no Unix sockets.
    pub listen: Option<Loopback>,
    /// How much of what happens goes to the log.
    pub log: LogLevel,
    /// A built-in ladder, or the path of a ladder file.
    pub ladder: String,
    /// Folder of the model files; where `molt pull` puts them, if not given.
    pub models: Option<PathBuf>,
    /// Bytes that may be used at first, in MiB; half of what the system has available, if not given.
    pub budget_mib: Option<u64>,
    /// What else limits the budget.
    pub budget: Sources,
    /// At what precision keys and values are kept; as the ladder says, if not given.
    pub cache: Option<CachePrecision>,
    /// Most tokens of a conversation; what the models were trained for and at most 4,096, if not given.
    pub context: Option<u64>,
    /// Threads that compute; as many as the system allows, if not given.
    pub threads: Option<NonZeroUsize>,
    /// Whether each of them stays on one processor.
    pub pin: bool,
    /// How much of a carry is done before the next token.
    pub carry: Carry,
    /// What is read natively in the background afterwards.
    pub heal: Heal,
    /// What is read natively in the background before a sequence changes its rung.
    pub ahead: ReadAhead,
    /// What sequences leave behind on bigger models.
    pub keepsakes: Keepsakes,
    /// What ended conversations leave for their next turn.
    pub reuse: Reuse,
    /// What outlives the daemon.
    pub state: KeptState,
    /// When levers are used and when things go up again.
    pub scheduler: Scheduling,
    /// Limits on tenants.
    pub tenants: TenantLimits,
    /// Who asks without having registered.
    pub default_tenant: TenantClaim,
    /// Tenants that a registration may name.
    #[serde(rename = "profile")]
    pub profiles: Vec<TenantClaim>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::from("/run/molt/molt.sock"),
            socket_mode: Mode(0o660),
            listen: None,
            log: LogLevel::Events,
            ladder: "pocket".to_owned(),
            models: None,
            budget_mib: None,
            budget: Sources::default(),
            cache: None,
            context: None,
            threads: None,
            pin: false,
            carry: Carry::default(),
            heal: Heal::default(),
            ahead: ReadAhead::default(),
            keepsakes: Keepsakes::default(),
            reuse: Reuse::default(),
            state: KeptState::default(),
            scheduler: Scheduling::default(),
            tenants: TenantLimits::default(),
            default_tenant: TenantClaim {
                name: "default".to_owned(),
                class: molt_scheduler::Class::Foreground,
                weight: std::num::NonZeroU16::MIN,
                floor: molt_scheduler::units::RungIdx::new(molt_scheduler::units::RungIdx::LIMIT - 1),
                ceiling: molt_scheduler::units::RungIdx::TOP,
                context_limit: None,
                quota: None,
            },
            profiles: Vec::new(),
        }
    }
}

/// An address that only this machine reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Loopback(SocketAddr);

impl Loopback {
    /// The address.
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl TryFrom<String> for Loopback {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        loopback(&text).map(Self)
    }
}

/// Permissions of a file, written as `"0660"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Mode(u32);

impl Mode {
    /// The bits.
    pub fn bits(self) -> u32 {
        self.0
    }
}

impl TryFrom<String> for Mode {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let bits = u32::from_str_radix(&text, 8).ok().filter(|bits| *bits <= 0o777);
        bits.map(Self).ok_or_else(|| format!("{text:?} is no mode; write \"0660\""))
    }
}

/// What limits the budget beside the operator; the strictest holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sources {
    /// Available memory of the machine less the reserve.
    pub host: bool,
    /// What is left to everybody else, in MiB; a twentieth of the machine's memory, if not given.
    pub host_reserve_mib: Option<u64>,
    /// The limits of the control group and of those above it.
    pub cgroup: bool,
    /// How long programs wait for memory, on the machine and in the control group.
    pub pressure: bool,
    /// What the service manager says, where it watches for us.
    pub systemd: bool,
}

impl Default for Sources {
    fn default() -> Self {
        Self { host: true, host_reserve_mib: None, cgroup: true, pressure: true, systemd: true }
    }
}

impl Sources {
    /// Those that this machine has, on one with so much memory; `alarm` knows what is used.
    pub fn measured(self, memory: Bytes, alarm: &Alarm) -> Result<Vec<Box<dyn BudgetSource>>, WatchError> {
        let proc = Path::new("/proc");
        let reserve = self.host_reserve_mib.map_or(Bytes::new(memory.get() / 20), Bytes::mib);
        let mut sources: Vec<Box<dyn BudgetSource>> = Vec::new();
        if self.host {
            sources.push(Box::new(HostBudget::new(proc, reserve)));
        }
        let cgroup = CgroupBudget::new(proc, Path::new("/sys/fs/cgroup"));
        if self.pressure {
            let files = [("pressure", Some(proc.join("pressure/memory")))].into_iter();
            let files = files.chain([("cgroup_pressure", cgroup.as_ref().and_then(CgroupBudget::pressure_file))]);
            for (name, file) in files.filter_map(|(name, file)| Some((name, file?))) {
                let source = PressureBudget::new(name, &file, alarm.clone());
                sources.extend(source.map(|source| -> Box<dyn BudgetSource> { Box::new(source) }));
            }
        }
        if self.systemd {
            let source = SystemdBudget::from_environment(alarm.clone())?;
            sources.extend(source.map(|source| -> Box<dyn BudgetSource> { Box::new(source) }));
        }
        let cgroup = cgroup.filter(|_| self.cgroup);
        sources.extend(cgroup.map(|cgroup| -> Box<dyn BudgetSource> { Box::new(cgroup) }));
        Ok(sources)
    }
}

/// What outlives the daemon: answers that are streamed, their caches, registrations.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeptState {
    /// Whether anything does.
    pub keep: bool,
    /// The folder; `state` in the one that systemd gives, if not given, and where there is none, nothing is kept.
    pub folder: Option<PathBuf>,
    /// The cache of an answer is written after so many tokens.
    pub every_tokens: usize,
    /// Seconds until an answer is dropped that nobody asks for.
    pub grace_s: u64,
}

impl Default for KeptState {
    fn default() -> Self {
        Self { keep: true, folder: None, every_tokens: 256, grace_s: 300 }
    }
}

impl KeptState {
    /// The folder, if anything is kept. `given` is what systemd says in `STATE_DIRECTORY`.
    pub fn folder(&self, given: Option<&str>) -> Option<PathBuf> {
        // Of several, which are separated by colons, the first is ours.
        let given = given.and_then(|all| all.split(':').next()).filter(|first| !first.is_empty());
        let beside = given.map(|first| Path::new(first).join("state"));
        self.folder.clone().or(beside).filter(|_| self.keep)
    }

    /// How things are kept in it.
    pub fn settings(&self) -> StateSettings {
        StateSettings { every_tokens: self.every_tokens, grace: Duration::from_secs(self.grace_s) }
    }
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A key or a value makes no sense; the message shows where.
    #[error("the configuration {}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// A tenant makes no sense.
    #[error("the configuration's tenant {name}: {field} {reason}")]
    Tenant {
        /// Which.
        name: String,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl ServiceConfig {
    /// Reads a file and checks what can be checked without a ladder.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Checks the text of a file; `path` is named in errors.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text)
            .map_err(|error| ConfigError::Syntax { path: path.to_owned(), reason: error.to_string() })?;
        for claim in config.profiles.iter().chain([&config.default_tenant]) {
            claim.check(Tokens::MAX).map_err(|(field, reason)| ConfigError::Tenant {
                name: claim.name.clone(),
                field,
                reason,
            })?;
        }
        Ok(config)
    }

    /// The keys that are another in `new` and cannot change while the service runs.
    pub fn fixed_changes(&self, new: &Self) -> Vec<&'static str> {
        // Taken apart, so that a new key is thought of here.
        let Self {
            socket,
            socket_mode,
            listen,
            ladder,
            models,
            budget,
            cache,
            context,
            threads,
            pin,
            carry,
            heal,
            ahead,
            keepsakes,
            reuse,
            state,
            scheduler,
            default_tenant,
            log: _,
            budget_mib: _,
            tenants: _,
            profiles: _,
        } = self;
        let same = [
            ("socket", *socket == new.socket),
            ("socket_mode", *socket_mode == new.socket_mode),
            ("listen", *listen == new.listen),
            ("ladder", *ladder == new.ladder),
            ("models", *models == new.models),
            ("budget", *budget == new.budget),
            ("cache", *cache == new.cache),
            ("context", *context == new.context),
            ("threads", *threads == new.threads),
            ("pin", *pin == new.pin),
            ("carry", *carry == new.carry),
            ("heal", *heal == new.heal),
            ("ahead", *ahead == new.ahead),
            ("keepsakes", *keepsakes == new.keepsakes),
            ("reuse", *reuse == new.reuse),
            ("state", *state == new.state),
            ("scheduler", *scheduler == new.scheduler),
            ("default_tenant", *default_tenant == new.default_tenant),
        ];
        same.iter().filter(|(_, same)| !same).map(|(key, _)| *key).collect()
    }

    /// The engine's part.
    pub fn engine(&self) -> EngineSettings {
        let carry = match self.carry.always {
            None => Effort::Stall { target_ms: self.carry.stall_ms_target },
            Some(Always::Fast) => Effort::Fixed(CarrySettings::FAST),
            Some(Always::Balanced) => Effort::Fixed(CarrySettings::BALANCED),
            Some(Always::Faithful) => Effort::Fixed(CarrySettings::FAITHFUL),
            Some(Always::Exact) => Effort::Fixed(CarrySettings::EXACT),
        };
        let heal = HealSettings { tokens: Tokens::new(self.heal.tokens), every: self.heal.every_rounds };
        let defaults = EngineSettings::default();
        let keepsakes = match (self.keepsakes.keep, &self.keepsakes.folder) {
            (false, _) => None,
            (true, Some(folder)) => Some(folder.clone()),
            (true, None) => defaults.keepsakes,
        };
        let ahead = AheadSettings {
            catch_up: Span::from_millis(self.ahead.catch_up_ms),
            eager_up: self.ahead.eager_up,
            shadow: self.ahead.shadow,
            shadow_bytes: Bytes::mib(self.ahead.shadow_mib),
            tokens: Tokens::new(self.ahead.tokens),
            every: self.ahead.every_rounds,
            shadow_every: self.ahead.shadow_every_rounds,
        };
        EngineSettings { carry, keepsakes, heal, ahead, conversations: self.reuse.conversations }
    }

    /// The scheduler's part, on a machine with so much memory.
    pub fn scheduler(&self, memory: Bytes) -> molt_scheduler::Config {
        let s = &self.scheduler;
        molt_scheduler::Config {
            policy: s.policy,
            budget_limit: memory,
            patience: Span::from_millis(s.patience_ms),
            residence: Span::from_millis(s.residence_ms),
            queue_limit: s.queue_limit,
            chunk: Tokens::new(s.chunk),
            ..molt_scheduler::Config::default()
        }
    }

    /// The threads.
    pub fn workers(&self) -> Workers {
        Workers { threads: self.threads, pinned: self.pin }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commented_example_says_every_key_at_its_default() {
        let text = include_str!("../../deploy/moltd.toml");
        // What has no default is commented out there; once uncommented it must still be a key that is known.
        let uncommented: String =
            text.lines().map(|line| line.strip_prefix("#? ").unwrap_or(line)).fold(String::new(), |mut all, line| {
                all.push_str(line);
                all.push('\n');
                all
            });
        toml::from_str::<ServiceConfig>(&uncommented).unwrap();
        let found = toml::from_str::<ServiceConfig>(text).unwrap();
        assert_eq!(format!("{found:?}"), format!("{:?}", ServiceConfig::default()));
        // Every key of the types above is in it.
        let table: toml::Table = uncommented.parse().unwrap();
        let debug = format!("{:?}", ServiceConfig::default());
        for key in
            ["socket_mode", "stall_ms_target", "every_rounds", "residence_ms", "requests_in_flight", "host_reserve_mib"]
        {
            assert!(debug.contains(key) && uncommented.contains(key), "{key}");
        }
        assert_eq!(table.len(), 22, "a key of the file was added or dropped: {:?}", table);
    }

    #[test]
    fn things_are_kept_where_there_is_a_folder() {
        let check = |text: &str, given: Option<&str>, expected: Option<&str>| {
            let config: ServiceConfig = toml::from_str(text).unwrap();
            assert_eq!(config.state.folder(given), expected.map(PathBuf::from), "{text} {given:?}");
        };
        check("", None, None);
        check("", Some(""), None);
        check("", Some("/var/lib/molt"), Some("/var/lib/molt/state"));
        check("", Some("/var/lib/molt:/var/lib/other"), Some("/var/lib/molt/state"));
        check("[state]\nfolder = \"/here\"", Some("/var/lib/molt"), Some("/here"));
        check("[state]\nkeep = false\nfolder = \"/here\"", Some("/var/lib/molt"), None);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moltd.toml");
        let check = |text: &str, part: &str| {
            std::fs::write(&path, text).unwrap();
            let error = ServiceConfig::read(&path).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        };
        check("sokcet = \"/x\"", "sokcet");
        check("[carry]\nstall = 1", "stall");
        check("[carry]\nalways = \"sometimes\"", "sometimes");
        check("socket_mode = \"rw\"", "0660");
        check("listen = \"0.0.0.0:80\"", "no loopback address");
        check("log = \"loud\"", "loud");
        check("socket_mode = \"7777\"", "0660");
        check("[[profile]]\nname = \"a b\"", "a b");
        check("[[profile]]\nname = \"a\"\nfloor = 0\nceiling = 2", "floor");
        check("[scheduler]\npolicy = \"none\"", "policy");
        let missing = ServiceConfig::read(&folder.path().join("none.toml")).unwrap_err().to_string();
        assert!(missing.contains("none.toml"), "{missing}");
    }
}
