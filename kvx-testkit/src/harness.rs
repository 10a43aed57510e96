//! The harness of kvx's integration tests: one program per crate, with modules inside.
//!
//! A program has `harness = false`, imports [`macro@crate::test`] wherever it has tests, and ends
//! its `main` with [`harness_main`]. It may add trials that it makes at run time, such as the
//! clauses of a conformance suite. What sets it apart from Rust's own harness:
//!
//! - a test that skips itself ([`crate::skip`]) is reported as ignored, with its reason;
//! - a test that hangs fails by its name after [`LIMIT`], and the others run on;
//! - a test that needs a process of its own gets one (`#[test(own_process)]`);
//! - the fast tier leaves registered tests out: a program that has a part in that tier adds trials
//!   for it;
//! - `main` runs first, so the program can play the other process of a test before there are any
//!   tests.

use std::any::Any;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;
use std::time::Duration;

#[doc(hidden)]
pub use inventory::submit;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::check::Failure;
use crate::hosts::run_one_test;
use crate::skip::{KNOWN_GAP, NoteKind, noted};
use crate::tier::Tier;

/// The time that a test may take before it counts as hung.
pub const LIMIT: Duration = Duration::from_secs(150);

/// Set in the process that a test has for itself.
const OWN_PROCESS: &str = "KVX_TEST_OWN_PROCESS";

/// A test that [`macro@crate::test`] has registered.
#[doc(hidden)]
pub struct RegisteredTest {
    /// The function's path, with the crate's name.
    pub path: &'static str,
    /// True if it runs in a separate process.
    pub own_process: bool,
    /// The test.
    pub run: fn() -> Result<(), Failed>,
}

inventory::collect!(RegisteredTest);

/// The return value of a test: nothing, or a result whose error says what failed.
pub trait Outcome {
    /// Returns the failure, if it is one.
    ///
    /// # Errors
    /// The failure.
    fn into_result(self) -> Result<(), Failed>;
}

impl Outcome for () {
    fn into_result(self) -> Result<(), Failed> {
        Ok(())
    }
}

impl Outcome for Result<(), Failed> {
    fn into_result(self) -> Result<(), Failed> {
        self
    }
}

macro_rules! impl_outcome {
    ($($error:ty),+) => {
        $(impl Outcome for Result<(), $error> {
            fn into_result(self) -> Result<(), Failed> {
                self.map_err(|error| error.to_string().into())
            }
        })+
    };
}

impl_outcome!(
    Failure,
    String,
    std::io::Error,
    kvx_core::Error,
    Box<dyn Error>,
    Box<dyn Error + Send + Sync>
);

/// Runs the registered tests of this program, and these trials: the end of its `main`.
pub fn harness_main(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    harness_main_with(trials, 2)
}

/// Runs them, `at_a_time` at a time unless the command line says otherwise.
pub fn harness_main_with(trials: impl IntoIterator<Item = Trial>, at_a_time: usize) -> ExitCode {
    let tests = inventory::iter::<RegisteredTest>().filter(|_| Tier::Usual.runs());
    let mut all: Vec<_> = tests.map(registered).collect();
    all.sort_by(|one, other| one.name().cmp(other.name()));
    all.extend(trials);
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(at_a_time);
    libtest_mimic::run(&arguments, all).exit_code()
}

fn registered(test: &'static RegisteredTest) -> Trial {
    let title = test.path.split_once("::").map_or(test.path, |(_, path)| path);
    trial(title, move || match test.own_process && !is_own_process() {
        true => run_in_own_process(title, |_| {}).into_result(),
        false => (test.run)(),
    })
}

/// Makes a trial that may skip itself by its name, and fails when it takes longer than [`LIMIT`].
pub fn trial<T: Outcome>(
    name: impl Into<String>,
    test: impl FnOnce() -> T + Send + 'static,
) -> Trial {
    trial_within(LIMIT, name, test)
}

/// Makes such a trial with another limit.
pub fn trial_within<T: Outcome>(
    limit: Duration,
    name: impl Into<String>,
    test: impl FnOnce() -> T + Send + 'static,
) -> Trial {
    let name = name.into();
    Trial::ignorable_test(name.clone(), move || {
        within(limit, &name, || test().into_result())??;
        Ok(match noted(&name) {
            None => Completion::Completed,
            Some((NoteKind::Skip, reason)) => Completion::ignored_with(reason),
            Some((NoteKind::Gap, reason)) => {
                Completion::ignored_with(format!("{KNOWN_GAP}{reason}"))
            }
        })
    })
}

/// Runs a function on a thread of this name, so that a panic says where it happened and a hang ends
/// only this test.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (sender, result) = channel();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(&*panic));
        sender.send(result).ok(); // an error: the limit is over and nobody waits
    })?;
    match result.recv_timeout(limit) {
        Ok(result) => {
            thread.join().ok(); // its panic is the result
            result.map_err(Failure::new)
        }
        Err(_) => Err(Failure::new(format!("it did not end within {limit:?}"))),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

/// Returns whether [`run_in_own_process`] has started this process.
pub fn is_own_process() -> bool {
    std::env::var_os(OWN_PROCESS).is_some()
}

/// Runs the test of this name in a process of its own, which `prepare` may give an environment.
///
/// # Errors
/// The output of the process, if the test failed there.
pub fn run_in_own_process(title: &str, prepare: impl FnOnce(&mut Command)) -> Result<(), Failure> {
    let mut again = Command::new(std::env::current_exe()?);
    again.args(["--exact", title, "--test-threads=1"]).env(OWN_PROCESS, "1");
    prepare(&mut again);
    run_one_test(title, &mut again, LIMIT).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<String> {
        within(Duration::from_millis(200), "name", run).err().map(|failure| failure.to_string())
    }

    #[test]
    fn a_hang_and_a_panic_are_failures_of_their_test_alone() {
        assert_eq!(failure(|| ()), None);
        let (hold, held) = channel::<()>();
        assert!(failure(move || held.recv()).is_some_and(|why| why.contains("did not end")));
        drop(hold);
        assert_eq!(failure(|| panic!("{} is not 2", 1)).as_deref(), Some("1 is not 2"));
    }

    #[test]
    fn results_become_failures_with_their_words() {
        assert!(Outcome::into_result(Ok::<(), Failure>(())).is_ok());
        let failed = Err::<(), _>(Failure::new("no route")).into_result();
        assert_eq!(
            failed.err().and_then(|failed| failed.message().map(str::to_owned)).as_deref(),
            Some("no route")
        );
    }
}
