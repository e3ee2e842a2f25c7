//! What `/metrics` says against what the stream said, and everything that reads it: promtool, rules, dashboard, docs.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use molt_tests::daemon::{Daemon, chunks, over_tcp, request};
use molt_tests::sum;
use serde_json::{Value, json};

const FULL: u64 = 256 << 20;

fn start() -> Daemon {
    Daemon::start_with("", &["--metrics-listen", "127.0.0.1:0"])
}

/// The body of an answer over TCP, asked in the name of that host.
fn get_over_tcp(address: &str, path: &str, host: &str, status: u16) -> String {
    let answer = over_tcp(address, &request(None, "GET", path, host, b""));
    assert_eq!(answer.status, status, "{answer:?}");
    answer.body
}

/// What the streams told, added up.
#[derive(Debug, Default)]
struct Told {
    answers: f64,
    tokens: f64,
    switches: f64,
    switched_tokens: f64,
    mapped_tokens: f64,
    levers: f64,
    freed_bytes: f64,
    unparks: f64,
    healed_tokens: f64,
}

impl Told {
    fn hear(&mut self, chunk: &Value) {
        let molt = &chunk["molt"];
        let number = |field: &str| molt[field].as_f64().unwrap();
        match molt["event"].as_str() {
            Some("switch") => {
                self.switches += 1.0;
                self.switched_tokens += number("tokens");
                self.mapped_tokens += number("mapped_tokens");
            }
            Some("lever") => {
                self.levers += 1.0;
                self.freed_bytes += number("bytes");
            }
            Some("unpark") => self.unparks += 1.0,
            Some("healed") => self.healed_tokens += number("tokens"),
            _ => {}
        }
        self.tokens += chunk["usage"]["completion_tokens"].as_f64().unwrap_or(0.0);
        self.answers += f64::from(u8::from(chunk["choices"][0]["finish_reason"].is_string()));
    }

    fn check(&self, text: &str) {
        let same = |name: &str, labels: &[&str], told: f64| {
            assert_eq!(sum(text, name, labels), told, "{name} {labels:?} after {self:?}\n{text}");
        };
        same("molt_requests_total", &[], self.answers);
        same("molt_answers_total", &[], self.answers);
        same("molt_answer_seconds_count", &[], self.answers);
        same("molt_first_token_seconds_count", &[], self.answers);
        same("molt_tokens_total", &["class=\"foreground\""], self.tokens);
        same("molt_inter_token_seconds_count", &[], self.tokens - self.answers);
        same("molt_switches_total", &["result=\"done\""], self.switches);
        same("molt_switch_seconds_count", &[], self.switches);
        same("molt_switch_tokens_total", &[], self.switched_tokens);
        same("molt_switch_tokens_total", &["provenance=\"mapped\""], self.mapped_tokens);
        same("molt_levers_total", &[], self.levers);
        same("molt_lever_freed_bytes_total", &[], self.freed_bytes);
        same("molt_unparks_total", &[], self.unparks);
        same("molt_healed_tokens_total", &[], self.healed_tokens);
        same("molt_troubles_total", &[], 0.0);
    }
}

fn ask() -> String {
    let prompt = "Fellow-citizens of the Senate and House of Representatives: The past year has been one of peace.";
    json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 300, "stream": true,
        "stream_options": {"include_usage": true}, "temperature": 0.8, "seed": 3})
    .to_string()
}

