//! `cargo xtask limits`: whether kvx is as near to what the host can do as it shall be.
//!
//! Not part of the tests: it takes minutes, 5 GiB of memory, and a machine that is quiet meanwhile.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::Result;
use crate::arguments::LimitsOptions;
use crate::bars::{Asked, BARS, Bar, Figure, Program, RUNS, Run};
use crate::install::site_packages;
use crate::metadata::Metadata;
use crate::peers;
use crate::process::{self, Output};

/// What runs in NIXL's Python, with the folder that the library lies in.
const IN_NIXL: &str = "kvx-nixl/benches/beside_ucx.py";
/// How long a build may take.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// How long one run may take.
const RUN_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The variable that names NIXL's library.
const NIXL: &str = "KVX_RIXL_LIB";
/// The same below the folder of the wheel.
const NIXL_LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";

/// The variable that names Mooncake's.
const MOONCAKE: &str = "KVX_MOONCAKE_LIB";

/// Runs everything as often as the options say, prints the table, and says whether every bar holds.
pub(crate) fn run(options: &LimitsOptions) -> Result<bool> {
    let chosen =
        |run: &str| options.only.is_empty() || options.only.iter().any(|only| run.contains(only.as_str()));
    let (nixl, mooncake) = (nixl()?, mooncake()?);
    let is_there =
        |run: &&Run| (nixl.is_some() || !is_over_nixl(run)) && (mooncake.is_some() || !is_over_mooncake(run));
    let (runs, without): (Vec<_>, Vec<_>) = RUNS.iter().filter(|run| chosen(run.name)).partition(is_there);
    for run in without {
        let whose = if is_over_mooncake(run) { "Mooncake" } else { "NIXL" };
        eprintln!("{} is left out: {whose}'s wheel is not installed (cargo xtask test --install)", run.name);
    }
    let chosen = |name: &str| runs.iter().any(|run| run.name == name);
    let bars: Vec<_> = BARS.iter().filter(|bar| needs(bar).iter().all(|run| chosen(run))).collect();
    if bars.is_empty() {
        let names: Vec<_> = RUNS.iter().map(|run| run.name).collect();
        return Err(format!("no bar comes from these runs alone; the runs are: {}", names.join(", ")).into());
    }
    let programs = Programs::build(&runs, nixl, mooncake)?;
    let mut figures = vec![Vec::new(); bars.len()];
    for time in 0..options.times {
        let mut lines = Vec::new();
        for run in &runs {
            eprintln!("{} of {}: {}", time + 1, options.times, run.name);
            lines.extend(programs.run(run)?);
        }
        for (bar, figures) in bars.iter().zip(&mut figures) {
            let figure = figure(bar, &lines).ok_or_else(|| format!("the runs do not say: {}", bar.what))?;
            figures.push(figure);
        }
    }
    println!("| bar | asked | median of {} | from | to | |\n|---|---|---|---|---|---|", options.times);
    let mut missed = 0;
    for (bar, figures) in bars.iter().zip(figures) {
        let (line, held) = row(bar, figures);
        missed += usize::from(!held);
        println!("{line}");
    }
    println!("\n{} bars, {missed} missed", bars.len());
    Ok(missed == 0)
}

/// What was built.
struct Programs {
    /// The program `kvx`.
    kvx: PathBuf,
    /// See [`nixl`].
    nixl: Option<PathBuf>,
    /// See [`mooncake`].
    mooncake: Option<PathBuf>,
}

/// NIXL's library: that which the variable names, or the wheel's.
fn nixl() -> Result<Option<PathBuf>> {
    if let Some(named) = std::env::var_os(NIXL) {
        return Ok(Some(named.into()));
    }
    let environment = Metadata::of_members()?.target_directory()?.join("peers/nixl/venv");
    let mut libraries = site_packages(&environment).map(|folder| folder.join(NIXL_LIBRARY));
    Ok(libraries.find(|library| library.is_file()))
}

