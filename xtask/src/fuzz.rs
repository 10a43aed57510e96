//! `cargo xtask fuzz`: runs the fuzz targets, for everything that kvx reads from others, with
//! libFuzzer and AddressSanitizer.
//!
//! The tests do not include this, but replay its inputs. kvx's own compiler builds the workspace
//! `fuzz/`: `RUSTC_BOOTSTRAP` makes it accept the sanitizer's flags.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;

use crate::bars::print_table;
use crate::metadata::Metadata;
use crate::process::{self, Deadline, Output};
use crate::{Result, one_of, root, subfolders};

/// The committed corpora, a folder for each target.
const CORPORA: &str = "fuzz/corpus";
/// The variable that names the program's target.
const TARGET: &str = "KVX_FUZZ";
/// The only supported platform. Naming it keeps the flags from applying to build scripts and
/// macros.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// AddressSanitizer, and the coverage that libFuzzer needs.
const FLAGS: &str = "-Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares";
/// The time limit of the build.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// The time that a target may take to start and to end, beyond its run time.
const BEYOND: Duration = Duration::from_secs(120);
/// The most bytes of an added input, and of a whole corpus; the most inputs that are added.
const KEPT_INPUT: u64 = 512;
const KEPT_IN_ALL: u64 = 12 << 10;
const KEPT_INPUTS: usize = 64;
/// The results of the runs that added to the corpora.
const RESULTS: &str = "fuzz/coverage.txt";
/// The most rounds of a target.
const ROUNDS: u64 = 10;

/// The options of `cargo xtask fuzz`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct FuzzOptions {
    /// Run each target for this long
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: u64,
    /// Repeat this until a round reaches nothing new, at most ten times
    #[arg(long)]
    pub(crate) until_flat: bool,
    /// Write the fewest inputs that reach all that was reached to the committed corpora
    /// (fuzz/corpus), which tests replay, and the results to fuzz/coverage.txt
    #[arg(long)]
    pub(crate) keep: bool,
    /// Only these targets; without a name all of them
    #[arg(value_name = "TARGET", value_parser = one_of(targets()))]
    pub(crate) only: Vec<String>,
}

/// Returns the targets, each of which has a corpus.
pub(crate) fn targets() -> Vec<String> {
    subfolders(CORPORA, |_| true)
}

/// Runs the targets one by one and prints a table; returns false if one of them found something.
pub(crate) fn run(options: &FuzzOptions) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory.join("fuzz");
    let program = build(&target)?;
    let chosen = if options.only.is_empty() { targets() } else { options.only.clone() };
    let mut rows = Vec::new();
    let mut nothing_found = true;
    for name in &chosen {
        eprintln!("{name}");
        let result = fuzz(name, options, &program, &target)?;
        nothing_found &= result.found.is_none();
        if options.keep && result.found.is_none() {
            record(name, &result)?;
        }
        rows.push(format!("| {name} | {result} |"));
    }
    print_table(HEADINGS, &rows);
    Ok(nothing_found)
}

/// The headings of the table.
const HEADINGS: &str = "target | seconds | executions | edges | inputs | found";

/// The result of a target's rounds.
struct Fuzzed {
    seconds: u64,
    executions: u64,
    edges: u64,
    inputs: usize,
    found: Option<String>,
}

impl std::fmt::Display for Fuzzed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Fuzzed { seconds, executions, edges, inputs, found } = self;
        let found = found.as_deref().unwrap_or("nothing");
        write!(f, "{seconds} | {executions} | {edges} | {inputs} | {found}")
    }
}

/// Replaces a target's line in the committed results.
fn record(name: &str, result: &Fuzzed) -> Result<()> {
    let path = root().join(RESULTS);
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let own = format!("{name} | ");
    let mut lines: Vec<_> =
        known.lines().skip(1).filter(|line| !line.starts_with(&own)).map(str::to_owned).collect();
    lines.push(format!("{own}{result}"));
    lines.sort();
    Ok(std::fs::write(path, format!("{HEADINGS}\n{}\n", lines.join("\n")))?)
}

/// Builds the program with all targets.
fn build(target: &Path) -> Result<PathBuf> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(
            format!("fuzzing is built for {PLATFORM} only, and this is another platform").into()
        );
    }
    let mut cargo = process::cargo(["build", "--target", PLATFORM, "--manifest-path"]);
    cargo.arg(root().join("fuzz/Cargo.toml")).env("CARGO_TARGET_DIR", target);
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS);
    process::must_succeed(cargo, Deadline::after(BUILD_LIMIT)).map_err(|error| {
        format!("{error}; libFuzzer needs a C++ compiler (g++, or CXX) and, the first time, the registry")
    })?;
    Ok(target.join(PLATFORM).join("debug/kvx-fuzz"))
}

