//! SHM and TCP keep the contract over AMD devices.

use std::sync::Arc;

use kvx_testkit::{Device, Suite, device};

use crate::native;

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_rocm::devices, |device, len| device.pool(len).build())
}

/// The machine over both makers' drivers is one: the suites with device memory on one side run over CUDA's.
pub(crate) fn suites() -> Vec<Suite> {
    native::suites(first_device, false)
}
