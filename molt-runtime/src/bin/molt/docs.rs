//! Documents show commands; here each is held against the parser of the program, and figures against their constants.

use std::path::Path;

use clap::{CommandFactory as _, Parser as _};
use molt_runtime::own_ladder::{CLOSE_KL_64, USABLE_KL_64};

use crate::Cli;

const PAGES: &[(&str, &str)] = &[
    ("README.md", include_str!("../../../../README.md")),
    ("docs/operator.md", include_str!("../../../../docs/operator.md")),
    ("docs/contributor.md", include_str!("../../../../docs/contributor.md")),
    ("docs/bring-your-own-models.md", include_str!("../../../../docs/bring-your-own-models.md")),
];

/// The commands of a page's ```console blocks, without the prompt.
fn commands(page: &str) -> Vec<&str> {
    let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("$ ")).collect()
}

#[test]
fn every_command_that_is_shown_is_one() {
    let mut seen = 0;
    for (name, page) in PAGES {
        for command in commands(page) {
            let words = shlex::split(command).unwrap_or_else(|| panic!("{name}: {command} has an open quote"));
            if words.first().is_some_and(|word| word == "molt") {
                seen += 1;
                if let Err(error) = Cli::try_parse_from(&words) {
                    panic!("{name}: {command}: {error}");
                }
            }
            // What is run from the repository is there.
            for path in words.iter().filter(|word| word.starts_with("deploy/") || word.starts_with("tenants/")) {
                let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
                assert!(root.join(path).exists(), "{name}: {command}: there is no {path}");
            }
        }
    }
    assert!(seen >= 20, "only {seen} commands were found");
}

#[test]
fn commands_named_in_running_text_exist() {
    let cli = Cli::command();
    for (name, page) in PAGES {
        for named in page.split("`molt ").skip(1).filter_map(|rest| rest.split('`').next()) {
            let word = named.split([' ', '\n']).next().unwrap_or_default();
            let known = cli.find_subcommand(word).is_some() || word.starts_with("--") || word.contains(',');
            assert!(known, "{name}: `molt {named}`");
        }
    }
}

#[test]
fn figures_are_those_of_the_program() {
    let page = PAGES.iter().find(|(name, _)| name.ends_with("models.md")).map_or("", |(_, page)| page);
    for (verdict, most) in [("close", CLOSE_KL_64), ("usable", USABLE_KL_64)] {
        let row = format!("| {verdict} | at most {most:.2} |");
        assert!(page.contains(&row), "{row} is not in the page");
    }
}
