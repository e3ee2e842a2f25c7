//! Which ladders are here, whole and the right ones.

use std::path::Path;

use molt_models::LadderFile;
use molt_models::pull::{PullError, verify};

use super::Finding;

/// One finding for each built-in ladder. Files are held against their hashes; those that were before are not read again.
pub(super) fn findings(models: &Path) -> Vec<Finding> {
    LadderFile::built_in().map(|name| ladder(name, models)).collect()
}

fn ladder(name: &str, models: &Path) -> Finding {
    let about = format!("ladder {name}");
    let claim = match LadderFile::find(name) {
        Ok((claim, _)) => claim,
        Err(error) => {
            return Finding::broken(&about, error.to_string(), "report it: the ladder is part of the program");
        }
    };
    let files = claim.files_to_pull();
    if files.is_empty() {
        return Finding::good(&about, "part of the program");
    }
    let missing = files.iter().filter(|file| !models.join(&file.name).exists()).count();
    if missing > 0 {
        let says = format!("{missing} of {} model files are not in {}", files.len(), models.display());
        return Finding::missing(&about, says, format!("`molt pull {name}` fetches them"));
    }
    let held = files.iter().map(|file| verify(&models.join(&file.name), &file.sha256, file.bytes));
    match held.collect::<Result<Vec<_>, PullError>>() {
        Ok(held) => Finding::good(&about, format!("{} model files, the right ones", held.len())),
        Err(error) => {
            Finding::broken(&about, error.to_string(), format!("remove the file and `molt pull {name}` again"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn files_that_are_missing_or_wrong_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let state = |name: &str| {
            let finding = ladder(name, folder.path());
            (finding.state, finding.says)
        };
        assert_eq!(state("pocket").0, State::Good);
        let (found, says) = state("qwen2.5-coder");
        assert_eq!(found, State::Missing);
        assert!(says.starts_with("2 of 2"), "{says}");
        let (claim, _) = LadderFile::find("qwen2.5-coder").unwrap();
        for file in claim.files_to_pull() {
            std::fs::write(folder.path().join(file.name), "short").unwrap();
        }
        assert_eq!(state("qwen2.5-coder").0, State::Broken);
        assert_eq!(findings(folder.path()).len(), LadderFile::built_in().count());
    }
}
