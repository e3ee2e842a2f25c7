//! What comes in from outside, one function a boundary: bytes to something checked, or a refusal that names it.
//!
//! The fuzz targets in `targets/` run these, and so does `molt-runtime/tests/hostile.rs` on every build. Nothing here knows
//! whether it is a fuzzer or a test that calls it.

use std::cell::LazyCell;
use std::error::Error;
use std::path::{Path, PathBuf};

use molt_kv::bridge::Bridge;
use molt_kv::cache::CacheShape;
use molt_kv::ledger::Ledger;
use molt_kv::numbers::CachePrecision;
use molt_kv::record;
use molt_models::file::ModelFile;
use molt_models::{ChatTemplate, LadderFile, Message, Tokenizer};
use molt_runtime::budget::Watch;
use molt_runtime::config::ServiceConfig;
use molt_runtime::service::{ChatRequest, Kind, Prompt, TenantClaim};
use molt_runtime::state::{Owner, State, StateSettings};
use molt_runtime::trace::{Frame, Trace};
use molt_scheduler::units::{Bytes, Time, Tokens};
use molt_scheduler::{Config, LadderCost, RungCost};
use sha2::{Digest as _, Sha256};

/// A place where bytes come in.
pub struct Boundary {
    /// Its name, which is that of its target and of its folder of seeds.
    pub name: &'static str,
    /// What every refusal says, so that whoever reads it knows what is meant.
    pub named: &'static str,
    /// Reads them.
    pub read: fn(&[u8]) -> Result<(), String>,
}

/// All of them.
pub const BOUNDARIES: &[Boundary] = &[
    Boundary { name: "gguf", named: "case.gguf", read: gguf },
    Boundary { name: "safetensors", named: "case/", read: safetensors },
    Boundary { name: "ladder", named: "ladder", read: ladder },
    Boundary { name: "config", named: "configuration", read: config },
    Boundary { name: "bridge", named: "case.bridge", read: bridge },
    Boundary { name: "template", named: "chat template", read: template },
    Boundary { name: "request", named: ": ", read: request },
    Boundary { name: "trace", named: "trace case", read: trace },
    Boundary { name: "record", named: "case.cache", read: record },
    Boundary { name: "journal", named: "case.answer", read: journal },
    Boundary { name: "pressure", named: "MEMORY_PRESSURE_", read: pressure },
];

/// Gives bytes to a boundary, which must take them or refuse them by name.
///
/// # Panics
/// Where it does neither.
pub fn hold(name: &str, bytes: &[u8]) {
    let boundary = BOUNDARIES.iter().find(|b| b.name == name).expect("a boundary of that name");
    if let Err(refusal) = (boundary.read)(bytes) {
        assert!(refusal.contains(boundary.named), "{:?} is not named in: {refusal}", boundary.named);
    }
}

/// An error and what is behind it, as the programs print it.
fn told(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut behind = error.source();
    while let Some(error) = behind {
        text.push_str(": ");
        text.push_str(&error.to_string());
        behind = error.source();
    }
    text
}

thread_local! {
    static FOLDER: LazyCell<tempfile::TempDir> = LazyCell::new(|| tempfile::tempdir().expect("a folder for the case"));
}

/// Puts bytes into a file of this thread's own folder.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.with(|folder| folder.path().join(name));
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder for the case");
    std::fs::write(&path, bytes).expect("a file for the case");
    path
}

fn model(path: &Path) -> Result<(), String> {
    let file = ModelFile::open(path).map_err(|e| told(&e))?;
    let tokenizer = Tokenizer::new(file.vocabulary(), path).map_err(|e| told(&e))?;
    let tokens = tokenizer.encode("The people of 1787, é.").map_err(|e| told(&e))?;
    tokenizer.decode(&tokens);
    Ok(())
}

fn gguf(bytes: &[u8]) -> Result<(), String> {
    model(&file("case.gguf", bytes))
}

/// The three files of a model hub in one: the configuration, the tokenizer and the weights, with [`CUT`] between them.
fn safetensors(bytes: &[u8]) -> Result<(), String> {
    let mut parts = [&bytes[..0]; 3];
    let mut rest = bytes;
    for part in &mut parts[..2] {
        let at = rest.windows(CUT.len()).position(|window| window == CUT).unwrap_or(rest.len());
        (*part, rest) = (&rest[..at], &rest[(at + CUT.len()).min(rest.len())..]);
    }
    parts[2] = rest;
    file("case/config.json", parts[0]);
    file("case/tokenizer.json", parts[1]);
    model(&file("case/model.safetensors", parts[2]))
}

/// Between the parts of a case of safetensors.
pub const CUT: &[u8] = b"\n====\n";

fn ladder(bytes: &[u8]) -> Result<(), String> {
    let ladder = LadderFile::parse("case", &String::from_utf8_lossy(bytes)).map_err(|e| told(&e))?;
    ladder.files_to_pull();
    Ok(())
}

