//! The calls that differ between HIP and CUDA's driver. kvx supports HIP 5, 6 and 7 with functions
//! that are equal in all of them: it uses no structure of device properties, and no constant whose
//! number has changed.

use std::ffi::{c_char, c_int, c_uint};
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};

use kvx_backend::loader::{self, NativeLibrary};
use kvx_core::backend::{Hop, Unavailable};
use kvx_core::{DeviceId, ErrorKind};
use kvx_gpu::driver::{
    Address, CallResult, Context, CopyDirection, DeviceNumber, Failure, LibraryFile, PointerInfo,
    PointerPlace, Rows, Status, StreamHandle, VendorCalls, status,
};

/// HIP 6.0, which renumbered the kinds of memory.
const NEW_MEMORY_KINDS: c_int = 60_000_000;

/// The layer below HIP, which has loaded a library of this name.
const HSA: LibraryFile = LibraryFile {
    variable: "KVX_HSA_LIB",
    names: &["libhsa-runtime64.so.1"],
    file: None,
    cure: "install ROCm 5.6 or newer, and Linux 6.2 or newer or the module amdgpu-dkms",
};

/// A `hipPointerAttribute_t`, equal in all releases, except for the meaning of `kind`.
#[repr(C)]
struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: Address,
    host_pointer: Address,
    is_managed: c_int,
    flags: c_uint,
}

// On 64-bit machines.
const _: () = assert!(size_of::<PointerAttributes>() == 32);

pub(crate) struct HipCalls {
    version: c_int,
    error_name: unsafe extern "C" fn(Status) -> *const c_char,
    error_text: unsafe extern "C" fn(Status) -> *const c_char,
    set_device: unsafe extern "C" fn(c_int) -> Status,
    get_device: unsafe extern "C" fn(*mut c_int) -> Status,
    pointer_attributes: unsafe extern "C" fn(*mut PointerAttributes, Address) -> Status,
    copy: unsafe extern "C" fn(Address, Address, usize, c_int, StreamHandle) -> Status,
    copy_rows: unsafe extern "C" fn(
        Address,
        usize,
        Address,
        usize,
        usize,
        usize,
        c_int,
        StreamHandle,
    ) -> Status,
    /// `None` in older releases.
    pointer_attribute: Option<unsafe extern "C" fn(*mut usize, c_int, Address) -> Status>,
    /// Since HIP 7.0.
    dma_buf: Option<unsafe extern "C" fn(*mut c_int, Address, usize, c_int, u64) -> Status>,
}

impl HipCalls {
    /// # Safety
    /// The library is HIP's runtime.
    pub(crate) unsafe fn find(
        library: &NativeLibrary,
        version: c_int,
    ) -> Result<Box<dyn VendorCalls>, Unavailable> {
        // SAFETY: the signatures are those of HIP's interface, equal in all releases, and the
        // caller guarantees that this is HIP.
        Ok(Box::new(unsafe {
            HipCalls {
                version,
                error_name: library.symbol(c"hipGetErrorName")?,
                error_text: library.symbol(c"hipGetErrorString")?,
                set_device: library.symbol(c"hipSetDevice")?,
                get_device: library.symbol(c"hipGetDevice")?,
                pointer_attributes: library.symbol(c"hipPointerGetAttributes")?,
                copy: library.symbol(c"hipMemcpyAsync")?,
                copy_rows: library.symbol(c"hipMemcpy2DAsync")?,
                pointer_attribute: library.optional_symbol(c"hipPointerGetAttribute"),
                dma_buf: library.optional_symbol(c"hipMemGetHandleForAddressRange"),
            }
        }))
    }

    fn set_device(&self, Context(device): Context) -> CallResult {
        // SAFETY: the runtime named the device.
        Failure::check(c"hipSetDevice", unsafe { (self.set_device)(device as c_int) })
    }

    /// Returns whether the runtime reports that memory belongs to one of its own pools; older ones
    /// do not report it.
    fn is_pooled(&self, address: u64) -> bool {
        const MEMORY_POOL: i32 = 17;
        self.number_of(MEMORY_POOL, address).is_some()
    }

