//! Pictures of the report, as SVG.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
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

/// How the axes of lines are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// Evenly, from zero upwards.
    Linear,
    /// Both by factors of two, for there is seldom a whole decade; what is not above zero has no place.
    Logarithmic,
}

/// Lines over a common axis.
#[derive(Debug, Clone)]
pub(super) struct Lines<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    pub(super) scale: Scale,
    pub(super) series: Vec<(String, Vec<(f64, f64)>)>,
}

impl Lines<'_> {
    pub(super) fn draw(&self) -> Result<String, ReportError> {
        let points = || self.series.iter().flat_map(|(_, points)| points).filter(|point| self.has_place(point));
        let range = |of: fn(&(f64, f64)) -> f64| {
            points().map(of).fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)))
        };
        let (x, y) = (range(|point| point.0), range(|point| point.1));
        picture(HEIGHT, |area| match self.scale {
            Scale::Linear => self.draw_on(area, 0.0..x.1.max(1e-9), 0.0..y.1.max(1e-9) * 1.1),
            Scale::Logarithmic => {
                let range = |(low, high): (f64, f64)| if low > high { 1.0..10.0 } else { low / 1.3..high * 1.3 };
                self.draw_on(area, range(x).log_scale().base(2.0), range(y).log_scale().base(2.0))
            }
        })
    }

    fn has_place(&self, (x, y): &(f64, f64)) -> bool {
        self.scale == Scale::Linear || (*x > 0.0 && *y > 0.0)
    }

    fn draw_on<'a, X, Y>(&self, area: &DrawingArea<SVGBackend<'a>, Shift>, x: X, y: Y) -> Result<(), ReportError>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let chart = ChartBuilder::on(area)
            .caption(self.title, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(x, y);
        let mut chart = failed("axes", chart)?;
        failed(
            "grid",
            chart
                .configure_mesh()
                .light_line_style(TRANSPARENT)
                .x_labels(6)
                .y_labels(6)
                .x_label_formatter(&|x| short(*x))
                .y_label_formatter(&|y| short(*y))
                .label_style(("sans-serif", 13))
                .x_desc(self.x)
                .y_desc(self.y)
                .draw(),
        )?;
        for (at, (name, points)) in self.series.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let points: Vec<(f64, f64)> = points.iter().copied().filter(|point| self.has_place(point)).collect();
            failed("a line", chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2))))?
                .label(name.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
            let dots = points.into_iter().map(|at| Circle::new(at, 3, colour.filled()));
            failed("dots", chart.draw_series(dots))?;
        }
        let position = match self.scale {
            Scale::Linear => SeriesLabelPosition::LowerRight,
            Scale::Logarithmic => SeriesLabelPosition::UpperLeft,
        };
        legend(&mut chart, position)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts of a picture.
    fn texts(svg: &str) -> Vec<&str> {
        let parts = svg.split("<text").skip(1).filter_map(|part| part.split_once('>')?.1.split_once("</text>"));
        parts.map(|(text, _)| text.trim()).collect()
    }

    #[test]
    fn every_group_has_its_name_and_its_values() {
        for groups in 1..=12 {
            for series in [vec!["one".to_owned()], vec!["one".to_owned(), "other".to_owned()]] {
                let bar = |group: usize, at: usize| {
                    let value = (100 * group + at + 11) as f64;
                    Some(Bar { value, range: Some((value - 5.0, value + 5.0)) })
                };
                let bars = |group| (0..series.len()).map(|at| bar(group, at)).collect::<Vec<_>>();
                let groups: Vec<_> = (0..groups).map(|group| (format!("group {group}"), bars(group))).collect();
                let (title, unit) = ("a title", "a unit");
                let svg = Bars { title, unit, series, groups: groups.clone() }.draw().unwrap();
                let texts = texts(&svg);
                for (name, bars) in &groups {
                    assert_eq!(texts.iter().filter(|text| *text == name).count(), 1, "{name} of {}", groups.len());
                    for bar in bars.iter().flatten() {
                        assert!(texts.contains(&&short(bar.value)[..]), "{} of {name}: {texts:?}", bar.value);
                    }
                }
                assert!(texts.contains(&title) && texts.contains(&unit));
            }
        }
    }

    #[test]
    fn three_digits_count() {
        let check = |value: f64, expected: &str| assert_eq!(short(value), expected);
        check(0.0, "0");
        check(1_234.5, "1234");
        check(12.34, "12.3");
        check(1.234, "1.23");
        check(0.1234, "0.123");
        check(0.0001, "1e-4");
    }
}
