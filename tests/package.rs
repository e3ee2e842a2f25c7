//! The Debian package: built, looked into, unpacked, and its daemon started from its own configuration.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use molt_tests::{program, root};

/// Past the test harness, which would keep it to itself.
fn skipped(reason: &str) {
    std::io::stderr().write_all(format!("SKIPPED: {reason}\n").as_bytes()).unwrap();
}

fn installed(name: &str) -> bool {
    Command::new(name).arg("--version").output().is_ok()
}

fn package(out: &Path) -> PathBuf {
    program("molt");
    let built = Command::new(root().join("deploy/deb/build")).arg("--fast").env("MOLT_DEB_OUT", out).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let found = std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
    found.into_iter().find(|path| path.extension().is_some_and(|ending| ending == "deb")).unwrap()
}

fn dpkg_deb(args: &[&str], package: &Path, more: &[&Path]) -> String {
    let output = Command::new("dpkg-deb").args(args).arg(package).args(more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn it_installs_everything_and_its_daemon_serves() {
    if !installed("cargo-deb") || !installed("dpkg-deb") {
        return skipped("cargo-deb or dpkg-deb is not installed (cargo install cargo-deb)");
    }
    let folder = tempfile::tempdir().unwrap();
    let package = package(folder.path());
    let content = dpkg_deb(&["--contents"], &package, &[]);
    for path in [
        "usr/bin/molt",
        "usr/bin/moltd",
        "usr/lib/systemd/system/moltd.service",
        "usr/lib/systemd/system/moltd.socket",
        "usr/lib/sysusers.d/molt.conf",
        "etc/molt/moltd.toml",
        "usr/share/man/man1/molt.1.gz",
        "usr/share/man/man1/molt-batch.1.gz",
        "usr/share/man/man1/moltd.1.gz",
        "usr/share/bash-completion/completions/molt",
        "usr/share/zsh/vendor-completions/_molt",
        "usr/share/fish/vendor_completions.d/moltd.fish",
        "usr/share/molt/prometheus/molt.rules.yml",
        "usr/share/molt/grafana/molt.json",
        "usr/share/molt/profiles/phone.toml",
        "usr/share/doc/molt/copyright",
    ] {
        assert!(content.lines().any(|line| line.ends_with(&format!("./{path}"))), "{path} is not in\n{content}");
    }
    assert!(!content.contains(".deb-assets"), "{content}");
    assert!(dpkg_deb(&["--field"], &package, &[]).contains("Package: molt\n"));

    // What runs when it is installed, and when it is purged.
    let scripts = folder.path().join("control");
    dpkg_deb(&["--control"], &package, &[&scripts]);
    let script = |name: &str| std::fs::read_to_string(scripts.join(name)).unwrap();
    assert_eq!(script("conffiles").trim(), "/etc/molt/moltd.toml");
    let postinst = script("postinst");
    let user = postinst.find("systemd-sysusers").expect("the user is made");
    let start = postinst.find("deb-systemd-invoke").expect("the units are started");
    assert!(user < start && postinst.contains("deb-systemd-helper enable moltd.socket"), "{postinst}");
    assert!(script("postrm").contains("rm -rf /var/lib/molt") && script("postrm").contains("deb-systemd-helper"));

    let scratch = folder.path().join("root");
    dpkg_deb(&["--extract"], &package, &[&scratch]);
    let moltd = scratch.join("usr/bin/moltd");
    let config = scratch.join("etc/molt/moltd.toml");
    let checked = Command::new(&moltd).arg("check").arg("--config").arg(&config).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let socket = folder.path().join("molt.sock");
    let daemon = Command::new(&moltd).arg("--config").arg(&config).arg("--socket").arg(&socket).spawn().unwrap();
    let mut daemon = Stopped(daemon);
    let molt = scratch.join("usr/bin/molt");
    let answer = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut ask = Command::new(&molt);
        ask.args(["complete", "The people", "--max-tokens", "5", "--socket"]).arg(&socket).output().unwrap()
    });
    let answer = answer.take(300).find(|answer| answer.status.success()).expect("the installed daemon answers");
    assert!(!answer.stdout.trim_ascii().is_empty());
    assert!(daemon.0.try_wait().unwrap().is_none());
}

/// A process that ends with the test.
struct Stopped(std::process::Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped = self.0.wait();
    }
}
