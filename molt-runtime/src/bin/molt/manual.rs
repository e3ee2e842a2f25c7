//! `molt completions` and `molt man`.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;
use molt_runtime::manual;

use crate::Cli;

/// Print completions for a shell, for example: molt completions bash > /etc/bash_completion.d/molt
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: manual::Shell,
}

/// Write the manual pages into a folder.
#[derive(clap::Args)]
pub(crate) struct ManArgs {
    /// The folder; made if it is not there.
    folder: PathBuf,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    manual::completions(Cli::command(), args.shell, &mut std::io::stdout()).context("cannot print")
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    manual::pages(Cli::command(), &args.folder).with_context(|| format!("cannot write to {}", args.folder.display()))
}
