//! The report of a bench: a page with plots, or the plots alone.

use std::path::{Path, PathBuf};

use super::figures::Figures;
use super::machine::{date, unix_time};
use super::points::{BenchOp, name};
use super::rounds::{median, significant};
use crate::report::{self, Axis, Drawn, Key, Mark, Panel, Plot, ReportFile, escaped};
use crate::{Result, bytes};

/// Values this many times apart need a logarithmic axis.
const FAR_APART: f64 = 12.0;

/// The form of a report, which its name's extension selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Page,
    Picture,
}

fn form(path: &Path) -> Result<Form> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("html" | "htm") => Ok(Form::Page),
        Some("svg") => Ok(Form::Picture),
        _ => Err(format!(
            "--report {}: write a name that ends in .html for a page, or in .svg for its plots",
            path.display()
        )
        .into()),
    }
}

/// The files of the reports that were asked for.
pub(super) struct Reports(Vec<(Form, ReportFile)>);

impl Reports {
    /// Fails if a report could not be written: before the measurements, not after them.
    pub(super) fn new(paths: &[PathBuf]) -> Result<Self> {
        let file = |path: &PathBuf| Ok((form(path)?, ReportFile::new(path, None)?));
        Ok(Reports(paths.iter().map(file).collect::<Result<_>>()?))
    }

    /// Writes all reports of the figures, if there are any, of as many points as were `planned`.
    /// `libraries` are the backends' versions.
    pub(super) fn write(
        self,
        figures: &[Figures],
        planned: usize,
        libraries: &[String],
    ) -> Result<()> {
        if figures.is_empty() {
            return Ok(());
        }
        let about = About::new(libraries, planned);
        self.0.into_iter().try_for_each(|(form, file)| {
            file.write(&match form {
                Form::Page => page(figures, &about),
                Form::Picture => picture(figures, &about),
            })
        })
    }
}

/// When, where and how the figures were measured.
struct About {
    command: String,
    date: String,
    libraries: String,
    /// The number of points that were to be measured.
    planned: usize,
}

impl About {
    fn new(libraries: &[String], planned: usize) -> Self {
        About {
            command: command(std::env::args_os().map(|word| word.to_string_lossy().into_owned())),
            date: date(unix_time()),
            libraries: libraries.join(", "),
            planned,
        }
    }
}

/// Returns why the figures are not to be trusted, or not complete.
fn warnings(figures: &[Figures], about: &About) -> Vec<String> {
    let mut warnings = Vec::new();
    let wrong: Vec<_> = figures.iter().filter(|one| !one.verified).map(point).collect();
    if !wrong.is_empty() {
        warnings.push(format!(
            "Wrong bytes arrived at points that are not drawn: {}.",
            wrong.join("; ")
        ));
    }
    if figures.len() < about.planned {
        let (of, planned) = (figures.len(), about.planned);
        warnings.push(format!("The run failed after {of} of {planned} points."));
    }
    warnings
}

/// Returns the command line in the form in which a shell reads it.
fn command(arguments: impl IntoIterator<Item = String>) -> String {
    let mut words: Vec<_> = arguments
        .into_iter()
        .map(|word| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
            if !word.is_empty() && word.chars().all(plain) {
                word
            } else {
                format!("'{}'", word.replace('\'', "'\\''"))
            }
        })
        .collect();
    // Not the folder of the program, which means nothing to others.
    if let Some(first) = words.first_mut() {
        "kvx".clone_into(first);
    }
    words.join(" ")
}

fn picture(figures: &[Figures], about: &About) -> String {
    let machine = figures[0].machine;
    let mut last = format!(
        "kvx {} on {}, {} cores, {}; {}",
        machine.kvx, machine.cpu, machine.cores, machine.kernel, about.date
    );
    for warning in warnings(figures, about) {
        last = format!("{warning} {last}");
    }
    report::standalone("kvx bench", &plots(figures), &last)
}

