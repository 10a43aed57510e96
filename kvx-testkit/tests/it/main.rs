//! The integration tests of the conformance suite: it matches the contract, and it detects
//! violations.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod catches;
mod contract;
mod listeners;

use std::process::ExitCode;

use kvx_testkit::{harness_main_with, serve_if_asked};

/// Concurrent tests: broken clauses mostly wait, but unbroken ones measure time.
const AT_A_TIME: usize = 3;

fn main() -> ExitCode {
    serve_if_asked(catches::registry);
    catches::run_if_asked();
    listeners::serve_if_asked();
    harness_main_with(catches::trials(), AT_A_TIME)
}
