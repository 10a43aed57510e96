//! `cargo xtask test`: every check of the repository, step by step.

mod excuse;
mod ledger;
pub(crate) mod programs;
pub(crate) mod steps;
mod summary;
pub(crate) mod tier;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::arguments::TestOptions;
use crate::harness::{self, Failure, Tally, Test};
use crate::metadata::Metadata;
use crate::process::{self, Deadline, Output};
use crate::{Result, features, install, spelling};
use crate::{progress, skips};
use ledger::Ledger;
use programs::TestProgram;
use steps::{Action, STEPS, Step};
use summary::Summary;
use tier::Tier;

/// Runs the chosen steps, even after one has failed; returns false if any failed.
pub(crate) fn run(options: &TestOptions) -> Result<bool> {
    let workspace = Metadata::of_members()?;
    let crates = match &options.package {
        Some(name) if workspace.packages.iter().any(|package| package.name == *name) => {
            format!("-p {name}")
        }
        Some(name) => return Err(format!("the workspace has no crate {name}").into()),
        None => "--workspace".to_owned(),
    };
    let (target, tier) = (workspace.target_directory.clone(), options.tier());
    let installing = options.install.then(|| {
        let target = target.clone();
        progress::hide(true); // the first steps write to the terminal meanwhile
        std::thread::spawn(move || install::run(&target, tier == Tier::Whole, steps::LIMIT))
    });
    let mut run = TestRun {
        options,
        crates,
        notes: target.join("xtask").join("skips"),
        target,
        workspace,
        installing,
        ledger: Ledger::load()?,
        summary: Summary::new(options.require.is_some()),
    };
    let chosen = |step: &&Step| match &step.action {
        Action::Install => options.install,
        _ => {
            let named = options.only.is_empty() || options.only.contains(&step.name);
            named && step.is_part_of(tier, options.package.as_deref())
        }
    };
    for step in STEPS.iter().filter(chosen) {
        run.step(&step.name, |run| match &step.action {
            Action::Cargo(line) => run.cargo(step, line),
            Action::Install => Ok(check(run.installed(), "cargo xtask test --install")),
            Action::Tests => run.tests(),
            Action::Spelling => spelling::check(&run.target, steps::LIMIT),
            Action::Features { all } => {
                Ok(check(features::check(*all, steps::LIMIT), "cargo xtask features"))
            }
        });
    }
    if tier == Tier::Whole && options.only.is_empty() && options.package.is_none() {
        let unknown = |error| format!("(no date or commit: {error})");
        run.summary.date_and_commit = Some(date_and_commit().unwrap_or_else(unknown));
    }
    println!("{}", run.summary);
    Ok(run.summary.held())
}

/// Returns the day in UTC and the commit, with `+changes` if files differ from it.
fn date_and_commit() -> Result<String> {
    let output = |line: &str| {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).current_dir(crate::root());
        process::output_of(command, Duration::from_secs(60)).map(|output| output.trim().to_owned())
    };
    let changes = if output("git status --porcelain")?.is_empty() { "" } else { "+changes" };
    Ok(format!("{} {}{changes}", output("date -u +%F")?, output("git rev-parse --short HEAD")?))
}

/// A run of the steps.
struct TestRun<'a> {
    options: &'a TestOptions,
    /// The choice of packages, as cargo takes it.
    crates: String,
    workspace: Metadata,
    target: PathBuf,
    /// The folder of the files in which tests note their skips.
    notes: PathBuf,
    /// The thread that installs the tests' dependencies while the first steps run.
    installing: Option<JoinHandle<Vec<String>>>,
    ledger: Ledger,
    summary: Summary,
}

