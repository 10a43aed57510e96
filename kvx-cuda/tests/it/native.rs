//! The conformance suites over a vendor's devices and the embedded transports.

use kvx_core::Registry;
use kvx_testkit::{Backing, DeviceSource, Suite, Tier};

pub(crate) fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).unwrap().add(kvx_native::Tcp).unwrap();
    registry
}

/// Returns all clauses, in one process and in two, with device memory on both sides, from this tier
/// on.
pub(crate) fn suites(device: DeviceSource, tier: Tier) -> Vec<Suite> {
    use Backing::Device;
    let over = |backend, label| Suite {
        label,
        near: Device,
        far: Device,
        device: Some(device),
        tier,
        ..Suite::over(backend)
    };
    vec![over("SHM", "SHM-device"), over("TCP", "TCP-device")]
}
