//! Plots as SVG, on light and dark pages and on paper.

use std::fmt::Write as _;

/// A plot: panels side by side, which share their axes and their series.
pub(crate) struct Plot {
    pub(crate) title: String,
    /// The description for readers who cannot see the plot.
    pub(crate) description: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    /// The series, as the legend names them.
    pub(crate) series: Vec<Key>,
    pub(crate) panels: Vec<Panel>,
}

/// A series in the legend.
#[derive(Clone)]
pub(crate) struct Key {
    pub(crate) name: String,
    /// The number of its colour and of the shape of its marks.
    pub(crate) colour: usize,
    pub(crate) drawn: Drawn,
}

/// The form of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "proxy"), expect(dead_code, reason = "`kvx replay` draws two of them"))]
pub(crate) enum Drawn {
    /// A line without marks: dashed for every second colour.
    Curve,
    /// Small marks without a line.
    Points,
    /// A line with marks and the spread of their values.
    Measured,
    /// A thin dashed line.
    Limit,
    /// A dotted line with hollow marks.
    Peer,
}

/// A part of a plot with its own values.
#[derive(Default)]
pub(crate) struct Panel {
    pub(crate) name: String,
    /// The marks of each series.
    pub(crate) series: Vec<Vec<Mark>>,
}

/// A value, and its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mark {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Mark {
    /// A value without a spread.
    #[cfg(any(test, feature = "proxy"))]
    pub(crate) fn exact((x, y): (f64, f64)) -> Self {
        Mark { x, y, low: y, high: y }
    }
}

/// An axis from the least to the greatest value.
pub(crate) struct Axis {
    name: &'static str,
    least: f64,
    most: f64,
    is_log: bool,
    /// The marked values with their texts.
    ticks: Vec<(f64, String)>,
    /// The part of the axis before the least and behind the greatest value.
    margin: f64,
}

const WIDTH: f64 = 720.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const GAP: f64 = 14.0;
const COLUMNS: usize = 3;
/// The height of a panel without its texts.
const HEIGHT: f64 = 236.0;
/// The height of the texts below a panel: those of the ticks.
const BELOW: f64 = 22.0;
/// The height of a line of text.
const LINE: f64 = 18.0;
/// The estimated width of a character, and of a legend's sample with its distances.
const CHARACTER: f64 = 6.6;
const SAMPLE: f64 = 48.0;
/// The least distance between the texts of two ticks.
const APART: f64 = 8.0;
/// The most points of a series that are drawn.
const POINTS: usize = 2000;
const COLOURS: usize = 8;

/// The style of plots. Paper is always light.
pub(super) const STYLE: &str = "\
.plot text{font:12px system-ui,sans-serif;fill:#1b1b1b}.plot .grid{stroke:#ddd}.plot .frame{stroke:#8a8a8a;fill:none}\
.plot polyline,.plot .key{fill:none;stroke:currentColor;stroke-width:2}.plot .spread{stroke:currentColor}\
.plot .limit{stroke-width:1.5;stroke-dasharray:6 4}.plot .peer{stroke-dasharray:2 3}.plot .second{stroke-dasharray:7 4}\
.plot .mark{fill:currentColor}.plot .hollow{fill:#fff;stroke:currentColor;stroke-width:1.5}.plot .small{fill-opacity:.7}\
.c0{color:#0b62c4}.c1{color:#c2570c}.c2{color:#1a7f37}.c3{color:#8b3fb0}.c4{color:#b3261e}.c5{color:#0e7c86}.c6{color:#6b5b00}.c7{color:#555}\
@media screen and (prefers-color-scheme:dark){.plot text{fill:#e6e6e6}.plot .grid{stroke:#33363b}.plot .frame{stroke:#787c82}\
.plot .hollow{fill:#15171a}\
.c0{color:#6fb1ff}.c1{color:#ffab66}.c2{color:#66d283}.c3{color:#d49bf0}.c4{color:#ff9a92}.c5{color:#5fd3de}.c6{color:#d9c45a}.c7{color:#bbb}}";

