//! Exports memory for the cards of other vendors, as HIP before 7.0 does.

use std::ffi::c_int;
use std::os::fd::RawFd;

use crate::argument::{Out, answer};
use crate::code::Code;
use crate::memory::memory;

/// A function of `libhsa-runtime64`, which HIP before 7.0 uses: the descriptor covers the whole
/// allocation.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_portable_export_dmabuf(
    address: u64,
    len: usize,
    descriptor: Out<RawFd>,
    offset: Out<u64>,
) -> c_int {
    /// `HSA_STATUS_ERROR_INVALID_ARGUMENT`.
    const INVALID_ARGUMENT: c_int = 0x1001;
    let done = answer("hsa_amd_portable_export_dmabuf", || {
        let memory = memory();
        memory.range(address, len)?;
        let (base, found) = memory.around(address).ok_or(Code::INVALID_VALUE)?;
        let whole = memory.descriptor(base, found.len)?;
        descriptor.set(whole)?;
        offset.set(address - base)
    });
    if done == 0 { 0 } else { INVALID_ARGUMENT }
}