    /// Returns an attribute of an address that is a number of 64 bits; `None` if the runtime does
    /// not know it.
    fn number_of(&self, attribute: c_int, address: u64) -> Option<u64> {
        let ask = self.pointer_attribute?;
        let mut number = 0;
        // SAFETY: a location for one number.
        let status = unsafe { ask(&raw mut number, attribute, address) };
        (status == status::SUCCESS && number != 0).then_some(number as u64)
    }

    /// Exports a range with HIP; `None` if this release does not support it.
    fn dma_buf_by_hip(&self, range: &Range<u64>) -> CallResult<Option<(OwnedFd, u64)>> {
        const DMA_BUF: i32 = 1;
        let Some(export) = self.dma_buf else { return Ok(None) };
        let (mut file, len) = (-1, (range.end - range.start) as usize);
        // SAFETY: a location for one descriptor; the runtime validates the range.
        let status = unsafe { export(&raw mut file, range.start, len, DMA_BUF, 0) };
        if status == status::NOT_SUPPORTED {
            return Ok(None);
        }
        Failure::check(c"hipMemGetHandleForAddressRange", status)?;
        // SAFETY: the runtime created it for this call, and nobody else has it.
        Ok(Some((unsafe { OwnedFd::from_raw_fd(file) }, 0)))
    }
}

/// Exports a range with the layer below HIP.
fn dma_buf_by_hsa(range: &Range<u64>) -> CallResult<(OwnedFd, u64)> {
    type Export = unsafe extern "C" fn(Address, usize, *mut c_int, *mut u64) -> c_int;
    let found = loader::with_signals_kept(|| {
        let library = HSA.open()?;
        // SAFETY: the signature is that of its header, equal in all releases that have the
        // function.
        unsafe { library.symbol::<Export>(c"hsa_amd_portable_export_dmabuf") }
    });
    let export = found.map_err(|why| Failure::Missing(format!("no dma-buf descriptors: {why}")))?;
    let (mut file, mut offset, len) = (-1, 0, (range.end - range.start) as usize);
    // SAFETY: a location for each of the two; the runtime, which HIP has initialised, validates the
    // range.
    let status = unsafe { export(range.start, len, &raw mut file, &raw mut offset) };
    if status != 0 {
        let sentence = "the ROCm runtime did not export a dma-buf descriptor: it needs Linux 6.2 or newer, or amdgpu-dkms";
        return Err(ErrorKind::Unsupported
            .because(sentence)
            .with_operation("hsa_amd_portable_export_dmabuf")
            .with_native(status.into(), format!("hsa_status_t {status:#x}"))
            .into());
    }
    // SAFETY: the runtime created it for this call, and nobody else has it.
    Ok((unsafe { OwnedFd::from_raw_fd(file) }, offset))
}

/// Returns the place that a `hipMemoryType` stands for.
fn place(kind: c_int, has_new_kinds: bool) -> PointerPlace {
    match (has_new_kinds, kind) {
        (true, 1) | (false, 0) => PointerPlace::Pinned,
        (true, 2) | (false, 1) => PointerPlace::Device,
        (true, 3) | (false, 4) => PointerPlace::Managed,
        _ => PointerPlace::Unknown,
    }
}

/// Returns the number of a direction in `hipMemcpyKind`.
fn copy_kind(way: CopyDirection) -> c_int {
    match way {
        CopyDirection::ToDevice => 1,
        CopyDirection::ToHost => 2,
        CopyDirection::Within => 3,
    }
}

// SAFETY: each method makes the documented call of the runtime; when the runtime reports an event
// as reached, all work before it on its stream has ended.
unsafe impl VendorCalls for HipCalls {
    fn describe(&self, status: Status) -> [*const c_char; 2] {
        // SAFETY: the runtime returns its own string.
        [self.error_name, self.error_text].map(|function| unsafe { function(status) })
    }

    /// Returns the UUID, or the PCI address for devices without one, for which HIP returns an error
    /// or `XX`.
    fn device_id(&self, uuid: CallResult<[u8; 16]>, bus: &str) -> CallResult<DeviceId> {
        Ok(device_id(uuid.ok(), bus))
    }

    fn context(&self, device: DeviceNumber) -> CallResult<Context> {
        Ok(Context(device.cast_unsigned() as usize))
    }