/// Steps of a logarithmic axis, times powers of ten.
const STEPS: [f64; 3] = [1.0, 2.0, 5.0];

fn tick(value: f64) -> (f64, String) {
    // Without the digits that a product has by rounding.
    let value = (value * 1e9).round() / 1e9;
    (value, value.to_string())
}

impl Axis {
    /// Returns a linear axis from 0.
    pub(crate) fn linear(name: &'static str, most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let rough = most / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let count = (most / step + 1e-9) as usize;
        let ticks = (0..=count).map(|number| tick(number as f64 * step)).collect();
        Axis { name, least: 0.0, most, is_log: false, ticks, margin: 0.0 }
    }

    /// Returns a logarithmic axis around the values, of which it leaves out those below 1e-9.
    pub(crate) fn logarithmic(name: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|value| *value >= 1e-9 && value.is_finite()) {
            (least, most) = (least.min(value), most.max(value));
        }
        if most == 0.0 {
            (least, most) = (1.0, 10.0);
        }
        let powers = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let step = |power| STEPS.map(|step| (step, tick(step * 10f64.powi(power))));
        let steps: Vec<_> = powers.flat_map(step).collect();
        let last = steps.len() - 1;
        // The values lie within the steps, and between two of them at least.
        let first = steps.iter().rposition(|(_, (value, _))| *value <= least).unwrap_or(0);
        let first = first.min(last - 1);
        let end = steps.iter().position(|(_, (value, _))| *value >= most).unwrap_or(last);
        let steps = &steps[first..=end.max(first + 1)];
        let (least, most) = (steps[0].1.0, steps[steps.len() - 1].1.0);
        let few = steps.len() <= 8;
        let shown = steps.iter().filter(|(step, _)| few || *step == 1.0);
        let ticks = shown.map(|(_, tick)| tick.clone()).collect();
        Axis { name, least, most, is_log: true, ticks, margin: 0.0 }
    }

    /// Returns a logarithmic axis with marks at these values, which are above 0 and ascend.
    pub(crate) fn marked(name: &'static str, ticks: Vec<(f64, String)>) -> Self {
        let (least, most) = (
            ticks.first().map_or(1.0, |(value, _)| *value),
            ticks.last().map_or(1.0, |(value, _)| *value),
        );
        Axis { name, least, most, is_log: true, ticks, margin: 0.08 }
    }

    /// Returns the place of a value, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.is_log { value.log10() } else { value };
        let value = value.clamp(self.least, self.most);
        if self.least >= self.most {
            return 0.5;
        }
        let place = (scale(value) - scale(self.least)) / (scale(self.most) - scale(self.least));
        self.margin + place * (1.0 - 2.0 * self.margin)
    }
}

/// Returns every mark, or as many as can be seen of a long series.
fn thinned(series: &[Mark]) -> impl Iterator<Item = Mark> + '_ {
    let step = series.len().div_ceil(POINTS).max(1);
    let last = series.len().saturating_sub(1);
    let kept = move |at: &usize| at.is_multiple_of(step) || *at == last;
    (0..series.len()).filter(kept).map(move |at| series[at])
}

/// The area of a panel.
#[derive(Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
}

impl Area {
    fn x(&self, axis: &Axis, value: f64) -> f64 {
        self.left + axis.place(value) * self.width
    }

    fn y(&self, axis: &Axis, value: f64) -> f64 {
        self.top + (1.0 - axis.place(value)) * HEIGHT
    }

    fn bottom(&self) -> f64 {
        self.top + HEIGHT
    }
}

impl Plot {
    /// Draws the plot, with its legend above.
    pub(crate) fn svg(&self) -> String {
        self.drawn().0
    }

