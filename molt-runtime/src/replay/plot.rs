//! A replay as a picture: budget, usage and levers above, who runs on which rung below, over the same time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use molt_scheduler::{Action, LeverKind};
use plotters::prelude::*;

use super::Round;
use super::summary::rung;

/// Points of a line; more are not seen.
const POINTS: usize = 1_600;
const SIZE: (u32, u32) = (1_200, 760);

/// Told apart by colour-blind readers too (Okabe and Ito).
const BUDGET: RGBColor = RGBColor(0, 0, 0);
const USAGE: RGBColor = RGBColor(0, 114, 178);
const RUNGS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(0, 158, 115), RGBColor(240, 228, 66), RGBColor(230, 159, 0)];
const PARKED: RGBColor = RGBColor(204, 121, 167);
const WAITING: RGBColor = RGBColor(170, 170, 170);
const LEVERS: [(LeverKind, &str, RGBColor); 4] = [
    (LeverKind::Defer, "defer", RGBColor(120, 120, 120)),
    (LeverKind::Demote, "demote", RGBColor(230, 159, 0)),
    (LeverKind::Park, "park", RGBColor(204, 121, 167)),
    (LeverKind::Shed, "shed", RGBColor(213, 94, 0)),
];

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// It cannot be drawn.
    #[error("cannot draw {what}: {reason}")]
    Draw {
        /// What was to be drawn.
        what: &'static str,
        /// What the plotter says.
        reason: String,
    },
    /// It cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
}

/// A point in time.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    at_s: f64,
    budget_mib: f64,
    usage_mib: f64,
    /// By rung: running; then parked, then waiting.
    stack: Vec<u64>,
}

/// Gathers rounds for a picture.
#[derive(Debug, Clone, Default)]
pub struct Plot {
    points: Vec<Point>,
    /// Where which lever was used.
    marks: BTreeMap<LeverKind, Vec<(f64, f64)>>,
    end_s: f64,
}

impl Plot {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a round. Of rounds that look alike one is kept.
    pub fn round(&mut self, round: &Round) {
        let mut stack: Vec<u64> = round.census.rungs.iter().map(|(running, _)| *running).collect();
        stack.push(round.census.rungs.iter().map(|(_, parked)| parked).sum());
        stack.push(round.census.waiting);
        let at_s = round.at_us.micros() as f64 / 1e6;
        let (budget_mib, usage_mib) = (round.budget_bytes.as_mib(), round.usage_bytes.as_mib());
        self.end_s = self.end_s.max(at_s);
        for done in &round.done {
            let kind = match done.action {
                Action::Defer { .. } => LeverKind::Defer,
                Action::Demote { .. } => LeverKind::Demote,
                Action::Park { .. } => LeverKind::Park,
                Action::Shed { .. } => LeverKind::Shed,
                _ => continue,
            };
            let marks = self.marks.entry(kind).or_default();
            if marks.last() != Some(&(at_s, usage_mib)) {
                marks.push((at_s, usage_mib));
            }
        }
        self.points.push(Point { at_s, budget_mib, usage_mib, stack });
        // Where there are too many, every second one of the earlier ones goes that its neighbours explain.
        if self.points.len() > 4 * POINTS {
            self.thin();
        }
    }

    fn thin(&mut self) {
        let mut index = 0;
        let mut last: Option<Point> = None;
        self.points.retain(|point| {
            index += 1;
            let same =
                last.as_ref().is_some_and(|last| last.budget_mib == point.budget_mib && last.stack == point.stack);
            let keep = !same || index % 2 == 0;
            if keep {
                last = Some(point.clone());
            }
            keep
        });
    }

