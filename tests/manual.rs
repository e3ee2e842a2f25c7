//! Shell completions and manual pages, as the programs write them and as their readers take them.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::process::Command;

use molt_tests::program;

#[test]
fn shells_take_the_completions() {
    let folder = tempfile::tempdir().unwrap();
    for (name, word) in [("molt", "batch"), ("moltd", "--socket")] {
        for shell in ["bash", "zsh", "fish"] {
            let written = Command::new(program(name)).args(["completions", shell]).output().unwrap();
            let text = String::from_utf8(written.stdout).unwrap();
            assert!(written.status.success() && text.contains(word.trim_start_matches('-')), "{name} {shell}: {text}");
            let file = folder.path().join(format!("{name}.{shell}"));
            std::fs::write(&file, text).unwrap();
            // A shell that is not installed cannot be asked; bash is on every machine that builds Molt.
            if let Ok(read) = Command::new(shell).arg("-n").arg(&file).output() {
                assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
            }
        }
    }
    // Bash completes a word with it.
    let script = format!(
        "source {}; COMP_WORDS=(molt bat); COMP_CWORD=1; _molt molt bat molt; echo \"${{COMPREPLY[@]}}\"",
        folder.path().join("molt.bash").display()
    );
    let completed = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&completed.stdout).trim(), "batch", "{completed:?}");
}

#[test]
fn every_command_has_a_page_and_the_exit_codes_are_told() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["molt", "moltd"] {
        let help = Command::new(program(name)).arg("--help").output().unwrap();
        assert!(String::from_utf8(help.stdout).unwrap().contains("Exit codes"));
        assert!(Command::new(program(name)).arg("man").arg(folder.path()).status().unwrap().success());
        let page = std::fs::read_to_string(folder.path().join(format!("{name}.1"))).unwrap();
        assert!(page.contains("Exit codes") && page.contains("130"), "{page}");
    }
    for command in ["demo", "chat", "batch", "events", "top", "doctor", "tenants", "budget", "ladder-new", "pull"] {
        let page = std::fs::read_to_string(folder.path().join(format!("molt-{command}.1"))).unwrap();
        assert!(page.starts_with(".ie") || page.contains(".TH"), "{page}");
    }
    // groff finds nothing to complain about, where it is installed.
    if let Ok(set) =
        Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).arg(folder.path().join("molt.1")).output()
    {
        assert_eq!(String::from_utf8_lossy(&set.stderr), "");
    }
}
