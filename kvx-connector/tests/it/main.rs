//! The integration tests of the connector: vLLM's protocol against golden data, engines stepped by hand and in
//! simulations, connectors that run, and ranks in processes of their own.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

#[cfg(feature = "protocol")]
mod engine;
#[cfg(feature = "params")]
mod golden;
#[cfg(feature = "protocol")]
mod mapping;
#[cfg(feature = "protocol")]
mod mooncake;
#[cfg(feature = "params")]
mod params;
mod parity;
#[cfg(feature = "runtime")]
mod ranks;
#[cfg(feature = "runtime")]
mod runtime;
#[cfg(feature = "protocol")]
mod simulation;
#[cfg(feature = "protocol")]
mod wire;

use std::process::ExitCode;

#[cfg(feature = "runtime")]
fn main() -> ExitCode {
    if ranks::served_as_rank() {
        return ExitCode::SUCCESS;
    }
    let secret = ranks::secret_of_this_host();
    // Most of the time tests wait for processes, and their deadlines allow for four at a time.
    let trials = simulation::trials().into_iter().chain(ranks::trials());
    let result = kvx_testkit::harness_main_with(trials, 4);
    secret.into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    result
}

#[cfg(not(feature = "runtime"))]
fn main() -> ExitCode {
    #[cfg(feature = "protocol")]
    let trials = simulation::trials();
    #[cfg(not(feature = "protocol"))]
    let trials = [];
    kvx_testkit::harness_main(trials)
}
