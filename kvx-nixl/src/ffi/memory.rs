//! Adopts memory at an address from NIXL.

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

/// Adopts the memory that NIXL's user registers. Errors: logged in one line.
///
/// # Safety
/// The contract of `registerMem`: NIXL's user keeps the range valid until `deregisterMem` has
/// returned without an error, and expects peers to write to it.
pub(super) unsafe fn adopt(blob: &Blob, kind: c_int, devices: &Devices) -> NixlResult<Memory> {
    let Blob { address, len, device, .. } = *blob;
    match kind {
        // kvx does not own the memory, so quarantine frees nothing.
        // SAFETY: guaranteed by the caller.
        HOST => Ok(unsafe { Memory::adopt(address as *mut u8, len, ()) }),
        DEVICE => {
            let device = devices.of(device).map_err(|why| {
                warn(format_args!(
                    "{len} bytes at {address:#x} of device {device} are not registered: {why}"
                ));
                NixlStatus::InvalidParam
            })?;
            // SAFETY: guaranteed by the caller.
            let adopted = unsafe { device.adopt(DevicePtr(address), len, ()) };
            adopted.map_err(|error| report("memory could not be registered", &error))
        }
        _ => Err(NixlStatus::NotSupported),
    }
}
