//! Whole answers: under a spike, right or wrong, and without one of Molt's means.

use std::collections::BTreeMap;

use molt_kv::carry::Route;

use super::carries::divergences;
use super::charts::{Bar, Bars, short};
use super::page::Page;
use super::{ReportError, by};
use crate::bench::ablations::{AblationRow, carried, traced};
use crate::bench::conditions::{Condition, ConditionRow};
use crate::bench::judge::Judged;
use crate::bench::results::Section;
use crate::bench::seams::SeamRow;
use crate::bench::stats::{Spread, wilson};
use crate::bench::tasks::{TaskRow, Way, apart, kinds, named, right};

/// `5 of 10, 24 to 76 %`.
pub(super) fn percent(seen: usize, asked: usize) -> String {
    let range = wilson(seen, asked);
    let range = range.map_or(String::new(), |(low, high)| format!(", {:.0} to {:.0} %", low * 100.0, high * 100.0));
    format!("{seen} of {asked}{range}")
}

fn spread<R>(rows: &[&R], of: impl Fn(&R) -> f64) -> Option<Spread> {
    Spread::of(&rows.iter().map(|row| of(row)).collect::<Vec<_>>())
}

fn median<R>(rows: &[&R], of: impl Fn(&R) -> f64) -> f64 {
    spread(rows, of).map_or(f64::NAN, |spread| spread.median)
}

fn at_most_mib(rows: &[&ConditionRow], of: impl Fn(&ConditionRow) -> i64) -> String {
    format!("{:.1} MiB", rows.iter().map(|row| of(row)).max().unwrap_or(0) as f64 / 1_048_576.0)
}

fn judged(rows: &[&ConditionRow], of: impl Fn(&Judged) -> f64) -> String {
    let values: Vec<f64> = rows.iter().filter_map(|row| row.judged.as_ref()).map(of).collect();
    Spread::of(&values).map_or("-".to_owned(), |spread| format!("{:.2}", spread.median))
}

pub(super) fn conditions(page: &mut Page, section: &Section<ConditionRow>) -> Result<(), ReportError> {
    let prompts = by(&section.rows, |row| row.prompt).len();
    page.text(&format!(
        "The budget falls in mid-answer and comes back. A runtime that does not react is counted as killed when it uses more \
         than the budget; no process was killed. Medians over {prompts} prompts, the same seeds for all. Overshoot is usage minus \
         budget after the levers of a round; through transitions it is the most that was in use at any moment of a round, above \
         both the budget and what was in use before."
    ));
    let groups = by(&section.rows, |row| row.condition);
    let rows = groups.iter().map(|(condition, rows)| {
        let count =
            |of: fn(&ConditionRow) -> bool| format!("{} of {}", rows.iter().filter(|r| of(r)).count(), rows.len());
        let mut written: BTreeMap<&str, u64> = BTreeMap::new();
        for (rung, tokens) in rows.iter().flat_map(|row| &row.tokens_by_rung) {
            *written.entry(rung).or_default() += tokens;
        }
        let all: u64 = written.values().sum();
        let shares =
            written.iter().map(|(rung, tokens)| format!("{rung} {:.0} %", *tokens as f64 / all.max(1) as f64 * 100.0));
        vec![
            condition.to_string(),
            count(|row| row.completed),
            count(|row| row.killed_simulated),
            short(median(rows, |row| row.tokens as f64)),
            shares.collect::<Vec<_>>().join(", "),
            short(median(rows, |row| row.first_token_ms)),
            short(median(rows, |row| row.stall_ms)),
            short(median(rows, |row| row.answer_tok_s)),
            at_most_mib(rows, |row| row.overshoot_bytes),
            at_most_mib(rows, |row| row.transition_overshoot_bytes),
            judged(rows, |judged| judged.mean_logprob_nats),
            judged(rows, |judged| judged.repeated_ratio),
        ]
    });
    page.table(
        &[
            "condition",
            "completed",
            "killed (simulated)",
            "tokens",
            "written by",
            "first token ms",
            "longest stall ms",
            "tokens/s",
            "overshoot at most",
            "through transitions",
            "judged, nats a token",
            "repeated",
        ],
        rows,
    );
    page.text(
        "Judged: the mean log-probability that the biggest rung gives to what was written, and the share of runs of four tokens \
         that had been written before, which a judge likes too well. Neither is a headline: read them together, and the answers, \
         which are in results.json.",
    );
    page.figure(
        &stalls(&groups)?,
        "How long a reader waits at worst, by how the spike is met; lines span the prompts.",
    );
    let molt = section.rows.iter().filter(|row| row.condition == Condition::Molt);
    let switches: u64 = molt.map(|row| row.switches).sum();
    page.text(&format!("Molt changed rungs {switches} times in these answers."));
    seams(page, &section.rows);
    Ok(())
}

/// How far what came over was from a native read, where an answer changed its rung.
fn seams(page: &mut Page, rows: &[ConditionRow]) {
    let seams: Vec<_> = rows.iter().flat_map(|row| &row.seams).filter(|seam| seam.kl_8.is_some()).collect();
    if seams.is_empty() {
        return;
    }
    page.text(
        "Its seams, each at the words where it fell: the divergence of the destination's distributions after what came over from          those after a native read of the same words, at the first token and over the first eight, in nats. Ways that are exact          are not compared.",
    );
    let groups = by(&seams, |seam| (seam.from, seam.to));
    let rows = groups.into_iter().map(|((from, to), seams)| {
        let spread = |of: fn(&SeamRow) -> Option<f64>| {
            let values: Vec<f64> = seams.iter().filter_map(|seam| of(seam)).collect();
            Spread::of(&values).map_or("-".to_owned(), |spread| format!("{spread:.4}"))
        };
        let route = seams.first().map_or("-", |seam| if seam.route == Route::Identity { "identity" } else { "bridge" });
        vec![
            format!("{from} to {to}"),
            route.to_owned(),
            seams.len().to_string(),
            spread(|seam| seam.kl_seam),
            spread(|seam| seam.kl_8),
        ]
    });
    page.table(&["switch", "by", "seams", "first token", "first eight"], rows);
}

