//! What the documents show of `moltd`, links between them, the tests that they name, and the list of unsafe code.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::BTreeMap;
use std::process::Command;

use molt_tests::{program, root};

fn pages() -> Vec<(String, String)> {
    let folders = [root(), root().join("docs"), root().join("deploy"), root().join("tenants"), root().join("traces")];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    let pages = files.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    pages.map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap())).collect()
}

#[test]
fn flags_of_the_daemon_are_its_own() {
    let help = Command::new(program("moltd")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let mut seen = 0;
    for (name, page) in pages() {
        let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
        for line in blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("$ moltd ")) {
            for flag in line.split_whitespace().filter(|word| word.starts_with("--")) {
                seen += 1;
                assert!(help.contains(flag), "{name}: moltd has no {flag}");
            }
        }
    }
    assert!(seen >= 3, "only {seen} flags were found");
}

#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    for (name, page) in pages() {
        let folder = std::path::Path::new(&name).parent().unwrap().to_owned();
        for target in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = target.split('#').next().unwrap();
            if path.is_empty() || path.contains("://") {
                continue;
            }
            seen += 1;
            assert!(folder.join(path).exists(), "{name} links to {target}");
        }
    }
    assert!(seen >= 10, "only {seen} links were found");
}

/// Everything in the repository that is Rust: its path from the root, and its text.
fn sources() -> BTreeMap<String, String> {
    let (mut folders, mut all) = (vec![root()], BTreeMap::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let from_root = path.strip_prefix(root()).unwrap().display().to_string();
                all.insert(from_root, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    all
}

#[test]
fn the_list_of_unsafe_code_is_true() {
    // Put together here, so that this file does not count.
    let marks = ["{", "fn", "impl", "extern"].map(|what| ["unsafe", what].join(" "));
    let in_source = |text: &str| marks.iter().map(|mark| text.matches(mark.as_str()).count()).sum::<usize>();
    let sources = sources().into_iter();
    let found: BTreeMap<String, usize> =
        sources.map(|(path, text)| (path, in_source(&text))).filter(|(_, count)| *count > 0).collect();
    let page = std::fs::read_to_string(root().join("docs/unsafe.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let listed: BTreeMap<String, usize> = rows
        .map(|(path, rest)| {
            let (count, why) = rest.split_once(" | ").unwrap();
            assert!(why.len() > 20, "{path} has no reason");
            (path.to_owned(), count.parse().unwrap())
        })
        .collect();
    assert_eq!(listed, found, "docs/unsafe.md (left) is not what the sources hold (right)");
}

#[test]
fn tests_that_are_named_as_proof_exist() {
    let sources: String = sources().into_values().collect();
    for page in ["docs/complaints.md", "SPECIFICATION.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let word =
            |code: &&str| code.matches('_').count() >= 2 && code.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let named: Vec<&str> = text.split('`').skip(1).step_by(2).filter(word).collect();
        assert!(named.len() >= 20, "{page} names only {} tests", named.len());
        for test in named {
            assert!(sources.contains(&format!("fn {test}(")), "{page} names the test {test}, which is not there");
        }
    }
}
