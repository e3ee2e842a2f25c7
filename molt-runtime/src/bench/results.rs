//! What `molt bench` found, as one file. The report is made from this file and from nothing else.

use std::path::{Path, PathBuf};
use std::process::Command;

use molt_models::kernels::isa_name;
use molt_scheduler::units::Bytes;
use serde::{Deserialize, Serialize};

use super::ablations::AblationRow;
use super::conditions::ConditionRow;
use super::engine::EngineRow;
use super::ladder::{ResidualRow, RungRow};
use super::memory::MemoryRun;
use super::shedding::SheddingRun;
use super::switch_cost::SwitchCostRow;
use super::tasks::TaskRow;
use super::tenants::{PolicyRow, TenantsRun};
use super::wire::WireRow;
use crate::eval;
use crate::memory;

/// The version of the file's layout.
pub const SCHEMA: u32 = 2;

/// Everything that was measured. A section that was not is absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The machine.
    pub machine: Machine,
    /// The program.
    pub program: Program,
    /// The ladder's name.
    pub name: String,
    /// Whether little was measured, to see that everything works.
    pub quick: bool,
    /// The rungs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ladder: Option<Section<RungRow>>,
    /// A spike in mid-answer, met in several ways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Section<ConditionRow>>,
    /// Small questions with a right answer, answered across a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<Section<TaskRow>>,
    /// A carry against reading again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub switch_cost: Option<Section<SwitchCostRow>>,
    /// How close carried caches are to native ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Section<eval::Row>>,
    /// One of the means taken away at a time: of the most faithful carry, and of Molt under the spike.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ablations: Option<Section<AblationRow>>,
    /// Residuals of the maps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residuals: Option<Section<ResidualRow>>,
    /// Three tenants under one budget, in the simulator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Section<TenantsRun>>,
    /// The same beside the policies of others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Section<PolicyRow>>,
    /// A session on the wire, as it came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire: Option<Section<WireRow>>,
    /// Prefill and decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Section<EngineRow>>,
    /// How fast memory comes back, whether the books are true, and a cold start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Section<MemoryRun>>,
    /// What is still known when the oldest context has gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shedding: Option<Section<SheddingRun>>,
    /// The same of other ladders, measured in the same way by the same program on the same machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Results>,
}

/// One part of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section<T> {
    /// What was measured.
    pub rows: Vec<T>,
    /// What was to be shown, and whether it was.
    pub claims: Vec<Claim>,
    /// How long measuring took.
    pub took_s: f64,
}

/// Something that was to be shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// What.
    pub claim: String,
    /// Whether it was.
    pub holds: bool,
    /// What was found.
    pub found: String,
}

impl Claim {
    /// A claim and what came of it.
    pub fn new(claim: impl Into<String>, holds: bool, found: impl Into<String>) -> Self {
        Self { claim: claim.into(), holds, found: found.into() }
    }
}

/// Where it was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The processor, as it calls itself.
    pub cpu: String,
    /// Threads that computed.
    pub threads: usize,
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// The kernels' instruction set.
    pub isa: String,
    /// The system's kernel.
    pub kernel: String,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = line("/proc/cpuinfo");
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            cpu: cpu.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            threads: rayon::current_num_threads(),
            memory_bytes: memory::total().map(Bytes::get),
            isa: isa_name().to_owned(),
            kernel: line("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// What was measured with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Its version.
    pub version: String,
    /// The commit of the repository that it was run in, where it was run in one.
    pub commit: Option<String>,
    /// Whether its assertions were compiled in.
    pub debug_assertions: bool,
}

impl Program {
    /// This one.
    pub fn this() -> Self {
        // Only in a repository of Molt, and with a word where something has been changed since.
        let own = Path::new("molt-runtime/src/bench/results.rs").exists();
        let git = Command::new("git").args(["describe", "--always", "--dirty", "--exclude=*"]).output().ok();
        let git = git.filter(|_| own);
        let commit =
            git.filter(|out| out.status.success()).map(|out| String::from_utf8_lossy(&out.stdout).trim().into());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { version, commit, debug_assertions: cfg!(debug_assertions) }
    }
}

/// Why there are no results.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The file holds something else.
    #[error("{} holds no results of this version: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file is of another run.
    #[error("{} is of {found}, not of {expected}; give another --out, or delete it", path.display())]
    OtherRun {
        /// The file.
        path: PathBuf,
        /// What it is of.
        found: String,
        /// What was asked for.
        expected: String,
    },
}

impl Results {
    /// Nothing yet.
    pub fn new(name: &str, quick: bool) -> Self {
        Self {
            schema: SCHEMA,
            machine: Machine::this(),
            program: Program::this(),
            name: name.to_owned(),
            quick,
            ladder: None,
            conditions: None,
            tasks: None,
            switch_cost: None,
            fidelity: None,
            ablations: None,
            residuals: None,
            tenants: None,
            peers: None,
            wire: None,
            engine: None,
            memory: None,
            shedding: None,
            beside: Vec::new(),
        }
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, ResultsError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ResultsError::Read { path: path.to_owned(), source })?;
        let malformed = |reason: String| ResultsError::Malformed { path: path.to_owned(), reason };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        // Of another layout the first difference would be named, which says less.
        let other = value.get("schema").and_then(serde_json::Value::as_u64).filter(|found| *found != u64::from(SCHEMA));
        if let Some(other) = other {
            return Err(malformed(format!("its schema is {other}, this version reads {SCHEMA}")));
        }
        serde_json::from_value(value).map_err(|e| malformed(e.to_string()))
    }

    /// What an earlier run of the same kind left, to go on from; something new where there is none. Another ladder than
    /// the first stands beside it.
    pub fn take_up(path: &Path, name: &str, quick: bool) -> Result<Self, ResultsError> {
        let fresh = Self::new(name, quick);
        if !path.exists() {
            return Ok(fresh);
        }
        let mut found = Self::read(path)?;
        let kind = |of: &Self| {
            let (size, commit) = (if of.quick { "quick" } else { "full" }, of.program.commit.as_deref());
            let Machine { cpu, threads, isa, .. } = &of.machine;
            let Program { version, debug_assertions, .. } = &of.program;
            let built = if *debug_assertions { "with assertions" } else { "without assertions" };
            let commit = commit.unwrap_or("no commit");
            format!("a {size} run at {commit} ({version}, {built}) on {cpu} ({threads} threads, {isa})")
        };
        if let Some(other) = found.each().find(|of| kind(of) != kind(&fresh)) {
            let (path, found, expected) = (path.to_owned(), kind(other), kind(&fresh));
            return Err(ResultsError::OtherRun { path, found, expected });
        }
        if found.each().all(|of| of.name != name) {
            found.beside.push(fresh);
        }
        Ok(found)
    }

    /// These, and those of the other ladders.
    pub fn each(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.beside)
    }

    /// The results of a ladder that was taken up.
    pub fn of(&mut self, name: &str) -> &mut Self {
        match self.beside.iter().position(|other| other.name == name) {
            Some(at) => &mut self.beside[at],
            None => self,
        }
    }

    /// Writes the file: aside, and renamed, so that an interrupted run leaves what it had.
    pub fn write(&self, path: &Path) -> Result<(), ResultsError> {
        let error = |source| ResultsError::Write { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(error)?;
        }
        let text = serde_json::to_string_pretty(self).map_err(|e| error(e.into()))?;
        let aside = path.with_extension("json.part");
        std::fs::write(&aside, text + "\n").and_then(|()| std::fs::rename(&aside, path)).map_err(error)
    }
}
