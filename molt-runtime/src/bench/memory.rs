//! Memory of an engine on real models: how fast it comes back when it is wanted in the middle of work, what the reader
//! waits, how far it rises meanwhile, and whether the books are true.

use super::cold::ColdRow;
use super::results::Claim;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use molt_models::sampling::SamplingSettings;
use molt_models::{Ladder, Precision};
use molt_scheduler::units::{Bytes, RungIdx, Span, Time, Tokens};
use molt_scheduler::{Class, Config, Refusal, SequenceId, TenantId, TenantSpec};
use serde::{Deserialize, Serialize};

use super::stats::{Spread, percentile};
use crate::budget::OperatorBudget;
use crate::engine::{AnswerRequest, Engine, EngineError, EngineSettings};
use crate::event::Event;
use crate::memory::Resident;
use crate::sampler::{EVERY, Path, Sampler};

/// What is measured, and how often.
#[derive(Debug, Clone)]
pub struct MemorySettings {
    /// The rungs to release.
    pub rungs: Vec<RungIdx>,
    /// Tokens of the prompt in whose middle memory is wanted.
    pub prompt_tokens: usize,
    /// Releases of each rung in the middle of its prompt, and as many in the middle of an answer.
    pub runs: usize,
}

/// When memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum During {
    /// In the middle of reading the prompt.
    Prefill,
    /// Between tokens of an answer.
    Answer,
}

/// Releases of one rung.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReleaseRow {
    /// The rung.
    pub rung: RungIdx,
    /// Its precision.
    pub precision: String,
    /// When memory was wanted.
    pub during: During,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Bytes in use when the signal came.
    pub before_bytes: Bytes,
    /// What may be used from then on: nothing but the process and the conversation's cache.
    pub budget_bytes: Bytes,
    /// From the signal until the resident set was within the budget, of each run.
    pub reaction_ms: Vec<f64>,
    /// Of the runs in the middle of an answer: between the tokens before and after the signal, with the budget back at once.
    pub stall_ms: Vec<f64>,
    /// The most that the books held from the signal on, over what they held when it came, of each run.
    pub peak_ratio: Vec<f64>,
    /// The most that the books held after they were within the budget, over the budget, of each run.
    pub within_ratio: Vec<f64>,
}

/// Books and resident set in one state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BooksRow {
    /// The rung.
    pub rung: RungIdx,
    /// Its precision.
    pub precision: String,
    /// What the books hold that is no file's, without what the process took before any model.
    pub books_bytes: Bytes,
    /// What the system says is resident and no file's, without the same.
    pub resident_bytes: Bytes,
    /// What the books hold in mapped files.
    pub books_file_bytes: Bytes,
    /// What the system says is resident of files, without what was before any model.
    pub resident_file_bytes: Bytes,
}

impl BooksRow {
    /// How far the resident set is from the books, files included.
    pub fn difference_ratio(&self) -> f64 {
        let (books, resident) =
            (self.books_bytes + self.books_file_bytes, self.resident_bytes + self.resident_file_bytes);
        (resident.get() as f64 - books.get() as f64) / books.get().max(1) as f64
    }
}

impl ReleaseRow {
    /// Median and range of the reaction.
    pub fn reaction(&self) -> Option<Spread> {
        Spread::of(&self.reaction_ms)
    }

    /// 99 of 100 reactions were as fast; of fewer than a hundred it is the slowest.
    pub fn reaction_p99_ms(&self) -> Option<f64> {
        percentile(&self.reaction_ms, 0.99)
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Releases.
    pub releases: Vec<ReleaseRow>,
    /// Books.
    pub books: Vec<BooksRow>,
}

/// Everything about memory, as the report keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryRun {
    /// Memory wanted back while a rung was busy.
    pub releases: Vec<ReleaseRow>,
    /// The books against what the system says.
    pub books: Vec<BooksRow>,
    /// From the start of the daemon to the first token.
    pub cold: ColdRow,
}

