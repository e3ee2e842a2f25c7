//! A rung that was kept is the rung that is built, and a file that is not it is refused by name.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{PROSE, TIER0, pocket, read};
use molt_kv::ledger::{Kind, Ledger};
use molt_models::{Ladder, LadderFile, Model, Precision, Stored};

const SMALL: &str = "pocket-tier2.gguf";

/// A ladder of one rung: the smallest model of `pocket` at a precision.
fn ladder(precision: Precision, models: &Path) -> Result<Ladder, String> {
    let (mut claim, _) = LadderFile::find("pocket").unwrap();
    claim.rungs.retain(|rung| rung.file == SMALL);
    claim.rungs.truncate(1);
    claim.rungs[0].precision = precision;
    claim.bridges.clear();
    Ladder::check(&claim, None, models).map_err(|e| e.to_string())
}

fn loaded(ladder: &Ladder) -> (Model, Ledger) {
    let ledger = Ledger::new();
    (common::load(ladder, TIER0, &ledger), ledger)
}

fn logits(ladder: &Ladder) -> Vec<f32> {
    let (model, ledger) = loaded(ladder);
    let tokens = ladder.tokenizer().encode(PROSE).unwrap();
    let (_, hidden) = read(&model, &tokens[..40], &ledger);
    model.with_logits(&hidden, |logits| logits.to_vec())
}

fn keep(ladder: &Ladder, models: &Path) -> PathBuf {
    let mut heard = Vec::new();
    let path = ladder.rungs()[0].keep(models, |done, total| heard.push((done, total))).unwrap().unwrap();
    assert!(heard.is_sorted() && heard.last().is_some_and(|(done, total)| done == total), "{heard:?}");
    path
}

#[test]
fn a_kept_rung_is_the_built_one() {
    let check = |linear, table| {
        let (precision, models) = (Precision { linear, table }, tempfile::tempdir().unwrap());
        let built = ladder(precision, models.path()).unwrap();
        assert!(built.rung(TIER0).unwrap().kept().is_none());
        keep(&built, models.path());
        let kept = ladder(precision, models.path()).unwrap();
        assert!(kept.rung(TIER0).unwrap().kept().is_some(), "{precision}: the kept rung is not found");
        let ((a, books), (b, other)) = (loaded(&built), loaded(&kept));
        assert_eq!(books.used(Kind::Weights), other.used(Kind::Weights), "{precision}");
        assert_eq!(a.bytes_per_token(), b.bytes_per_token(), "{precision}");
        assert_eq!(logits(&built), logits(&kept), "{precision}");
    };
    check(Stored::F32, Stored::F32);
    check(Stored::Q4_0, Stored::F16);
    check(Stored::Q8_0, Stored::Q8_0);
    check(Stored::Q4_0, Stored::AsStored);
}

#[test]
fn what_lies_in_the_model_file_is_not_kept() {
    let check = |stored| {
        let models = tempfile::tempdir().unwrap();
        let ladder = ladder(Precision { linear: stored, table: stored }, models.path()).unwrap();
        assert_eq!(ladder.rungs()[0].keep(models.path(), |_, _| ()).unwrap(), None);
        assert_eq!(fs::read_dir(models.path()).unwrap().count(), 0);
    };
    check(Stored::AsStored);
    // So the models of `pocket` are stored.
    check(Stored::F16);
}

#[test]
fn another_file_is_refused_by_name() {
    let precision = Precision { linear: Stored::Q8_0, table: Stored::Q8_0 };
    let check = |spoil: &dyn Fn(&Path), reason: &str| {
        let models = tempfile::tempdir().unwrap();
        let path = keep(&ladder(precision, models.path()).unwrap(), models.path());
        spoil(&path);
        let error = ladder(precision, models.path()).unwrap_err();
        let name = path.display().to_string();
        assert!(error.contains(&name) && error.contains(reason) && error.contains("delete it"), "{error}");
    };
    check(&|path| fs::write(path, b"no rung").unwrap(), "header");
    check(
        &|path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        },
        "header",
    );
    check(
        &|path| {
            // The same bytes under the name of the rung, made at another precision.
            let models = tempfile::tempdir().unwrap();
            let other = Precision { linear: Stored::Q4_0, table: Stored::F32 };
            fs::copy(keep(&ladder(other, models.path()).unwrap(), models.path()), path).unwrap();
        },
        "precision is q4_0",
    );
    check(
        &|path| {
            let text = fs::read(path).unwrap();
            let ladder = pocket();
            let (source, other) = (ladder.rungs()[2].source(), ladder.rungs()[0].source());
            let at = text.windows(source.len()).position(|part| part == source.as_bytes()).unwrap();
            let mut text = text;
            text[at..at + other.len()].copy_from_slice(other.as_bytes());
            fs::write(path, text).unwrap();
        },
        "model is",
    );
}

#[test]
fn nothing_is_left_of_a_rung_that_cannot_be_kept() {
    let models = tempfile::tempdir().unwrap();
    let ladder = ladder(Precision { linear: Stored::F32, table: Stored::F32 }, models.path()).unwrap();
    // A file where the folder should be.
    fs::write(models.path().join("built"), "").unwrap();
    let rung = &ladder.rungs()[0];
    let path = rung.kept_path(models.path()).unwrap();
    let error = rung.keep(models.path(), |_, _| ()).unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert_eq!(fs::read_dir(models.path()).unwrap().count(), 1);
    loaded(&ladder);
}
