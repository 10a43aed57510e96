//! `cargo xtask test`: every check of the repository, step by step.

mod again;
mod ledger;
pub(crate) mod programs;
mod schedule;
pub(crate) mod steps;
mod summary;
pub(crate) mod tier;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::arguments::TestOptions;
use crate::harness::{self, Failure, Tally, Test};
use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::skips;
use crate::{Result, features, install, package, spelling};
use ledger::Ledger;
use programs::{Features, TestProgram};
use schedule::Seconds;
use steps::{Action, CargoCall, STEPS, Step};
use summary::Summary;
use tier::Tier;

/// Runs the steps that the options name; a failing one does not stop the rest. False if any failed.
pub(crate) fn run(options: &TestOptions) -> Result<bool> {
    let workspace = Metadata::of_members()?;
    let crates = match &options.package {
        Some(name) if workspace.packages().any(|package| package.name() == name) => format!("-p {name}"),
        Some(name) => return Err(format!("the workspace has no crate {name}").into()),
        None => "--workspace".to_owned(),
    };
    let target = workspace.target_directory()?;
    let mut run = TestRun {
        options,
        crates,
        notes: target.join("xtask").join("skips"),
        target,
        workspace,
        second_looks: if options.strict { 0 } else { again::MOST },
        ledger: Ledger::load()?,
        summary: Summary::new(options.require_all),
    };
    if options.install {
        run.step("install", |run| {
            Ok(of_check(install::run(&run.target, steps::LIMIT), "cargo xtask test --install"))
        });
    }
    let chosen = |step: &&Step| {
        let named = options.only.is_empty() || options.only.iter().any(|name| name == step.name);
        named && step.is_part_of(options.tier, options.package.as_deref())
    };
    for step in STEPS.iter().filter(chosen) {
        run.step(step.name, |run| match step.action {
            Action::Cargo(call) => run.cargo(step, call),
            Action::Tests => run.tests(step.limit),
            Action::Package => Ok(of_check(package::check(step.limit), "cargo xtask package")),
            Action::Spelling => {
                let failures = spelling::spelling(&run.target, step.limit);
                Ok(of_check(failures, "cargo xtask test --only spelling"))
            }
            Action::Features => {
                let check = match options.tier {
                    Tier::Whole => features::check_every_choice,
                    Tier::Fast | Tier::Usual => features::check,
                };
                Ok(of_check(check(step.limit), "cargo xtask features"))
            }
        });
    }
    println!("{}", run.summary);
    Ok(run.summary.held())
}

/// A run of the steps.
struct TestRun<'a> {
    options: &'a TestOptions,
    /// The choice of packages, as cargo takes it.
    crates: String,
    workspace: Metadata,
    target: PathBuf,
    /// The folder of the files in which tests note what they skip.
    notes: PathBuf,
    /// How many failed tests may still be looked at again.
    second_looks: usize,
    ledger: Ledger,
    summary: Summary,
}

/// What one test program came to.
struct Ran {
    title: String,
    took: Duration,
    tally: Tally,
    left_to_the_whole: BTreeSet<String>,
}

