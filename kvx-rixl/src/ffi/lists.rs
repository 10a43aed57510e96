//! Descriptor lists.

use std::ptr;

use kvx_core::Result;

use super::bindings::{
    Functions, NIXL_CAPI_MEM_DRAM, NIXL_CAPI_MEM_VRAM, nixl_reg_dlist, nixl_xfer_dlist,
};
use super::status::Status;

/// The kind of memory in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MemorySegment {
    Host,
    Device,
}

impl MemorySegment {
    /// Returns NIXL's constant.
    pub(crate) fn number(self) -> i32 {
        let number = match self {
            MemorySegment::Host => NIXL_CAPI_MEM_DRAM,
            MemorySegment::Device => NIXL_CAPI_MEM_VRAM,
        };
        number as i32
    }
}

/// A contiguous range of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Range {
    pub(crate) segment: MemorySegment,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) device: u64,
}

impl Range {
    /// Returns whether the two ranges share bytes.
    pub(crate) fn overlaps(&self, other: &Range) -> bool {
        (self.segment, self.device) == (other.segment, other.device)
            && self.address < other.address.saturating_add(other.len)
            && other.address < self.address.saturating_add(self.len)
    }
}

/// A list of ranges for registration.
pub(super) struct RegistrationList {
    pub(super) raw: nixl_reg_dlist,
    functions: &'static Functions,
}

impl RegistrationList {
    pub(super) fn of(functions: &'static Functions, ranges: &[Range]) -> Result<Self> {
        let segment = ranges.first().map_or(MemorySegment::Host, |range| range.segment);
        let mut raw = ptr::null_mut();
        // SAFETY: a location for a handle.
        let status = unsafe { (functions.nixl_capi_create_reg_dlist)(segment.number(), &mut raw) };
        Status::check(status).map_err(|status| status.error("making a list"))?;
        let list = RegistrationList { raw, functions };
        for range in ranges {
            let (address, len) = (range.address as usize, range.len as usize);
            // SAFETY: the list is alive; no metadata is passed.
            let status = unsafe {
                (functions.nixl_capi_reg_dlist_add_desc)(
                    raw,
                    address,
                    len,
                    range.device,
                    ptr::null(),
                    0,
                )
            };
            Status::check(status).map_err(|status| status.error("adding to a list"))?;
        }
        Ok(list)
    }
}

impl Drop for RegistrationList {
    fn drop(&mut self) {
        // SAFETY: created by `of` and destroyed once, here.
        unsafe { (self.functions.nixl_capi_destroy_reg_dlist)(self.raw) };
    }
}

/// A list of ranges to transfer, which is reused.
pub(crate) struct TransferList {
    pub(super) raw: nixl_xfer_dlist,
    functions: &'static Functions,
}

// SAFETY: a list is plain data of the library, bound to no thread, and has one owner.
unsafe impl Send for TransferList {}

impl TransferList {
    pub(super) fn new(functions: &'static Functions, segment: MemorySegment) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a location for a handle.
        let status = unsafe { (functions.nixl_capi_create_xfer_dlist)(segment.number(), &mut raw) };
        Status::check(status).map_err(|status| status.error("making a list"))?;
        Ok(TransferList { raw, functions })
    }

    #[inline]
    pub(crate) fn add(&mut self, address: u64, len: u64, device: u64) {
        // SAFETY: the list is alive. The call fails only for lack of memory.
        unsafe {
            (self.functions.nixl_capi_xfer_dlist_add_desc)(
                self.raw,
                address as usize,
                len as usize,
                device,
            )
        };
    }

    pub(crate) fn clear(&mut self) {
        // SAFETY: the list is alive. The call fails only for lack of memory.
        unsafe { (self.functions.nixl_capi_xfer_dlist_clear)(self.raw) };
    }
}

impl Drop for TransferList {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed once, here.
        unsafe { (self.functions.nixl_capi_destroy_xfer_dlist)(self.raw) };
    }
}
