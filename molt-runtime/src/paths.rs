//! Where things lie on this machine.

use std::path::PathBuf;

fn from(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The folder of model files that somebody has named: `$MOLT_MODELS`.
pub fn named_models_folder() -> Option<PathBuf> {
    from("MOLT_MODELS")
}

/// The folder of model files: `$MOLT_MODELS`, or `molt/models` in the user's data folder (XDG Base Directory
/// Specification); `None` where neither it nor `$HOME` is set.
pub fn models_folder() -> Option<PathBuf> {
    named_models_folder()
        .or_else(|| from("XDG_DATA_HOME").map(|home| home.join("molt/models")))
        .or_else(|| from("HOME").map(|home| home.join(".local/share/molt/models")))
}