fn page(figures: &[Figures], about: &About) -> String {
    let machine = figures[0].machine;
    let (kvx, cpu) = (escaped(&machine.kvx), escaped(&machine.cpu));
    let has_peer = figures.iter().any(|one| one.beside.is_some());
    let beside = if has_peer { " Dotted lines are the companion program." } else { "" };
    let mut parts =
        vec![format!("<p>kvx {kvx} on {cpu}, {}. {EXPLANATION}{beside}</p>", about.date)];
    for warning in warnings(figures, about) {
        parts.push(format!("<p><strong>{}</strong></p>", escaped(&warning)));
    }
    parts.push(format!("<ul>{}</ul>", summary(figures)));
    parts.extend(
        plots(figures).iter().map(|plot| {
            format!("<figure><h2>{}</h2>\n{}</figure>", escaped(&plot.title), plot.svg())
        }),
    );
    parts.push(format!("<h2>All figures</h2>\n<p>{COLUMNS}</p>"));
    let rows = table(figures);
    let cells = rows.iter().map(|row| row.iter().map(String::as_str));
    parts.push(report::table(&rounds(figures), TEXTS, cells));
    parts.push("<h2>Machine and command</h2>".to_owned());
    let memory = format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30));
    let list = [
        ("Processor", machine.cpu.clone()),
        ("Cores", machine.cores.to_string()),
        ("Memory", memory),
        ("Kernel", machine.kernel.clone()),
        ("kvx", machine.kvx.clone()),
        ("Backends", about.libraries.clone()),
        ("Date", about.date.clone()),
    ];
    let list = list.map(|(term, is)| format!("<dt>{term}</dt><dd>{}</dd>", escaped(&is)));
    let command = escaped(&about.command);
    parts
        .push(format!("<dl>{}<dt>Command</dt><dd><code>{command}</code></dd></dl>", list.concat()));
    report::page("kvx bench", &parts)
}

const EXPLANATION: &str = "\
Each point moves a list of blocks from one process to another, again and again. Solid lines are \
kvx; a vertical line at a mark spans its slowest and fastest round, or ends at the edge. Dashed lines are the limit: the \
same blocks moved without kvx, in rounds between kvx's. The closer kvx is to its dashed line, the \
less it costs. 1 GB is 10<sup>9</sup> bytes.";

const COLUMNS: &str = "\
GB/s: the median of the rounds. p50, p99: the time of a transfer that half and 99 % of them need. \
Limit: the way in which the same blocks move without kvx. Ratio: kvx's GB/s divided by the limit's \
in the same round, the median of the rounds; 1.00 is as fast as without kvx, 0.50 takes twice the \
time. Ranges: the least and the greatest of the rounds.";

fn rounds(figures: &[Figures]) -> String {
    let points = if figures.len() == 1 { "point" } else { "points" };
    let rounds = if figures[0].rounds == 1 { "round" } else { "rounds" };
    format!("{} {points}, {} {rounds} each", figures.len(), figures[0].rounds)
}

/// Returns what a newcomer should learn from the figures, as items of a list.
fn summary(figures: &[Figures]) -> String {
    let mut items = String::new();
    for op in ops(figures) {
        for series in all_series(figures, op) {
            let fastest = series.figures.iter().max_by(|a, b| a.gbps.total_cmp(&b.gbps));
            let Some(best) = fastest else { continue };
            let ratio = median(series.figures.iter().filter_map(|one| one.ratio));
            let limit = ratio.map_or_else(
                || ": no limit was measured".to_owned(),
                |ratio| {
                    let of = match series.figures.len() {
                        1 => String::new(),
                        points => format!(", the median of {points} points"),
                    };
                    format!(": {ratio:.2} of the limit{of}")
                },
            );
            let line = format!(
                "{} {}: up to {} GB/s, with {} of {}{limit}",
                series.label,
                name(op),
                significant(rate(best.gbps, &best.round_gbps), 3),
                blocks(best.count),
                bytes::show(best.block)
            );
            items.push_str(&format!("<li>{}</li>", escaped(&line)));
        }
    }
    items
}

