#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![deny(missing_docs)]

mod calls;
mod conflict;
mod vendor;

use std::sync::Arc;

use kvx_core::backend::Unavailable;
use kvx_gpu::Devices;

pub use kvx_gpu::{
    BlockSelection, Device, DeviceInfo, DevicePoolBuilder, DevicePtr, StreamHandle, StridedBlocks,
};

static DEVICES: Devices = Devices::new(&vendor::NVIDIA);

/// Returns the NVIDIA devices that this process sees, in the driver's order; each call returns the
/// same ones.
///
/// The call does nothing on a device; the first use of a device starts it. `CUDA_VISIBLE_DEVICES`,
/// as of the first call, restricts the devices.
///
/// # Errors
/// The reason why there are none: no driver, one that is too old or fails to initialise, or no
/// device; and what to do. The next call tries again.
pub fn devices() -> Result<Vec<Arc<Device>>, Unavailable> {
    DEVICES.list()
}
