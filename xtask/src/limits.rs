//! `cargo xtask limits`: measures whether kvx is as close to what the host can do as it has to be.
//!
//! Not part of the tests: it takes minutes, 5 GiB of memory, and an otherwise idle machine.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::arguments::LimitsOptions;
use crate::bars::{Bar, lines};
use crate::install::{Environment, NIXL_LIBRARY};
use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::{Result, peers};

/// The script that runs in NIXL's Python, with the folder of the release build.
const IN_NIXL: &str = "kvx-nixl/benches/beside_ucx.py";
/// How long the builds may take.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// How long one run may take.
const RUN_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The variables that name NIXL's and Mooncake's libraries.
const NIXL: &str = "KVX_RIXL_LIB";
const MOONCAKE: &str = "KVX_MOONCAKE_LIB";

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
    #[serde(default = "ratio")]
    field: String,
    bars: Vec<Bar>,
}

/// A library that not every machine has.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Library {
    Nixl,
    Mooncake,
}

fn ratio() -> String {
    "ratio".to_owned()
}

fn runs() -> Result<Vec<Run>> {
    Ok(toml::from_str::<Table>(include_str!("../bars.toml"))?.runs)
}

/// Runs everything as often as the options say, prints the table, and returns whether every bar holds.
pub(crate) fn run(options: &LimitsOptions) -> Result<bool> {
    let programs = Programs::find()?;
    let mut runs = runs()?;
    let names: Vec<_> = runs.iter().map(|run| run.name.clone()).collect();
    runs.retain(|run| options.only.is_empty() || options.only.iter().any(|only| run.name.contains(only)));
    for run in runs.extract_if(.., |run| programs.lacks(run.needs)) {
        eprintln!("{} is left out: {:?} is missing (cargo xtask test --install)", run.name, run.needs);
    }
    if runs.is_empty() {
        return Err(format!("no run has this name or can run; the runs are: {}", names.join(", ")).into());
    }
    programs.build(&runs)?;
    let mut bars: Vec<_> = runs.iter().flat_map(|run| &run.bars).map(|bar| (bar, Vec::new())).collect();
    for time in 0..options.times {
        let mut figures = bars.iter_mut().map(|(_, figures)| figures);
        for run in &runs {
            eprintln!("{} of {}: {}", time + 1, options.times, run.name);
            let lines = programs.run(run)?;
            for (bar, figures) in run.bars.iter().zip(&mut figures) {
                figures.push(bar.figure(&lines, &run.field)?);
            }
        }
    }
    println!("| bar | asked | median of {} | from | to | |\n|---|---|---|---|---|---|", options.times);
    let (count, mut missed) = (bars.len(), 0);
    for (bar, figures) in bars {
        let (line, held) = bar.row(figures);
        missed += usize::from(!held);
        println!("{line}");
    }
    println!("\n{count} bars, {missed} missed");
    Ok(missed == 0)
}

/// The program `kvx` and the libraries that exist: those that variables name, or those of wheels.
struct Programs {
    kvx: PathBuf,
    nixl: Option<PathBuf>,
    mooncake: Option<PathBuf>,
}

impl Programs {
    fn find() -> Result<Programs> {
        let target = Metadata::of_members()?.target_directory;
        let named = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
        Ok(Programs {
            nixl: named(NIXL).or_else(|| Environment::of(&target, "nixl").find(NIXL_LIBRARY)),
            mooncake: named(MOONCAKE).or_else(|| peers::mooncake_adapter(&target)),
            kvx: target.join("release/kvx"),
        })
    }

    fn lacks(&self, needs: Option<Library>) -> bool {
        match needs {
            None => false,
            Some(Library::Nixl) => self.nixl.is_none(),
            Some(Library::Mooncake) => self.mooncake.is_none(),
        }
    }

    fn build(&self, runs: &[Run]) -> Result<()> {
        let line = |run: &Run| match (&run.benchmark, &run.of, &run.in_nixl) {
            (Some(benchmark), Some(of), _) => format!("bench --no-run --bench {benchmark} -p {of}"),
            (_, _, Some(_)) => "build --release -p kvx-nixl".to_owned(),
            _ => "build --release -p kvx-cli".to_owned(),
        };
        let mut builds: Vec<_> = runs.iter().map(line).collect();
        builds.sort_unstable();
        builds.dedup();
        let deadline = Deadline::after(BUILD_LIMIT);
        builds.iter().try_for_each(|line| process::must_succeed(process::cargo(line.split(' ')), deadline))
    }

    /// Returns the Python of the environment that NIXL's library lies in.
    fn python(&self) -> Result<PathBuf> {
        let mut folders = self.nixl.iter().flat_map(|library| library.ancestors());
        let python = folders.find_map(|at| Some(at.join("bin/python3")).filter(|python| python.exists()));
        Ok(python.ok_or("NIXL's library lies in no Python environment")?)
    }

    /// Runs a program and returns what it printed.
    fn run(&self, run: &Run) -> Result<Vec<Value>> {
        let mut command;
        if let (Some(benchmark), Some(of)) = (&run.benchmark, &run.of) {
            let argument = run.argument.as_deref().unwrap_or("--bars");
            let line = format!("bench --bench {benchmark} -p {of} -- {argument}");
            command = process::cargo(line.split(' '));
            if run.needs == Some(Library::Nixl) {
                command.arg(self.python()?);
            }
        } else if let Some(what) = &run.in_nixl {
            command = Command::new(self.python()?);
            command.arg(crate::root().join(IN_NIXL)).arg(what).args(self.kvx.parent());
        } else {
            let arguments = run.bench.as_ref().ok_or_else(|| format!("{} runs nothing", run.name))?;
            command = Command::new(&self.kvx);
            command.args(["bench", "--json"]).args(arguments.split(' '));
            if let Some(beside) = &run.beside {
                command.arg("--beside").arg(format!("'{}' bench-beside {beside}", self.kvx.display()));
            }
        }
        if let (Some(Library::Nixl), Some(nixl)) = (run.needs, &self.nixl) {
            command.env(NIXL, nixl).env("UCX_NET_DEVICES", "lo"); // UCX listens on all devices otherwise
        }
        if let (Some(Library::Mooncake), Some(mooncake)) = (run.needs, &self.mooncake) {
            command.env(MOONCAKE, mooncake);
        }
        lines(&process::output_of(command, RUN_LIMIT).map_err(|error| format!("{}: {error}", run.name))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_one_program_and_bars() {
        let mut names = std::collections::BTreeSet::new();
        for run in runs().unwrap() {
            let programs = [&run.bench, &run.benchmark, &run.in_nixl].into_iter().flatten().count();
            assert!(programs == 1 && !run.bars.is_empty(), "{}", run.name);
            assert_eq!(run.benchmark.is_some(), run.of.is_some(), "{}", run.name);
            assert!(names.insert(run.name.clone()), "{} is there twice", run.name);
        }
    }
}