fn blocks(count: u32) -> String {
    if count == 1 { "1 block".to_owned() } else { format!("{count} blocks") }
}

fn point(one: &Figures) -> String {
    let block = bytes::show(one.block);
    format!("{} {} {block} x{}", one.backend, name(one.op), one.count)
}

/// The points of one line of a plot.
struct SeriesOf<'a> {
    label: String,
    figures: Vec<&'a Figures>,
}

/// Returns the figures whose bytes arrived correctly.
fn sound(figures: &[Figures]) -> impl Iterator<Item = &Figures> {
    figures.iter().filter(|one| one.verified)
}

/// Returns the median of the rounds, of which `rounded` has fewer digits.
fn rate(rounded: f64, rounds: &[f64]) -> f64 {
    median(rounds.iter().copied()).unwrap_or(rounded)
}

fn ops(figures: &[Figures]) -> impl Iterator<Item = BenchOp> + '_ {
    let all = [BenchOp::Read, BenchOp::Write];
    all.into_iter().filter(|op| sound(figures).any(|one| one.op == *op))
}

/// Returns the series of an operation, named by all that differs between any two points.
fn all_series(figures: &[Figures], op: BenchOp) -> Vec<SeriesOf<'_>> {
    let differs = |of: fn(&Figures) -> String| figures.iter().any(|one| of(one) != of(&figures[0]));
    let parts: [fn(&Figures) -> String; 3] =
        [|one| name(one.pattern), |one| name(one.memory), |one| name(one.wait)];
    let shown: Vec<_> = parts.into_iter().filter(|part| differs(*part)).collect();
    let mut all: Vec<SeriesOf<'_>> = Vec::new();
    for one in sound(figures).filter(|one| one.op == op) {
        let others: String = shown.iter().map(|part| format!(" {}", part(one))).collect();
        let label = format!("{}{others}", one.backend);
        match all.iter_mut().find(|series| series.label == label) {
            Some(series) => series.figures.push(one),
            None => all.push(SeriesOf { label, figures: vec![one] }),
        }
    }
    all
}

