//! The conformance suite over SHM and TCP: every clause, in one process and in two.

use std::sync::{Arc, OnceLock};

use kvx_core::{MemoryKind, Registry};
use kvx_testkit::{Backing, Device, Suite, TestDevice, Tier};

pub(crate) fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).unwrap().add(kvx_native::Tcp).unwrap();
    registry
}

/// SHM over the program's own memory, which is read through the kernel.
const FOREIGN: Suite = Suite {
    label: "SHM-foreign",
    near: Backing::Owned,
    far: Backing::Owned,
    tier: Tier::Whole,
    ..Suite::over("SHM")
};

/// The seal that TCP uses toward other hosts.
const SEAL: &str = r#"{"tcp": {"seal": "all"}}"#;
const SEALED: Suite =
    Suite { label: "TCP-sealed", options: SEAL, tier: Tier::Whole, ..Suite::over("TCP") };

/// Returns the single device of this process.
fn device() -> kvx_core::Result<Arc<dyn Device>> {
    static DEVICE: OnceLock<Arc<TestDevice>> = OnceLock::new();
    Ok(Arc::new(Arc::clone(DEVICE.get_or_init(|| TestDevice::new(MemoryKind::Cuda)))))
}

/// Returns a suite with device memory on one side or on both. The usual tier runs the suites over
/// the stand-in's devices (kvx-cuda).
const fn on_device(
    backend: &'static str,
    label: &'static str,
    near: Backing,
    far: Backing,
) -> Suite {
    Suite { label, near, far, device: Some(device), tier: Tier::Whole, ..Suite::over(backend) }
}

pub(crate) fn suites() -> Vec<Suite> {
    use Backing::{Device, Owned, Pool};
    vec![
        Suite { tier: Tier::Fast, ..Suite::over("SHM") },
        FOREIGN,
        on_device("SHM", "SHM-device", Device, Device),
        on_device("SHM", "SHM-from-device", Pool, Device),
        on_device("SHM", "SHM-to-device", Device, Pool),
        Suite { tier: Tier::Fast, ..Suite::over("TCP") },
        SEALED,
        on_device("TCP", "TCP-device", Device, Device),
        Suite { options: SEAL, ..on_device("TCP", "TCP-sealed-device", Device, Device) },
        on_device("TCP", "TCP-from-device", Pool, Device),
        on_device("TCP", "TCP-to-device", Device, Owned),
        Suite { label: "SHM-namespace", ..Suite::over("SHM") }.in_another_namespace(),
        Suite { label: "TCP-namespace", ..Suite::over("TCP") }.in_another_namespace(),
        // Not for SHM, which rejects another user and another host with an error.
        Suite { label: "TCP-user", ..Suite::over("TCP") }.as_another_user(),
        Suite {
            label: "TCP-hosts",
            options: r#"{"tcp": {"bind": "{address}"}}"#,
            ..Suite::over("TCP")
        }
        .on_two_hosts(),
    ]
}
