//! Second looks: whether a test that failed beside others fails alone too.
//!
//! The suites start thousands of processes, two tests at a time, on machines that others use as well. A test that fails
//! there once and never alone is a defect, of kvx, of a library or of the test, but one that no repetition of the whole
//! run finds: what finds it is its name and its words, each time. So they are told at the end of the run, and a few of
//! them do not hide what the other thousands say. One that fails alone, if only once in [`TIMES`], has failed.

use std::path::Path;
use std::time::Duration;

use crate::harness::{self, Failure, Tally};
use crate::process::{self, Output};
use crate::skips;

/// Of how many tests it is found out whether they fail alone too: more say that something is broken.
pub(crate) const MOST: usize = 2;

/// How often a test has to pass alone.
pub(crate) const TIMES: usize = 3;

/// How long each time may take, build included: the programs are built.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the failed tests of `tally` again by `passes`, if all of them can be run alone and no more than `left` failed,
/// and takes those that pass each time out of the failures.
pub(crate) fn look(tally: &mut Tally, left: &mut usize, passes: impl Fn(&[String]) -> bool) {
    let failures = &tally.failures;
    if failures.len() > *left || failures.iter().any(|failure| failure.alone.is_none()) {
        return;
    }
    *left -= failures.len();
    let steady = |failure: &Failure| {
        let arguments = failure.alone.as_deref().unwrap_or_default();
        !(0..TIMES).all(|_| passes(arguments))
    };
    let (failed, unsteady): (Vec<_>, Vec<_>) =
        std::mem::take(&mut tally.failures).into_iter().partition(steady);
    tally.passed += unsteady.len();
    (tally.failures, tally.unsteady) = (failed, unsteady);
}

/// Whether the test that cargo runs by these `arguments`, and no other, runs and passes.
pub(crate) fn alone(arguments: &[String], target: &Path) -> bool {
    println!("again, alone: cargo {}", arguments.join(" "));
    let told = target.join("xtask").join("skips").join("again");
    if skips::clear(&told).is_err() {
        return false;
    }
    let mut command = process::cargo(arguments.iter().map(String::as_str));
    command.env(skips::VARIABLE, &told);
    let passed = process::run(command, LIMIT, Output::Shown)
        .is_ok_and(|finished| finished.succeeded() && harness::ran(&finished.output) == (1, 0));
    passed && skips::read(&told).is_ok_and(|skips| skips.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn failed(names: &[&str]) -> Tally {
        let failures = names.iter().map(|name| Failure::of_test(name, "cargo test", ""));
        Tally { passed: 5, failures: failures.collect(), ..Tally::default() }
    }

    #[test]
    fn what_passes_each_time_is_told_and_what_fails_once_has_failed() {
        let (mut tally, mut left, runs) = (failed(&["steady", "rare"]), 2, Cell::new(0));
        look(&mut tally, &mut left, |arguments| {
            runs.set(runs.get() + 1);
            // The first passes twice and fails then.
            arguments.ends_with(&["rare".to_owned()]) || runs.get() < TIMES
        });
        assert_eq!((runs.get(), left), (2 * TIMES, 0));
        assert_eq!(tally.failures, failed(&["steady"]).failures);
        assert_eq!(tally.unsteady, failed(&["rare"]).failures);
        assert_eq!(tally.passed, 6);
    }

    #[test]
    fn too_many_failures_and_those_without_a_name_stay_failures() {
        let unasked = |_: &[String]| unreachable!("nothing runs again");
        let mut left = 1;
        let mut many = failed(&["a", "b"]);
        look(&mut many, &mut left, unasked);
        let mut nameless = Tally { failures: vec![Failure::from("it hung".to_owned())], ..Tally::default() };
        look(&mut nameless, &mut left, unasked);
        assert_eq!((many.failures.len(), nameless.failures.len(), left), (2, 1, 1));
    }
}
