//! Integration tests of vLLM's configuration and protocol: against golden data, with engines
//! stepped by hand, and in simulations.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

#[cfg(feature = "config")]
mod config;
#[cfg(feature = "protocol")]
mod engine;
#[cfg(feature = "params")]
mod golden;
#[cfg(feature = "protocol")]
mod mapping;
#[cfg(feature = "protocol")]
mod model;
#[cfg(feature = "protocol")]
mod mooncake;
#[cfg(feature = "params")]
mod params;
mod parity;
#[cfg(feature = "protocol")]
mod random;
#[cfg(feature = "protocol")]
mod simulation;
#[cfg(feature = "protocol")]
mod wire;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: kvx_testkit::CountingAllocator = kvx_testkit::CountingAllocator;

fn main() -> ExitCode {
    #[cfg(feature = "protocol")]
    let trials = simulation::trials().into_iter().chain(model::trials());
    #[cfg(not(feature = "protocol"))]
    let trials = [];
    kvx_testkit::harness_main(trials)
}
