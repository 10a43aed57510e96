//! Runs the conformance suites of SHM and TCP over AMD devices.

use std::sync::Arc;

use kvx_testkit::{Device, Suite, Tier, device};

use crate::native;

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_rocm::devices, |device, len| device.pool(len).build())
}

/// Returns the suites. Both vendors' devices use the same code, so the usual tier runs the suites
/// only over CUDA's.
pub(crate) fn suites() -> Vec<Suite> {
    native::suites(first_device, Tier::Whole)
}
