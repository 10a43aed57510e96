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

/// Returns the AMD devices that this process sees, in the runtime's order; each call returns the
/// same ones.
///
/// The call does nothing on a device; the first use of a device starts it. `ROCR_VISIBLE_DEVICES`
/// and `HIP_VISIBLE_DEVICES`, as of the first call, restrict the devices.
///
/// # Errors
/// The reason why there are none: no runtime, one that is too old, or no device; and what to do.
/// The next call tries again.
pub fn devices() -> Result<Vec<Arc<Device>>, Unavailable> {
    DEVICES.list()
}
