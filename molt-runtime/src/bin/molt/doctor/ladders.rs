//! Which ladders are here, whole and the right ones.

use molt_models::LadderFile;
use molt_models::pull::{PullError, verify};

use super::Finding;
use super::folder::Folder;

/// One finding for each built-in ladder. Files are held against their hashes; those that were before are not read again.
pub(super) fn findings(models: &Folder) -> Vec<Finding> {
    LadderFile::built_in().map(|name| ladder(name, models)).collect()
}

fn ladder(name: &str, models: &Folder) -> Finding {
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
    let missing = files.iter().filter(|file| !models.path.join(&file.name).exists()).count();
    if missing > 0 {
        let of_service = if models.of_service { ", where the service looks" } else { "" };
        let path = models.path.display();
        let says = format!("{missing} of {} model files are not in {path}{of_service}", files.len());
        return Finding::missing(&about, says, format!("{} fetches them", models.pull(name)));
    }
    let held = files.iter().map(|file| verify(&models.path.join(&file.name), &file.sha256, file.bytes));
    match held.collect::<Result<Vec<_>, PullError>>() {
        Ok(held) => Finding::good(&about, format!("{} model files, the right ones", held.len())),
        Err(error) => {
            Finding::broken(&about, error.to_string(), format!("remove the file and call {}", models.pull(name)))
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
        let models = Folder { path: folder.path().to_owned(), of_service: false };
        let state = |name: &str| {
            let finding = ladder(name, &models);
            (finding.state, finding.says)
        };
        assert_eq!(state("pocket").0, State::Good);
        let (found, says) = state("qwen2.5-coder");
        assert_eq!(found, State::Missing);
        assert!(says.starts_with("2 of 2"), "{says}");
        // What the service reads its own user must fetch.
        let advice = ladder("qwen2.5-coder", &Folder { of_service: true, ..models.clone() }).advice.unwrap();
        assert!(advice.starts_with("`sudo -u molt molt pull qwen2.5-coder --models "), "{advice}");
        let (claim, _) = LadderFile::find("qwen2.5-coder").unwrap();
        for file in claim.files_to_pull() {
            std::fs::write(folder.path().join(file.name), "short").unwrap();
        }
        assert_eq!(state("qwen2.5-coder").0, State::Broken);
        assert_eq!(findings(&models).len(), LadderFile::built_in().count());
    }
}
