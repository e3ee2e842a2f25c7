//! The page itself: text, tables and figures in the order in which they are given.

use std::fmt::Write as _;

use super::ReportError;
use crate::bench::results::{Claim, Results, Section};

const STYLE: &str = "
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --soft: #666; --line: #ddd; --good: #00694a; --bad: #a63c00; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --ink: #e6e6e6; --soft: #9aa0a6; --line: #34383d; --good: #4fd1a5; --bad: #ff9b63; }
}
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p.soft, figcaption { color: var(--soft); font-size: .9rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--ground); }
@media (max-width: 40rem) {
  body { padding: .7rem; } h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; }
  td:first-child, th:first-child { white-space: normal; min-width: 7rem; max-width: 9rem; padding-left: 0; }
}
pre { font-size: .8rem; } figure { margin: 1.5rem 0; } figure svg { width: 100%; min-width: 30rem; max-width: 48rem; height: auto; background: #fff;
  border-radius: 6px; }
figure.large svg { min-width: 54rem; max-width: none; }
h1.part { margin-top: 4rem; } nav ul { columns: 16rem; padding-left: 1.2rem; } a { color: inherit; }
ul.claims { list-style: none; padding: 0; } ul.claims li { margin: .4rem 0; } .holds { color: var(--good); } .fails { color: var(--bad); }
";

/// What is written so far.
pub(super) struct Page {
    text: String,
    /// The ladder at hand.
    ladder: String,
    /// Names of all sections, with where they stand.
    contents: Vec<(String, String)>,
    /// Sections that were not measured.
    missing: Vec<String>,
}

/// Where the names of all sections are put once they are known.
const CONTENTS: &str = "<!-- contents -->";

