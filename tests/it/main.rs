//! The integration tests of the facade.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod config;
mod documents;
#[cfg(feature = "connector")]
mod engines;
#[cfg(all(
    feature = "connector",
    feature = "shm",
    feature = "tcp",
    feature = "cuda",
    feature = "rocm"
))]
mod engines_on_devices;
mod examples;
#[cfg(all(feature = "shm", feature = "tcp", feature = "ucx", feature = "libfabric"))]
mod faults;
mod monitoring;
mod readme;
mod registry;
#[cfg(all(feature = "shm", feature = "tcp", feature = "ucx", feature = "libfabric"))]
mod soak;
mod structure;
mod tokio;

use std::process::ExitCode;

use kvx_testkit::{harness_main_with, serve_if_asked};
use libtest_mimic::{Arguments, Trial};

fn registry_of_facade(_: &str) -> kvx::Registry {
    kvx::registry()
}

/// Runs the trials that a command of `cargo xtask` has requested with an environment variable, at
/// most `at_a_time` concurrently.
fn run_only(trials: Vec<Trial>, at_a_time: usize) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(at_a_time);
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn main() -> ExitCode {
    #[cfg(feature = "connector")]
    engines::serve_if_asked();
    serve_if_asked(registry_of_facade);
    let mut trials: Vec<Trial> = examples::trials().collect();
    #[cfg(feature = "connector")]
    {
        if let Some(wanted) = engines::asked_for() {
            // Outcomes have deadlines, and each trial starts at least two processes.
            return run_only(wanted, 2);
        }
        trials.extend(engines::trials());
        #[cfg(all(feature = "shm", feature = "tcp", feature = "cuda", feature = "rocm"))]
        trials.extend(engines_on_devices::trials());
    }
    #[cfg(all(feature = "shm", feature = "tcp", feature = "ucx", feature = "libfabric"))]
    {
        if let Some(wanted) = faults::asked_for().or_else(soak::asked_for) {
            // These trials count and limit the resources of this process, and measure times.
            return run_only(wanted, 1);
        }
        trials.extend(faults::trials());
        trials.extend(soak::trials());
    }
    // Most trials wait most of the time.
    harness_main_with(trials, 3)
}