/// Mooncake's library: that which the variable names, or the adapter over its wheel.
fn mooncake() -> Result<Option<PathBuf>> {
    if let Some(named) = std::env::var_os(MOONCAKE) {
        return Ok(Some(named.into()));
    }
    Ok(peers::mooncake_adapter(&Metadata::of_members()?.target_directory()?))
}

fn is_over_mooncake(run: &Run) -> bool {
    matches!(run.program, Program::LoadsOverMooncake(_))
}

fn is_over_nixl(run: &Run) -> bool {
    match run.program {
        Program::Bench(arguments) => arguments.contains("--backend RIXL"),
        Program::InNixl(_) | Program::LoadsOverRixl(_) => true,
        Program::Beside(..) | Program::Costs(..) | Program::Loads(_) | Program::LoadsOverMooncake(_) => false,
    }
}

/// What benchmarks of the connector's runtime are built with.
const LOADS: [&str; 4] = ["-p", "kvx-transfer", "--features", "connector"];

/// Arguments that the bars write as one text.
fn words(text: &str) -> Vec<&str> {
    text.split(' ').collect()
}

impl Programs {
    fn build(runs: &[&Run], nixl: Option<PathBuf>, mooncake: Option<PathBuf>) -> Result<Self> {
        let metadata = Metadata::of_members()?;
        let mut builds: Vec<_> = runs
            .iter()
            .map(|run| match run.program {
                Program::Loads(bench) | Program::LoadsOverRixl(bench) | Program::LoadsOverMooncake(bench) => {
                    [&["bench", "--no-run"][..], &LOADS, &["--bench", bench]].concat()
                }
                Program::Costs(package, bench) => {
                    [&["bench", "--no-run", "--bench", bench, "-p"][..], &words(package)].concat()
                }
                Program::Bench(_) | Program::Beside(..) => vec!["build", "--release", "-p", "kvx-cli"],
                Program::InNixl(_) => vec!["build", "--release", "-p", "kvx-nixl"],
            })
            .collect();
        builds.sort_unstable();
        builds.dedup();
        for arguments in builds {
            let built = process::run(process::cargo(arguments.iter().copied()), BUILD_LIMIT, Output::Shown)?;
            if !built.succeeded() {
                return Err(format!("cargo {}: {}", arguments.join(" "), built.end).into());
            }
        }
        let kvx = metadata.target_directory()?.join("release").join("kvx");
        Ok(Programs { kvx, nixl, mooncake })
    }

    /// The Python of the environment that NIXL's library lies in.
    fn python(&self) -> Result<PathBuf> {
        let mut folders = self.nixl.iter().flat_map(|library| library.ancestors());
        let python =
            folders.find_map(|folder| Some(folder.join("bin/python3")).filter(|python| python.exists()));
        Ok(python.ok_or("NIXL's library lies in no Python environment")?)
    }

    /// The lines of one run, each with the run's name in it.
    fn run(&self, run: &Run) -> Result<Vec<Value>> {
        let mut command = match run.program {
            Program::Bench(arguments) => {
                let mut command = Command::new(&self.kvx);
                command.args(["bench", "--json"]).args(arguments.split(' '));
                command
            }
            Program::Beside(arguments, beside) => {
                let mut command = Command::new(&self.kvx);
                command.args(["bench", "--json"]).args(arguments.split(' '));
                command.arg("--beside").arg(format!("'{}' bench-beside {beside}", self.kvx.display()));
                command
            }
            Program::InNixl(what) => {
                let mut command = Command::new(self.python()?);
                command.arg(crate::root().join(IN_NIXL)).arg(what).args(self.kvx.parent());
                command
            }
            Program::Costs(package, bench) => process::cargo(
                [&["bench", "--bench", bench, "-p"][..], &words(package), &["--", "--bars"]].concat(),
            ),
            Program::Loads(bench) => {
                process::cargo([&["bench"][..], &LOADS, &["--bench", bench, "--", "--bars"]].concat())
            }
            Program::LoadsOverMooncake(bench) => {
                process::cargo([&["bench"][..], &LOADS, &["--bench", bench, "--", "--mooncake"]].concat())
            }
            Program::LoadsOverRixl(bench) => {
                let words = [&["bench"][..], &LOADS, &["--bench", bench, "--", "--rixl"]].concat();
                let mut command = process::cargo(words);
                command.arg(self.python()?);
                command
            }
        };
        if let Some(nixl) = self.nixl.as_ref().filter(|_| is_over_nixl(run)) {
            command.env(NIXL, nixl).env("UCX_NET_DEVICES", "lo"); // it listens on all of them otherwise
        }
        if let Some(mooncake) = self.mooncake.as_ref().filter(|_| is_over_mooncake(run)) {
            command.env(MOONCAKE, mooncake);
        }
        let finished = process::run(command, RUN_LIMIT, Output::Kept)?;
        if !finished.succeeded() {
            return Err(format!("{}: {}", run.name, finished.end).into());
        }
        let lines = finished.output.lines().filter(|line| line.starts_with('{'));
        lines.map(|line| Ok(named(serde_json::from_str(line)?, run.name))).collect()
    }
}

