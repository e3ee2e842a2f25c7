//! What is part of the program: the built-in ladders, the models of `pocket` and the fitted bridges.

/// Ladder files by name.
const LADDERS: &[(&str, &str)] = &[
    ("pocket", include_str!("../ladders/pocket.toml")),
    ("qwen2.5-coder", include_str!("../ladders/qwen2.5-coder.toml")),
    ("smollm2", include_str!("../ladders/smollm2.toml")),
    ("qwen2.5-coder-seed", include_str!("../ladders/qwen2.5-coder-seed.toml")),
];

/// Models and bridges by file name.
const FILES: &[(&str, &[u8])] = &[
    (
        "qwen2.5-coder-1.5b-to-0.5b.bridge.safetensors",
        include_bytes!("../ladders/qwen2.5-coder-1.5b-to-0.5b.bridge.safetensors"),
    ),
    ("pocket-tier0.gguf", include_bytes!("../ladders/pocket/pocket-tier0.gguf")),
    ("pocket-tier2.gguf", include_bytes!("../ladders/pocket/pocket-tier2.gguf")),
    (
        "pocket-tier0-to-tier2.bridge.safetensors",
        include_bytes!("../ladders/pocket/pocket-tier0-to-tier2.bridge.safetensors"),
    ),
    (
        "pocket-tier2-to-tier0.bridge.safetensors",
        include_bytes!("../ladders/pocket/pocket-tier2-to-tier0.bridge.safetensors"),
    ),
];

/// Names of the built-in ladders.
pub(crate) fn ladders() -> impl Iterator<Item = &'static str> {
    LADDERS.iter().map(|(name, _)| *name)
}

/// The text of a built-in ladder file.
pub(crate) fn ladder(name: &str) -> Option<&'static str> {
    LADDERS.iter().find(|(own, _)| *own == name).map(|(_, text)| *text)
}

/// A file that is part of the program.
pub(crate) fn file(name: &str) -> Option<&'static [u8]> {
    FILES.iter().find(|(own, _)| *own == name).map(|(_, bytes)| *bytes)
}
