//! The integration tests of kvx-core.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod adopted_file;
mod backends;
mod surroundings;

use std::process::ExitCode;

use kvx_testkit::harness_main;

fn main() -> ExitCode {
    harness_main([])
}