    /// Draws the plot, and returns its height.
    fn drawn(&self) -> (String, f64) {
        let mut body = String::new();
        let legend = self.legend(&mut body);
        let columns = self.panels.len().clamp(1, COLUMNS);
        let width = (WIDTH - LEFT - RIGHT - GAP * (columns - 1) as f64) / columns as f64;
        let name = if self.panels.iter().any(|panel| !panel.name.is_empty()) { LINE } else { 4.0 };
        let row = name + HEIGHT + BELOW;
        for (at, panel) in self.panels.iter().enumerate() {
            let (column, line) = (at % columns, at / columns);
            let left = LEFT + column as f64 * (width + GAP);
            let area = Area { left, top: legend + row * line as f64 + name, width };
            self.axes(&mut body, area, column == 0);
            if !panel.name.is_empty() {
                let (middle, y) = (left + width / 2.0, area.top - 5.0);
                text(&mut body, (middle, y), "middle", &panel.name);
            }
            for (key, series) in self.series.iter().zip(&panel.series) {
                let _ = write!(body, "<g class=\"c{}\">", key.colour % COLOURS);
                self.one(&mut body, area, key, series);
                body.push_str("</g>\n");
            }
        }
        let rows = self.panels.len().div_ceil(columns) as f64;
        let height = legend + row * rows + LINE;
        text(&mut body, ((LEFT + WIDTH - RIGHT) / 2.0, height - 5.0), "middle", self.x.name);
        let middle = legend + (row * rows) / 2.0;
        let _ = writeln!(
            body,
            "<text transform=\"translate(13 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escaped(self.y.name)
        );
        let (title, description) = (escaped(&self.title), escaped(&self.description));
        let svg = format!(
            "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
             role=\"img\">\n<title>{title}</title><desc>{description}</desc>\n{body}</svg>"
        );
        (svg, height)
    }

    /// Draws the legend, and returns its height.
    fn legend(&self, body: &mut String) -> f64 {
        let (mut x, mut line) = (LEFT, 0.0);
        for key in &self.series {
            let width = SAMPLE + CHARACTER * key.name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH {
                (x, line) = (LEFT, line + 1.0);
            }
            let y = line * LINE + 12.0;
            let _ = write!(body, "<g class=\"c{}\">", key.colour % COLOURS);
            if key.drawn != Drawn::Points {
                let class = line_class(key);
                let _ = write!(
                    body,
                    "<line class=\"key{class}\" x1=\"{x:.1}\" y1=\"{y}\" x2=\"{:.1}\" y2=\"{y}\"/>",
                    x + 28.0
                );
            }
            mark(body, key, (x + 14.0, y));
            body.push_str("</g>");
            text(body, (x + 33.0, y + 4.0), "start", &key.name);
            x += width;
        }
        (line + 1.0) * LINE + 4.0
    }

    fn axes(&self, body: &mut String, area: Area, first: bool) {
        let (bottom, right) = (area.bottom(), area.left + area.width);
        let mut last = f64::NEG_INFINITY;
        for (value, label) in &self.x.ticks {
            let at = area.x(&self.x, *value);
            let _ = write!(
                body,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>",
                area.top
            );
            let half = CHARACTER * label.chars().count() as f64 / 2.0;
            if at - half >= last + APART {
                last = at + half;
                text(body, (at, bottom + 15.0), "middle", label);
            }
        }
        for (value, label) in &self.y.ticks {
            let at = area.y(&self.y, *value);
            let _ = write!(
                body,
                "<line class=\"grid\" x1=\"{:.1}\" y1=\"{at:.1}\" x2=\"{right:.1}\" y2=\"{at:.1}\"/>",
                area.left
            );
            if first {
                text(body, (area.left - 6.0, at + 4.0), "end", label);
            }
        }
        let _ = writeln!(
            body,
            "<rect class=\"frame\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{HEIGHT}\"/>",
            area.left, area.top, area.width
        );
    }

