//! What `moltd` says to a supervisor and takes from it. Neither needs systemd as the first process.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use molt_tests::daemon::Daemon;

#[test]
fn it_is_ready_then_alive_then_stopping() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("molt.sock");
    let supervisor = UnixDatagram::bind(folder.path().join("notify.sock")).unwrap();
    supervisor.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut command = Command::new(molt_tests::program("moltd"));
    let file = folder.path().join("moltd.toml");
    std::fs::write(&file, "").unwrap();
    command.arg("--config").arg(&file).args(["--budget-mib", "256", "--socket"]).arg(&socket);
    command.env("NOTIFY_SOCKET", folder.path().join("notify.sock")).env("WATCHDOG_USEC", "1000000");
    let mut daemon = Daemon::run(&mut command, socket);
    let hear = || {
        let mut message = [0; 1_024];
        let read = supervisor.recv(&mut message).expect("the supervisor hears something");
        String::from_utf8_lossy(&message[..read]).trim().to_owned()
    };
    let until = |wanted: &str| {
        let heard: Vec<String> = std::iter::repeat_with(hear).take(20).take_while(|said| said != wanted).collect();
        assert!(heard.len() < 20, "{wanted} is not in {heard:?}");
        heard
    };
    let first = until("READY=1");
    assert!(!first.iter().any(|said| said == "WATCHDOG=1"), "ready comes first");
    // An idle engine makes rounds too.
    until("WATCHDOG=1");
    until("WATCHDOG=1");
    // The line for people follows the budget.
    assert_eq!(daemon.ask("PUT", "/v1/budget", br#"{"budget_bytes": 209715200}"#).0, 200);
    until("STATUS=serving pocket, budget 200.0 MiB");
    // A reload is told with the time at which it began, and is done when the daemon says again that it is ready: whoever
    // waited for that finds what the file says.
    let register = || daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#).0;
    let mut last = 0;
    for (config, status) in [("[tenants]\nregistrations = 1\n", 201), ("sokcet = 3\n", 429), ("", 201)] {
        std::fs::write(&file, config).unwrap();
        daemon.signal("HUP");
        let began = std::iter::repeat_with(hear).find_map(|said| {
            said.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").map(|usec| usec.parse::<u128>().unwrap())
        });
        assert!(began.is_some_and(|began| began > last), "{began:?} after {last}");
        last = began.unwrap();
        until("READY=1");
        assert_eq!(register(), status, "{config:?}");
    }
    daemon.signal("TERM");
    until("STOPPING=1");
    assert!(daemon.ended_well());
}

#[test]
fn a_socket_that_is_passed_is_used_and_left() {
    let activate = ["/usr/bin/systemd-socket-activate", "/bin/systemd-socket-activate"].map(PathBuf::from);
    let Some(activate) = activate.into_iter().find(|path| path.exists()) else {
        eprintln!("SKIPPED: systemd-socket-activate is not installed (Debian: apt install systemd)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("passed.sock");
    let elsewhere = folder.path().join("elsewhere.sock");
    let mut command = Command::new(activate);
    command.arg("--listen").arg(&socket).arg(molt_tests::program("moltd"));
    command.args(["--budget-mib", "256", "--socket"]).arg(&elsewhere);
    // It starts the daemon for the first client, which comes while nobody serves yet.
    let client = std::thread::spawn({
        let socket = socket.clone();
        move || {
            for _ in 0..600 {
                if let Ok(stream) = std::os::unix::net::UnixStream::connect(&socket) {
                    return Some(stream);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            None
        }
    });
    let mut daemon = Daemon::run(&mut command, socket.clone());
    assert!(client.join().unwrap().is_some(), "the first client was taken");
    assert!(daemon.get("/health").contains("ok"));
    assert!(!elsewhere.exists(), "it binds nothing of its own");
    // The activator has become the daemon.
    daemon.signal("TERM");
    assert!(daemon.ended_well());
    assert!(socket.exists(), "a socket that was passed is not the daemon's to remove");
}

#[test]
fn units_are_well_formed_and_hardened() {
    let units = PathBuf::from(env!("CARGO_MANIFEST_DIR")).ancestors().nth(1).unwrap().join("deploy/systemd");
    let analyze = |args: &[&str]| Command::new("systemd-analyze").args(args).current_dir(&units).output();
    let Ok(verified) = analyze(&["verify", "./moltd.service", "./moltd.socket"]) else {
        eprintln!("SKIPPED: systemd-analyze is not installed (Debian: apt install systemd)");
        return;
    };
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    // The program need not be installed where the units are checked, and a manager before version 253 leaves out the type
    // that it does not know.
    let fine = ["/usr/bin/moltd is not executable", "Failed to parse service type, ignoring: notify-reload"];
    let complaints: Vec<&str> =
        said.lines().filter(|line| line.contains("moltd") && !fine.iter().any(|fine| line.contains(fine))).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    // 2.0 is given in tenths.
    let scored = analyze(&["security", "--offline=true", "--threshold=20", "./moltd.service"]).unwrap();
    assert!(scored.status.success(), "{}", String::from_utf8_lossy(&scored.stdout));
}
