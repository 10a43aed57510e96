//! SHM and TCP keep the contract: every clause, in one process and in two.

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{Suite, conformance_main};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).expect("two names");
    registry
}

/// SHM over memory of the program's own, which is read through the kernel.
const FOREIGN: Suite = Suite { label: "SHM-foreign", pools: false, ..Suite::over("SHM") };

fn main() -> ExitCode {
    conformance_main(registry, &[Suite::over("SHM"), FOREIGN, Suite::over("TCP")])
}
