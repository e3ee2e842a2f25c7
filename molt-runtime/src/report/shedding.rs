//! What is still known when the oldest context has gone.

use super::ReportError;
use super::answers::percent;
use super::charts::{Bar, Bars};
use super::page::{Page, mib};
use crate::bench::results::Section;
use crate::bench::shedding::{Left, Place, SheddingRun};
use crate::bench::stats::{Spread, wilson};

pub(super) fn shedding(page: &mut Page, section: &Section<SheddingRun>) -> Result<(), ReportError> {
    page.text(
        "The last lever: the oldest context goes, in blocks, between the first tokens and the most recent ones; nothing is read \
         again, and what is left keeps its positions. Contexts are lists of facts, and every fact is asked for: whether the right \
         animal is the likeliest among those of all facts, and whether it is what the model says. What comes next is judged on 256 \
         tokens of held-out texts. Shed by attention, those blocks go that the recent tokens look at least, not the oldest. A truncated re-read is what a runtime does that has no such cache: it reads what is left anew.",
    );
    for run in &section.rows {
        let amount = format!("{} of {} tokens shed", run.shed_tokens, run.context_tokens);
        let (texts, ms) =
            (run.rest.len(), |samples: &[f64]| Spread::of(samples).map(|spread| format!("{spread:.1} ms")));
        let times = ms(&run.shed_ms).zip(ms(&run.truncated_ms));
        let times = times.map_or(String::new(), |(shed, read)| {
            format!(" Shedding took {shed} and gave back {}, reading what is left took {read}.", mib(run.freed_bytes))
        });
        page.text(&format!("{}: {amount}. Perplexity over {texts} texts.{times}", run.rung));
        let rows = Left::ALL.map(|left| {
            let facts = |place| match run.recall_of(left, place) {
                Some(row) => [percent(row.likeliest, row.asked), percent(row.said, row.asked)],
                None => ["-".to_owned(), "-".to_owned()],
            };
            let ([kept, kept_said], [shed, shed_said]) = (facts(Place::Kept), facts(Place::Shed));
            let (ratio, interval) = run.perplexity_ratio(left);
            if ratio.is_nan() {
                return vec![left.to_string(), kept, kept_said, shed, shed_said, "-".to_owned(), "-".to_owned()];
            }
            let range = interval.filter(|_| left != Left::Truncated);
            let range = range.map_or(String::new(), |(low, high)| format!(" ({low:.3} to {high:.3})"));
            let perplexity = format!("{:.2}", run.perplexity(left));
            vec![left.to_string(), kept, kept_said, shed, shed_said, perplexity, format!("{ratio:.3}{range}")]
        });
        page.table(
            &[
                "what is left",
                "kept facts: likeliest",
                "said",
                "shed facts: likeliest",
                "said",
                "perplexity",
                "/ truncated (95 %)",
            ],
            rows.into_iter(),
        );
        let groups = Left::ALL.map(|left| {
            let bar = |place| {
                let row = run.recall_of(left, place)?;
                let (low, high) = wilson(row.likeliest, row.asked)?;
                let share = row.likeliest as f64 / row.asked as f64;
                Some(Bar { value: share * 100.0, range: Some((low * 100.0, high * 100.0)) })
            };
            (left.to_string(), vec![bar(Place::Kept), bar(Place::Shed)])
        });
        let series = vec!["of the part that was kept".to_owned(), "of the part that went".to_owned()];
        let title = format!("Facts that are still known, {amount}");
        let bars = Bars { title: &title, unit: "% of the facts, with 95 % intervals", series, groups: groups.to_vec() };
        let chance = run.chance_ratio * 100.0;
        page.figure(
            &bars.draw()?,
            &format!(
                "The right animal is the likeliest of all that the context names; chance alone finds {chance:.0} %."
            ),
        );
    }
    Ok(())
}