    fn one(&self, body: &mut String, area: Area, key: &Key, series: &[Mark]) {
        let place = |value: Mark| (area.x(&self.x, value.x), area.y(&self.y, value.y));
        if key.drawn != Drawn::Points && series.len() > 1 {
            let _ = write!(body, "<polyline class=\"line{}\" points=\"", line_class(key));
            for (x, y) in thinned(series).map(place) {
                let _ = write!(body, "{x:.1},{y:.1} ");
            }
            body.push_str("\"/>");
        }
        for value in thinned(series) {
            let (x, y) = place(value);
            let ends = [value.low, value.high].map(|end| area.y(&self.y, end));
            if key.drawn != Drawn::Limit && (ends[0] - ends[1]).abs() >= 1.0 {
                let _ = write!(
                    body,
                    "<line class=\"spread\" x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>",
                    ends[0], ends[1]
                );
            }
            // A limit has marks only where no line shows it.
            if key.drawn != Drawn::Limit {
                mark(body, key, (x, y));
            } else if series.len() == 1 {
                let (from, to) = (x - 14.0, x + 14.0);
                let _ = write!(
                    body,
                    "<line class=\"key limit\" x1=\"{from:.1}\" y1=\"{y:.1}\" x2=\"{to:.1}\" y2=\"{y:.1}\"/>"
                );
            }
        }
    }
}

fn line_class(key: &Key) -> &'static str {
    match key.drawn {
        Drawn::Limit => " limit",
        Drawn::Peer => " peer",
        Drawn::Curve if key.colour % 2 == 1 => " second",
        _ => "",
    }
}

