//! The harness of kvx's integration tests: one program per crate, with modules inside.
//!
//! A program has `harness = false`, imports [`macro@crate::test`] wherever it has tests, and ends
//! its `main` with [`harness_main`]. It may add trials that it creates at run time, such as the
//! clauses of a conformance suite. The differences from Rust's own harness:
//!
//! - A test that skips itself ([`crate::skip`]) is reported as ignored, with its reason.
//! - A test that hangs fails by its name after [`LIMIT`], and the others continue.
//! - A test that needs a separate process gets one (`#[test(own_process)]`).
//! - The fast tier omits registered tests: a program with tests for that tier adds trials for them.
//! - `main` runs first, so the program can act as the other process of a test before any test
//!   starts.

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

/// How long a test may take before it counts as hung.
pub const LIMIT: Duration = Duration::from_secs(150);

/// Set in the process that [`run_in_own_process`] starts.
const OWN_PROCESS: &str = "KVX_TEST_OWN_PROCESS";

/// A test that [`macro@crate::test`] has registered.
#[doc(hidden)]
pub struct RegisteredTest {
    /// The function's path, with the crate's name.
    pub path: &'static str,
    /// True if the test runs in a separate process.
    pub own_process: bool,
    /// The test.
    pub run: fn() -> Result<(), Failed>,
}

inventory::collect!(RegisteredTest);

/// The return value of a test: nothing, or a result whose error describes the failure.
pub trait Outcome {
    /// Converts the return value into the harness's result.
    ///
    /// # Errors
    /// The failure of the test.
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

/// Runs the registered tests of this program and these trials. Call it at the end of `main`.
pub fn harness_main(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    harness_main_with(trials, 2)
}

/// Runs the registered tests and these trials, `at_a_time` concurrently unless the command line
/// says otherwise.
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

/// Creates a trial that may skip itself by its name, and that fails if it takes longer than
/// [`LIMIT`].
pub fn trial<T: Outcome>(
    name: impl Into<String>,
    test: impl FnOnce() -> T + Send + 'static,
) -> Trial {
    trial_within(LIMIT, name, test)
}

/// Creates such a trial with another limit.
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

/// Runs a function on a thread of this name, so that a panic names the test and a hang ends only
/// this test.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (sender, result) = channel();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(&*panic));
        sender.send(result).ok(); // the error means that the limit has passed
    })?;
    match result.recv_timeout(limit) {
        Ok(result) => {
            thread.join().ok(); // the result contains its panic
            result.map_err(Failure::new)
        }
        Err(_) => Err(Failure::new(format!("it did not end within {limit:?}"))),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

/// Returns whether [`run_in_own_process`] started this process.
pub fn is_own_process() -> bool {
    std::env::var_os(OWN_PROCESS).is_some()
}

/// Runs the test of this name in a separate process, whose environment `prepare` may change.
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
    fn results_become_failures_with_their_messages() {
        assert!(Outcome::into_result(Ok::<(), Failure>(())).is_ok());
        let failed = Err::<(), _>(Failure::new("no route")).into_result();
        assert_eq!(
            failed.err().and_then(|failed| failed.message().map(str::to_owned)).as_deref(),
            Some("no route")
        );
    }
}
