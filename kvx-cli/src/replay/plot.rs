//! Plots as SVG, with the colours of the page around them.

use std::fmt::Write as _;

/// A plot: its title, its axes, and a series of points for each endpoint.
pub(super) struct Plot<'a> {
    pub(super) title: &'a str,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) kind: PlotKind,
    pub(super) series: Vec<Vec<(f64, f64)>>,
}

pub(super) enum PlotKind {
    Line,
    Points,
}

/// An axis from the least to the greatest value.
pub(super) struct Axis {
    name: &'static str,
    least: f64,
    most: f64,
    is_log: bool,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// The most points of a series that are drawn.
const POINTS: usize = 2000;

impl Axis {
    /// Returns a linear axis from 0.
    pub(super) fn linear(name: &'static str, most: f64) -> Self {
        Axis { name, least: 0.0, most: if most > 0.0 { most } else { 1.0 }, is_log: false }
    }

    /// Returns a logarithmic axis between powers of ten.
    pub(super) fn logarithmic(name: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|value| *value > 0.0) {
            (least, most) = (least.min(value), most.max(value));
        }
        if most == 0.0 {
            (least, most) = (1.0, 10.0);
        }
        let (least, most) = (least.log10().floor(), most.log10().ceil());
        let most = if most > least { most } else { least + 1.0 };
        Axis { name, least: 10f64.powf(least), most: 10f64.powf(most), is_log: true }
    }

    /// Returns the place of a value, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.is_log { value.log10() } else { value };
        let value = value.clamp(self.least, self.most);
        (scale(value) - scale(self.least)) / (scale(self.most) - scale(self.least))
    }

    /// Returns the marked values.
    fn ticks(&self) -> Vec<f64> {
        if self.is_log {
            let (from, to) = (self.least.log10().round() as i32, self.most.log10().round() as i32);
            return (from..=to).map(|power| 10f64.powi(power)).collect();
        }
        let rough = (self.most - self.least) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let count = (self.most / step + 1e-9) as usize;
        // Without the digits that the product has by rounding.
        (0..=count).map(|number| (number as f64 * step * 1e9).round() / 1e9).collect()
    }
}

fn x(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)
}

fn y(axis: &Axis, value: f64) -> f64 {
    HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)
}

/// Returns every point, or as many as can be seen of a long series.
fn thinned(series: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> + '_ {
    let step = series.len().div_ceil(POINTS).max(1);
    let last = series.len().saturating_sub(1);
    let kept = move |at: &usize| at.is_multiple_of(step) || *at == last;
    (0..series.len()).filter(kept).map(move |at| series[at])
}

impl Plot<'_> {
    /// Draws the plot. Series take their colours from the classes `s0` and `s1`.
    pub(super) fn svg(&self) -> String {
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            escaped(self.title)
        );
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in self.x.ticks() {
            let at = x(&self.x, tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 16.0
            );
        }
        for tick in self.y.ticks() {
            let at = y(&self.y, tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
        for (number, series) in self.series.iter().enumerate() {
            match self.kind {
                PlotKind::Line if series.is_empty() => {}
                PlotKind::Line => {
                    let _ = write!(svg, "<polyline class=\"s{number}\" points=\"");
                    for (at, value) in thinned(series) {
                        let _ = write!(svg, "{:.1},{:.1} ", x(&self.x, at), y(&self.y, value));
                    }
                    svg.push_str("\"/>\n");
                }
                PlotKind::Points => {
                    for (at, value) in thinned(series) {
                        let (x, y) = (x(&self.x, at), y(&self.y, value));
                        // Another shape for the second endpoint: colours alone are not enough.
                        let _ = match number {
                            0 => writeln!(
                                svg,
                                "<circle class=\"p0\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.2\"/>"
                            ),
                            _ => writeln!(
                                svg,
                                "<rect class=\"p{number}\" x=\"{:.1}\" y=\"{:.1}\" width=\"4\" height=\"4\"/>",
                                x - 2.0,
                                y - 2.0
                            ),
                        };
                    }
                }
            }
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n</svg>",
            (LEFT + right) / 2.0,
            HEIGHT - 8.0,
            self.x.name,
            (TOP + bottom) / 2.0,
            self.y.name
        );
        svg
    }
}

/// Returns a text that HTML and SVG show as it is.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_marks() {
        assert_eq!(Axis::linear("x", 10.0).ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(Axis::linear("x", 0.0).ticks().len(), 6);
        let log = Axis::logarithmic("x", [3.0, 0.0, 450.0].into_iter());
        assert_eq!(log.ticks(), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!((log.place(1.0), log.place(1000.0)), (0.0, 1.0));
        assert!((log.place(10.0) - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(Axis::logarithmic("x", [10.0].into_iter()).ticks(), [10.0, 100.0]);
    }

    #[test]
    fn long_series_are_thinned_to_their_ends_and_texts_are_escaped() {
        let series: Vec<_> = (0..100_000).map(|at| (f64::from(at), 0.5)).collect();
        let drawn: Vec<_> = thinned(&series).collect();
        assert!(drawn.len() <= POINTS + 1 && drawn[0] == series[0], "{}", drawn.len());
        assert_eq!(drawn.last(), series.last());
        assert_eq!(escaped("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
    }
}
