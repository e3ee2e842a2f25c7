//! Manual pages and shell completions, made from what a program says of its own arguments.

use std::io::{self, Write};
use std::path::Path;

use clap::Command;
pub use clap_complete::Shell;

/// What `molt` and `moltd` end with, for `--help` and the manual.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed; standard error says why
  2    the command line makes no sense
  130  ended by Ctrl-C";

/// Writes the completions of a program for a shell.
pub fn completions(mut program: Command, shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let name = program.get_name().to_owned();
    // Written at once: the generator panics where its output is closed.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut program, name, &mut text);
    out.write_all(&text)
}

/// Writes the manual pages of a program and of its commands into a folder, which is made if it is not there.
pub fn pages(program: Command, folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(program, folder)
}