/// Draws a mark. Series have different shapes: colours alone are not enough.
fn mark(body: &mut String, key: &Key, (x, y): (f64, f64)) {
    let (class, r) = match key.drawn {
        Drawn::Curve | Drawn::Limit => return,
        Drawn::Points => ("mark small", 2.2),
        Drawn::Measured => ("mark", 4.0),
        Drawn::Peer => ("hollow", 4.0),
    };
    let corners: &[(f64, f64)] = match key.colour % 4 {
        0 => {
            let _ =
                write!(body, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\"/>");
            return;
        }
        1 => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        2 => &[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
        _ => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
    };
    let _ = write!(body, "<polygon class=\"{class}\" points=\"");
    for (right, down) in corners {
        let _ = write!(body, "{:.1},{:.1} ", x + r * right, y + r * down);
    }
    body.push_str("\"/>");
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = escaped(text);
    let _ =
        writeln!(body, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

/// Returns a picture of all plots, each below its title. A line of text ends the picture.
pub(crate) fn standalone(title: &str, plots: &[Plot], last: &str) -> String {
    const TITLE: f64 = 34.0;
    let mut body = String::new();
    let mut height = 0.0;
    for plot in plots {
        text(&mut body, (LEFT, height + 22.0), "start", &plot.title);
        let (svg, tall) = plot.drawn();
        let placed =
            format!("<svg y=\"{:.0}\" width=\"{WIDTH}\" height=\"{tall:.0}\" ", height + TITLE);
        body.push_str(&svg.replacen("<svg ", &placed, 1));
        body.push('\n');
        height += TITLE + tall + 10.0;
    }
    text(&mut body, (LEFT, height + 14.0), "start", last);
    height += LINE + 8.0;
    format!(
        "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
         width=\"{WIDTH}\" height=\"{height:.0}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}\
         .page{{fill:#fff}}@media screen and (prefers-color-scheme:dark){{.page{{fill:#15171a}}}}</style>\n\
         <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
        escaped(title)
    )
}

/// Returns a text that HTML and SVG show as it is.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML knows no other control characters.
            '\t' | '\n' => escaped.push(' '),
            other if other.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(axis: &Axis) -> Vec<f64> {
        axis.ticks.iter().map(|(value, _)| *value).collect()
    }

    #[test]
    fn axes_have_round_marks() {
        assert_eq!(values(&Axis::linear("x", 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(values(&Axis::linear("x", 0.0)).len(), 6);
        let log = Axis::logarithmic("x", [3.0, 0.0, 450.0].into_iter());
        assert_eq!(values(&log), [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
        assert_eq!((log.place(2.0), log.place(500.0), log.place(9000.0)), (0.0, 1.0, 1.0));
        let long = Axis::logarithmic("x", [0.03, 45_000.0].into_iter());
        assert_eq!(values(&long), [0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        for one in [1.0, 9.99, 10.0, 1e-9, 1e12] {
            let axis = Axis::logarithmic("x", [one].into_iter());
            assert!(axis.least <= one && one <= axis.most && axis.least < axis.most, "{one}");
        }
        assert_eq!(values(&Axis::logarithmic("x", std::iter::empty())), [1.0, 2.0, 5.0, 10.0]);
        let marked = Axis::marked("x", vec![(1.0, "1".into()), (64.0, "64".into())]);
        assert!((marked.place(8.0) - 0.5).abs() < 1e-9 && marked.place(1.0) > 0.05);
        assert_eq!(Axis::marked("x", vec![(7.0, "7".into())]).place(7.0), 0.5);
    }

    #[test]
    fn long_series_are_thinned_to_their_ends_and_texts_are_escaped() {
        let series: Vec<_> = (0..100_000).map(|at| Mark::exact((f64::from(at), 0.5))).collect();
        let drawn: Vec<_> = thinned(&series).collect();
        assert!(drawn.len() <= POINTS + 1 && drawn[0] == series[0], "{}", drawn.len());
        assert_eq!(drawn.last(), series.last());
        assert_eq!(escaped("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
        assert_eq!(escaped("a\u{1b}[2J\nb"), "a\u{fffd}[2J b");
    }

    #[test]
    fn every_series_is_drawn_in_every_panel_within_the_picture() {
        let key = |name: &str, drawn| Key { name: name.to_owned(), colour: 0, drawn };
        let series = || {
            let spread = Mark { x: 1.0, y: 2.0, low: 1.0, high: 4.0 };
            vec![vec![spread, Mark::exact((64.0, 4.0))], vec![Mark::exact((1.0, 5.0))]]
        };
        let plot = Plot {
            title: "Read <fast>".into(),
            description: "of two".into(),
            x: Axis::marked("blocks", vec![(1.0, "1".into()), (64.0, "64".into())]),
            y: Axis::linear("GB/s", 5.0),
            series: vec![key("SHM", Drawn::Measured), key("memcpy", Drawn::Limit)],
            panels: vec![
                Panel { name: "4 KiB".into(), series: series() },
                Panel { name: "1 MiB".into(), series: series() },
            ],
        };
        let svg = plot.svg();
        assert!(svg.contains("<title>Read &lt;fast&gt;</title><desc>of two</desc>"), "{svg}");
        // A sample in the legend, and two marks in each panel.
        assert_eq!(svg.matches("<circle").count(), 1 + 2 * 2);
        assert_eq!(svg.matches("class=\"spread\"").count(), 2);
        assert_eq!(svg.matches("class=\"key limit\"").count(), 1 + 2);
        for name in ["4 KiB", "1 MiB", "GB/s", "blocks", "memcpy"] {
            assert!(svg.contains(&format!(">{name}</text>")), "{name} in {svg}");
        }
        for place in svg.split("cx=\"").skip(1) {
            let x: f64 = place.split('"').next().unwrap().parse().unwrap();
            assert!((0.0..=WIDTH).contains(&x), "{x}");
        }
        let picture = standalone("all", &[plot], "the end");
        assert_eq!(picture.matches("<svg").count(), 2);
        assert_eq!(picture.matches("</svg>").count(), 2);
        assert!(picture.contains("<style>") && picture.contains("the end"), "{picture}");
    }
}
