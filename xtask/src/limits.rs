//! `cargo xtask limits`: measures whether kvx is as close to the host's limits as the bars require.
//!
//! The tests do not include this: it takes minutes, 5 GiB of memory, and an otherwise idle machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::arguments::LimitsOptions;
use crate::bars::{Bar, lines, print_table};
use crate::install::{Environment, NIXL_LIBRARY};
use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::progress::Progress;
use crate::{Result, peers};

/// The script that NIXL's Python runs with the folder of the release build.
const IN_NIXL: &str = "kvx-nixl/benches/beside_ucx.py";
/// The time limit of the builds.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// The time limit of one run.
const RUN_LIMIT: Duration = Duration::from_secs(10 * 60);

/// The file `bars.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    runs: Vec<Run>,
}

/// A program to run, and the bars of its figures.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Run {
    name: String,
    bench: Option<String>,
    beside: Option<String>,
    benchmark: Option<String>,
    of: Option<String>,
    argument: Option<String>,
    in_nixl: Option<String>,
    needs: Option<Library>,
    field: Option<String>,
    bars: Vec<Bar>,
}

/// A library that some machines lack.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Library {
    Nixl,
    Mooncake,
}

impl Library {
    /// Returns the environment variable that names the library, for kvx and for this command.
    fn variable(self) -> &'static str {
        match self {
            Library::Nixl => "KVX_RIXL_LIB",
            Library::Mooncake => "KVX_MOONCAKE_LIB",
        }
    }

    /// Returns the file that the variable names, or else that of the wheel.
    fn find(self, target: &Path) -> Option<PathBuf> {
        std::env::var_os(self.variable()).map(PathBuf::from).or_else(|| match self {
            Library::Nixl => Environment::of(target, "nixl").find(NIXL_LIBRARY),
            Library::Mooncake => peers::mooncake_adapter(target),
        })
    }
}

fn runs() -> Result<Vec<Run>> {
    Ok(toml::from_str::<Table>(include_str!("../bars.toml"))?.runs)
}

/// Runs everything `times` times, prints the table, and returns whether every bar is met.
pub(crate) fn run(options: &LimitsOptions) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory;
    let mut runs = runs()?;
    let names: Vec<_> = runs.iter().map(|run| run.name.clone()).collect();
    runs.retain(|run| {
        options.only.is_empty() || options.only.iter().any(|only| run.name.contains(only))
    });
    for run in
        runs.extract_if(.., |run| run.needs.is_some_and(|library| library.find(&target).is_none()))
    {
        eprintln!(
            "{} is left out: {:?} is missing (cargo xtask test --install)",
            run.name, run.needs
        );
    }
    if runs.is_empty() {
        return Err(
            format!("no run with this name can run; the runs are: {}", names.join(", ")).into()
        );
    }
    build(&runs)?;
    let mut bars: Vec<_> =
        runs.iter().flat_map(|run| &run.bars).map(|bar| (bar, Vec::new())).collect();
    let progress = Progress::of(options.times as usize * runs.len(), None);
    for time in 0..options.times {
        let mut figures = bars.iter_mut().map(|(_, figures)| figures);
        for run in &runs {
            let what = format!("{}, time {} of {}", run.name, time + 1, options.times);
            eprintln!("{}", progress.begins(&what));
            let lines = run.run(&target)?;
            for (bar, figures) in run.bars.iter().zip(&mut figures) {
                figures.push(bar.figure(&lines, run.field.as_deref().unwrap_or("ratio"))?);
            }
        }
    }
    drop(progress);
    let (rows, held): (Vec<_>, Vec<_>) =
        bars.into_iter().map(|(bar, figures)| bar.row(figures)).unzip();
    print_table(&format!("bar | asked | median of {} | from | to | ", options.times), &rows);
    let missed = held.iter().filter(|held| !**held).count();
    println!("\n{} bars, {missed} missed", rows.len());
    Ok(missed == 0)
}

fn build(runs: &[Run]) -> Result<()> {
    let line = |run: &Run| match (&run.benchmark, &run.of, &run.in_nixl) {
        (Some(benchmark), Some(of), _) => format!("bench --no-run --bench {benchmark} -p {of}"),
        (_, _, Some(_)) => "build --release -p kvx-nixl".to_owned(),
        _ => "build --release -p kvx-cli".to_owned(),
    };
    let builds: BTreeSet<_> = runs.iter().map(line).collect();
    let deadline = Deadline::after(BUILD_LIMIT);
    let progress = Progress::unlike(builds.len());
    builds.iter().try_for_each(|line| {
        progress.begins(&format!("cargo {line}"));
        process::must_succeed(process::cargo(line.split(' ')), deadline)
    })
}

impl Run {
    /// Runs the program and returns the lines that it prints.
    fn run(&self, target: &Path) -> Result<Vec<Value>> {
        let library = self.needs.and_then(|library| library.find(target));
        // The Python of the environment that contains NIXL's library.
        let python = || {
            let mut folders = library.iter().flat_map(|library| library.ancestors());
            let python = folders
                .find_map(|at| Some(at.join("bin/python3")).filter(|python| python.exists()));
            python.ok_or("NIXL's library is not in a Python environment")
        };
        let release = target.join("release");
        let mut command;
        if let (Some(benchmark), Some(of)) = (&self.benchmark, &self.of) {
            let argument = self.argument.as_deref().unwrap_or("--bars");
            let line = format!("bench --bench {benchmark} -p {of} -- {argument}");
            command = process::cargo(line.split(' '));
            if self.needs == Some(Library::Nixl) {
                command.arg(python()?);
            }
        } else if let Some(what) = &self.in_nixl {
            command = Command::new(python()?);
            command.arg(crate::root().join(IN_NIXL)).arg(what).arg(&release);
        } else {
            let arguments =
                self.bench.as_ref().ok_or_else(|| format!("{} runs nothing", self.name))?;
            let kvx = release.join("kvx");
            command = Command::new(&kvx);
            command.args(["bench", "--json"]).args(arguments.split(' '));
            if let Some(beside) = &self.beside {
                command.arg("--beside").arg(format!("'{}' bench-beside {beside}", kvx.display()));
            }
        }
        if let (Some(needs), Some(library)) = (self.needs, &library) {
            // By default UCX listens on all devices.
            command.env(needs.variable(), library).env("UCX_NET_DEVICES", "lo");
        }
        lines(
            &process::output_of(command, RUN_LIMIT)
                .map_err(|error| format!("{}: {error}", self.name))?,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_one_program_and_bars() {
        let mut names = BTreeSet::new();
        for run in runs().unwrap() {
            let programs = [&run.bench, &run.benchmark, &run.in_nixl].into_iter().flatten().count();
            assert!(programs == 1 && !run.bars.is_empty(), "{}", run.name);
            assert_eq!(run.benchmark.is_some(), run.of.is_some(), "{}", run.name);
            assert!(names.insert(run.name.clone()), "{} is there twice", run.name);
        }
    }
}
