//! The tiers of `cargo xtask test`, which select the tests that run.

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

/// Options of test programs whose value is a separate argument.
const WITH_VALUE: [&str; 5] = ["--test-threads", "--skip", "--format", "--color", "--logfile"];

impl Tier {
    /// Returns the tier of this run: `KVX_TEST_TIER`, or the usual one. If the command line selects
    /// tests by parts of their names, all tests are available.
    ///
    /// # Panics
    /// If the variable is not `fast`, `usual` or `whole`.
    pub fn of_this_run() -> Tier {
        if names_tests(std::env::args().skip(1)) {
            return Tier::Whole;
        }
        match std::env::var("KVX_TEST_TIER").as_deref() {
            Ok("fast") => Tier::Fast,
            Ok("usual") | Err(_) => Tier::Usual,
            Ok("whole") => Tier::Whole,
            Ok(other) => panic!("KVX_TEST_TIER is fast, usual or whole, not {other:?}"),
        }
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
    fn a_name_is_told_from_an_option_and_its_value() {
        let names = |line: &str| names_tests(line.split_whitespace().map(str::to_owned));
        assert!(names("SHM::one") && names("--exact T1 --nocapture") && names("--skip a T1"));
        assert!(
            !names("") && !names("--nocapture --test-threads=1") && !names("--test-threads 1 -q")
        );
    }
}
