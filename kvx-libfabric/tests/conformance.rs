//! libfabric keeps the contract: every clause, in one process and in two, over sockets and over shared memory.

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{Suite, conformance_main};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).expect("one name");
    registry
}

const TCP: Suite = Suite {
    label: "LIBFABRIC-tcp",
    options: r#"{"libfabric": {"provider": "tcp;ofi_rxm"}}"#,
    ..Suite::over("LIBFABRIC")
};
const SHM: Suite = Suite {
    label: "LIBFABRIC-shm",
    options: r#"{"libfabric": {"provider": "shm"}}"#,
    ..Suite::over("LIBFABRIC")
};

fn main() -> ExitCode {
    conformance_main(registry, &[TCP, SHM])
}