/// Returns the values in ascending order, each once.
fn distinct(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Returns the only value, if all are the same.
fn only(mut values: impl Iterator<Item = String>) -> Option<String> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

fn plots(figures: &[Figures]) -> Vec<Plot> {
    ops(figures).flat_map(|op| [plot(figures, op, true), plot(figures, op, false)]).collect()
}

/// Returns the plot of an operation's bandwidth, or else of its latency.
fn plot(figures: &[Figures], op: BenchOp, bandwidth: bool) -> Plot {
    let of_op = || sound(figures).filter(|one| one.op == op);
    let sizes = distinct(of_op().map(|one| one.block));
    let counts = distinct(of_op().map(|one| one.count.into()));
    // Of sizes and counts, those with more values are the axis; each of the others has a panel.
    let by_count = counts.len() >= sizes.len() && counts.len() > 1;
    let (along, panels) = if by_count { (&counts, &sizes) } else { (&sizes, &counts) };
    let x_of = |one: &Figures| if by_count { one.count.into() } else { one.block };
    let panel_of = |one: &Figures| if by_count { one.block } else { one.count.into() };
    let tick = |value: u64| if by_count { value.to_string() } else { bytes::show(value) };
    let panel_name = |value: u64| {
        if by_count {
            format!("blocks of {}", bytes::show(value))
        } else {
            blocks(u32::try_from(value).unwrap_or(u32::MAX))
        }
    };

    let mut keys = Vec::new();
    let mut drawn = Vec::new();
    let all = all_series(figures, op);
    for (colour, series) in all.iter().enumerate() {
        let label = &series.label;
        let marks = |of: &dyn Fn(&Figures) -> Option<(f64, f64, f64)>| -> Vec<(&Figures, Mark)> {
            let mut marks: Vec<_> = series
                .figures
                .iter()
                .filter_map(|one| {
                    let (y, low, high) = of(one)?;
                    Some((*one, Mark { x: x_of(one) as f64, y, low, high }))
                })
                .collect();
            marks.sort_by(|a, b| a.1.x.total_cmp(&b.1.x));
            marks
        };
        let us = |one: &Figures, gbps: f64| one.bytes as f64 / gbps / 1e3;
        let shown = |one: &Figures, gbps: f64| if bandwidth { gbps } else { us(one, gbps) };
        // The time of a transfer is that of a round, divided by its transfers: not every limit
        // knows its median.
        let spread = |one: &Figures, rounded: f64, rounds: &[f64]| {
            let gbps = rate(rounded, rounds);
            if gbps <= 0.0 {
                return None;
            }
            let (low, high) = range(rounds).unwrap_or((gbps, gbps));
            let (low, high) = (shown(one, low), shown(one, high));
            Some((shown(one, gbps), low.min(high), low.max(high)))
        };
        let ours = |one: &Figures| spread(one, one.gbps, &one.round_gbps);
        let ours = (label.clone(), Drawn::Measured, marks(&ours));
        let limit = |one: &Figures| spread(one, one.limit_gbps?, &one.limit_round_gbps);
        let limit_name = only(series.figures.iter().filter_map(|one| Some(one.limit_name?.into())));
        let limit_name = limit_name.map_or(String::new(), |name| format!(": {name}"));
        let limit = (format!("limit of {label}{limit_name}"), Drawn::Limit, marks(&limit));
        let peer = |one: &Figures| {
            let beside = one.beside.as_ref()?;
            spread(one, beside.beside_gbps, &beside.beside_round_gbps)
        };
        let peers = series.figures.iter().filter_map(|one| one.beside.as_ref());
        let peer_name = only(peers.map(|beside| beside.beside_name.clone()));
        let peer_name = peer_name.unwrap_or_else(|| "companion".to_owned());
        let peer = (format!("{peer_name} beside {label}"), Drawn::Peer, marks(&peer));
        for (name, drawn_as, marks) in [ours, limit, peer] {
            if !marks.is_empty() {
                keys.push(Key { name, colour, drawn: drawn_as });
                drawn.push(marks);
            }
        }
    }

    // A round that an interruption slowed down ends at the edge of the plot.
    let ends = |mark: &Mark| [mark.y, mark.low.max(mark.y / 4.0), mark.high.min(mark.y * 4.0)];
    let values = || drawn.iter().flatten().flat_map(move |(_, mark)| ends(mark));
    let most = values().fold(0.0, f64::max);
    let least = drawn.iter().flatten().map(|(_, mark)| mark.y).fold(f64::INFINITY, f64::min);
    let y = match (bandwidth, most > FAR_APART * least) {
        (true, true) => Axis::logarithmic("GB/s, logarithmic", values()),
        (true, false) => Axis::linear("GB/s", most * 1.05),
        (false, true) => Axis::logarithmic("microseconds, logarithmic", values()),
        (false, false) => Axis::linear("microseconds", most * 1.05),
    };
    let x = Axis::marked(
        if by_count { "blocks per transfer" } else { "size of a block" },
        along.iter().map(|value| (*value as f64, tick(*value))).collect(),
    );
    let panels = panels.iter().map(|value| Panel {
        name: panel_name(*value),
        series: drawn
            .iter()
            .map(|marks| {
                let here = marks.iter().filter(|(one, _)| panel_of(one) == *value);
                here.map(|(_, mark)| *mark).collect()
            })
            .collect(),
    });
    let what = match op {
        BenchOp::Read => "Read",
        BenchOp::Write => "Write",
    };
    let title = if bandwidth {
        format!("{what}: bandwidth, higher is better")
    } else {
        format!("{what}: time of a transfer, lower is better")
    };
    let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    Plot {
        title,
        description: format!(
            "Lines: {}. All values are in the table of all figures.",
            names.join(", ")
        ),
        x,
        y,
        panels: panels.collect(),
        series: keys,
    }
}

/// Returns the least and the greatest value.
fn range(values: &[f64]) -> Option<(f64, f64)> {
    let least = values.iter().copied().reduce(f64::min)?;
    Some((least, values.iter().copied().reduce(f64::max)?))
}

/// The columns of the table that are texts.
const TEXTS: usize = 2;

/// Returns the rows of the table, the heading first. Columns without a value are left out.
fn table(figures: &[Figures]) -> Vec<Vec<String>> {
    let two = |value: f64| format!("{value:.2}");
    let maybe = |value: Option<f64>| value.map_or(String::new(), two);
    let between = |rounds: &[f64]| {
        range(rounds).map_or(String::new(), |(least, most)| format!("{least:.2}–{most:.2}"))
    };
    type Cell<'a> = &'a dyn Fn(&Figures) -> String;
    let columns: [(&str, Cell<'_>); 18] = [
        ("Backend", &|one| one.backend.to_owned()),
        ("Operation", &|one| name(one.op)),
        ("Pattern", &|one| name(one.pattern)),
        ("Memory", &|one| name(one.memory)),
        ("Wait", &|one| name(one.wait)),
        ("Block", &|one| bytes::show(one.block)),
        ("Blocks", &|one| one.count.to_string()),
        ("GB/s", &|one| two(one.gbps)),
        ("range", &|one| between(&one.round_gbps)),
        ("p50 µs", &|one| two(one.p50_us)),
        ("p99 µs", &|one| two(one.p99_us)),
        ("Limit", &|one| one.limit_name.unwrap_or("none").to_owned()),
        ("limit GB/s", &|one| maybe(one.limit_gbps)),
        ("Ratio", &|one| maybe(one.ratio)),
        ("range", &|one| match (one.ratio_min, one.ratio_max) {
            (Some(least), Some(most)) => format!("{least:.2}–{most:.2}"),
            _ => String::new(),
        }),
        ("Companion", &|one| {
            one.beside.as_ref().map_or(String::new(), |beside| beside.beside_name.clone())
        }),
        ("GB/s", &|one| maybe(one.beside.as_ref().map(|beside| beside.beside_gbps))),
        ("ratio", &|one| maybe(one.beside.as_ref().map(|beside| beside.beside_ratio))),
    ];
    let differs = |cell: Cell<'_>| figures.iter().any(|one| cell(one) != cell(&figures[0]));
    let shown = |(title, cell): &(&str, Cell<'_>)| match *title {
        "Pattern" | "Memory" | "Wait" => differs(*cell),
        _ => figures.iter().any(|one| !cell(one).is_empty()),
    };
    let columns: Vec<_> = columns.into_iter().filter(shown).collect();
    let mut rows = vec![columns.iter().map(|(title, _)| (*title).to_owned()).collect()];
    rows.extend(figures.iter().map(|one| columns.iter().map(|(_, cell)| cell(one)).collect()));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_selects_the_form() {
        assert_eq!(form(Path::new("a/out.html")).unwrap(), Form::Page);
        assert_eq!(form(Path::new("out.svg")).unwrap(), Form::Picture);
        for wrong in ["out.png", "out", ".svg", "out.HTML.gz"] {
            let why = form(Path::new(wrong)).unwrap_err().to_string();
            assert!(why.starts_with(&format!("--report {wrong}: write a name")), "{why}");
        }
    }

    #[test]
    fn commands_can_be_pasted_into_a_shell() {
        let words = ["/home/me/kvx", "bench", "--options", "{\"a\": 'b'}", "--block", "4K,1M", ""];
        assert_eq!(
            command(words.map(str::to_owned)),
            "kvx bench --options '{\"a\": '\\''b'\\''}' --block 4K,1M ''"
        );
    }
}
