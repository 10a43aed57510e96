//! `cargo xtask gpu`: everything that needs a machine with an NVIDIA GPU.
//!
//! A [kit](kit::Kit) has the programs and libraries for this, in cargo's folders or in an archive
//! for a machine without cargo and network. Both run the same checks. `--rehearse` packs a kit,
//! unpacks it in another folder and runs it with the stand-in, to test the archive without a GPU.

mod checks;
mod kit;
mod pack;

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::Result;
use crate::arguments::GpuOptions;
use crate::bars::{lines, print_table, show};
use crate::harness;
use crate::process::{self, Output};
use checks::{BenchRun, Check, Needs};
use kit::Kit;

/// The time limit of one check, or of one point of the bench with its memory and all rounds.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Runs the requested command; returns false if a test failed or a bar was missed.
pub(crate) fn run(options: &GpuOptions) -> Result<bool> {
    match &options.from {
        _ if options.rehearse => rehearse(),
        _ if options.pack => pack::make(&Kit::build(true)?).map(|_| true),
        None => run_all(&Kit::build(true)?, options),
        Some(folder) => run_all(&Kit::unpacked(folder)?, options),
    }
}

/// Packs the programs that the tests have built, and runs them from a temporary folder, without a
/// PATH, with the stand-in.
fn rehearse() -> Result<bool> {
    let archive = pack::make(&Kit::build(false)?)?;
    let folder = std::env::temp_dir().join(format!("kvx-gpu-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    pack::unpack(&archive, &folder)?;
    let mut command = Command::new(folder.join(pack::SCRIPT));
    command
        .arg("--quick")
        .env_clear()
        .env("PATH", "")
        .env("KVX_CUDA_LIB", folder.join(kit::STAND_IN));
    let held = process::shown_to_succeed(command, LIMIT);
    fs::remove_dir_all(&folder)?;
    held
}

/// Prints the device, runs tests and bench, and prints all failures. A quick run includes only a
/// part of the tests, and a bench of a few bytes whose bars are not checked.
fn run_all(kit: &Kit, options: &GpuOptions) -> Result<bool> {
    let (device, is_stand_in) = kit.device()?;
    let (real, quick) = (!is_stand_in, options.quick);
    println!("{}\n", machine(&device));
    let chosen = |name: &str| {
        options.only.is_empty() || options.only.iter().any(|part| name.contains(part.as_str()))
    };
    let table = checks::table()?;
    let mut failures = Vec::new();
    for check in table.checks.iter().filter(|check| chosen(&check.name)) {
        println!("==> {}: {}", check.name, check.what);
        let result = test(kit, check, quick, real).map_err(|why| format!("FAILED: {why}"));
        failures.extend(result.as_ref().err().map(|why| format!("{}: {why}", check.name)));
        println!("<== {}: {}\n", check.name, result.unwrap_or_else(|why| why));
    }
    let (mut points, mut bars) = (Vec::new(), Vec::new());
    for run in table.runs.iter().filter(|run| chosen(&run.name)) {
        println!("==> kvx bench: {}", run.name);
        if let Some(why) = kit.lacks(run.needs) {
            println!("<== skipped: {why}");
            continue;
        }
        match bench(kit, run, quick) {
            Ok(lines) => {
                for bar in run.bars.iter().filter(|_| real && !quick) {
                    match bar.figure(&lines, "ratio").map(|figure| bar.row(vec![figure])) {
                        Ok((row, held)) => {
                            failures.extend((!held).then(|| format!("missed: {}", bar.what)));
                            bars.push(row);
                        }
                        Err(why) => failures.push(why.to_string()),
                    }
                }
                points.extend(lines.iter().map(row));
            }
            Err(why) if !real && run.needs != Needs::Nothing => {
                println!("<== not over the stand-in: {why}")
            }
            Err(why) => failures.push(format!("{}: {why}", run.name)),
        }
    }
    print_table("what | blocks | memory | GB/s | limit | GB/s | ratio | from | to", &points);
    print_table("bar | asked | is | | |", &bars);
    if !real {
        println!("\nthis run used the stand-in for a device, so its figures mean nothing");
    }
    println!("{} failed", failures.len());
    Ok(crate::all_held(failures))
}

/// Returns a line about the machine that figures come from: the device, the CPU, the kernel.
fn machine(device: &str) -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{device}; {cores} CPUs ({model}), Linux {}", kernel.trim())
}

/// Runs a test program and returns its counts.
fn test(kit: &Kit, check: &Check, quick: bool, real: bool) -> Result<String> {
    if let Some(why) = kit.lacks(check.needs) {
        return Ok(format!("skipped: {why}"));
    }
    let mut command = kit.command(&check.program, check.needs)?;
    // A real device is tested with all of them, even in a quick run.
    command.args(if quick && !real { &check.quick } else { &check.arguments });
    let finished = process::run(command, LIMIT, Output::Shown)?;
    let (passed, skipped) = harness::passed_and_skipped(&finished.output);
    if !finished.succeeded() {
        return Err(format!("{}, after {passed} tests had passed", finished.end).into());
    }
    // A library that does not work with the stand-in makes tests skip, but must work with a real
    // device.
    let may_skip = !real && check.needs != Needs::Nothing && skipped > 0;
    if passed == 0 && !may_skip {
        return Err("no test ran".into());
    }
    Ok(format!("{passed} passed, {skipped} skipped"))
}

/// Runs the bench and returns its lines.
fn bench(kit: &Kit, run: &BenchRun, quick: bool) -> Result<Vec<Value>> {
    let mut command = kit.command("kvx", run.needs)?;
    command.args(["bench", "--json"]).args(run.arguments.split(' '));
    if quick {
        command.args("--block 4K --count 64 --pool 2M --rounds 3 --seconds 0.1".split(' '));
    } else {
        command.args(["--block", &run.block, "--count", &run.count]);
    }
    lines(&process::output_of(command, LIMIT)?)
}

/// Formats a line of the bench as a row of a table.
fn row(line: &Value) -> String {
    let word = |field: &str| line[field].as_str().unwrap_or("").to_owned();
    let number = |field: &str| line[field].as_f64().map_or_else(|| "-".to_owned(), show);
    let what = match line["kernel"].as_str() {
        Some(kernel) => kernel.to_owned(),
        None => format!("{} {}", word("backend"), word("op")),
    };
    let blocks = format!("{} KiB x{}", line["block"].as_u64().unwrap_or(0) >> 10, line["count"]);
    let figures = [number("gbps"), word("limit_name"), number("limit_gbps"), number("ratio")];
    let range = [number("ratio_min"), number("ratio_max")];
    format!(
        "| {what} | {blocks} | {} | {} | {} |",
        word("memory"),
        figures.join(" | "),
        range.join(" | ")
    )
}
