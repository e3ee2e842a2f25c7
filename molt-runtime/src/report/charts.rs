//! Pictures of the report, as SVG.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::ReportError;

/// As wide as a page needs it and as a phone can still show it, and as high as what is in it asks for.
const WIDTH: u32 = 680;
const HEIGHT: u32 = 380;

/// Told apart by colour-blind readers too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
];

/// A value, and what it may as well be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bar {
    pub(super) value: f64,
    pub(super) range: Option<(f64, f64)>,
}

/// Values with a name each, below one another in groups; names stand at the left, where they have room.
#[derive(Debug, Clone)]
pub(super) struct Bars<'a> {
    pub(super) title: &'a str,
    /// What the values are, with their unit.
    pub(super) unit: &'a str,
    /// Names of the values in a group.
    pub(super) series: Vec<String>,
    /// Groups and their values, one a series; a value that is not there leaves a gap.
    pub(super) groups: Vec<(String, Vec<Option<Bar>>)>,
}

impl Bars<'_> {
    pub(super) fn draw(&self) -> Result<String, ReportError> {
        let (groups, several) = (self.groups.len().max(1), self.series.len() > 1);
        let rows = u32::try_from(groups * self.series.len().max(1)).unwrap_or(1);
        let longest = self.groups.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        // Where there are several values in a group, their names stand in a group of their own.
        let (space, height) = (if several { 0.9 } else { 0.0 }, 96 + rows * if several { 24 } else { 30 });
        picture(height + if several { 36 } else { 0 }, |area| {
            let bars = || self.groups.iter().flat_map(|(_, bars)| bars).flatten();
            let ends = bars().flat_map(|bar| [Some(bar.value), bar.range.map(|(_, high)| high)]).flatten();
            let right = ends.fold(0.0f64, f64::max).max(1e-9) * 1.16;
            let bottom_up = |at: usize| (groups - 1 - at) as f64;
            let mut chart = failed(
                "axes",
                ChartBuilder::on(area)
                    .caption(self.title, ("sans-serif", 17))
                    .margin(10)
                    .x_label_area_size(44)
                    .y_label_area_size(14 + u32::try_from(longest).unwrap_or(20).min(52) * 7)
                    .build_cartesian_2d(0.0..right, 0.0..groups as f64 + space),
            )?;
            let name = |y: &f64| {
                // One label a group, in its middle.
                let group = (0..groups).find(|at| (bottom_up(*at) + 0.5 - y).abs() < 0.01);
                group.and_then(|at| self.groups.get(at)).map_or(String::new(), |(name, _)| name.clone())
            };
            failed(
                "grid",
                chart
                    .configure_mesh()
                    .disable_y_mesh()
                    .light_line_style(TRANSPARENT)
                    .x_labels(6)
                    .x_label_formatter(&|x| short(*x))
                    .y_labels(groups * 2 + 3)
                    .y_label_formatter(&name)
                    .label_style(("sans-serif", 13))
                    .x_desc(self.unit)
                    .draw(),
            )?;
            let width = 0.8 / self.series.len().max(1) as f64;
            for (at, series) in self.series.iter().enumerate() {
                let colour = COLOURS[at % COLOURS.len()];
                let each = || {
                    self.groups.iter().enumerate().filter_map(move |(group, (_, bars))| {
                        let top = bottom_up(group) + 0.9 - width * at as f64;
                        Some((top, bars.get(at).copied().flatten()?))
                    })
                };
                let filled = each()
                    .map(|(top, bar)| Rectangle::new([(0.0, top), (bar.value, top - width * 0.88)], colour.filled()));
                failed("bars", chart.draw_series(filled))?
                    .label(series.clone())
                    .legend(move |(x, y)| Rectangle::new([(x + 2, y - 5), (x + 14, y + 5)], colour.filled()));
                let ranges = each().filter_map(|(top, bar)| {
                    let (low, high) = bar.range?;
                    let middle = top - width * 0.44;
                    Some(PathElement::new([(low, middle), (high, middle)], BLACK.stroke_width(2)))
                });
                failed("ranges", chart.draw_series(ranges))?;
                let labels = each().map(|(top, bar)| {
                    let end = bar.range.map_or(bar.value, |(_, high)| high.max(bar.value));
                    Text::new(
                        short(bar.value),
                        (end + right * 0.012, top - width * 0.2),
                        ("sans-serif", 13).into_font(),
                    )
                });
                failed("labels", chart.draw_series(labels))?;
            }
            if several {
                legend(&mut chart, SeriesLabelPosition::UpperRight)?;
            }
            Ok(())
        })
    }
}

/// Lines over a common axis, both axes logarithmic.
#[derive(Debug, Clone)]
pub(super) struct Lines<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    pub(super) series: Vec<(String, Vec<(f64, f64)>)>,
}

impl Lines<'_> {
    pub(super) fn draw(&self) -> Result<String, ReportError> {
        picture(HEIGHT, |area| {
            let points = || self.series.iter().flat_map(|(_, points)| points).filter(|(x, y)| *x > 0.0 && *y > 0.0);
            let range = |of: fn(&(f64, f64)) -> f64| {
                let (low, high) =
                    points().map(of).fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
                if low > high { 1.0..10.0 } else { low / 1.3..high * 1.3 }
            };
            let mut chart = failed(
                "axes",
                ChartBuilder::on(area)
                    .caption(self.title, ("sans-serif", 17))
                    .margin(10)
                    .x_label_area_size(40)
                    .y_label_area_size(70)
                    .build_cartesian_2d(range(|p| p.0).log_scale(), range(|p| p.1).log_scale()),
            )?;
            failed(
                "grid",
                chart
                    .configure_mesh()
                    .light_line_style(TRANSPARENT)
                    .x_labels(6)
                    .y_labels(6)
                    .x_label_formatter(&|x| short(*x))
                    .y_label_formatter(&|y| short(*y))
                    .x_desc(self.x)
                    .y_desc(self.y)
                    .draw(),
            )?;
            for (at, (name, points)) in self.series.iter().enumerate() {
                let colour = COLOURS[at % COLOURS.len()];
                let points: Vec<(f64, f64)> = points.iter().copied().filter(|(x, y)| *x > 0.0 && *y > 0.0).collect();
                failed("a line", chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2))))?
                    .label(name.clone())
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
                let dots = points.into_iter().map(|at| Circle::new(at, 3, colour.filled()));
                failed("dots", chart.draw_series(dots))?;
            }
            legend(&mut chart, SeriesLabelPosition::UpperLeft)
        })
    }
}

/// Three digits that count.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.0e}"),
    }
}

fn picture(
    height: u32,
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), ReportError>,
) -> Result<String, ReportError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        failed("the ground", area.fill(&WHITE))?;
        draw(&area)?;
        failed("the picture", area.present())?;
    }
    Ok(text)
}

fn legend<'a, B: DrawingBackend + 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, B, C>,
    position: SeriesLabelPosition,
) -> Result<(), ReportError> {
    let style = chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw();
    failed("the legend", style)
}

fn failed<T, E: std::fmt::Display>(what: &'static str, result: Result<T, E>) -> Result<T, ReportError> {
    result.map_err(|reason| ReportError { what, reason: reason.to_string() })
}