#[test]
fn the_figures_are_those_of_the_stream() {
    let daemon = start();
    let said = daemon.says("moltd: metrics on http://");
    let address = said.split("http://").nth(1).unwrap().strip_suffix("/metrics").unwrap();
    let before = get_over_tcp(address, "/metrics", address, 200);
    assert_eq!(sum(&before, "molt_load_seconds_count", &[]), 0.0, "looking loads nothing");
    assert_eq!(sum(&before, "molt_usage_kind_bytes", &["weights"]), 0.0);
    Told::default().check(&before);
    get_over_tcp(address, "/metrics", "example.org", 403);
    get_over_tcp(address, "/v1/models", address, 404);
    let mut told = Told::default();
    // The cut comes over another connection and may be too late for an answer as short-lived as this: try again.
    for _ in 0..20 {
        daemon.set_budget(FULL);
        let mut chunks = chunks(daemon.send("POST", "/v1/chat/completions", ask().as_bytes()));
        told.hear(&chunks.next().unwrap());
        let during = daemon.get("/metrics");
        let (usage, weights) = (sum(&during, "molt_usage_bytes", &[]), sum(&during, "molt_usage_kind_bytes", &[]));
        assert_eq!(usage, weights, "the kinds add up to the usage");
        // One MiB less than the first rung takes when it is loaded, whatever else there is.
        let top = sum(&during, "molt_rung_weights_bytes", &["rung=\"0\""]);
        let cut = sum(&during, "molt_usage_kind_bytes", &["overhead"]) + top;
        daemon.set_budget(format!("{cut:.0}").parse().unwrap());
        chunks.by_ref().for_each(|chunk: Value| told.hear(&chunk));
        let after = daemon.get("/metrics");
        told.check(&after);
        if told.switches > 0.0 {
            assert!(sum(&after, "molt_budget_changes_total", &[]) >= 2.0);
            assert_eq!(sum(&after, "molt_budget_bytes", &[]), cut);
            assert!(sum(&after, "molt_overshoot_max_bytes", &[]) <= 0.0, "the budget was kept");
            eprintln!("agreed on {told:?}");
            return;
        }
    }
    panic!("twenty answers ended before their budget could be cut: {told:?}");
}

/// The root of the repository.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).ancestors().nth(1).unwrap().to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Runs promtool, which must be content. Says so where it is not installed.
fn promtool(args: &[&str], input: &str) {
    let started = Command::new("promtool")
        .args(args)
        .current_dir(root().join("deploy/prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = started else {
        eprintln!("SKIPPED: promtool {args:?}: it is not installed (Debian: apt install prometheus)");
        return;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success(), "promtool {args:?}: {said}");
    assert!(args[1] != "metrics" || said.is_empty(), "promtool {args:?}: {said}");
}

/// Every word in the text that looks like a metric of ours.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| word.starts_with("molt_")).map(str::to_owned).collect()
}

/// Every query of the dashboard.
fn queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn promtool_dashboard_rules_and_docs_agree_with_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start();
    let text = loop {
        let text = daemon.get("/metrics");
        if sum(&text, "molt_rounds_total", &[]) > 0.0 {
            break text;
        }
    };
    promtool(&["check", "metrics"], &text);
    promtool(&["check", "rules", "molt.rules.yml"], "");
    promtool(&["test", "rules", "molt.test.yml"], "");

    let mut real = names(&text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n"));
    let help: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' ')).collect();
    let described: BTreeSet<&str> = help.iter().map(|(name, _)| *name).collect();
    real.extend(described.iter().map(|name| (*name).to_owned()));
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/molt.json")).unwrap();
    let queries = queries(&dashboard);
    assert!(queries.len() > 30, "the dashboard has its queries");
    let rules = read("deploy/prometheus/molt.rules.yml");
    for (place, text) in [
        ("the dashboard's queries", queries.join("\n")),
        ("the rules", rules.clone()),
        ("the rules' tests", read("deploy/prometheus/molt.test.yml")),
        ("the operator's page", read("docs/operator.md")),
    ] {
        let unknown: Vec<_> = names(&text).difference(&real).cloned().collect();
        assert!(unknown.is_empty(), "{place}: there is no {unknown:?}");
    }
    // What is counted is shown somewhere.
    let shown = names(&queries.join("\n"));
    let hidden = described.iter().filter(|name| !shown.iter().any(|shown| shown.starts_with(**name)));
    assert_eq!(hidden.collect::<Vec<_>>(), Vec::<&&str>::new(), "not on the dashboard");

    // Every query is one that Prometheus can parse.
    let as_rules = queries.iter().enumerate().map(|(at, query)| {
        let query = query.replace("$__rate_interval", "1m").replace("$instance", ".*");
        json!({"record": format!("panel:{at}"), "expr": query})
    });
    let file = folder.path().join("queries.yml");
    let group = json!({"groups": [{"name": "dashboard", "rules": as_rules.collect::<Vec<_>>()}]});
    std::fs::write(&file, group.to_string()).unwrap();
    promtool(&["check", "rules", file.to_str().unwrap()], "");

    let page = read("docs/operator.md");
    for (name, meaning) in &help {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        assert!(row.is_some_and(|row| row.ends_with(&format!("| {meaning} |"))), "{name}: {meaning} is not in {row:?}");
    }
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(page.contains(&format!("| `{alert}` |")), "{alert} is not on the operator's page");
    }
}
