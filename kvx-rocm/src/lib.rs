#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![deny(missing_docs)]

mod calls;
mod vendor;

use std::sync::Arc;

use kvx_core::backend::Unavailable;
use kvx_gpu::Devices;

pub use kvx_gpu::{
    BlockSelection, Device, DeviceInfo, DevicePoolBuilder, DevicePtr, StreamHandle, StridedBlocks,
};

static DEVICES: Devices = Devices::new(&vendor::AMD);

/// Returns the AMD devices that this process sees, in the runtime's order; each time the same ones.
///
/// The call starts no device; its first use does. `ROCR_VISIBLE_DEVICES` and
/// `HIP_VISIBLE_DEVICES`, as of the first call, choose what the process sees.
///
/// # Errors
/// The reason why there are none: no runtime, one that is too old, or no device; with what to do.
/// The next call tries again.
pub fn devices() -> Result<Vec<Arc<Device>>, Unavailable> {
    DEVICES.list()
}