/// A line with the name of its run, without spaces.
pub(crate) fn named(mut line: Value, run: &str) -> Value {
    line["run"] = run.replace(' ', ".").into();
    line
}

/// The runs that a bar needs.
fn needs(bar: &Bar) -> Vec<String> {
    let mut runs = vec![bar.run.to_owned()];
    if let Figure::Quotient { at, by_at, .. } = bar.figure {
        let words = at.split(' ').chain(by_at.split(' '));
        runs.extend(words.filter_map(|word| word.strip_prefix("run=")).map(|run| run.replace('.', " ")));
    }
    runs
}

/// A bar's figure in the lines of one time.
pub(crate) fn figure(bar: &Bar, lines: &[Value]) -> Option<f64> {
    let number = |at: &str, field: &str| {
        let path = field.split('.').collect::<Vec<_>>();
        let line = only_line(at, bar.run, lines)?;
        path.into_iter().try_fold(line, |value, key| value.get(key))?.as_f64()
    };
    match bar.figure {
        Figure::Field { at, field } => number(at, field),
        Figure::Largest { at, fields } => {
            let all = fields.iter().map(|field| number(at, field)).collect::<Option<Vec<_>>>()?;
            all.into_iter().reduce(f64::max)
        }
        Figure::Quotient { at, field, by_at, by } => Some(number(at, field)? / number(by_at, by)?),
        Figure::BeyondTheCopy { at } => {
            // 1e9 bytes a second are one byte a nanosecond.
            let copy = number(at, "block")? / number(at, "limit_gbps")?;
            Some(copy * (1.0 / number(at, "ratio")? - 1.0))
        }
        Figure::BesideBulkOrBare { at } => {
            let of_bare = number(at, "small.beside_p99_us")? / number(at, "bare.beside_p99_us")?;
            Some(number(at, "small.times")?.min(5.0 * of_bare))
        }
    }
}

/// The one line of a run that has these values; of the bar's run, if no other is named.
fn only_line<'a>(at: &str, run: &str, lines: &'a [Value]) -> Option<&'a Value> {
    let own = format!("run={}", run.replace(' ', "."));
    let words: Vec<_> = at.split(' ').filter(|word| !word.is_empty()).collect();
    let other = words.iter().any(|word| word.starts_with("run="));
    let words: Vec<_> = if other { words } else { words.into_iter().chain([own.as_str()]).collect() };
    let fits = |line: &&Value| {
        words.iter().all(|word| {
            let (field, value) = word.split_once('=').unwrap_or((word, ""));
            let found = &line[field];
            found.as_str().map_or_else(|| found.to_string(), str::to_owned) == value
        })
    };
    let mut fitting = lines.iter().filter(fits);
    fitting.next().filter(|_| fitting.next().is_none())
}

