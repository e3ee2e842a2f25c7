//! A folder that daemons are started on one after another.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::program;

/// A folder with a configuration, and the daemons that are started on it one after another.
pub struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    /// With those lines of configuration.
    ///
    /// # Panics
    /// Where the disk takes nothing, as in all of these.
    pub fn new(config: &str) -> Self {
        let home = Self { folder: tempfile::tempdir().expect("a folder") };
        let state = home.state();
        std::fs::write(
            home.config(),
            format!("{config}\n[state]\nfolder = {:?}\nevery_tokens = 40\n", state.display().to_string()),
        )
        .expect("a file of the folder");
        home
    }

    /// Where its daemons keep what outlives them.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// What is there of answers, with that ending.
    pub fn files(&self, ending: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.state().join("answers")).into_iter().flatten();
        let paths = entries.map(|entry| entry.expect("a file of the folder").path());
        paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
    }

    /// Its configuration.
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("moltd.toml")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(program("moltd"));
        self.arguments(&mut command);
        command
    }

    /// Gives a command what a daemon of this folder is started with.
    pub fn arguments(&self, command: &mut Command) {
        let socket = self.folder.path().join("molt.sock");
        command.arg("--config").arg(self.config()).arg("--socket").arg(socket);
        command.args(["--budget-mib", "256"]);
    }

    /// Starts a daemon.
    pub fn start(&self) -> Daemon {
        self.run(&mut self.command())
    }

    /// Starts what the command says.
    pub fn run(&self, command: &mut Command) -> Daemon {
        Daemon::run(command, self.folder.path().join("molt.sock"))
    }
}

/// A request for a long answer, streamed; the same seed gets the same one.
pub fn asked(seed: u64, tokens: u64) -> Value {
    let prompt = "Fellow-citizens of the Senate and House of Representatives: The past year has been one of peace and of \
        plenty, and the people of every State have good reason to be content with what it has brought to them.";
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": seed, "stream": true,
        "frequency_penalty": 0.3, "stop": ["\n\n\n\n"], "stream_options": {"include_usage": true}})
}
