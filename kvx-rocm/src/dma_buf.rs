//! Descriptors for cards of other makers: HIP's own since 7.0, else those of the layer below.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};

use kvx_backend::loader::{self, Search};
use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::Driver as _;

use crate::driver::Hip;
use crate::ffi::{self, Address, Hsa};

/// The variable that names the layer below.
const VARIABLE: &str = "KVX_HSA_LIB";
/// HIP has loaded the library of this name already.
const NAMES: &[&str] = &["libhsa-runtime64.so.1"];
const CURE: &str = "install ROCm 5.6 or newer, and Linux 6.2 or newer or the module amdgpu-dkms";

/// A range as a descriptor, and where in it the range begins.
pub(crate) fn export(hip: &Hip, range: Range<u64>) -> Result<(OwnedFd, u64)> {
    let told = match by_hip(hip, &range)? {
        Some(told) => Ok(told),
        None => by_hsa(hip, &range),
    };
    told.map_err(|error| error.with_kind(ErrorKind::Unsupported))
}

/// `None` if this release does not do it.
fn by_hip(hip: &Hip, range: &Range<u64>) -> Result<Option<(OwnedFd, u64)>> {
    const DMA_BUF: i32 = 1;
    let Some(export) = hip.library.table.hipMemGetHandleForAddressRange else { return Ok(None) };
    let mut file = -1;
    let len = (range.end - range.start) as usize;
    // SAFETY: a place for one descriptor; what the range is the runtime looks at.
    let status = unsafe { export(&raw mut file, range.start as Address, len, DMA_BUF, 0) };
    if status == ffi::NOT_SUPPORTED {
        return Ok(None);
    }
    let checked = hip.check("hipMemGetHandleForAddressRange", status);
    checked.map_err(|error| error.with_kind(ErrorKind::Unsupported))?;
    // SAFETY: the runtime made it for this call, and nobody else has it.
    Ok(Some((unsafe { OwnedFd::from_raw_fd(file) }, 0)))
}

fn by_hsa(hip: &Hip, range: &Range<u64>) -> Result<(OwnedFd, u64)> {
    let found = loader::with_signals_kept(|| {
        let library = Search::new(VARIABLE, NAMES, CURE).open()?;
        // SAFETY: the signature is that of its header, the same in all releases that have the function.
        unsafe { Hsa::find(&library) }
    });
    let hsa = found.map_err(|why| hip.cannot(&format!("no dma-buf descriptors: {why}")))?;
    let (mut file, mut offset) = (-1, 0);
    let (start, len) = (range.start as *const c_void, (range.end - range.start) as usize);
    // SAFETY: a place for each of the two; what the range is the runtime looks at. HIP has initialised it.
    let status =
        unsafe { (hsa.hsa_amd_portable_export_dmabuf)(start, len, &raw mut file, &raw mut offset) };
    if status != 0 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the ROCm runtime gives no dma-buf descriptor: it needs Linux 6.2 or newer, or amdgpu-dkms",
        )
        .with_operation("hsa_amd_portable_export_dmabuf")
        .with_native(status.into(), format!("hsa_status_t {status:#x}")));
    }
    // SAFETY: the runtime made it for this call, and nobody else has it.
    Ok((unsafe { OwnedFd::from_raw_fd(file) }, offset))
}
