//! The figures of the published prototype beside those of this run.

use super::page::Page;
use crate::bench::engine::EngineRow;
use crate::bench::memory::{During, MemoryRun};
use crate::bench::results::{Results, Section};
use crate::bench::stats::Spread;
use crate::eval::{Direction, Setting};

/// What was published, what was found here, and whether that is better; of what was not measured, nothing.
struct Row {
    what: &'static str,
    published: &'static str,
    found: Option<(String, bool)>,
}

/// The carry of the prototype: 25 tokens, between rungs that were warm.
const SWITCH_MS: f64 = 260.0;

/// The table, where any of it was measured.
pub(super) fn published(page: &mut Page, of: &Results) {
    let rows = [carry_cost(of), operations(of), seam(of), switch(of), int8(of), up(of), budget(of)];
    if rows.iter().all(|row| row.found.is_none()) {
        return;
    }
    page.heading("Against the published prototype");
    page.text(
        "The prototype ran other software on another machine. Ratios can be compared, milliseconds say no more than their order of \
         magnitude.",
    );
    let cells = rows.into_iter().map(|Row { what, published, found }| {
        let (found, verdict) = match found {
            Some((found, true)) => (found, "better"),
            Some((found, false)) => (found, "not better"),
            None => ("not measured".to_owned(), "-"),
        };
        vec![what.to_owned(), published.to_owned(), found, verdict.to_owned()]
    });
    page.table(&["what", "prototype", "here", ""], cells);
}

/// Of the longest context that was carried with the engine's own effort.
fn carry_cost(of: &Results) -> Row {
    let longest = of.switch_cost.iter().flat_map(|section| &section.rows).filter(|row| row.setting == "default");
    let longest = longest.max_by_key(|row| row.context_tokens);
    let found =
        longest.map(|row| (format!("{:.1} x, {} tokens", row.cost_ratio, row.context_tokens), row.cost_ratio > 4.0));
    Row { what: "a carry is cheaper than reading again by", published: "4.0 x", found }
}

fn operations(of: &Results) -> Row {
    let rows = of.switch_cost.iter().flat_map(|section| &section.rows);
    let least = rows.min_by(|one, other| one.flops_ratio.total_cmp(&other.flops_ratio));
    let found = least.map(|row| {
        let saved = 1.0 - row.flops_ratio;
        (format!("{:.0} %, {}, {} tokens", saved * 100.0, row.setting, row.context_tokens), saved > 0.79)
    });
    Row { what: "operations that it saves, at most", published: "79 %", found }
}

fn seam(of: &Results) -> Row {
    let rows = of.fidelity.iter().flat_map(|section| &section.rows);
    let carried = rows.filter(|row| row.setting == Setting::Default && row.direction == Direction::Down);
    let worst = carried.filter_map(|row| row.seam_jsd_ratio).reduce(f64::max);
    let found = worst.map(|ratio| (format!("{ratio:.2} at worst"), ratio < 5.7));
    Row { what: "break at the seam, over that of reading again", published: "5.7", found }
}

fn switch(of: &Results) -> Row {
    let rows = of.switch_cost.iter().flat_map(|section| &section.rows).filter(|row| row.setting == "default");
    let shortest = rows.min_by_key(|row| row.context_tokens);
    let found = shortest.and_then(|row| {
        let ms = Spread::of(&row.carry_ms)?.median;
        Some((format!("{ms:.0} ms, {} tokens", row.context_tokens), ms < SWITCH_MS))
    });
    Row { what: "one switch of a short conversation, both rungs warm", published: "260 ms, 25 tokens", found }
}

/// The rung of eight bits beside the same weights as floats.
fn int8(of: &Results) -> Row {
    let rows = || of.engine.iter().flat_map(|section| &section.rows);
    let found = rows().find(|row| row.precision.starts_with("q8_0")).and_then(|int8| {
        let same = |row: &&EngineRow| {
            row.precision == "f32" && row.file == int8.file && row.prompt_tokens == int8.prompt_tokens
        };
        let ratio = Spread::of(&int8.decode_tok_s)?.median / Spread::of(&rows().find(same)?.decode_tok_s)?.median;
        Some((format!("{ratio:.1} times as fast as f32"), ratio > 0.25))
    });
    Row { what: "decoding at int8", published: "a quarter of f32's speed", found }
}

/// What the way back up is: read natively, and so exact.
fn up(of: &Results) -> Row {
    let rows = of.fidelity.iter().flat_map(|section| &section.rows);
    let kept = rows.filter(|row| row.setting == Setting::Keepsake && row.direction == Direction::Up);
    let worst = kept.map(|row| row.kl_256).reduce(f64::max);
    let found = worst.map(|kl| (format!("keepsakes: divergence {kl:.4} from a native read"), kl < 1e-3));
    Row { what: "going up", published: "weak", found }
}

/// The prototype's budget was a number of its own; memory that is really back is measured here.
fn budget(of: &Results) -> Row {
    let reaction = |section: &Section<MemoryRun>| {
        let releases = section.rows.iter().flat_map(|run| &run.releases);
        let all: Vec<f64> =
            releases.filter(|row| row.during == During::Prefill).flat_map(|row| row.reaction_ms.clone()).collect();
        Spread::of(&all)
    };
    let found = of.memory.as_ref().and_then(reaction);
    // Real at all is better than simulated; slower than a step would be, it is none that a system can count on.
    let found = found.map(|ms| (format!("really back, after {ms:.0} ms"), ms.median < 150.0));
    Row { what: "memory that is wanted", published: "simulated", found }
}
