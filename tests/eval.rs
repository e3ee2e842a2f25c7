//! `molt eval` and `molt ladder new` as a person runs them.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::path::{Path, PathBuf};

use molt_tests::{events, molt};
use serde_json::Value;

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row} is no number"))
}

fn refused(args: &[&str], named: &[&str]) {
    let output = molt(args);
    let (out, reason) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && !reason.contains("panicked"), "molt {args:?}: {reason}");
    assert!(!out.contains("kl_64") && !out.contains("kl 64"), "rows in spite of an error: {out}");
    for name in named {
        assert!(reason.contains(name), "{name:?} is not named by molt {args:?}: {reason}");
    }
}

fn pocket(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../molt-models/ladders/pocket").join(file)
}

const KEYS: [&str; 18] = [
    "pair",
    "direction",
    "setting",
    "context_tokens",
    "cost_ratio",
    "carry_ms",
    "reread_ms",
    "seam_jsd_ratio",
    "kl_seam",
    "kl_8",
    "kl_64",
    "kl_256",
    "kl_64_low",
    "kl_64_high",
    "top1_64",
    "nll_delta_256",
    "ppl_ratio",
    "seams",
];

#[test]
fn a_quick_evaluation_judges_every_pair_in_every_way() {
    let rows = events(&["eval", "pocket", "--quick", "--json"]);
    let mut expected = Vec::new();
    for (pair, direction) in
        [("tier0:tier2", "down"), ("tier1:tier2", "down"), ("tier2:tier0", "up"), ("tier2:tier1", "up")]
    {
        for setting in ["fast", "default", "faithful", "shadowed", "healed", "keepsake"] {
            expected.push((pair, direction, setting));
        }
    }
    let text = |row: &'_ Value, key: &str| row[key].as_str().unwrap().to_owned();
    let found: Vec<_> = rows.iter().map(|r| (text(r, "pair"), text(r, "direction"), text(r, "setting"))).collect();
    let found: Vec<_> = found.iter().map(|(p, d, s)| (p.as_str(), d.as_str(), s.as_str())).collect();
    assert_eq!(found, expected);
    for row in &rows {
        let mut keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let mut all = KEYS;
        keys.sort_unstable();
        all.sort_unstable();
        assert_eq!(keys, all);
        assert_eq!((row["context_tokens"].as_u64(), row["seams"].as_u64()), (Some(128), Some(8)));
        let (kl, low, high) = (number(row, "kl_64"), number(row, "kl_64_low"), number(row, "kl_64_high"));
        assert!(low <= kl + 1e-12 && kl <= high + 1e-12, "{row}");
        assert!(number(row, "carry_ms") > 0.0 && number(row, "reread_ms") > 0.0, "{row}");
        let ratio = number(row, "reread_ms") / number(row, "carry_ms");
        assert!((number(row, "cost_ratio") / ratio - 1.0).abs() < 1e-9, "{row}");
        assert!((number(row, "ppl_ratio").ln() - number(row, "nll_delta_256")).abs() < 1e-9, "{row}");
        match row["setting"].as_str().unwrap() {
            "shadowed" | "healed" | "keepsake" => {
                assert!(number(row, "kl_seam") < 1e-9 && kl < 1e-9 && number(row, "kl_256") < 1e-9, "{row}");
                assert_eq!(number(row, "top1_64"), 1.0, "{row}");
                assert!((number(row, "seam_jsd_ratio") - 1.0).abs() < 1e-6, "{row}");
            }
            // A reader waits for all of so short a context, and nothing is mapped.
            "default" => assert!(kl < 1e-9 && number(row, "top1_64") == 1.0, "{row}"),
            _ => assert!(kl > 1e-6 && kl < 1.0 && number(row, "top1_64") <= 1.0, "{row}"),
        }
    }
    // Much read natively is closer.
    for of_pair in rows.chunks(6) {
        let kl: Vec<f64> = of_pair[..3].iter().map(|row| number(row, "kl_64")).collect();
        assert!(kl[2] < kl[0] && kl[1] <= kl[2], "fast, default and faithful: {kl:?}");
    }
}

