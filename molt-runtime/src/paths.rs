//! Where things lie on this machine.

use std::path::PathBuf;

/// The folder of model files: `$MOLT_MODELS`, or `molt/models` in the user's data folder (XDG Base Directory
/// Specification); `None` where neither it nor `$HOME` is set.
pub fn models_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("MOLT_MODELS")
        .or_else(|| from("XDG_DATA_HOME").map(|home| home.join("molt/models")))
        .or_else(|| from("HOME").map(|home| home.join(".local/share/molt/models")))
}
