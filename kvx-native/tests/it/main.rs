//! The integration tests of SHM and TCP.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod conformance;
mod devices;
mod ends;
mod listeners;
mod lists;
mod shm_pair;
mod shm_processes;
mod tcp_device;
mod tcp_faults;
mod tcp_hostile;
mod tcp_hung;
mod tcp_pair;
mod tcp_sealed;
mod tcp_stopped;
mod tcp_transfers;
mod telemetry;

use std::process::ExitCode;

use kvx_testkit::{conformance_trials, harness_main};

fn main() -> ExitCode {
    listeners::play_if_asked();
    shm_processes::play_if_asked();
    tcp_stopped::play_if_asked();
    harness_main(conformance_trials(conformance::registry, &conformance::suites()))
}