impl Page {
    pub(super) fn new(results: &Results) -> Self {
        let title = format!("Molt on {}", escape(&results.name));
        let text = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n\
             <body>\n"
        );
        Self { text, ladder: String::new(), contents: Vec::new(), missing: Vec::new() }
    }

    /// The sections of a ladder begin.
    pub(super) fn part(&mut self, results: &Results, first: bool) {
        let (machine, program) = (&results.machine, &results.program);
        let commit = program.commit.as_ref().map_or(String::new(), |commit| format!(" at {}", escape(commit)));
        let memory = machine.memory_bytes.map_or(String::new(), |bytes| format!(", {} of memory", mib(bytes)));
        let quick = if results.quick { " A quick run: few samples, to see that everything works." } else { "" };
        let (class, at) = if first { ("", "headline") } else { (" class=\"part\"", &results.name[..]) };
        let name = escape(&results.name);
        let _infallible = writeln!(
            self.text,
            "<h1{class} id=\"{}\">Molt on {name}</h1>\n<p>Measured on {} ({} threads, {} kernels{memory}, Linux {}) with Molt \
             {}{commit}{}.{quick}</p>",
            escape(at),
            escape(&machine.cpu),
            machine.threads,
            escape(&machine.isa),
            escape(&machine.kernel),
            escape(&program.version),
            if program.debug_assertions { ", assertions compiled in" } else { "" },
        );
        if first {
            self.text.push_str(CONTENTS);
        } else {
            self.contents.push((at.to_owned(), format!("Molt on {}", results.name)));
        }
        self.ladder.clone_from(&results.name);
    }

    /// A section with its claims, held or not, in the same type; one that was not measured is named at the end.
    pub(super) fn section<T>(
        &mut self,
        title: &'static str,
        section: Option<&Section<T>>,
        fill: impl FnOnce(&mut Self, &Section<T>) -> Result<(), ReportError>,
    ) -> Result<(), ReportError> {
        let Some(section) = section else {
            self.missing.push(format!("{title} ({})", self.ladder));
            return Ok(());
        };
        let at = format!("section-{}", self.contents.len() + 1);
        let _infallible = writeln!(self.text, "<h2 id=\"{at}\">{}</h2>", escape(title));
        self.contents.push((at, title.to_owned()));
        self.claims(&section.claims);
        fill(self, section)?;
        if section.took_s >= 1.0 {
            let _infallible = writeln!(self.text, "<p class=\"soft\">Measured in {:.0} s.</p>", section.took_s);
        }
        Ok(())
    }

    fn claims(&mut self, claims: &[Claim]) {
        if claims.is_empty() {
            return;
        }
        self.text.push_str("<ul class=\"claims\">\n");
        for claim in claims {
            let (class, word) = if claim.holds { ("holds", "holds") } else { ("fails", "does not hold") };
            let (what, found) = (escape(&claim.claim), escape(&claim.found));
            let _infallible =
                writeln!(self.text, "<li><b class=\"{class}\">{word}</b>: {what} <span>({found})</span></li>");
        }
        self.text.push_str("</ul>\n");
    }

    /// What stands before all sections of a ladder.
    pub(super) fn heading(&mut self, title: &str) {
        let _infallible = writeln!(self.text, "<h2>{}</h2>", escape(title));
    }

    pub(super) fn text(&mut self, text: &str) {
        let _infallible = writeln!(self.text, "<p>{}</p>", escape(text));
    }

    /// Text as it is, line by line.
    pub(super) fn verbatim(&mut self, text: &str) {
        let _infallible = writeln!(self.text, "<div class=\"wide\"><pre>{}</pre></div>", escape(text));
    }

    pub(super) fn table(&mut self, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = String>| {
            cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(&cell))).collect::<String>()
        };
        let _infallible = writeln!(
            self.text,
            "<div class=\"wide\"><table>\n<tr>{}</tr>",
            cells("th", &mut head.iter().map(|cell| (*cell).to_owned()))
        );
        for row in rows {
            let _infallible = writeln!(self.text, "<tr>{}</tr>", cells("td", &mut row.into_iter()));
        }
        self.text.push_str("</table></div>\n");
    }

    /// A picture, which is SVG of ours, and what it shows.
    pub(super) fn figure(&mut self, svg: &str, caption: &str) {
        self.picture("", svg, caption);
    }

    /// A picture that was drawn for a wider place than this; where there is less, it is moved and not made smaller.
    pub(super) fn large_figure(&mut self, svg: &str, caption: &str) {
        self.picture(" class=\"large\"", svg, caption);
    }

    fn picture(&mut self, class: &str, svg: &str, caption: &str) {
        let _infallible = writeln!(
            self.text,
            "<figure{class} role=\"img\" aria-label=\"{0}\">\n<div class=\"wide\">{svg}</div>\n\
             <figcaption>{0}</figcaption></figure>",
            escape(caption)
        );
    }

    pub(super) fn close(mut self) -> String {
        self.text.push_str("<h2 id=\"edges\">What this does not show</h2>\n<ul>\n");
        if !self.missing.is_empty() {
            let missing = escape(&self.missing.join(", "));
            let _infallible = writeln!(self.text, "<li>Not measured in this run: {missing}.</li>");
        }
        for edge in EDGES {
            let _infallible = writeln!(self.text, "<li>{}</li>", escape(edge));
        }
        self.text.push_str("</ul>\n</body>\n</html>\n");
        self.contents.push(("edges".to_owned(), "What this does not show".to_owned()));
        let entry =
            |(at, title): &(String, String)| format!("<li><a href=\"#{}\">{}</a></li>", escape(at), escape(title));
        let entries: String = self.contents.iter().map(entry).collect();
        self.text.replacen(CONTENTS, &format!("<nav><ul>{entries}</ul></nav>\n"), 1)
    }
}

/// What no section shows.
const EDGES: [&str; 8] = [
    "Whether long answers are good: no person and no other model has read them. The questions with a right answer are short, \
     in English, and far easier than what such models are asked; the biggest rung's own judgement favours what it would have \
     written itself.",
    "Fidelity on texts unlike the held-out ones: mostly American addresses, a novel and Rust. Other languages, long chats and \
     contexts beyond those in the tables are not judged.",
    "A real kill: runtimes that hold on are counted as killed by arithmetic.",
    "Ablations of the maps themselves: native first layers and source layers need a fit of their own. Reading ahead pays where \
     there is room for both models, which the spike never leaves.",
    "Other runtimes under pressure: their policies are reckoned in the simulator, their programs were not run.",
    "Answers across the way back up, and across many switches: questions are answered over one switch, down.",
    "Shedding after a carry: what was shed here had been read natively. Facts of one kind in one form of sentence; nobody asked \
     for what takes two of them together.",
    "Other machines than the one named above, and this one with something else to do.",
];

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / 1_048_576.0)
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
