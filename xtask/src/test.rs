//! `cargo xtask test`: every check of the repository, step by step.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::arguments::TestOptions;
use crate::harness::{self, Failure, Tally};
use crate::metadata::Metadata;
use crate::process::{self, Finished, Output};
use crate::skips;
use crate::steps::{self, Action, CargoCall, STEPS, Step};
use crate::summary::Summary;
use crate::{Result, again, features, install, root, width};

/// Runs the steps that the options name; a failing one does not stop the rest. False if any failed.
pub(crate) fn run(options: &TestOptions) -> Result<bool> {
    let workspace = Metadata::of_members()?;
    let target = workspace.target_directory()?;
    let mut summary = Summary::new(options.require_all);
    let mut second_looks = if options.strict { 0 } else { again::MOST };
    if options.install {
        println!("==> install");
        let start = Instant::now();
        let tally = of_check(install::run(&target, steps::LIMIT), "cargo xtask test --install");
        report(&mut summary, "install", start.elapsed(), tally);
    }
    let chosen = |step: &&Step| options.only.is_empty() || options.only.iter().any(|name| name == step.name);
    for step in STEPS.iter().filter(chosen) {
        println!("==> {}", step.name);
        let start = Instant::now();
        let tally = match step.action {
            Action::Cargo(call) => of_cargo(step, call, &target).map(|(finished, told)| Tally {
                skips: told,
                ..one(finished.succeeded(), &ending(&finished, call))
            }),
            Action::Harness(call) => {
                of_cargo(step, call, &target).map(|(finished, told)| of_harness(&finished, call, told))
            }
            Action::Width => Ok(of_check(width::too_wide(root()), "make them at most 120 columns wide")),
            Action::Features => Ok(of_check(features::check(step.limit), "cargo xtask features")),
        };
        let mut tally = tally.unwrap_or_else(|error| one(false, &error.to_string()));
        again::look(&mut tally, &mut second_looks, |test| again::alone(test, &target));
        report(&mut summary, step.name, start.elapsed(), tally);
    }
    println!("{summary}");
    Ok(summary.held())
}

fn report(summary: &mut Summary, name: &'static str, took: Duration, tally: Tally) {
    let verdict = if summary.add(name, took, tally) { "ok" } else { "FAILED" };
    println!("<== {name}: {verdict}, {:.1} s\n", took.as_secs_f64());
}

/// A step that counts as one.
fn one(held: bool, failure: &str) -> Tally {
    if held {
        Tally { passed: 1, ..Tally::default() }
    } else {
        Tally { failures: vec![Failure::from(failure.to_owned())], ..Tally::default() }
    }
}

/// A step of xtask's own, which says what failed, and the command that repeats it.
fn of_check(failures: Result<Vec<String>>, again: &str) -> Tally {
    match failures {
        Ok(failures) => one(failures.is_empty(), &format!("{} ({again})", failures.join("; "))),
        Err(error) => one(false, &format!("{error} ({again})")),
    }
}

fn of_cargo(step: &Step, call: &CargoCall, target: &Path) -> Result<(Finished, Vec<skips::Skip>)> {
    let told = target.join("xtask").join("skips").join(step.name);
    skips::clear(&told)?;
    let mut command = process::cargo(call.line.split(' '));
    command.envs(call.environment.iter().copied()).env(skips::VARIABLE, &told);
    println!("{}", shown(call));
    let finished = process::run(command, step.limit, Output::Shown)?;
    Ok((finished, skips::read(&told)?))
}

/// The call as one would type it.
fn shown(call: &CargoCall) -> String {
    let variables = call.environment.iter().map(|(name, value)| format!("{name}={value:?} "));
    format!("{}cargo {}", variables.collect::<String>(), call.line)
}

fn ending(finished: &Finished, call: &CargoCall) -> String {
    format!("{} ({})", finished.end, shown(call))
}

fn of_harness(finished: &Finished, call: &CargoCall, told: Vec<skips::Skip>) -> Tally {
    let mut tally = harness::read(&finished.output, finished.succeeded(), told);
    // Failing tests explain a failing exit status; otherwise something did not build, or hung.
    let unexplained = !finished.succeeded() && tally.failures.is_empty();
    if unexplained || matches!(finished.end, process::End::TimedOut(_)) {
        tally.failures.push(Failure::from(ending(finished, call)));
    } else if tally.passed == 0 && tally.failures.is_empty() {
        tally.failures.push(Failure::from(format!("no test ran ({})", shown(call))));
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const CALL: CargoCall =
        CargoCall { line: "test --workspace", environment: &[("RUSTDOCFLAGS", "-D warnings")] };
    const RAN: &str = "Running tests/a.rs (target/debug/deps/a-0)\n\
                       test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";

    fn finished(code: i32, output: &str) -> Finished {
        let end = process::End::Exited(ExitStatus::from_raw(code << 8));
        Finished { end, output: output.to_owned() }
    }

    #[test]
    fn tests_that_pass_are_counted() {
        let tally = of_harness(&finished(0, RAN), &CALL, Vec::new());
        assert_eq!((tally.passed, tally.failures.len()), (2, 0));
    }

    #[test]
    fn a_build_that_fails_is_one_failure_with_its_command() {
        let tally = of_harness(&finished(101, "error: could not compile `kvx-core`"), &CALL, Vec::new());
        let failures: Vec<_> = tally.failures.iter().map(Failure::to_string).collect();
        assert_eq!(failures, ["exit status: 101 (RUSTDOCFLAGS=\"-D warnings\" cargo test --workspace)"]);
    }

    #[test]
    fn a_step_that_hung_or_ran_nothing_failed() {
        let hung = Finished { end: process::End::TimedOut(Duration::from_secs(1)), output: RAN.to_owned() };
        assert_eq!(of_harness(&hung, &CALL, Vec::new()).failures.len(), 1);
        assert_eq!(of_harness(&finished(0, ""), &CALL, Vec::new()).failures.len(), 1);
    }
}
