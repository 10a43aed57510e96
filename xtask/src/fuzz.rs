//! `cargo xtask fuzz`: whatever kvx reads from others, under libFuzzer with AddressSanitizer, for a time.
//!
//! Not part of the tests, which replay what it found. The workspace `fuzz/` is built by the compiler that builds kvx:
//! `RUSTC_BOOTSTRAP` lets that take the sanitizer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Result;
use crate::arguments::FuzzOptions;
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// The workspace, and in it the folder with a folder for each target.
const WORKSPACE: &str = "fuzz";
const CORPUS: &str = "corpus";
/// The variable that tells the program its target.
const TARGET: &str = "KVX_FUZZ";
/// The only platform that it is built for: flags for a named one spare build scripts and macros.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// AddressSanitizer, and what libFuzzer wants to know of each step.
const FLAGS: &str = "-Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares";
/// How long a build may take.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// How long a target may take to start and to end, beyond its time.
const BEYOND: Duration = Duration::from_secs(120);
/// The most bytes of an input that is kept, and of all of a target's; and how many are added at a time.
const KEPT_INPUT: u64 = 512;
const KEPT_IN_ALL: u64 = 6 << 10;
const KEPT_AT_A_TIME: usize = 32;

/// The targets: each has a corpus.
pub(crate) fn targets() -> Vec<String> {
    let folders =
        std::fs::read_dir(crate::root().join(WORKSPACE).join(CORPUS)).into_iter().flatten().flatten();
    let mut names: Vec<_> = folders.filter_map(|folder| folder.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Runs the targets one by one and prints a table; false if one of them found something.
pub(crate) fn run(options: &FuzzOptions) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory()?.join("fuzz");
    let program = build(&target)?;
    let known = targets();
    let chosen = if options.only.is_empty() { &known } else { &options.only };
    let mut rows = Vec::new();
    for name in chosen {
        eprintln!("{name}, {} s", options.seconds);
        let row = fuzz(name, options, &program, &target)?;
        eprintln!("{row}");
        rows.push(row);
    }
    println!("| target | seconds | executions | edges | found |\n|---|---|---|---|---|");
    rows.iter().for_each(|row| println!("{row}"));
    Ok(rows.iter().all(|row| row.found.is_none()))
}

/// Builds the program with all targets.
fn build(target: &Path) -> Result<PathBuf> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(format!("fuzzing is built for {PLATFORM} alone, and this is another platform").into());
    }
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        let name = compiler.display();
        return Err(format!(
            "no C++ compiler `{name}`, which libFuzzer needs (it is C++, and nothing else of kvx is): install g++, or \
             name one by CXX"
        )
        .into());
    }
    let manifest = crate::root().join(WORKSPACE).join("Cargo.toml");
    let mut cargo = process::cargo(["build", "--target", PLATFORM, "--manifest-path"]);
    cargo.arg(manifest).env("CARGO_TARGET_DIR", target).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS);
    let built = process::run(cargo, BUILD_LIMIT, Output::Shown)?;
    if !built.succeeded() {
        return Err(format!(
            "the workspace {WORKSPACE}/ does not build ({}): its crate libfuzzer-sys comes from the registry the first time",
            built.end
        )
        .into());
    }
    Ok(target.join(PLATFORM).join("debug/kvx-fuzz"))
}

/// What a target did.
struct TargetRow {
    name: String,
    seconds: u64,
    executions: u64,
    edges: u64,
    /// The file that makes it fail, or how it ended.
    found: Option<String>,
}

impl std::fmt::Display for TargetRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TargetRow { name, seconds, executions, edges, found } = self;
        let found = found.as_deref().unwrap_or("nothing");
        write!(f, "| {name} | {seconds} | {executions} | {edges} | {found} |")
    }
}

