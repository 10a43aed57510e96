//! Memory at an address that NIXL gives, as kvx's.

use std::ffi::c_int;

use kvx::Memory;
use kvx_gpu::DevicePtr;

use super::Blob;
use crate::devices::Devices;
use crate::engine::report;
use crate::log::warn;
use crate::status::{NixlResult, NixlStatus};

/// `DRAM_SEG`.
pub(super) const HOST: c_int = 0;
/// `VRAM_SEG`.
pub(super) const DEVICE: c_int = 1;

/// The memory that a user of NIXL's registers. Errors: told in a line.
///
/// # Safety
/// NIXL's contract of `registerMem`: its user keeps the range valid until `deregisterMem` has
/// returned without an error, and expects peers to write to it meanwhile.
pub(super) unsafe fn adopt(blob: &Blob, kind: c_int, devices: &Devices) -> NixlResult<Memory> {
    let Blob { address, len, device, .. } = *blob;
    match kind {
        // Nothing is owned here, so that quarantine frees nothing.
        // SAFETY: the caller's promise.
        HOST => Ok(unsafe { Memory::adopt(address as *mut u8, len, ()) }),
        DEVICE => {
            let device = devices.of(device).map_err(|why| {
                warn(format_args!(
                    "{len} bytes at {address:#x} of device {device} are not registered: {why}"
                ));
                NixlStatus::InvalidParam
            })?;
            // SAFETY: the caller's promise.
            let adopted = unsafe { device.adopt(DevicePtr(address), len, ()) };
            adopted.map_err(|error| report("memory is not registered", &error))
        }
        _ => Err(NixlStatus::NotSupported),
    }
}
