//! The integration tests of the backend KVX in NIXL.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod conformance;
mod engines;
mod plain_agent;
mod wheels;

use std::process::ExitCode;

use kvx_testkit::{harness_main_with, is_own_process};

fn main() -> ExitCode {
    if engines::served_as_engine() {
        return ExitCode::SUCCESS;
    }
    let mut trials = plain_agent::trials();
    if is_own_process() {
        return harness_main_with(trials, 1);
    }
    let plugins = wheels::Folder::of_plugins("plugins").expect("a new folder");
    let borrowed = wheels::numpy("numpy").expect("a new folder");
    trials.extend(engines::trials());
    trials.extend(conformance::trials(&plugins, &borrowed));
    // Conformance measures times, so tests run one after the other.
    let code = harness_main_with(trials, 1);
    drop((plugins, borrowed));
    code
}
