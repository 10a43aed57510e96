//! The tiers of `cargo xtask test`, which select the tests that run.

use std::process::Command;

use crate::skip::tell_runner;

/// A tier of tests. Each tier includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The tests for a developer after each edit: those in one process that need nothing installed.
    Fast,
    /// Every test once, on one version of each library.
    Usual,
    /// Further versions and variants, and tests that take long.
    Whole,
}

/// The variable that passes the tier to test programs.
const VARIABLE: &str = "KVX_TEST_TIER";

/// Options of test programs whose value is a separate argument.
const WITH_VALUE: [&str; 5] = ["--test-threads", "--skip", "--format", "--color", "--logfile"];

impl Tier {
    /// Returns the tier of this run, which `KVX_TEST_TIER` names. Without it, all tests are available
    /// if the command line selects tests by parts of their names, and otherwise those of the usual
    /// tier.
    ///
    /// # Panics
    /// If the variable is not `fast`, `usual` or `whole`.
    pub fn of_this_run() -> Tier {
        match std::env::var(VARIABLE).as_deref() {
            Ok("fast") => Tier::Fast,
            Ok("usual") => Tier::Usual,
            Ok("whole") => Tier::Whole,
            Ok(other) => panic!("{VARIABLE} is fast, usual or whole, not {other:?}"),
            Err(_) if names_tests(std::env::args().skip(1)) => Tier::Whole,
            Err(_) => Tier::Usual,
        }
    }

    /// Gives a test program the tier of this run, although its command line may name a test.
    pub(crate) fn pass_to(program: &mut Command) {
        let name = match Tier::of_this_run() {
            Tier::Fast => "fast",
            Tier::Usual => "usual",
            Tier::Whole => "whole",
        };
        program.env(VARIABLE, name);
    }

    /// Returns whether tests of this tier run.
    pub fn runs(self) -> bool {
        self <= Tier::of_this_run()
    }

    /// Returns whether tests of this tier run. If only the whole tier would run them, reports
    /// `what` to `cargo xtask test`, which lists it.
    pub fn runs_or_says(self, what: &str) -> bool {
        let run = Tier::of_this_run();
        if self == Tier::Whole && run == Tier::Usual {
            tell_runner(&format!("WHOLE {what}\n"));
        }
        self <= run
    }
}

/// Returns whether the environment variable is set, which enables additional tests in any tier.
/// Otherwise prints what it would add.
pub fn is_asked_for(variable: &str, what: &str) -> bool {
    let is_set = std::env::var_os(variable).is_some();
    if !is_set {
        eprintln!("{variable}=1 adds {what}");
    }
    is_set
}

/// Returns whether one of a test program's arguments selects tests by name.
fn names_tests(arguments: impl Iterator<Item = String>) -> bool {
    let mut is_value = false;
    for argument in arguments {
        if !is_value && !argument.starts_with('-') {
            return true;
        }
        is_value = WITH_VALUE.contains(&argument.as_str());
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tier_runs_what_those_before_it_run() {
        assert!(Tier::Fast < Tier::Usual && Tier::Usual < Tier::Whole);
        assert!(Tier::Fast.runs());
    }

    #[test]
    fn a_program_that_a_test_starts_has_its_tier() {
        let mut program = Command::new("env");
        Tier::pass_to(&mut program);
        let printed = String::from_utf8(program.output().unwrap().stdout).unwrap();
        let tier = printed.lines().find_map(|line| line.strip_prefix("KVX_TEST_TIER="));
        let this = format!("{:?}", Tier::of_this_run()).to_lowercase();
        assert_eq!(tier, Some(&*this));
    }

    #[test]
    fn a_name_is_told_from_an_option_and_its_value() {
        let names = |line: &str| names_tests(line.split_whitespace().map(str::to_owned));
        assert!(names("SHM::one") && names("--exact T1 --nocapture") && names("--skip a T1"));
        assert!(
            !names("") && !names("--nocapture --test-threads=1") && !names("--test-threads 1 -q")
        );
    }
}
