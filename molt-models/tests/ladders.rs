//! Ladders that must be refused, each with an error that names the thing.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::fs;
use std::path::Path;

use common::pocket;
use molt_models::file::ModelFile;
use molt_models::{Ladder, LadderFile, Tokenizer};
use sha2::{Digest as _, Sha256};

const TIER0: &[u8] = include_bytes!("../ladders/pocket/pocket-tier0.gguf");
const TIER2: &[u8] = include_bytes!("../ladders/pocket/pocket-tier2.gguf");

fn hash(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn entry(name: &str, bytes: &[u8], sha256: &str) -> String {
    format!("[[file]]\nname = \"{name}\"\nsha256 = \"{sha256}\"\nbytes = {}\n", bytes.len())
}

fn rung(file: &str, precision: &str) -> String {
    format!("[[rung]]\nfile = \"{file}\"\nprecision = {precision}\n")
}

/// Opens a ladder of files in a folder; `parts` is the ladder file after its name.
fn open(files: &[(&str, &[u8])], parts: &[String]) -> Result<Ladder, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let text = format!("name = \"mine\"\ndescription = \"a test\"\n{}", parts.join("\n"));
    let claim = LadderFile::parse("mine", &text).map_err(|e| e.to_string())?;
    let with_causes = |e: &dyn std::error::Error| {
        let cause = e.source().map(|s| format!(": {s}")).unwrap_or_default();
        format!("{e}{cause}")
    };
    Ladder::check(&claim, None, folder.path()).map_err(|e| with_causes(&e))
}

fn check(files: &[(&str, &[u8])], parts: &[String], named: &[&str]) {
    let reason = open(files, parts).expect_err("must be refused");
    for name in named {
        assert!(reason.contains(name), "{name:?} is not named in: {reason}");
    }
}

/// The file with another text of the same length at the first place of `from`.
fn patched(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn a_good_ladder_opens() {
    let parts = [
        rung("big.gguf", "\"f32\""),
        rung("big.gguf", "{ linear = \"q4_0\", table = \"f16\" }"),
        rung("small.gguf", "\"q8_0\""),
        entry("big.gguf", TIER0, &hash(TIER0)),
        entry("small.gguf", TIER2, &hash(TIER2)),
    ];
    let ladder = open(&[("big.gguf", TIER0), ("small.gguf", TIER2)], &parts).unwrap();
    assert_eq!(ladder.rungs().len(), 3);
}

#[test]
fn what_is_wrong_is_named() {
    let both = [("big.gguf", TIER0), ("small.gguf", TIER2)];
    let (big, small) = (entry("big.gguf", TIER0, &hash(TIER0)), entry("small.gguf", TIER2, &hash(TIER2)));
    let rungs = [rung("big.gguf", "\"f32\""), rung("small.gguf", "\"f32\"")].concat();

    let wrong = entry("small.gguf", TIER2, &"0".repeat(64));
    check(&both, &[rungs.clone(), big.clone(), wrong], &["small.gguf", "0000000000"]);
    check(&both, &[rungs.clone(), big.clone(), small.clone(), "[rung.extra]\n".into()], &["extra"]);
    check(&both, &[format!("speed = 3\n{rungs}"), big.clone(), small.clone()], &["speed"]);
    check(&both, &[rung("big.gguf", "\"q3\""), big.clone()], &["precision"]);
    check(&both, &[rungs.clone(), big.clone()], &["tier1", "small.gguf"]);
    check(&both[..1], &[rungs.clone(), big.clone(), small.clone()], &["small.gguf", "molt pull mine"]);
    let rising = [rung("small.gguf", "\"f32\""), rung("big.gguf", "\"f32\"")].concat();
    check(&both, &[rising, big.clone(), small.clone()], &["mine", "tier1"]);
    let equal = [rung("big.gguf", "\"f32\""), rung("big.gguf", "\"f32\"")].concat();
    check(&both, &[equal, big.clone()], &["mine", "tier1"]);

    let other = patched(TIER2, "Ġthe".as_bytes(), "Ġzhe".as_bytes());
    let files = [("big.gguf", TIER0), ("other.gguf", &other[..])];
    let parts = [
        rung("big.gguf", "\"f32\""),
        rung("other.gguf", "\"f32\""),
        big.clone(),
        entry("other.gguf", &other, &hash(&other)),
    ];
    check(&files, &parts, &["another tokenizer", "big.gguf", "other.gguf"]);

    let reason = LadderFile::find("pockets").unwrap_err().to_string();
    assert!(reason.contains("pockets") && reason.contains("pocket, "), "{reason}");
}

fn check_file(bytes: &[u8], named: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.gguf");
    fs::write(&path, bytes).unwrap();
    let reason = ModelFile::open(&path).expect_err("must be refused").to_string();
    for name in named.iter().chain(&["broken.gguf"]) {
        assert!(reason.contains(name), "{name:?} is not named in: {reason}");
    }
}

#[test]
fn broken_model_files_are_refused() {
    check_file(&TIER2[..TIER2.len() - 1], &["truncated", "tensor"]);
    check_file(&TIER2[..TIER2.len() / 2], &["truncated", "tensor"]);
    check_file(&TIER2[..1_000], &[]);
    check_file(b"", &[]);
    check_file(b"GGUF", &[]);
    check_file(b"not a model at all, but long enough to look at", &[]);
    check_file(&patched(TIER2, b"qwen2.block_count", b"qwen2.block_c_unt"), &["block_count"]);
    check_file(&patched(TIER2, b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"), &["blk.1.ffn_up.weight"]);
    check_file(&patched(TIER2, b"token_embd.weight", b"token_xmbd.weight"), &["token"]);
    let family = patched(TIER2, b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0gemma");
    check_file(&family, &["gemma", "qwen2"]);
}

#[test]
fn every_prefix_of_a_header_is_refused_without_harm() {
    for length in (0..4_000).step_by(37) {
        check_file(&TIER2[..length], &[]);
    }
}

#[test]
fn the_embedded_files_are_those_that_their_ladder_names() {
    let (claim, _) = LadderFile::find("pocket").unwrap();
    for (name, bytes) in [("pocket-tier0.gguf", TIER0), ("pocket-tier2.gguf", TIER2)] {
        let file = claim.files.iter().find(|f| f.name == name).unwrap();
        assert_eq!((file.sha256.as_str(), file.bytes), (hash(bytes).as_str(), bytes.len() as u64), "{name}");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ladders/pocket");
    let total: u64 = fs::read_dir(folder).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert!(total <= 8_000_000, "the embedded ladder takes {total} bytes");
}

#[test]
fn text_goes_to_tokens_and_back() {
    let ladder = pocket();
    let tokenizer: &Tokenizer = ladder.tokenizer();
    for text in ["", "The people of the United States.", "Naïve café — 東京 🙂\n\n\tdon't", "a\u{0}b\u{7f}"] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text);
        let mut stream = molt_models::TextStream::default();
        let streamed: String = ids.iter().map(|id| stream.push(tokenizer, *id)).collect();
        assert_eq!(streamed + &stream.finish(), text, "never cut inside a character, nothing lost");
    }
}
