//! RIXL keeps the contract over NIXL's UCX plugin: every clause, in one process and in two, on each release.

mod wheel;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Registry;
use kvx_testkit::{
    Backing, Device, Gap, Suite, Tier, conformance_main, device, is_asked_for, serve_if_asked,
};

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_rixl::Rixl).expect("one name");
    registry
}

const GAPS: &[Gap] = &[];
/// The variable that adds the older release's suite over TCP, which the newer one has as well.
const MORE: &str = "KVX_RIXL_TEST_MORE";
/// All suites of a release. Each clause has a limit of its own: this one is for a library that hangs as its process
/// ends.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// As UCX chooses on one host: bytes by the kernel's cross-memory attach, messages by TCP over loopback.
const CMA: Suite = Suite {
    gaps: GAPS,
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#,
    ..Suite::over("RIXL")
};

/// As between hosts without RDMA: UCX asks the peer's process to read and write for it.
const TCP: Suite = Suite {
    tier: Tier::Whole,
    label: "RIXL-tcp",
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo,TLS=tcp"}}}"#,
    ..CMA
};

/// While NIXL has a thread of its own, as plugins other than UCX need. That thread reads what has come before kvx's is
/// woken for it, which goes by the clock then.
const THREAD: Suite = Suite {
    tier: Tier::Whole,
    label: "RIXL-thread",
    options: r#"{"rixl": {"progress_thread": true, "params": {"engine_config": "NET_DEVICES=lo"}}}"#,
    ..CMA
};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// From an NVIDIA device to the same one.
const DEVICE: Suite = Suite {
    label: "RIXL-device",
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..CMA
};

/// Over the C interface that RIXL has: NIXL names no reason when it refuses something.
const CMA_AS_RIXL: Suite = Suite { label: "RIXL-1.1", ..CMA };
const TCP_AS_RIXL: Suite = Suite { label: "RIXL-1.1-tcp", ..TCP };

fn main() -> ExitCode {
    serve_if_asked(registry);
    if std::env::var_os("KVX_RIXL_LIB").is_none() {
        return wheel::on_each("conformance", LIMIT);
    }
    if wheel::is_for(wheel::AS_RIXL) {
        let mut suites = vec![CMA_AS_RIXL];
        if is_asked_for(MORE, TCP_AS_RIXL.label) {
            suites.push(TCP_AS_RIXL);
        }
        return conformance_main(registry, &suites);
    }
    let namespace = Suite { label: "RIXL-namespace", ..TCP }.in_another_namespace();
    let user = Suite { label: "RIXL-user", ..TCP }.as_another_user();
    let hosts = Suite {
        label: "RIXL-hosts",
        options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=eth0,TLS=tcp"}}}"#,
        ..TCP
    };
    conformance_main(registry, &[CMA, TCP, THREAD, DEVICE, namespace, user, hosts.on_two_hosts()])
}
