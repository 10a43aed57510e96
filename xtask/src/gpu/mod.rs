//! `cargo xtask gpu`: everything that only a machine with an NVIDIA GPU can show.
//!
//! A [kit](kit::Kit) has the programs and libraries that this needs, in cargo's folders or in one that was carried to a
//! machine without cargo and network; what runs is the same. `--rehearse` packs a kit, unpacks it elsewhere and runs it
//! over the stand-in, so that it works when it matters.

mod checks;
mod kit;
mod machine;
mod pack;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::Result;
use crate::arguments::GpuOptions;
use crate::harness;
use crate::limits::{figure, named, row, show};
use crate::process::{self, Output};
use checks::{BARS, BenchRun, CHECKS, Check, Needs, RUNS};
use kit::{Kit, Profile};

/// How long one point of the bench may take, with its memory and all rounds.
const RUN_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Does what the options say; false if a test failed or a bar was missed.
pub(crate) fn run(options: &GpuOptions) -> Result<bool> {
    match options {
        GpuOptions::Pack => pack::make(&Kit::build(Profile::Release)?).map(|_| true),
        GpuOptions::Rehearse => rehearse(),
        GpuOptions::Run { from: None, quick, only } => show_all(&Kit::build(Profile::Release)?, *quick, only),
        GpuOptions::Run { from: Some(folder), quick, only } => {
            show_all(&Kit::unpacked(folder)?, *quick, only)
        }
    }
}

/// Packs what the tests have built, and runs it from another folder, without a PATH, over the stand-in.
fn rehearse() -> Result<bool> {
    let archive = pack::make(&Kit::build(Profile::Dev)?)?;
    let folder = Elsewhere::new()?;
    pack::unpack(&archive, &folder.0)?;
    let mut command = Command::new(folder.0.join(pack::SCRIPT));
    command.arg("--quick").env_clear().env("PATH", "").env("KVX_CUDA_LIB", folder.0.join(kit::STAND_IN));
    let finished = process::run(command, RUN_LIMIT, Output::Shown)?;
    if !finished.succeeded() {
        println!("the kit's own run: {}", finished.end);
    }
    Ok(finished.succeeded())
}

/// A folder outside of the repository, for as long as this lives.
struct Elsewhere(PathBuf);