/// A line of the table, and whether the bar holds.
pub(crate) fn row(bar: &Bar, mut figures: Vec<f64>) -> (String, bool) {
    figures.sort_unstable_by(f64::total_cmp);
    let (median, last) = (figures[figures.len() / 2], figures[figures.len() - 1]);
    let (asked, held) = match bar.asked {
        Asked::AtLeast(least) => (format!("at least {}", show(least)), median >= least),
        Asked::AtMost(most) => (format!("at most {}", show(most)), median <= most),
        Asked::Nothing => ("-".to_owned(), true),
    };
    let verdict = match (bar.asked, held) {
        (Asked::Nothing, _) => "",
        (_, true) => "met",
        (_, false) => "MISSED",
    };
    let (median, first, last) = (show(median), show(figures[0]), show(last));
    (format!("| {} | {asked} | {median} | {first} | {last} | {verdict} |", bar.what), held)
}

/// Three digits or more, and no more than are worth reading.
pub(crate) fn show(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(figure: Figure, asked: Asked) -> Bar {
        Bar { what: "something", run: "SHM 4K", figure, asked }
    }

    fn lines() -> Vec<Value> {
        let lines = [
            (
                r#"{"op":"read","count":1,"ratio":0.5,"limit_gbps":8.0,"block":16384,"deep":{"down":7}}"#,
                "SHM 4K",
            ),
            (r#"{"op":"write","count":1,"ratio":0.9,"limit_p50_us":2}"#, "SHM 4K"),
            (r#"{"op":"read","count":1,"ratio":4.0}"#, "TCP"),
        ];
        lines.map(|(line, run)| named(serde_json::from_str(line).unwrap(), run)).into()
    }

    #[test]
    fn figures_come_from_the_one_line_that_fits() {
        let field = |at, field| figure(&bar(Figure::Field { at, field }, Asked::Nothing), &lines());
        assert_eq!(field("op=read", "ratio"), Some(0.5));
        assert_eq!(field("op=read count=1", "deep.down"), Some(7.0));
        assert_eq!(field("op=read run=TCP", "ratio"), Some(4.0));
        assert_eq!(
            (field("count=1", "ratio"), field("op=none", "ratio"), field("op=read", "none")),
            (None, None, None)
        );
    }

    #[test]
    fn figures_are_calculated_from_fields() {
        let of = |wanted: Figure| figure(&bar(wanted, Asked::Nothing), &lines());
        let quotient =
            Figure::Quotient { at: "op=write", field: "ratio", by_at: "op=write", by: "limit_p50_us" };
        assert_eq!(of(quotient), Some(0.45));
        // 16 KiB at 8 bytes a nanosecond, at half of the limit's speed: as much again.
        assert_eq!(of(Figure::BeyondTheCopy { at: "op=read" }), Some(2048.0));
        assert_eq!(of(Figure::Largest { at: "op=read", fields: &["ratio", "limit_gbps"] }), Some(8.0));
    }

    #[test]
    fn a_bar_is_missed_by_its_median() {
        let at_least = bar(Figure::Field { at: "", field: "" }, Asked::AtLeast(0.9));
        let (line, held) = row(&at_least, vec![0.5, 0.95, 0.91, 0.2, 0.99]);
        assert!(held && line == "| something | at least 0.90 | 0.91 | 0.20 | 0.99 | met |", "{line}");
        let (line, held) = row(&at_least, vec![0.5, 0.95, 0.2]);
        assert!(!held && line.ends_with("| MISSED |"), "{line}");
        let at_most = bar(Figure::Field { at: "", field: "" }, Asked::AtMost(200.0));
        assert!(row(&at_most, vec![200.0]).1 && !row(&at_most, vec![200.1]).1);
    }

    #[test]
    fn every_bar_comes_from_a_run_that_there_is() {
        for bar in BARS {
            for run in needs(bar) {
                assert!(RUNS.iter().any(|there| there.name == run), "{}: {run}", bar.what);
            }
        }
        for run in RUNS {
            assert!(
                BARS.iter().any(|bar| needs(bar).iter().any(|needed| needed == run.name)),
                "{}",
                run.name
            );
        }
    }
}
