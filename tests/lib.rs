//! Runs the real programs and reads what they print.

pub mod daemon;
pub mod home;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// A program of the workspace, built if it is not (tests of this crate alone would not build it).
pub fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        // .../target/release/deps/test-binary
        let own = std::env::current_exe().unwrap_or_default();
        let folder = own.ancestors().nth(2).map(PathBuf::from).unwrap_or_default();
        let profile = if folder.ends_with("debug") { "dev" } else { "release" };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built =
            Command::new(cargo).args(["build", "--profile", profile, "--quiet", "--workspace", "--bins"]).status();
        assert!(built.is_ok_and(|status| status.success()), "the programs do not build");
        folder
    });
    folder.join(name)
}

/// The root of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// An example of the workspace, built if it is not.
pub fn example(name: &str) -> PathBuf {
    let folder = program("examples");
    let profile = if folder.parent().is_some_and(|folder| folder.ends_with("debug")) { "dev" } else { "release" };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built =
        Command::new(cargo).args(["build", "--profile", profile, "--quiet", "--workspace", "--example", name]).status();
    assert!(built.is_ok_and(|status| status.success()), "the example {name} does not build");
    folder.join(name)
}

/// Runs `molt` to its end.
pub fn molt(args: &[&str]) -> Output {
    let run = Command::new(program("molt")).args(args).output();
    match run {
        Ok(output) => output,
        Err(error) => panic!("molt does not start: {error}"),
    }
}

/// Runs `molt`, which must succeed, and reads its standard output as one JSON object a line.
pub fn events(args: &[&str]) -> Vec<Value> {
    let output = molt(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "molt {args:?} failed: {err}");
    let parse = |line: &str| match serde_json::from_str(line) {
        Ok(value) => value,
        Err(error) => panic!("not a JSON object: {line:?}: {error}"),
    };
    out.lines().map(parse).collect()
}

/// The folder that `molt pull` fills.
pub fn models_folder() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("MOLT_MODELS")
        .or_else(|| from("XDG_DATA_HOME").map(|home| home.join("molt/models")))
        .or_else(|| from("HOME").map(|home| home.join(".local/share/molt/models")))
        .unwrap_or_default()
}

/// The sum over all lines of that family of metrics whose labels contain all of these.
pub fn sum(text: &str, name: &str, labels: &[&str]) -> f64 {
    let of_family = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
    let lines = text.lines().filter(of_family).filter(|line| labels.iter().all(|label| line.contains(label)));
    let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
    lines.map(|line| value(line).expect("a line ends with a number")).sum()
}

/// The SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