impl Elsewhere {
    fn new() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("kvx-gpu-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Elsewhere(folder))
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        // An error: it stays, in the system's folder for such.
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// The device, the tests, the bench; then all that failed. `quick`: a part of the tests, and a bench of a few bytes
/// whose bars are not judged. `only`: tests and runs with one of these in their names.
fn show_all(kit: &Kit, quick: bool, only: &[String]) -> Result<bool> {
    let device = kit.device()?;
    let real = !device.is_stand_in;
    println!("{}\n", machine::description(&device.line));
    let chosen = |name: &str| only.is_empty() || only.iter().any(|part| name.contains(part.as_str()));
    let mut failures = Vec::new();
    for check in CHECKS.iter().filter(|check| chosen(check.name)) {
        println!("==> {}: {}", check.name, check.what);
        match test(kit, check, quick, real) {
            Ok(told) => println!("<== {}: {told}\n", check.name),
            Err(why) => {
                println!("<== {}: FAILED: {why}\n", check.name);
                failures.push(format!("{}: {why}", check.name));
            }
        }
    }
    let mut lines = Vec::new();
    for run in RUNS.iter().filter(|run| chosen(run.name)) {
        println!("==> kvx bench: {}", run.name);
        match bench(kit, run, quick) {
            Ok(of_this) => lines.extend(of_this),
            Err(why) if !kit.has(run.needs) || (!real && run.needs != Needs::Nothing) => {
                println!("<== not here: {why}");
            }
            Err(why) => failures.push(format!("{}: {why}", run.name)),
        }
    }
    if !lines.is_empty() {
        print_table(&lines);
    }
    if real && !quick {
        failures.extend(judge(&lines, chosen));
    }
    if !real {
        println!("\nthis was the stand-in, made of host memory: its figures mean nothing");
    }
    for failure in &failures {
        println!("failed: {failure}");
    }
    println!("{} failed", failures.len());
    Ok(failures.is_empty())
}

/// Runs a test program; what it came to.
fn test(kit: &Kit, check: &Check, quick: bool, real: bool) -> Result<String> {
    if !kit.has(check.needs) {
        return Ok(format!("skipped: {}", kit.lacks(check.needs)));
    }
    let mut command = kit.command(check.program, check.needs)?;
    // Over the stand-in quick is a part of the names; a real device is tested by all of them.
    command.args(if quick && !real { check.quick } else { check.arguments });
    let finished = process::run(command, check.limit, Output::Shown)?;
    let (passed, skipped) = harness::ran(&finished.output);
    if !finished.succeeded() {
        return Err(format!("{} after {passed} tests passed", finished.end).into());
    }
    // A library that does not reach the stand-in says so, and passes; a real device it must reach.
    let may_skip = !real && check.needs != Needs::Nothing && skipped > 0;
    if passed == 0 && !may_skip {
        return Err("no test ran".into());
    }
    Ok(format!("{passed} passed, {skipped} skipped"))
}

/// The lines of a run of the bench. Errors: it failed, or needs what there is not.
fn bench(kit: &Kit, run: &BenchRun, quick: bool) -> Result<Vec<Value>> {
    if !kit.has(run.needs) {
        return Err(kit.lacks(run.needs).into());
    }
    let mut command = kit.command("kvx", run.needs)?;
    command.args(["bench", "--json"]).args(run.arguments.split(' '));
    if quick {
        command.args(["--block", "4K", "--count", "64", "--pool", "2M", "--rounds", "3", "--seconds", "0.1"]);
    } else {
        command.args(["--block", run.block, "--count", run.count]);
    }
    let finished = process::run(command, RUN_LIMIT, Output::Kept)?;
    if !finished.succeeded() {
        return Err(finished.end.to_string().into());
    }
    let lines = finished.output.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| Ok(named(serde_json::from_str(line)?, run.name))).collect()
}

/// Every line of the bench.
fn print_table(lines: &[Value]) {
    println!("\n| what | blocks | memory | GB/s | limit | GB/s | ratio | from | to |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for line in lines {
        let word = |field: &str| line[field].as_str().unwrap_or("").to_owned();
        let number = |field: &str| line[field].as_f64().map_or_else(|| "-".to_owned(), show);
        let what = match line["kernel"].as_str() {
            Some(kernel) => kernel.to_owned(),
            None => format!("{} {}", word("backend"), word("op")),
        };
        let blocks = format!("{} x{}", kib(line["block"].as_u64().unwrap_or(0)), line["count"]);
        println!(
            "| {what} | {blocks} | {} | {} | {} | {} | {} | {} | {} |",
            word("memory"),
            number("gbps"),
            word("limit_name"),
            number("limit_gbps"),
            number("ratio"),
            number("ratio_min"),
            number("ratio_max")
        );
    }
}

fn kib(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

/// The bars of what was run; those that were missed.
fn judge(lines: &[Value], chosen: impl Fn(&str) -> bool) -> Vec<String> {
    println!("\n| bar | asked | is | | | |\n|---|---|---|---|---|---|");
    let mut missed = Vec::new();
    for bar in BARS.iter().filter(|bar| chosen(bar.run)) {
        let Some(figure) = figure(bar, lines) else {
            missed.push(format!("the runs do not say: {}", bar.what));
            continue;
        };
        let (line, held) = row(bar, vec![figure]);
        println!("{line}");
        if !held {
            missed.push(format!("missed: {}", bar.what));
        }
    }
    missed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::{Bar, Figure};

    /// What chooses a bar's line.
    fn at(bar: &Bar) -> &'static str {
        match bar.figure {
            Figure::Field { at, .. } => at,
            _ => panic!("{} is a field", bar.what),
        }
    }

    #[test]
    fn bars_are_found_in_the_lines_and_missed_by_them() {
        let lines = |ratio: f64| -> Vec<_> {
            let line = |bar: &Bar| {
                let (field, value) = at(bar).split_once('=').expect("one field chooses the line");
                named(serde_json::json!({ field: value, "ratio": ratio }), bar.run)
            };
            BARS.iter().map(line).collect()
        };
        assert!(judge(&lines(0.95), |_| true).is_empty());
        assert_eq!(judge(&lines(0.75), |_| true).len(), BARS.len());
        assert_eq!(judge(&[], |run| run == "kernels").len(), 2, "nothing was measured");
    }
}
