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

/// Returns the NVIDIA devices that this process sees, in the driver's order; each time the same
/// ones.
///
/// The call starts no device; its first use does. `CUDA_VISIBLE_DEVICES`, as of the first call,
/// chooses what the process sees.
///
/// # Errors
/// The reason why there are none: no driver, one that is too old or does not start, or no device;
/// with what to do. The next call tries again.
pub fn devices() -> Result<Vec<Arc<Device>>, Unavailable> {
    DEVICES.list()
}
