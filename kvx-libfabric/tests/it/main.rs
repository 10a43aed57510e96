//! The integration tests of kvx-libfabric.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod agents;
mod buffers;
mod conformance;
mod devices;
mod ended;
mod killed;
mod listeners;
mod processes;
mod stopped;

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{conformance_trials, harness_main};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).expect("one name");
    registry
}

fn main() -> ExitCode {
    buffers::report_if_asked();
    listeners::play_if_asked();
    harness_main(conformance_trials(registry, &conformance::suites()))
}