fn config(bytes: &[u8]) -> Result<(), String> {
    let config = ServiceConfig::parse(Path::new("case.toml"), &String::from_utf8_lossy(bytes)).map_err(|e| told(&e))?;
    assert_eq!(config.fixed_changes(&config.clone()), [""; 0], "nothing has changed");
    config.engine();
    config.scheduler(Bytes::mib(1024));
    config.workers();
    Ok(())
}

/// Once as the bytes are, and once with the digest that belongs to them: a digest keeps out accidents, not an author.
fn bridge(bytes: &[u8]) -> Result<(), String> {
    let open = |bytes: &[u8]| {
        let ledger = Ledger::new();
        let opened = Bridge::open(&file("case.bridge", bytes), &ledger).map_err(|e| told(&e)).map(drop);
        assert_eq!(ledger.total(), Bytes::ZERO, "the books are as they were");
        opened
    };
    let as_it_is = open(bytes);
    match sealed(bytes) {
        Some(sealed) => open(&sealed),
        None => as_it_is,
    }
}

/// The same bridge with its true digest; `None` where its header cannot be read.
pub fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let (start, end) = (8, 8usize.checked_add(length)?);
    let header: serde_json::Value = serde_json::from_slice(bytes.get(start..end)?).ok()?;
    let metadata = header.get("__metadata__")?;
    let stated = metadata.get("digest")?.as_str()?;
    let mut hasher = Sha256::new();
    hasher.update(metadata.get("bridge")?.as_str()?);
    let mut names: Vec<&String> = header.as_object()?.keys().filter(|name| *name != "__metadata__").collect();
    names.sort();
    for name in names {
        let offset = |at: usize| header[name]["data_offsets"][at].as_u64().and_then(|o| usize::try_from(o).ok());
        hasher.update(name);
        hasher.update(bytes.get(end.checked_add(offset(0)?)?..end.checked_add(offset(1)?)?)?);
    }
    let digest = hex::encode(hasher.finalize());
    let at = bytes[start..end].windows(stated.len().max(1)).position(|window| window == stated.as_bytes())? + start;
    (stated.len() == digest.len()).then(|| [&bytes[..at], digest.as_bytes(), &bytes[at + digest.len()..]].concat())
}

/// Opened and restored, once as the bytes are and once with the checksums that belong to them.
fn record(bytes: &[u8]) -> Result<(), String> {
    let restore = |bytes: &[u8]| {
        let ledger = Ledger::new();
        let mut kept = record::open(&file("case.cache", bytes)).map_err(|e| told(&e))?;
        let (shape, slots) = (kept.shape(), kept.slots().to_vec());
        let cache = kept.restore(Tokens::from(slots.len()), &ledger).map_err(|e| told(&e))?;
        assert_eq!((cache.shape(), cache.slots()), (shape, &slots[..]), "it is what the record said");
        assert!(kept.is_of(&[]) && cache.next_position() > 0);
        drop(cache);
        assert_eq!(ledger.total(), Bytes::ZERO, "the books are as they were");
        let most = slots.len() / 2;
        let part = kept.restore_until(most, Tokens::from(slots.len()), &ledger).map_err(|e| told(&e))?;
        assert!(part.len() <= most, "no more than was asked for");
        Ok(())
    };
    let as_it_is = restore(bytes);
    match with_sums(bytes) {
        Some(sealed) => restore(&sealed),
        None => as_it_is,
    }
}

/// The same record with its true checksums; `None` where its head cannot be read.
fn with_sums(bytes: &[u8]) -> Option<Vec<u8>> {
    let length = usize::try_from(u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?)).ok()?;
    let head: serde_json::Value = serde_json::from_slice(bytes.get(12..12usize.checked_add(length)?)?).ok()?;
    let number = |name: &str| usize::try_from(head[name].as_u64()?).ok();
    let (slots, layers) = (number("slots")?, number("layers")?);
    let row = number("kv_heads")?.checked_mul(number("head_dim")?)?;
    let plane = row.checked_mul(slots)?.checked_mul(if head["precision"] == "f32" { 4 } else { 2 })?;
    let (mut sealed, mut at) = (bytes[..12].to_vec(), 12usize);
    let parts = [length, slots.checked_mul(9)?].into_iter().chain(std::iter::repeat_n(plane, layers.checked_mul(2)?));
    for (number, length) in parts.enumerate() {
        let part = bytes.get(at..at.checked_add(length)?)?;
        let mut sum = crc32fast::Hasher::new();
        sum.update(&number.to_le_bytes());
        sum.update(part);
        sealed.extend_from_slice(part);
        sealed.extend_from_slice(&sum.finalize().to_le_bytes());
        at = at.checked_add(length)?.checked_add(4)?;
    }
    sealed.extend_from_slice(bytes.get(at..)?);
    Some(sealed)
}