impl MemoryRun {
    /// What was to be shown of it.
    pub fn claims(&self) -> Vec<Claim> {
        let mut claims = Vec::new();
        for row in self.releases.iter().filter(|row| row.during == During::Prefill) {
            let (median, p99) =
                (row.reaction().map_or(f64::NAN, |s| s.median), row.reaction_p99_ms().unwrap_or(f64::NAN));
            let (most_median, most_p99) = if row.precision == "as stored" { (50.0, 50.0) } else { (60.0, 150.0) };
            claims.push(Claim::new(
                format!(
                    "{} at {} is back with the system within {most_median} ms (median) and {most_p99} ms (99 %)",
                    row.rung, row.precision
                ),
                median < most_median && p99 < most_p99,
                format!("{median:.1} and {p99:.1} ms"),
            ));
        }
        let worst = self.books.iter().map(|row| row.difference_ratio().abs()).fold(0.0, f64::max);
        let found = format!("{:.1} % at most", worst * 100.0);
        claims.push(Claim::new("books and resident set agree within 5 %", worst <= 0.05, found));
        claims
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The request.
    #[error("the request was refused")]
    Refused(#[from] Refusal),
    /// A thread could not be started.
    #[error("a thread")]
    Thread(#[from] std::io::Error),
    /// The system does not say what is resident.
    #[error("/proc/self/smaps_rollup cannot be read")]
    NoResident,
    /// The engine did not come to where it should be measured.
    #[error("{rung} never came to {what}")]
    Stuck {
        /// The rung.
        rung: RungIdx,
        /// What was waited for.
        what: &'static str,
    },
    /// The answer was complete before the signal came.
    #[error(
        "{rung} had read its prompt of {prompt_tokens} tokens and answered before memory was wanted; give a longer one \
         (--prompts, and not --quick)"
    )]
    TooShort {
        /// The rung.
        rung: RungIdx,
        /// The prompt.
        prompt_tokens: usize,
    },
}

/// One conversation at a time on an engine whose tenant stays on one rung.
struct Bench {
    engine: Engine,
    tenant: TenantId,
    prompt: Vec<u32>,
    started: Instant,
    start: Resident,
}

/// Tokens of an answer before memory is wanted.
const ANSWERED: usize = 4;
/// Tokens that are still to come then: `pocket` writes a hundred while a busy machine lets a thread wait.
const LEFT: usize = 400;
/// Rounds after which a run is called stuck: of a token or a chunk each.
const ROUNDS: usize = 20_000;

impl Bench {
    fn new(ladder: &Arc<Ladder>, rung: RungIdx, prompt_tokens: usize) -> Result<Self, MemoryError> {
        // Up again as soon as there is room: waiting is not what is measured.
        let config = Config::default();
        // A prompt that is read in one round has no middle between two.
        let half = Tokens::from((prompt_tokens / 2).max(1));
        let (patience, residence) = (Span::from_millis(1), Span::from_millis(1));
        let config = Config { patience, residence, chunk_alone: config.chunk_alone.min(half), ..config };
        let mut engine = Engine::new(ladder.clone(), config, EngineSettings::default())?;
        let spec = TenantSpec {
            class: Class::Foreground,
            weight: NonZeroU16::MIN,
            floor: rung,
            ceiling: rung,
            context_limit: Tokens::from(prompt_tokens + ANSWERED + LEFT),
            quota: None,
        };
        let tenant = engine.register("bench", spec);
        let vocab = u32::try_from(ladder.rungs()[rung.get()].config().vocab).unwrap_or(u32::MAX);
        let prompt = (1u32..).map(|i| i.wrapping_mul(7_919) % 100_000 % vocab).take(prompt_tokens).collect();
        let start = Resident::now().ok_or(MemoryError::NoResident)?;
        Ok(Self { engine, tenant, prompt, started: Instant::now(), start })
    }