#[test]
fn an_evaluation_is_taken_up_where_it_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("seams.jsonl");
    let resume = path.to_str().unwrap();
    let args = |seams: &'static str, settings: &'static str| {
        let fixed = ["eval", "pocket", "--contexts", "64", "--pairs", "tier0:tier2", "--json"];
        let words = [&fixed[..], &["--seams", seams, "--settings", settings, "--resume"]].concat();
        words.into_iter().map(str::to_owned).chain([resume.to_owned()]).collect::<Vec<String>>()
    };
    let run = |args: &[String]| events(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
    let first = run(&args("8", "default"));
    assert_eq!(lines(), 8);
    // Nothing is left to do: the same row, its times included, up to the last digit of a number read back.
    let same = |row: &Value, keys: &[&str]| {
        for key in keys {
            let (found, expected) = (number(row, key), number(&first[0], key));
            assert!((found - expected).abs() <= 1e-12 * expected.abs(), "{key}: {found} is not {expected}");
        }
    };
    let again = run(&args("8", "default"));
    assert_eq!(again.len(), 1);
    same(&again[0], &KEYS[4..]);
    assert_eq!(lines(), 8);
    // Another setting, and a last line that was cut off, are done; the rest is not.
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 20]).unwrap();
    let both = run(&args("8", "default,healed"));
    assert_eq!(lines(), 16);
    assert_eq!(both.len(), 2);
    same(&both[0], &["kl_seam", "kl_256", "top1_64", "seams"]);
    // Figures are those of the line, so that a file of another program shows.
    std::fs::write(&path, text.replace("\"kl_64\":", "\"kl_46\":")).unwrap();
    let spoilt: Vec<String> = args("8", "default");
    refused(&spoilt.iter().map(String::as_str).collect::<Vec<_>>(), &["seams.jsonl", "line 1", "kl_46"]);
}

#[test]
fn what_cannot_be_judged_is_said_and_no_row_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    refused(&["eval", "pockets"], &["pockets"]);
    refused(&["eval", "pocket", "--contexts", "512"], &["512", "769"]);
    refused(&["eval", "pocket", "--pairs", "tier0:tier1"], &["tier0:tier1", "tier2:tier0"]);
    refused(&["eval", "pocket", "--pairs", "tier0"], &["tier0:tier1"]);
    refused(&["eval", "pocket", "--settings", "fastest"], &["fastest", "faithful"]);
    refused(&["eval", "pocket", "--quick", "--held-out", &write("short.txt", "So few words.".to_owned())], &["385"]);
    // Where every context says the same, another text's cache does no harm: nothing would be learnt here.
    let same = write("same.txt", "the people of the United States ".repeat(400));
    refused(&["eval", "pocket", "--quick", "--held-out", &same], &["gate", "tier0:tier2", "no figure counts"]);
}

#[test]
fn a_ladder_of_ones_own_is_made_fitted_and_judged() {
    let folder = tempfile::tempdir().unwrap();
    let (big, small) = (pocket("pocket-tier0.gguf"), pocket("pocket-tier2.gguf"));
    let out = folder.path().to_str().unwrap();
    // The smaller one first: they are put in order.
    let files = [small.to_str().unwrap(), big.to_str().unwrap()];
    let fixed = ["ladder", "new", "mine"];
    let args = [&fixed[..], &files, &["--out", out, "--both", "--windows", "24", "--seams", "4"]].concat();
    let output = molt(&args);
    let (told, reason) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{reason}");
    for line in ["tier0  pocket-tier0.gguf", "tier1  pocket-tier2.gguf"] {
        assert!(told.contains(line), "{line:?} is not told: {told}");
    }
    for pair in ["tier0 -> tier1: ", "tier1 -> tier0: "] {
        let sentence = told.lines().find_map(|line| line.strip_prefix(pair)).unwrap_or_else(|| panic!("{told}"));
        assert!(["close: ", "usable: ", "poor: "].iter().any(|word| sentence.starts_with(word)), "{sentence}");
        assert!(sentence.contains("kl over 64 tokens") && sentence.contains("same favourite"), "{sentence}");
    }
    // What was written is a ladder like any other.
    let ladder = folder.path().join("mine.toml");
    let ladder = ladder.to_str().unwrap();
    let rows = events(&["eval", ladder, "--quick", "--settings", "default", "--json"]);
    let pairs: Vec<_> = rows.iter().map(|row| row["pair"].as_str().unwrap()).collect();
    assert_eq!(pairs, ["tier0:tier1", "tier1:tier0"]);
    assert!(events(&["demo", "--ladder", ladder, "--tokens", "40", "--json"]).iter().any(|e| e["event"] == "summary"));
    refused(&args, &["mine.toml", "there already"]);
}

#[test]
fn files_that_are_no_ladder_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let big = pocket("pocket-tier0.gguf");
    let big = big.to_str().unwrap();
    let patched = |name: &str, from: &[u8], to: &[u8]| {
        let mut bytes = std::fs::read(pocket("pocket-tier2.gguf")).unwrap();
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let check = |name: &str, files: &[&str], named: &[&str]| {
        refused(&[&["ladder", "new", name, "--out", out][..], files].concat(), named);
        assert!(!folder.path().join(format!("{name}.toml")).exists());
    };
    let other = patched("other.gguf", "Ġthe".as_bytes(), "Ġzhe".as_bytes());
    check("mine", &[big, &other], &["other.gguf", "pocket-tier0.gguf", "Ġzhe"]);
    let family = patched("family.gguf", b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0gemma");
    check("mine", &[big, &family], &["family.gguf", "gemma", "qwen2"]);
    check("mine", &[big, big], &["pocket-tier0.gguf", "smaller"]);
    check("mine", &[big, "/nowhere/small.gguf"], &["/nowhere/small.gguf"]);
    check("pocket", &[big], &["pocket", "built-in"]);
    check("a/b", &[big], &["a/b"]);
}