/// Found in a state folder, taken up and gone on with: once as the bytes are, and once with the checksum of its head.
fn journal(bytes: &[u8]) -> Result<(), String> {
    let as_it_is = taken_up(bytes);
    let length = bytes.get(8..12).and_then(|b| usize::try_from(u32::from_le_bytes(b.try_into().ok()?)).ok());
    let head = length.and_then(|length| bytes.get(16..16usize.checked_add(length)?));
    match head {
        Some(head) => {
            let sum = crc32fast::hash(head).to_le_bytes();
            taken_up(&[&bytes[..12], &sum, &bytes[16..]].concat())
        }
        None => as_it_is,
    }
}

fn taken_up(bytes: &[u8]) -> Result<(), String> {
    const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 1, head_dim: 2, precision: CachePrecision::F16 };
    let path = file("state/answers/case.answer", bytes);
    let folder = path.ancestors().nth(2).expect("a folder");
    let settings = StateSettings { every_tokens: 8, grace: std::time::Duration::from_secs(60) };
    let state = State::open(folder, settings).map_err(|e| told(&e))?;
    // Two kinds of owners; another's answer is nobody's here.
    for (token, user) in [(None, Some(7)), (Some("ab".to_owned()), None)] {
        if let Ok(Ok(taken)) = state.take("case", &Owner { token, user }, &[("abc", SHAPE)]) {
            assert_eq!(taken.head.id, "case");
            let (mut keeping, tokens) = (taken.keeping, taken.tokens);
            keeping.write(&[&tokens[..], &[1]].concat());
            assert!(keeping.is_kept(), "it can be gone on with");
        }
    }
    let refused = state.troubles();
    if refused.is_empty() { Ok(()) } else { Err(refused.join("; ")) }
}

fn conversation() -> ([Message; 4], serde_json::Value) {
    let call = serde_json::json!({"type": "function", "function": {"name": "look", "arguments": {"at": [1, "é"]}}});
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "Hi <there>\n\n"),
        Message { tool_calls: vec![call], ..Message::new("assistant", "<think>\nwell\n</think>\n\nHello.") },
        Message { tool_call_id: Some("1".to_owned()), ..Message::new("tool", "rain") },
    ];
    let parameters = serde_json::json!({"type": "object", "properties": {"at": {"type": "array"}}});
    (messages, serde_json::json!({"type": "function", "function": {"name": "look", "parameters": parameters}}))
}

fn template(bytes: &[u8]) -> Result<(), String> {
    let template = ChatTemplate::new(&String::from_utf8_lossy(bytes), Some("<s>")).map_err(|e| told(&e))?;
    let (messages, tool) = conversation();
    template.render(&messages, &[]).map_err(|e| told(&e))?;
    template.render(&messages, &[tool]).map_err(|e| told(&e))?;
    Ok(())
}

/// What most models of the kind write, to be given the messages of hostile clients.
const USUAL: &str = "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content | trim }}\
                     {% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}";

/// A body that may be a conversation, a text to go on with, or a registration.
fn request(bytes: &[u8]) -> Result<(), String> {
    let chat = ChatRequest::parse(Kind::Chat, bytes);
    if let Ok(ChatRequest { prompt: Prompt::Messages(messages), form, .. }) = &chat {
        let template = ChatTemplate::new(USUAL, None).map_err(|e| told(&e))?;
        template.render(messages, &form.tools).map_err(|e| told(&e))?;
    }
    let text = ChatRequest::parse(Kind::Text, bytes);
    let claim = serde_json::from_slice::<TenantClaim>(bytes).map_err(|e| format!("body: {e}"));
    let tenant =
        claim.and_then(|c| c.check(Tokens::new(4_096)).map_err(|(field, reason)| format!("{field}: {reason}")));
    match (chat, text, tenant) {
        (Err(chat), Err(_), Err(_)) => Err(told(&chat)),
        _ => Ok(()),
    }
}

fn trace(bytes: &[u8]) -> Result<(), String> {
    let trace = Trace::parse("case", &String::from_utf8_lossy(bytes)).map_err(|e| told(&e))?;
    let cost = RungCost { weights: Bytes::mib(2), cache_per_token: Bytes::new(512), scratch: Bytes::mib(1) };
    let ladder = LadderCost::new(vec![cost]).expect("a ladder of one rung");
    let frame = Frame { ladder: &ladder, overhead: Bytes::mib(8), context: Tokens::new(4_096) };
    let most = trace.budget_max(&frame);
    for now in [Time::START, trace.last_step()] {
        assert!(trace.budget_at(now, &frame) <= most, "no budget is larger than the largest");
    }
    trace.settings().over(Config::default());
    Ok(())
}

/// The first line is the path, the rest what is to be written there. Nothing is opened.
fn pressure(bytes: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let (path, write) = text.split_once('\n').map_or((&*text, None), |(path, write)| (path, Some(write)));
    Watch::parse(Path::new(path), write).map(drop).map_err(|e| told(&e))
}
