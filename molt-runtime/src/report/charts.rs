//! Pictures of the report, as SVG.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::ReportError;

const SIZE: (u32, u32) = (760, 380);

/// Told apart by colour-blind readers too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
];

/// Values with a name each, beside one another in groups.
#[derive(Debug, Clone)]
pub(super) struct Bars<'a> {
    pub(super) title: &'a str,
    /// What the values are, with their unit.
    pub(super) unit: &'a str,
    /// Names of the values in a group.
    pub(super) series: Vec<String>,
    /// Groups and their values, one a series; a value that is not there leaves a gap.
    pub(super) groups: Vec<(String, Vec<Option<f64>>)>,
}

impl Bars<'_> {
    pub(super) fn draw(&self) -> Result<String, ReportError> {
        picture(|area| {
            let values = self.groups.iter().flat_map(|(_, values)| values).flatten();
            let top = values.fold(0.0f64, |top, value| top.max(*value)).max(1e-9) * 1.15;
            let groups = self.groups.len().max(1) as f64;
            let mut chart = failed(
                "axes",
                ChartBuilder::on(area)
                    .caption(self.title, ("sans-serif", 17))
                    .margin(10)
                    .x_label_area_size(44)
                    .y_label_area_size(64)
                    .build_cartesian_2d(0.0..groups, 0.0..top),
            )?;
            let name = |x: &f64| {
                // One label a group, in its middle.
                let at = (x - 0.5).round();
                let middle = (x - 0.5 - at).abs() < 0.01;
                let group = self.groups.iter().enumerate().find(|(index, _)| (*index as f64 - at).abs() < 0.01);
                group.filter(|_| middle).map_or(String::new(), |(_, (name, _))| name.clone())
            };
            failed(
                "grid",
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .light_line_style(TRANSPARENT)
                    .x_labels(self.groups.len() * 2 + 1)
                    .x_label_formatter(&name)
                    .y_desc(self.unit)
                    .draw(),
            )?;
            let width = 0.8 / self.series.len().max(1) as f64;
            for (at, series) in self.series.iter().enumerate() {
                let colour = COLOURS[at % COLOURS.len()];
                let bars = self.groups.iter().enumerate().filter_map(|(group, (_, values))| {
                    let value = values.get(at).copied().flatten()?;
                    let left = group as f64 + 0.1 + width * at as f64;
                    Some(Rectangle::new([(left, 0.0), (left + width * 0.92, value)], colour.filled()))
                });
                failed("bars", chart.draw_series(bars))?
                    .label(series.clone())
                    .legend(move |(x, y)| Rectangle::new([(x + 2, y - 5), (x + 14, y + 5)], colour.filled()));
                let labels = self.groups.iter().enumerate().filter_map(|(group, (_, values))| {
                    let value = values.get(at).copied().flatten()?;
                    let middle = group as f64 + 0.1 + width * (at as f64 + 0.46);
                    let style = ("sans-serif", 12).into_font();
                    Some(Text::new(short(value), (middle - width * 0.3, value + top * 0.04), style))
                });
                failed("labels", chart.draw_series(labels))?;
            }
            if self.series.len() > 1 {
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
        picture(|area| {
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
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), ReportError>,
) -> Result<String, ReportError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
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
