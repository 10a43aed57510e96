//! `cargo xtask test`: every check of the repository, step by step.

mod again;
mod ledger;
pub(crate) mod programs;
mod schedule;
pub(crate) mod steps;
mod summary;
pub(crate) mod tier;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::arguments::TestOptions;
use crate::harness::{self, Failure, Tally, Test};
use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::skips::{self, Notes};
use crate::{Result, features, install, spelling};
use again::MOST;
use ledger::Ledger;
use programs::TestProgram;
use schedule::Seconds;
use steps::{Action, CargoCall, FeatureChecks, STEPS, Step};
use summary::Summary;

/// The features of lints, documentation and tests: one choice for all, so that nothing is compiled twice.
pub(crate) const FEATURES: &str = "--all-features";

/// Runs the steps that the options name; a failing one does not stop the rest. False if any failed.
pub(crate) fn run(options: &TestOptions) -> Result<bool> {
    let workspace = Metadata::of_members()?;
    let crates = match &options.package {
        Some(name) if workspace.packages().any(|package| package.name() == name) => format!("-p {name}"),
        Some(name) => return Err(format!("the workspace has no crate {name}").into()),
        None => "--workspace".to_owned(),
    };
    let target = workspace.target_directory()?;
    let installing = options.install.then(|| {
        let target = target.clone();
        let whole = options.tier == tier::Tier::Whole;
        std::thread::spawn(move || {
            install::run(&target, whole, steps::LIMIT).map_err(|error| error.to_string())
        })
    });
    let mut run = TestRun {
        options,
        crates,
        notes: target.join("xtask").join("skips"),
        target,
        workspace,
        installing,
        ledger: Ledger::load()?,
        summary: Summary::new(options.require_all),
    };
    let chosen = |step: &&Step| match step.action {
        Action::Install => options.install,
        _ => {
            let named = options.only.is_empty() || options.only.iter().any(|name| name == step.name);
            named && step.is_part_of(options.tier, options.package.as_deref())
        }
    };
    for step in STEPS.iter().filter(chosen) {
        run.step(step.name, |run| match step.action {
            Action::Cargo(call) => run.cargo(step, call),
            Action::Install => Ok(of_check(run.installed(), "cargo xtask test --install")),
            Action::Tests => run.tests(step.limit),
            Action::Spelling => {
                let wrong = spelling::spelling(&run.target, step.limit);
                Ok(of_check(wrong, "correct it, or add the word to _typos.toml"))
            }
            Action::Features(FeatureChecks::Cheap) => {
                Ok(of_check(features::check(step.limit), "cargo xtask features"))
            }
            Action::Features(FeatureChecks::EveryChoice) => {
                Ok(of_check(features::check_every_choice(step.limit), "cargo xtask features"))
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
    /// Installs what the tests need, while the first steps run.
    installing: Option<JoinHandle<std::result::Result<Vec<String>, String>>>,
    ledger: Ledger,
    summary: Summary,
}

/// The result of one test program.
struct Ran {
    title: String,
    took: Duration,
    tally: Tally,
    notes: Notes,
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

    /// Waits until everything is installed, and returns what could not be.
    fn installed(&mut self) -> Result<Vec<String>> {
        match self.installing.take().map(JoinHandle::join) {
            None => Ok(Vec::new()),
            Some(Ok(failures)) => Ok(failures?),
            Some(Err(_)) => Err("the thread that installs panicked: its message is above".into()),
        }
    }

    fn cargo(&self, step: &Step, call: &CargoCall) -> Result<Tally> {
        let notes = self.notes.join(step.name);
        skips::clear(&notes)?;
        let line = call.line.replace("{crates}", &self.crates);
        let mut command = process::cargo(line.split(' '));
        command.envs(call.environment.iter().copied()).envs(self.variables()).env(skips::VARIABLE, &notes);
        let shown = shown(&line, call);
        println!("{shown}");
        let finished = process::run(command, step.limit, Output::Shown)?;
        let tally = one(finished.succeeded(), &format!("{} ({shown})", finished.end));
        Ok(Tally { skips: skips::read(&notes)?.skips, ..tally })
    }

    /// Builds the test programs and runs them: several at a time, then those that want the machine for themselves.
    fn tests(&mut self, limit: Duration) -> Result<Tally> {
        let programs = programs::build(&self.crates, self.options.tier, &self.workspace)?;
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
            let (tally, notes) = ran.unwrap_or_else(|error| {
                let failures = vec![Failure::of_program(&program, &error.to_string())];
                (Tally { failures, ..Tally::default() }, Notes::default())
            });
            let verdict = if tally.failures.is_empty() { "ok" } else { "FAILED" };
            println!("{done:>3}/{count} {verdict:<6} {:>7.1} s  {}", took.as_secs_f64(), program.title);
            Ran { title: program.title, took, tally, notes }
        };
        let mut all = schedule::side_by_side(shared, lanes, run);
        all.extend(schedule::side_by_side(alone, 1, run));
        let mut sum = Tally::default();
        for ran in all {
            seconds.note(&ran.title, ran.took.as_secs_f64());
            self.summary.add_program(&ran.title, ran.took, ran.notes.left_to_the_whole);
            sum.add(ran.tally);
        }
        seconds.save()?;
        let notes = self.notes.join("again");
        let variables = self.variables();
        let skipped = sum.skips.clone();
        let passes = |test: &Test| again::alone(test, &notes, &variables, &skipped);
        again::excuse(&mut sum, if self.options.strict { 0 } else { MOST }, passes);
        self.summary.add_ledger_entries(self.ledger.review(&mut sum));
        if sum.passed == 0 && sum.failures.is_empty() {
            sum.failures.push(Failure::from(format!("no test ran (cargo test {})", self.crates)));
        }
        Ok(sum)
    }

    fn variables(&self) -> [(&'static str, &'static str); 1] {
        [(tier::VARIABLE, self.options.tier.name())]
    }

    /// Runs one test program; shows what it printed if it failed.
    fn program(&self, program: &TestProgram, limit: Duration) -> Result<(Tally, Notes)> {
        let file = self.notes.join(file_name(&program.title));
        skips::clear(&file)?;
        let mut command = program.command();
        command.env(skips::VARIABLE, &file).envs(self.variables());
        let finished = process::run(command, limit, Output::Quiet)?;
        let tally = harness::read(program, &finished, skips::read(&file)?);
        if !tally.failures.is_empty() {
            println!("---- cargo test {}\n{}", program.shown(), finished.output);
        }
        Ok((tally, skips::read(&file)?))
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