impl TestRun<'_> {
    fn step(&mut self, name: &str, step: impl FnOnce(&mut Self) -> Result<Tally>) {
        println!("==> {name}");
        let start = Instant::now();
        let tally = step(self).unwrap_or_else(|error| Tally::of_check(Some(error.to_string())));
        let took = start.elapsed();
        let verdict = if self.summary.add(name, took, tally) { "ok" } else { "FAILED" };
        println!("<== {name}: {verdict}, {:.1} s\n", took.as_secs_f64());
    }

    /// Waits until everything is installed, and returns the failures.
    fn installed(&mut self) -> Result<Vec<String>> {
        progress::hide(false);
        let failures = self.installing.take().map_or(Ok(Vec::new()), JoinHandle::join);
        progress::hide(true);
        failures.map_err(|_| "the thread that installs panicked: its message is above".into())
    }

    fn cargo(&self, step: &Step, line: &str) -> Result<Tally> {
        let notes = self.notes.join(&step.name);
        skips::clear(&notes)?;
        let line = line.replace("{crates}", &self.crates);
        let mut command = process::cargo(line.split(' '));
        command.envs(&step.environment).envs(self.variables()).env(skips::VARIABLE, &notes);
        let variables = step.environment.iter().map(|(name, value)| format!("{name}={value:?} "));
        let shown = format!("{}cargo {line}", variables.collect::<String>());
        let failure = process::failure_of(command, &shown, Deadline::after(steps::LIMIT))?;
        Ok(Tally { skips: skips::read(&notes)?.skips, ..Tally::of_check(failure) })
    }

    /// Builds the test programs and runs them: several at a time, then those that must run alone.
    fn tests(&mut self) -> Result<Tally> {
        let programs = programs::build(&self.crates, self.options.tier(), &self.workspace)?;
        let (alone, shared): (Vec<_>, Vec<_>) =
            programs.into_iter().partition(|program| program.alone);
        // Most programs wait most of the time, and busy ones start two threads.
        let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
        let count = shared.len() + alone.len();
        println!("{} programs, {threads} at a time, then {} alone", shared.len(), alone.len());
        let done = AtomicUsize::new(0);
        let run = |program: TestProgram| {
            let start = Instant::now();
            let tally = self.program(&program).unwrap_or_else(|error| {
                let failures = vec![Failure::of_program(&program, &error.to_string())];
                Tally { failures, ..Tally::default() }
            });
            let (done, took) = (done.fetch_add(1, Ordering::Relaxed) + 1, start.elapsed());
            let verdict = if tally.failures.is_empty() { "ok" } else { "FAILED" };
            println!(
                "{done:>3}/{count} {verdict:<6} {:>7.1} s  {}",
                took.as_secs_f64(),
                program.title
            );
            (program.title, took, tally)
        };
        let mut results = programs::run_in_parallel(shared, threads, run);
        results.extend(programs::run_in_parallel(alone, 1, run));
        let mut sum = Tally::default();
        for (title, took, tally) in results {
            self.summary.add_program(&title, took, &tally);
            sum.add(tally);
        }
        let (notes, skipped) = (self.notes.join("again"), sum.skips.clone());
        let passes = |test: &Test| excuse::passes_alone(test, &notes, &self.variables(), &skipped);
        excuse::excuse(&mut sum, if self.options.strict { 0 } else { excuse::MOST }, passes);
        self.summary.ledger_entries = self.ledger.review(&mut sum);
        if sum.passed == 0 && sum.failures.is_empty() {
            sum.failures.push(Failure::from(format!("no test ran (cargo test {})", self.crates)));
        }
        Ok(sum)
    }

    fn variables(&self) -> [(&'static str, &'static str); 1] {
        [(tier::VARIABLE, self.options.tier().name())]
    }

    /// Runs one test program; shows its output if it failed.
    fn program(&self, program: &TestProgram) -> Result<Tally> {
        let file = self.notes.join(file_name(&program.title));
        skips::clear(&file)?;
        let mut command = program.command();
        command.env(skips::VARIABLE, &file).envs(self.variables());
        let finished = process::run(command, steps::LIMIT, Output::Quiet)?;
        let tally = harness::tally(program, &finished, skips::read(&file)?);
        if !tally.failures.is_empty() {
            println!("---- cargo test {}\n{}", program.shown(), finished.output);
        }
        Ok(tally)
    }
}

/// Returns a program's title as a file name.
fn file_name(title: &str) -> String {
    title.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '-' }).collect()
}

/// Returns the result of one of xtask's own checks; `again` repeats it.
fn check(failures: Result<Vec<String>>, again: &str) -> Tally {
    let why = failures.map_or_else(|error| error.to_string(), |failures| failures.join("; "));
    Tally::of_check((!why.is_empty()).then(|| format!("{why} ({again})")))
}
