//! RIXL keeps the contract over NIXL's UCX plugin: every clause, in one process and in two.

mod wheel;

use std::process::ExitCode;
use std::sync::Arc;

use kvx_core::Registry;
use kvx_testkit::{Backing, Device, Gap, Suite, conformance_main, device, serve_if_asked, skip};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_rixl::Rixl).expect("one name");
    registry
}

const GAPS: &[Gap] = &[];

/// As UCX chooses on one host: bytes by the kernel's cross-memory attach, messages by TCP over loopback.
const CMA: Suite = Suite {
    gaps: GAPS,
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#,
    ..Suite::over("RIXL")
};

/// As between hosts without RDMA: UCX asks the peer's process to read and write for it.
const TCP: Suite = Suite {
    label: "RIXL-tcp",
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo,TLS=tcp"}}}"#,
    ..CMA
};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices)
}

/// From an NVIDIA device to the same one.
const DEVICE: Suite = Suite {
    label: "RIXL-device",
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..CMA
};

fn main() -> ExitCode {
    serve_if_asked(registry);
    if !wheel::chosen() {
        skip("conformance", wheel::ABSENT.0, wheel::ABSENT.1);
        return ExitCode::SUCCESS;
    }
    conformance_main(registry, &[CMA, TCP, DEVICE])
}
