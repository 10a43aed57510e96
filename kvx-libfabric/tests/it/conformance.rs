//! Runs the conformance suite over libfabric: every clause, in one process and in two, over sockets
//! and over shared memory.

use std::sync::Arc;

use kvx_testkit::{Backing, Device, Gap, GapRate, Suite, Tier, device};

const TCP: Suite = Suite {
    label: "LIBFABRIC-tcp",
    options: r#"{"libfabric": {"provider": "tcp;ofi_rxm"}}"#,
    ..Suite::over("LIBFABRIC")
};
const SHM: Suite = Suite {
    label: "LIBFABRIC-shm",
    options: r#"{"libfabric": {"provider": "shm"}}"#,
    gaps: &[Gap {
        clause: "P9",
        reason: "the shm provider of libfabric 1.17 crashes the process when it finds no descriptor for a peer's \
                 region: a segmentation fault in 10 of 12 runs (tcp;ofi_rxm keeps the clause)",
        rate: GapRate::Mostly,
    }],
    tier: Tier::Whole,
    ..Suite::over("LIBFABRIC")
};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// From NVIDIA device memory to memory of the same device.
const DEVICE: Suite = Suite {
    label: "LIBFABRIC-device",
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..TCP
};

/// The variable that adds [`VERBS`]: `cargo xtask rdma` sets it where there is a card.
const RDMA: &str = "KVX_RDMA_TEST";

/// Over an RDMA card, with the domains that kvx chooses.
const VERBS: Suite = Suite {
    label: "LIBFABRIC-verbs",
    options: r#"{"libfabric": {"provider": "verbs"}}"#,
    ..Suite::over("LIBFABRIC")
};

pub(crate) fn suites() -> Vec<Suite> {
    let namespace = Suite { label: "LIBFABRIC-namespace", ..TCP }.in_another_namespace();
    let user = Suite { label: "LIBFABRIC-user", ..TCP }.as_another_user();
    let hosts = Suite {
        label: "LIBFABRIC-hosts",
        options: r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": "eth0"}}"#,
        ..TCP
    };
    let mut suites = vec![TCP, SHM, DEVICE, namespace, user, hosts.on_two_hosts()];
    if std::env::var_os(RDMA).is_some() {
        suites.push(VERBS);
    }
    suites
}
