//! The integration tests of kvx-mooncake.
//!
//! Most of them have their own process, because a process loads one engine, which has one log and
//! its own listeners.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod adapter;
mod caution;
mod children;
mod conformance;
mod devices;
mod etcd_server;
mod exchange;
mod metadata_server;
mod python;
mod python_engine;
mod quiet;
mod restart;
mod silent;
mod unavailable;
mod which_library;

use std::process::ExitCode;

use kvx_testkit::{conformance_trials, harness_main};

fn main() -> ExitCode {
    quiet::play_if_asked();
    harness_main(conformance_trials(adapter::registry, &conformance::suites()))
}
