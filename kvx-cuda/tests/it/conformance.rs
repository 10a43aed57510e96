//! Runs the conformance suites of SHM and TCP over NVIDIA devices.

use std::sync::Arc;

use kvx_testkit::{Backing, Device, Suite, Tier, device};

use crate::native;

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// Returns the suites; the whole tier also has suites with device memory on one side.
pub(crate) fn suites() -> Vec<Suite> {
    use Backing::{Device, Owned, Pool};
    let on_one = |backend, label, near, far| Suite {
        label,
        near,
        far,
        device: Some(first_device),
        tier: Tier::Whole,
        ..Suite::over(backend)
    };
    let mut suites = native::suites(first_device, Tier::Usual);
    suites.extend([
        on_one("SHM", "SHM-from-device", Pool, Device),
        on_one("SHM", "SHM-to-device", Device, Pool),
        on_one("TCP", "TCP-from-device", Pool, Device),
        on_one("TCP", "TCP-to-device", Device, Owned),
    ]);
    suites
}
