//! SHM and TCP keep the contract over AMD devices.

use std::sync::Arc;

use kvx_testkit::{Device, Suite, Tier, device};

use crate::native;

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_rocm::devices, |device, len| device.pool(len).build())
}

/// Both makers' devices are driven by the same code: the usual tier runs the suites over CUDA's
/// alone.
pub(crate) fn suites() -> Vec<Suite> {
    native::suites(first_device, Tier::Whole)
}