    fn now(&self) -> Time {
        Time::from_micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn ask(&mut self) -> Result<SequenceId, MemoryError> {
        let request = AnswerRequest {
            user: None,
            pinned: Tokens::ZERO,
            prompt: self.prompt.clone(),
            answer: Tokens::from(ANSWERED + LEFT),
            sampling: SamplingSettings { temperature: 0.0, ..SamplingSettings::default() },
            stop: Vec::new(),
            grammar: None,
            likelihoods: None,
            reuse: true,
            ignore_end: true,
        };
        let now = self.now();
        Ok(self.engine.submit(self.tenant, request, now)?)
    }

    fn round(&mut self, budget: Bytes) -> Vec<Event> {
        let mut told = Vec::new();
        let now = self.now();
        self.engine.round(now, budget, &mut told);
        told.into_iter().map(|(_, event)| event).collect()
    }
}

/// Measures; `done` hears of every row.
pub fn measure(
    ladder: &Arc<Ladder>,
    settings: &MemorySettings,
    mut done: impl FnMut(&ReleaseRow),
) -> Result<MemoryReport, MemoryError> {
    let mut report = MemoryReport::default();
    for rung in &settings.rungs {
        let mut books = None;
        for during in [During::Prefill, During::Answer] {
            let (row, seen) = releases(ladder, *rung, during, settings)?;
            done(&row);
            report.releases.push(row);
            books = seen.or(books);
        }
        report.books.extend(books);
    }
    Ok(report)
}

fn releases(
    ladder: &Arc<Ladder>,
    rung: RungIdx,
    during: During,
    settings: &MemorySettings,
) -> Result<(ReleaseRow, Option<BooksRow>), MemoryError> {
    // A few tokens are enough of a prompt where the answer is interrupted.
    let prompt_tokens =
        if during == During::Prefill { settings.prompt_tokens } else { settings.prompt_tokens.min(512) };
    let mut bench = Bench::new(ladder, rung, prompt_tokens)?;
    let precision: Precision = ladder.rungs()[rung.get()].precision();
    let cost = bench.engine.cost().get(rung);
    let cache = cost.map_or(Bytes::ZERO, |cost| cost.cache_per_token.times(Tokens::from(prompt_tokens + 100)));
    // Less than the weights, of a very small model too.
    let room = cost.map_or(Bytes::ZERO, |cost| Bytes::new(cost.weights.get() / 2)).min(Bytes::mib(8));
    let budget = bench.engine.overhead() + cache + room;
    let mut row = ReleaseRow {
        rung,
        precision: precision.to_string(),
        during,
        prompt_tokens,
        before_bytes: Bytes::ZERO,
        budget_bytes: budget,
        reaction_ms: Vec::new(),
        stall_ms: Vec::new(),
        peak_ratio: Vec::new(),
        within_ratio: Vec::new(),
    };
    let mut books = None;
    for run in 0..settings.runs {
        let sequence = bench.ask()?;
        let read_ms = to_the_middle(&mut bench, rung, during)?;
        if during == During::Answer && books.is_none() {
            books = Some(look(&bench, rung, precision)?);
        }
        let sampler = Sampler::start(bench.engine.books(), EVERY)?;
        let operator = OperatorBudget::new(Bytes::MAX, bench.engine.alarm().clone());
        // Somewhere in the next chunk, elsewhere each time: golden ratio.
        let fraction = (0.618_033_988_75 * (run as f64 + 1.0)).fract();
        let delay = Duration::from_secs_f64(EVERY.as_secs_f64() * 2.0 + read_ms * fraction / 1e3);
        let signal = std::thread::scope(|scope| -> Result<Instant, MemoryError> {
            let setter = operator.clone();
            let set = scope.spawn(move || {
                std::thread::sleep(delay);
                let signal = Instant::now();
                setter.set(budget);
                signal
            });
            for _ in 0..ROUNDS {
                if operator.get() == Bytes::MAX && !bench.engine.has(sequence) {
                    return Err(MemoryError::TooShort { rung, prompt_tokens });
                }
                // In this order, so that no ring in between is lost.
                bench.engine.alarm().forget();
                let told = bench.round(operator.get());
                let back = told.iter().find_map(|event| match event {
                    Event::Reaction { reaction_ms, before_bytes, .. } => Some((*reaction_ms, *before_bytes)),
                    _ => None,
                });
                if let Some((reaction_ms, before)) = back {
                    row.reaction_ms.push(reaction_ms);
                    row.before_bytes = before;
                    return set.join().map_err(|_| MemoryError::Stuck { rung, what: "the signal" });
                }
            }
            Err(MemoryError::Stuck { rung, what: "giving memory back" })
        })?;
        let looks = sampler.stop();
        if let Some(path) = Path::of(&looks, signal, budget) {
            row.peak_ratio.push(path.peak.get() as f64 / path.before.get().max(1) as f64);
            let within = path.peak_within.unwrap_or(path.peak);
            row.within_ratio.push(within.get() as f64 / budget.get().max(1) as f64);
        }
        // The budget is back at once: what the reader waits for is loading and the next token.
        for _ in 0..ROUNDS {
            let told = bench.round(Bytes::MAX);
            row.stall_ms.extend(told.iter().filter_map(|event| match event {
                Event::Stall { stall_ms, .. } => Some(*stall_ms),
                _ => None,
            }));
            if during == During::Prefill || told.iter().any(|event| matches!(event, Event::Token { .. })) {
                break;
            }
        }
        bench.engine.cancel(sequence);
        bench.round(bench.engine.overhead());
    }
    Ok((row, books))
}

/// Runs until the prompt is half read, or the answer has begun; returns the milliseconds of the last round.
fn to_the_middle(bench: &mut Bench, rung: RungIdx, during: During) -> Result<f64, MemoryError> {
    let (mut read, mut answered) = (0, 0);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let told = bench.round(Bytes::MAX);
        let round_ms = started.elapsed().as_secs_f64() * 1e3;
        read += bench.engine.read_tokens();
        answered += told.iter().filter(|event| matches!(event, Event::Token { .. })).count();
        let there = match during {
            During::Prefill => read * 2 >= bench.prompt.len(),
            During::Answer => answered >= ANSWERED,
        };
        if there {
            return Ok(round_ms);
        }
    }
    Err(MemoryError::Stuck { rung, what: "the middle of its work" })
}

fn look(bench: &Bench, rung: RungIdx, precision: Precision) -> Result<BooksRow, MemoryError> {
    let (now, books) = (Resident::now().ok_or(MemoryError::NoResident)?, bench.engine.books());
    let files = |resident: Resident| resident.rss - resident.anonymous;
    Ok(BooksRow {
        rung,
        precision: precision.to_string(),
        books_bytes: books.usage() - bench.engine.overhead() - books.files(),
        resident_bytes: now.anonymous - bench.start.anonymous,
        books_file_bytes: books.files(),
        resident_file_bytes: files(now) - files(bench.start),
    })
}
