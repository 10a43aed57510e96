//! The integration tests of kvx-ucx.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod agents;
mod conformance;
mod devices;
mod environment;
mod listeners;
mod versions;

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{harness_main, is_own_process, serve_if_asked};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_ucx::Ucx).expect("one name");
    registry
}

fn main() -> ExitCode {
    serve_if_asked(registry);
    agents::play_if_asked();
    environment::report_if_asked();
    listeners::play_if_asked();
    if let Some(code) = conformance::run_suites_if_asked() {
        return code;
    }
    let code = harness_main(conformance::missing_versions());
    if versions::chosen().is_some() || is_own_process() {
        return code; // it runs one test on one version
    }
    if conformance::run_each_version() { code } else { ExitCode::FAILURE }
}
