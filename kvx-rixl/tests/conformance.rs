//! RIXL keeps the contract over NIXL's UCX plugin: every clause, in one process and in two.

mod wheel;

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{Gap, Suite, conformance_main, serve_if_asked, skip};

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

fn main() -> ExitCode {
    serve_if_asked(registry);
    if !wheel::chosen() {
        skip("conformance", wheel::ABSENT.0, wheel::ABSENT.1);
        return ExitCode::SUCCESS;
    }
    conformance_main(registry, &[CMA, TCP])
}