impl TestRun<'_> {
    fn step(&mut self, name: &'static str, step: impl FnOnce(&mut Self) -> Result<Tally>) {
        println!("==> {name}");
        let start = Instant::now();
        let tally = step(self).unwrap_or_else(|error| one(false, &error.to_string()));
        let took = start.elapsed();
        let verdict = if self.summary.add(name, took, tally) { "ok" } else { "FAILED" };
        println!("<== {name}: {verdict}, {:.1} s\n", took.as_secs_f64());
    }

    fn cargo(&self, step: &Step, call: &CargoCall) -> Result<Tally> {
        let told = self.notes.join(step.name);
        skips::clear(&told)?;
        let line = call.line.replace("{crates}", &self.crates);
        let mut command = process::cargo(line.split(' '));
        command.envs(call.environment.iter().copied()).envs(self.variables()).env(skips::VARIABLE, &told);
        let shown = shown(&line, call);
        println!("{shown}");
        let finished = process::run(command, step.limit, Output::Shown)?;
        let tally = one(finished.succeeded(), &format!("{} ({shown})", finished.end));
        Ok(Tally { skips: skips::read(&told)?, ..tally })
    }

    /// Builds the test programs and runs them: several at a time, then those that want the machine for themselves.
    fn tests(&mut self, limit: Duration) -> Result<Tally> {
        let features = features_of_tests(self.options);
        let programs = programs::build(&self.crates, features, self.options.tier, &self.workspace)?;
        let mut seconds = Seconds::load(&self.target, self.options.tier);
        let (shared, alone) = schedule::order(programs, &seconds);
        let (count, lanes) = (shared.len() + alone.len(), schedule::lanes());
        println!("{} programs, {lanes} at a time, then {} alone", shared.len(), alone.len());
        let done = AtomicUsize::new(0);
        let run = |program: TestProgram| {
            let start = Instant::now();
            let ran = self.program(&program, limit);
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            let took = start.elapsed();
            let (tally, left_to_the_whole) = ran.unwrap_or_else(|error| {
                let failures = vec![Failure::of_program(&program, &error.to_string())];
                (Tally { failures, ..Tally::default() }, BTreeSet::new())
            });
            let verdict = if tally.failures.is_empty() { "ok" } else { "FAILED" };
            println!("{done:>3}/{count} {verdict:<6} {:>7.1} s  {}", took.as_secs_f64(), program.title);
            Ran { title: program.title, took, tally, left_to_the_whole }
        };
        let mut all = schedule::side_by_side(shared, lanes, run);
        all.extend(schedule::side_by_side(alone, 1, run));
        let mut sum = Tally::default();
        for ran in all {
            seconds.note(&ran.title, ran.took.as_secs_f64());
            self.summary.add_program(&ran.title, ran.took, ran.left_to_the_whole);
            sum.add(ran.tally);
        }
        seconds.save()?;
        let variables = self.variables();
        let notes = self.notes.join("again");
        let skipped = sum.skips.clone();
        let passes = |test: &Test| again::alone(test, &notes, &variables, &skipped);
        again::look(&mut sum, &mut self.second_looks, passes);
        self.ledger.enter(&mut sum)?;
        if sum.passed == 0 && sum.failures.is_empty() {
            sum.failures.push(Failure::from(format!("no test ran (cargo test {})", self.crates)));
        }
        Ok(sum)
    }

    fn variables(&self) -> [(&'static str, &'static str); 1] {
        [(tier::VARIABLE, self.options.tier.name())]
    }

    /// Runs one test program; shows what it printed if it failed.
    fn program(&self, program: &TestProgram, limit: Duration) -> Result<(Tally, BTreeSet<String>)> {
        let notes = self.notes.join(file_name(&program.title));
        skips::clear(&notes)?;
        let mut command = program.command();
        command.env(skips::VARIABLE, &notes).envs(self.variables());
        let finished = process::run(command, limit, Output::Quiet)?;
        let tally = harness::read(program, &finished, skips::read(&notes)?);
        if !tally.failures.is_empty() {
            println!("---- cargo test {}\n{}", program.shown(), finished.output);
        }
        Ok((tally, skips::left_to_the_whole(&notes)?))
    }
}

/// The features that test programs are built with.
fn features_of_tests(options: &TestOptions) -> Features {
    match (&options.package, options.tier) {
        // A crate by itself has its default features alone, and the tests of the others would be left out.
        (Some(_), _) => Features { of_chosen: " --all-features", of_one: " --all-features" },
        (None, tier @ Tier::Whole) => {
            Features { of_chosen: features_of_all(tier), of_one: " -p kvx-cli --features kvx-cli/tls" }
        }
        (None, tier) => Features { of_chosen: features_of_all(tier), of_one: "" },
    }
}

/// The features that the test programs of all crates are built with, as cargo's arguments.
pub(crate) fn features_of_all(tier: Tier) -> &'static str {
    match tier {
        // TLS, and with it HTTP/2, to clients of `kvx proxy`.
        Tier::Whole => " --features kvx-cli/tls",
        Tier::Fast | Tier::Usual => "",
    }
}

/// A program's title as a file's name.
fn file_name(title: &str) -> String {
    title.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '-' }).collect()
}

/// The call as one would type it.
fn shown(line: &str, call: &CargoCall) -> String {
    let variables = call.environment.iter().map(|(name, value)| format!("{name}={value:?} "));
    format!("{}cargo {line}", variables.collect::<String>())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_run_and_a_crate_by_itself_have_tls_among_their_tests() {
        let of = |tier, package: Option<&str>| {
            let package = package.map(str::to_owned);
            features_of_tests(&TestOptions { tier, package, ..TestOptions::default() }).of_chosen
        };
        assert_eq!([of(Tier::Fast, None), of(Tier::Usual, None)], ["", ""]);
        assert_eq!(of(Tier::Whole, None), " --features kvx-cli/tls");
        assert_eq!(of(Tier::Usual, Some("kvx-proxy")), " --all-features");
    }
}
