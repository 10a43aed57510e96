//! How much `cargo xtask test` runs.

/// Each tier runs what those before it run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// What a developer waits for after each edit: format, lints, unit tests, and the contract on the transports that
    /// need nothing installed, in one process.
    Fast,
    /// Everything once, on one version of each library.
    #[default]
    Usual,
    /// Further versions of libraries and variants of suites, and what has to wait long.
    Whole,
}

/// The variable that tells test programs their tier; `kvx_testkit::Tier` reads it.
pub(crate) const VARIABLE: &str = "KVX_TEST_TIER";

impl Tier {
    /// That of the run which this is a step of, or the usual one.
    pub(crate) fn of_variable() -> Tier {
        match std::env::var(VARIABLE).as_deref() {
            Ok("fast") => Tier::Fast,
            Ok("whole") => Tier::Whole,
            _ => Tier::Usual, // test programs refuse other words
        }
    }

    /// As the variable has it, and a file's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tier::Fast => "fast",
            Tier::Usual => "usual",
            Tier::Whole => "whole",
        }
    }
}
