//! Tests that measure CPU time and waits. They need an otherwise idle machine and run one after the
//! other.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod attackers;
mod tcp_idle;
#[path = "../it/tcp_pair/mod.rs"]
mod tcp_pair;

use std::process::ExitCode;

use kvx_testkit::harness_main_with;

fn main() -> ExitCode {
    harness_main_with([], 1)
}