fn stalls(groups: &BTreeMap<Condition, Vec<&ConditionRow>>) -> Result<String, ReportError> {
    let groups = groups.iter().map(|(condition, rows)| {
        let bar = spread(rows, |row| row.stall_ms)
            .map(|spread| Bar { value: spread.median, range: Some((spread.min, spread.max)) });
        (condition.to_string(), vec![bar])
    });
    let series = vec!["longest stall".to_owned()];
    let title = "Longest stall between two tokens";
    Bars { title, unit: "ms, median and range", series, groups: groups.collect() }.draw()
}

pub(super) fn tasks(page: &mut Page, section: &Section<TaskRow>) -> Result<(), ReportError> {
    let rows = &section.rows;
    let context: Vec<f64> = rows.iter().map(|row| row.context_tokens as f64).collect();
    let context = Spread::of(&context).map_or("-".to_owned(), |spread| format!("{spread:.0}"));
    page.text(&format!(
        "{} small questions with checkable answers, answered greedily after five that are shown with theirs ({context} tokens of \
         context). An answer is right when it is the same but for case, blanks and a mark at its end; named at least when \
         it stands somewhere in what was said, as in a whole sentence that was not asked for. Before the answer: the big \
         model has read the question, the cache comes over, and the small one writes all of the answer. Within: the big one has \
         written half of it, one token at least. Always the small one is also what reading again before the answer gives, to the \
         last bit. What the big model gets right and the small one does not is what a switch can \
         keep.",
        rows.len()
    ));
    let table = Way::ALL.map(|way| {
        let (against, gained, lost) = match way.read_again() {
            Some(again) => {
                let (gained, lost) = apart(rows, way, again);
                (again.to_string(), gained.to_string(), lost.to_string())
            }
            None => ("-".to_owned(), "-".to_owned(), "-".to_owned()),
        };
        let right = percent(right(rows, way), rows.len());
        vec![way.to_string(), right, percent(named(rows, way), rows.len()), against, gained, lost]
    });
    page.table(&["who answers", "right, 95 %", "named at least, 95 %", "against", "gained", "lost"], table.into_iter());
    let groups = Way::ALL.map(|way| {
        let (count, all) = (right(rows, way), rows.len().max(1) as f64);
        let range = wilson(count, rows.len()).map(|(low, high)| (low * 100.0, high * 100.0));
        (way.to_string(), vec![Some(Bar { value: count as f64 / all * 100.0, range })])
    });
    let (title, unit) = ("Right answers", "% of the questions, with 95 % intervals");
    let bars = Bars { title, unit, series: vec!["right".to_owned()], groups: groups.to_vec() };
    page.figure(&bars.draw()?, "Exact match; the same questions in every way.");
    let kinds = kinds(rows);
    let mut head = vec!["who answers"];
    head.extend(&kinds);
    let by_kind = Way::ALL.map(|way| {
        let of = |kind: &&str| {
            let own = || rows.iter().filter(|row| row.kind == *kind);
            format!("{}/{}", right(own(), way), own().count())
        };
        std::iter::once(way.to_string()).chain(kinds.iter().map(of)).collect()
    });
    page.table(&head, by_kind.into_iter());
    Ok(())
}

pub(super) fn ablations(page: &mut Page, section: &Section<AblationRow>) -> Result<(), ReportError> {
    page.text(
        "The most faithful carry, and the same without one of its means: first tokens, last window, chosen tokens. What the \
         columns say is told under fidelity.",
    );
    divergences(page, carried(&section.rows).into_iter());
    let traced = traced(&section.rows);
    let groups = by(&traced, |row| row.condition);
    if groups.is_empty() {
        return Ok(());
    }
    let groups: BTreeMap<Condition, Vec<&ConditionRow>> =
        groups.into_iter().map(|(condition, rows)| (condition, rows.into_iter().copied().collect())).collect();
    let prompts = groups.values().map(Vec::len).max().unwrap_or(0);
    page.text(&format!(
        "Molt under the same spike, and the same without one of its means; medians over {prompts} prompts. What this trace does \
         not call for does not show: it never leaves room for both models, so nothing can be read ahead."
    ));
    let rows = groups.iter().map(|(condition, rows)| {
        vec![
            condition.to_string(),
            short(median(rows, |row| row.stall_ms)),
            short(median(rows, |row| row.answer_tok_s)),
            at_most_mib(rows, |row| row.overshoot_bytes),
            judged(rows, |judged| judged.mean_logprob_nats),
            judged(rows, |judged| judged.repeated_ratio),
        ]
    });
    page.table(
        &["condition", "longest stall ms", "tokens/s", "overshoot at most", "judged, nats a token", "repeated"],
        rows,
    );
    page.figure(
        &stalls(&groups)?,
        "What a reader waits at worst when one of the means is missing; lines span the prompts.",
    );
    Ok(())
}
