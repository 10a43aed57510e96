//! The integration tests of kvx over NVIDIA devices. The driver is the stand-in, a library with the
//! driver's functions over host memory, or the library that `KVX_CUDA_LIB` names.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod conformance;
mod devices;
mod native;
mod nvrtc;
mod stand_in;

use std::process::ExitCode;

use kvx_testkit::{conformance_trials, harness_main};

fn main() -> ExitCode {
    devices::play_if_asked(&stand_in::MAKER);
    kvx_stand_in::start_again(stand_in::MAKER.variables, env!("CARGO_TARGET_TMPDIR"));
    let clauses = conformance_trials(native::registry, &conformance::suites());
    harness_main(stand_in::trials().into_iter().chain(clauses))
}