    /// The picture as SVG text.
    pub fn draw(&self, title: &str) -> Result<String, PlotError> {
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            draw("the ground", root.fill(&WHITE))?;
            let (above, below) = root.split_vertically(SIZE.1 / 2 + 60);
            self.memory(&above, title)?;
            self.standing(&below)?;
            draw("the picture", root.present())?;
        }
        Ok(text)
    }

    fn memory<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, plotters::coord::Shift>,
        title: &str,
    ) -> Result<(), PlotError> {
        let top = self.points.iter().map(|point| point.budget_mib.max(point.usage_mib)).fold(1.0, f64::max) * 1.08;
        let mut chart = draw(
            "the axes of memory",
            ChartBuilder::on(area)
                .caption(title, ("sans-serif", 20))
                .margin(10)
                .x_label_area_size(34)
                .y_label_area_size(64)
                .build_cartesian_2d(0.0..self.end_s.max(1.0), 0.0..top),
        )?;
        draw(
            "the grid of memory",
            chart.configure_mesh().light_line_style(TRANSPARENT).x_desc("s").y_desc("MiB").draw(),
        )?;
        let budget = steps(&self.points, |point| point.budget_mib);
        let usage = steps(&self.points, |point| point.usage_mib);
        for (line, colour, name) in [(budget, BUDGET, "budget"), (usage, USAGE, "usage")] {
            draw("a line", chart.draw_series(LineSeries::new(line, colour.stroke_width(2))))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        for (kind, name, colour) in LEVERS {
            let Some(marks) = self.marks.get(&kind) else { continue };
            let each = marks.len().div_ceil(POINTS / 4).max(1);
            let dots = marks.iter().step_by(each).map(|at| Circle::new(*at, 4, colour.filled()));
            draw("the levers", chart.draw_series(dots))?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
        }
        draw("the legend", legend(&mut chart))
    }

    fn standing<B: DrawingBackend>(&self, area: &DrawingArea<B, plotters::coord::Shift>) -> Result<(), PlotError> {
        let most = self.points.iter().map(|point| point.stack.iter().sum::<u64>()).max().unwrap_or(0).max(1) as f64;
        let mut chart = draw(
            "the axes of sequences",
            ChartBuilder::on(area)
                .margin(10)
                .x_label_area_size(34)
                .y_label_area_size(64)
                .build_cartesian_2d(0.0..self.end_s.max(1.0), 0.0..most * 1.08),
        )?;
        draw(
            "the grid of sequences",
            chart.configure_mesh().light_line_style(TRANSPARENT).x_desc("s").y_desc("sequences").draw(),
        )?;
        let layers = self.points.first().map_or(0, |point| point.stack.len());
        // The whole stack first, so that each layer paints over those that stand on it.
        for layer in (0..layers).rev() {
            let (name, colour) = match layers - layer {
                1 => ("waiting".to_owned(), WAITING),
                2 => ("parked".to_owned(), PARKED),
                _ => (format!("on {}", rung(layer)), RUNGS[layer % RUNGS.len()]),
            };
            let line = steps(&self.points, |point| point.stack.iter().take(layer + 1).sum::<u64>() as f64);
            draw("a layer", chart.draw_series(AreaSeries::new(line, 0.0, colour.filled())))?
                .label(name)
                .legend(move |(x, y)| Rectangle::new([(x + 2, y - 5), (x + 14, y + 5)], colour.filled()));
        }
        draw("the legend", legend(&mut chart))
    }
}

/// A value that holds from its point to the next, thinned to what can be seen.
fn steps(points: &[Point], value: impl Fn(&Point) -> f64) -> Vec<(f64, f64)> {
    let mut line: Vec<(f64, f64)> = Vec::new();
    for point in points {
        let now = value(point);
        match line.last().copied() {
            Some((_, last)) if last == now => {}
            Some((_, last)) => line.extend([(point.at_s, last), (point.at_s, now)]),
            None => line.push((point.at_s, now)),
        }
    }
    if let (Some(end), Some((_, last))) = (points.last(), line.last().copied()) {
        line.push((end.at_s, last));
    }
    line
}

fn legend<'a, B: DrawingBackend + 'a>(
    chart: &mut ChartContext<
        'a,
        B,
        Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
    >,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()
}

fn draw<T, E: std::fmt::Display>(what: &'static str, result: Result<T, E>) -> Result<T, PlotError> {
    result.map_err(|reason| PlotError::Draw { what, reason: reason.to_string() })
}
