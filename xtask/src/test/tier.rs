//! The tiers of `cargo xtask test`.

use serde::Deserialize;

/// A tier; each includes those before it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Tier {
    /// The checks after each edit: format, lints, unit tests, and the contract on the transports
    /// that need no installation, in one process.
    Fast,
    /// Everything once, on one version of each library.
    #[default]
    Usual,
    /// Further versions of libraries and variants of suites, and checks with long waits.
    Whole,
}

/// The variable that passes the tier to test programs; `kvx_testkit::Tier` reads it.
pub(crate) const VARIABLE: &str = "KVX_TEST_TIER";

impl Tier {
    /// Returns its name, as the variable has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tier::Fast => "fast",
            Tier::Usual => "usual",
            Tier::Whole => "whole",
        }
    }
}
