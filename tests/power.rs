//! In which order the daemon asks the disk for things, seen from outside: what a loss of power leaves under a name is whole.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::BTreeMap;
use std::process::Command;

use molt_tests::daemon::chunks;
use molt_tests::home::{Home, asked};
use molt_tests::program;

/// A system call that has to do with the disk.
#[derive(Debug, PartialEq)]
enum Call {
    /// The disk has what was written to that path.
    Synced(String),
    /// The first path became the second.
    Renamed(String, String),
}

/// Reads a line of `strace -f -y`: the thread, and the call if it is one of ours.
fn read(line: &str) -> Option<(u32, Call)> {
    let (thread, call) = line.split_once(' ')?;
    let call = call.trim_start();
    let quoted = || {
        let mut parts = call.split('"');
        Some((parts.nth(1)?.to_owned(), parts.nth(1)?.to_owned()))
    };
    let call = match call.split_once('(')? {
        ("fsync" | "fdatasync", rest) => {
            Call::Synced(rest.split_once('<')?.1.split(">)").next()?.split("> <").next()?.to_owned())
        }
        ("rename" | "renameat" | "renameat2", _) => {
            let (from, to) = quoted()?;
            Call::Renamed(from, to)
        }
        _ => return None,
    };
    Some((thread.parse().ok()?, call))
}

#[test]
fn a_file_gets_its_name_once_the_disk_has_it() {
    if Command::new("strace").arg("-V").output().is_err() {
        // Past the test harness, which would keep it to itself.
        std::io::Write::write_all(&mut std::io::stderr(), b"SKIPPED: strace is not installed\n").unwrap();
        return;
    }
    let home = Home::new("");
    let trace = home.config().with_file_name("trace");
    let mut command = Command::new("strace");
    // The daemon is the process that was started, and the tracer another.
    command.args(["-D", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2", "-o"]).arg(&trace);
    command.arg(program("moltd"));
    home.arguments(&mut command);
    let mut daemon = home.run(&mut command);
    assert_eq!(daemon.ask("POST", "/v1/tenants", br#"{"name": "mail"}"#).0, 201);
    let mut stream = chunks(daemon.send("POST", "/v1/completions", asked(16, 250).to_string().as_bytes()));
    let id = stream.by_ref().nth(90).unwrap()["id"].as_str().unwrap().to_owned();
    daemon.signal("TERM");
    stream.for_each(drop);
    assert!(daemon.ended_well());
    let text = std::fs::read_to_string(&trace).unwrap();
    let mut threads: BTreeMap<u32, Vec<Call>> = BTreeMap::new();
    for (thread, call) in text.lines().filter_map(read) {
        threads.entry(thread).or_default().push(call);
    }
    let mut named = Vec::new();
    for calls in threads.values() {
        for (at, call) in calls.iter().enumerate() {
            let Call::Renamed(from, to) = call else { continue };
            let synced = |calls: &[Call], path: &str| calls.contains(&Call::Synced(path.to_owned()));
            let folder = to.rsplit_once('/').unwrap().0;
            assert!(synced(&calls[..at], from), "{to} has its name before the disk has it: {calls:#?}");
            assert_eq!(calls.get(at + 1), Some(&Call::Synced(folder.to_owned())), "the name of {to}: {calls:#?}");
            if to.ends_with(".cache") {
                let journal = format!("{folder}/{id}.answer");
                assert!(synced(&calls[..at], &journal), "{to} is there before its journal: {calls:#?}");
            }
            named.push(to.rsplit_once('.').map_or(to.clone(), |(_, ending)| ending.to_owned()));
        }
    }
    let count = |ending: &str| named.iter().filter(|name| name.ends_with(ending)).count();
    assert!(count("cache") >= 2 && count("json") >= 1 && count("secret") == 1, "{named:?}");
}
