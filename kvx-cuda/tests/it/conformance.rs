//! SHM and TCP keep the contract over NVIDIA devices.

use std::sync::Arc;

use kvx_testkit::{Device, Suite, device};

use crate::native;

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

pub(crate) fn suites() -> Vec<Suite> {
    native::suites(first_device, true)
}