/// Runs one target for its time.
fn fuzz(name: &str, options: &FuzzOptions, program: &Path, target: &Path) -> Result<TargetRow> {
    let committed = crate::root().join(WORKSPACE).join(CORPUS).join(name);
    let (grown, artifacts) = (target.join(CORPUS).join(name), target.join("artifacts").join(name));
    std::fs::create_dir_all(&grown)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut command = Command::new(program);
    command.env(TARGET, name).arg(format!("-max_total_time={}", options.seconds));
    command.args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(&grown).arg(&committed);
    let ended = process::run(command, Duration::from_secs(options.seconds) + BEYOND, Output::Quiet)?;
    let found = (!ended.succeeded()).then(|| {
        let file = ended
            .output
            .lines()
            .find_map(|line| line.split_once("Test unit written to "))
            .map(|(_, file)| file);
        let log = target.join(format!("{name}.log"));
        let kept = std::fs::write(&log, &ended.output);
        let log = kept.map_or_else(|error| error.to_string(), |()| log.display().to_string());
        format!("{}: {}; see {log}", ended.end, file.unwrap_or("no input"))
    });
    if options.keep && found.is_none() {
        keep(name, program, &grown, &committed)?;
    }
    let (executions, edges) = (executions(&ended.output), edges(&ended.output));
    Ok(TargetRow { name: name.to_owned(), seconds: options.seconds, executions, edges, found })
}

/// How many inputs were tried.
fn executions(output: &str) -> u64 {
    let said = output.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    said.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// How many edges of the program were taken.
fn edges(output: &str) -> u64 {
    let said = output.lines().rev().find_map(|line| line.split_once(" cov: "));
    said.and_then(|(_, rest)| rest.split(' ').next()?.parse().ok()).unwrap_or(0)
}

/// Adds to the committed corpus some kilobytes of what it lacks: of the few inputs that reach all that was reached, the
/// longest, which reach most.
fn keep(name: &str, program: &Path, grown: &Path, committed: &Path) -> Result<()> {
    let least = grown.with_extension("least");
    std::fs::remove_dir_all(&least).or_else(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    std::fs::create_dir_all(&least)?;
    let mut command = Command::new(program);
    command.env(TARGET, name).args(["-set_cover_merge=1", "-rss_limit_mb=2048"]);
    command.arg(format!("-max_len={KEPT_INPUT}")).args([&least, grown]);
    let merged = process::run(command, BEYOND, Output::Quiet)?;
    if !merged.succeeded() {
        return Err(format!("{name} cannot be minimised: {}\n{}", merged.end, merged.output).into());
    }
    let sizes = |folder: &Path| -> Result<Vec<(u64, PathBuf)>> {
        let files = std::fs::read_dir(folder)?.map(|file| {
            let file = file?;
            Ok((file.metadata()?.len(), file.path()))
        });
        files.collect()
    };
    let mut all: u64 = sizes(committed)?.iter().map(|(size, _)| size).sum();
    let mut found = sizes(&least)?;
    found.sort();
    let mut added = 0;
    for (size, file) in found.into_iter().rev() {
        let place = file.file_name().map(|file| committed.join(file)).filter(|place| !place.exists());
        let fits = size <= KEPT_INPUT && all + size <= KEPT_IN_ALL && added < KEPT_AT_A_TIME;
        let Some(place) = place.filter(|_| fits) else { continue };
        std::fs::copy(&file, place)?;
        (all, added) = (all + size, added + 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_says_is_read() {
        let output = "#2\tINITED cov: 7 ft: 8 corp: 1/1b\n#258551\tDONE   cov: 130 ft: 190 corp: 26/1817b lim: 2345\n\
                      Done 258551 runs in 6 second(s)\nstat::number_of_executed_units: 258551\n";
        assert_eq!((executions(output), edges(output)), (258_551, 130));
        assert_eq!((executions("killed"), edges("killed")), (0, 0));
    }

    #[test]
    fn every_corpus_is_small() {
        let targets = targets();
        assert!(targets.len() > 20, "{targets:?}");
        for name in targets {
            let folder = crate::root().join(WORKSPACE).join(CORPUS).join(&name);
            let files =
                std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
            let all: u64 = files.sum();
            assert!((1..=KEPT_IN_ALL).contains(&all), "{name} has {all} bytes");
        }
    }
}