    fn enter(&self, context: Context) -> CallResult<Context> {
        let mut previous = 0;
        // SAFETY: a location for one number.
        Failure::check(c"hipGetDevice", unsafe { (self.get_device)(&raw mut previous) })?;
        self.set_device(context)?;
        Ok(Context(previous.cast_unsigned() as usize))
    }

    fn leave(&self, previous: Context) -> CallResult {
        self.set_device(previous)
    }

    fn classify(&self, address: u64) -> CallResult<PointerInfo> {
        let mut found = PointerAttributes {
            kind: -1,
            device: -1,
            device_pointer: 0,
            host_pointer: 0,
            is_managed: 0,
            flags: 0,
        };
        // SAFETY: a location for one structure.
        let status = unsafe { (self.pointer_attributes)(&raw mut found, address) };
        if status == status::INVALID_VALUE {
            // The answer of HIP 5 for memory that it does not know.
            let place = PointerPlace::Unknown;
            return Ok(PointerInfo {
                place,
                ordinal: -1,
                is_pooled: false,
                is_mapped: false,
                context: None,
            });
        }
        Failure::check(c"hipPointerGetAttributes", status)?;
        let place = match found.is_managed {
            0 => place(found.kind, self.version >= NEW_MEMORY_KINDS),
            _ => PointerPlace::Managed,
        };
        let is_pooled = place == PointerPlace::Device && self.is_pooled(address);
        // HIP has one context for each device, and reports no virtual memory.
        Ok(PointerInfo { place, ordinal: found.device, is_pooled, is_mapped: false, context: None })
    }

    fn opened_len(&self, address: u64, _: u64) -> CallResult<Option<u64>> {
        const RANGE_START: i32 = 11;
        const RANGE_SIZE: i32 = 12;
        let start = self.number_of(RANGE_START, address);
        let end = start.zip(self.number_of(RANGE_SIZE, address));
        let end = end.map(|(start, len)| start.saturating_add(len));
        Ok(end.and_then(|end| end.checked_sub(address)).filter(|len| *len > 0))
    }

    fn dma_buf(&self, _: DeviceNumber, range: Range<u64>) -> CallResult<(OwnedFd, u64)> {
        match self.dma_buf_by_hip(&range)? {
            Some(exported) => Ok(exported),
            None => dma_buf_by_hsa(&range),
        }
    }

    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> CallResult {
        let Hop { from, to, len } = line;
        // SAFETY: guaranteed by the caller: both sides are valid.
        let status = unsafe { (self.copy)(to, from, len, copy_kind(way), stream) };
        Failure::check(c"hipMemcpyAsync", status)
    }

    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> CallResult {
        let Rows { from, from_pitch, to, to_pitch, width, count } = rows;
        let kind = copy_kind(way);
        // SAFETY: guaranteed by the caller: both sides are valid.
        let status =
            unsafe { (self.copy_rows)(to, to_pitch, from, from_pitch, width, count, kind, stream) };
        Failure::check(c"hipMemcpy2DAsync", status)
    }
}

fn device_id(uuid: Option<[u8; 16]>, bus: &str) -> DeviceId {
    match uuid {
        Some(uuid) if uuid != [0; 16] && !uuid.starts_with(b"XX") => DeviceId(uuid),
        _ => {
            let mut id = [0; 16];
            id.iter_mut().zip(bus.bytes()).for_each(|(id, byte)| *id = byte);
            DeviceId(id)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_a_uuid_is_identified_by_its_pci_address() {
        let bus = "0000:c3:00.0";
        for none in [None, Some([0; 16]), Some(*b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0")] {
            assert_eq!(&device_id(none, bus).0[..12], bus.as_bytes());
        }
        assert_eq!(device_id(Some([7; 16]), bus), DeviceId([7; 16]));
    }

    #[test]
    fn device_memory_is_never_taken_for_host_memory() {
        assert_eq!([0, 1, 2, 3].map(|kind| place(kind, true)), {
            use PointerPlace::*;
            [Unknown, Pinned, Device, Managed]
        });
        assert_eq!([0, 1, 4].map(|kind| place(kind, false)), {
            use PointerPlace::*;
            [Pinned, Device, Managed]
        });
    }
}