/// Runs one target, once or until it is flat.
fn fuzz(name: &str, options: &FuzzOptions, program: &Path, target: &Path) -> Result<Fuzzed> {
    let committed = root().join(CORPORA).join(name);
    let (grown, artifacts) =
        (target.join("corpus").join(name), target.join("artifacts").join(name));
    std::fs::create_dir_all(&grown)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut result = Fuzzed { seconds: 0, executions: 0, edges: 0, inputs: 0, found: None };
    for _ in 0..if options.until_flat { ROUNDS } else { 1 } {
        let mut command = Command::new(program);
        command.env(TARGET, name).arg(format!("-max_total_time={}", options.seconds));
        command.args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]);
        command.arg(format!("-artifact_prefix={}/", artifacts.display()));
        command.arg(&grown).arg(&committed);
        let limit = Duration::from_secs(options.seconds) + BEYOND;
        let ended = process::run(command, limit, Output::Quiet)?;
        let (executions, edges) = counts(&ended.output);
        let is_flat = edges <= result.edges;
        result.seconds += options.seconds;
        result.executions += executions;
        result.edges = edges.max(result.edges);
        if !ended.succeeded() {
            let input = after(&ended.output, "Test unit written to ").unwrap_or("no input");
            let log = target.join(format!("{name}.log"));
            std::fs::write(&log, &ended.output)?;
            result.found = Some(format!("{}: {input}; see {}", ended.end, log.display()));
            break;
        }
        if is_flat {
            break;
        }
    }
    if options.keep && result.found.is_none() {
        keep(name, program, &grown, &committed)?;
    }
    result.inputs = sizes(&committed)?.len();
    Ok(result)
}

/// Returns the number of inputs that were tried, and of the program's edges that they reached.
fn counts(output: &str) -> (u64, u64) {
    let number = |text| after(output, text).and_then(|number| number.parse().ok()).unwrap_or(0);
    (number("stat::number_of_executed_units:"), number(" cov: "))
}

/// Returns the token after the last occurrence of a text.
fn after<'a>(output: &'a str, text: &str) -> Option<&'a str> {
    output.rsplit_once(text)?.1.split_whitespace().next()
}

/// Replaces the committed inputs that libFuzzer found, whose names are hashes, with the fewest that
/// reach all that was reached. If these are too long, the longest ones stay, which reach most.
fn keep(name: &str, program: &Path, grown: &Path, committed: &Path) -> Result<()> {
    let least = grown.with_extension("least");
    let _ = std::fs::remove_dir_all(&least); // left by an earlier run
    std::fs::create_dir_all(&least)?;
    let mut command = Command::new(program);
    command.env(TARGET, name).args(["-set_cover_merge=1", "-rss_limit_mb=2048"]);
    command.arg(format!("-max_len={KEPT_INPUT}")).args([&least, committed, grown]);
    let merged = process::run(command, BEYOND, Output::Quiet)?;
    if !merged.succeeded() {
        return Err(format!("{name} cannot be minimised: {}\n{}", merged.end, merged.output).into());
    }
    for (_, file) in sizes(committed)?.into_iter().filter(|(_, file)| is_found(file)) {
        std::fs::remove_file(file)?;
    }
    let mut all: u64 = sizes(committed)?.iter().map(|(size, _)| size).sum();
    let mut found = sizes(&least)?;
    found.sort();
    let found = found.into_iter().rev().filter(|(size, _)| *size <= KEPT_INPUT).take(KEPT_INPUTS);
    for (size, file) in found {
        if all + size <= KEPT_IN_ALL {
            std::fs::copy(&file, committed.join(file.file_name().unwrap_or_default()))?;
            all += size;
        }
    }
    Ok(())
}

/// Returns whether libFuzzer found an input: it names inputs by their SHA-1.
fn is_found(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.len() == 40 && name.bytes().all(|letter| letter.is_ascii_hexdigit())
}

/// Returns the files of a folder with their sizes.
fn sizes(folder: &Path) -> std::io::Result<Vec<(u64, PathBuf)>> {
    std::fs::read_dir(folder)?
        .map(|file| file.and_then(|file| Ok((file.metadata()?.len(), file.path()))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_a_run_are_read() {
        let output = "#2\tINITED cov: 7 ft: 8 corp: 1/1b\n#258551\tDONE   cov: 130 ft: 190 corp: 26/1817b lim: 2345\n\
                      Done 258551 runs in 6 second(s)\nstat::number_of_executed_units: 258551\n";
        assert_eq!((counts(output), counts("killed")), ((258_551, 130), (0, 0)));
    }

    #[test]
    fn every_corpus_is_small() {
        let targets = targets();
        assert!(targets.len() > 20, "{targets:?}");
        for name in targets {
            let bytes: u64 = sizes(&root().join(CORPORA).join(&name))
                .unwrap()
                .iter()
                .map(|(size, _)| size)
                .sum();
            assert!((1..=KEPT_IN_ALL).contains(&bytes), "{name} has {bytes} bytes");
        }
    }
}
