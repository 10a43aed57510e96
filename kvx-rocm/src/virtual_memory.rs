//! Virtual memory management: addresses and physical memory apart.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::{Driver as _, Mapped};

use crate::driver::Hip;
use crate::ffi::{Access, Address, Handle, Location, Physical, VirtualMemory};

/// `hipMemHandleTypePosixFileDescriptor`.
const DESCRIPTOR: i32 = 1;

fn functions(hip: &Hip) -> Result<&VirtualMemory> {
    let found = hip.library.virtual_memory.as_ref();
    found.ok_or_else(|| hip.cannot("no virtual memory that can be shared: make the pool without"))
}

fn on(hip: &Hip) -> Location {
    Location { kind: 1, id: hip.number() }
}

/// New physical memory with addresses.
pub(crate) fn map(hip: &Hip, len: usize) -> Result<Mapped> {
    let functions = functions(hip)?;
    let physical = Physical {
        kind: 1,
        handles: DESCRIPTOR,
        location: on(hip),
        windows: std::ptr::null_mut(),
        compression: 0,
        for_rdma: 0,
        usage: 0,
    };
    let mut page = 0;
    // SAFETY: a place for one number; 0 asks for the least that works.
    let status = unsafe {
        (functions.hipMemGetAllocationGranularity)(&raw mut page, &raw const physical, 0)
    };
    hip.check("hipMemGetAllocationGranularity", status)?;
    let len = len.checked_next_multiple_of(page.max(1)).ok_or_else(|| {
        Error::new(
            ErrorKind::Invalid,
            format!("a pool of {len} bytes is larger than the address space"),
        )
    })?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: a place for one handle.
    let status = unsafe { (functions.hipMemCreate)(&raw mut handle, len, &raw const physical, 0) };
    hip.check("hipMemCreate", status)?;
    placed(hip, functions, handle, len)
}

/// Gives physical memory addresses; releases it if that fails.
fn placed(hip: &Hip, functions: &VirtualMemory, handle: Handle, len: usize) -> Result<Mapped> {
    let none = std::ptr::null_mut();
    let mut address = none;
    let access = Access { location: on(hip), flags: 3 };
    // SAFETY: the handle is one that the caller got for `len` bytes. Each step undoes those before it if it fails, and
    // nobody has seen the address then.
    unsafe {
        let reserved = (functions.hipMemAddressReserve)(&raw mut address, len, 0, none, 0);
        let mut result = hip.check("hipMemAddressReserve", reserved);
        if result.is_ok() {
            result = hip.check("hipMemMap", (functions.hipMemMap)(address, len, 0, handle, 0));
            if result.is_ok() {
                let allowed = (functions.hipMemSetAccess)(address, len, &raw const access, 1);
                result = hip.check("hipMemSetAccess", allowed);
                if result.is_err() {
                    (functions.hipMemUnmap)(address, len);
                }
            }
            if result.is_err() {
                (functions.hipMemAddressFree)(address, len);
            }
        }
        if result.is_err() {
            (functions.hipMemRelease)(handle);
        }
        result.map(|()| Mapped { address: address as u64, len, handle: handle as u64 })
    }
}

/// Gives both back.
///
/// # Safety
/// It came from [`map`] or [`import`], and nobody uses it any more.
pub(crate) unsafe fn unmap(hip: &Hip, mapped: Mapped) -> Result<()> {
    let functions = functions(hip)?;
    let (address, len) = (mapped.address as Address, mapped.len);
    // SAFETY: the caller's promise.
    let statuses = unsafe {
        [
            ("hipMemUnmap", (functions.hipMemUnmap)(address, len)),
            ("hipMemAddressFree", (functions.hipMemAddressFree)(address, len)),
            ("hipMemRelease", (functions.hipMemRelease)(mapped.handle as Handle)),
        ]
    };
    statuses.into_iter().try_for_each(|(call, status)| hip.check(call, status))
}

/// A descriptor of the physical memory.
pub(crate) fn export(hip: &Hip, mapped: Mapped) -> Result<OwnedFd> {
    let mut file = -1;
    let handle = mapped.handle as Handle;
    // SAFETY: a place for one descriptor; the handle is one of `map`'s.
    let status = unsafe {
        (functions(hip)?.hipMemExportToShareableHandle)(&raw mut file, handle, DESCRIPTOR, 0)
    };
    hip.check("hipMemExportToShareableHandle", status)?;
    // SAFETY: the runtime made it for this call, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Maps what another process has exported.
pub(crate) fn import(hip: &Hip, file: BorrowedFd<'_>, len: usize) -> Result<Mapped> {
    let functions = functions(hip)?;
    let mut file = file.as_raw_fd();
    // The descriptor itself in the place of the pointer since HIP 7.1, a pointer to it before.
    let told = if hip.library.takes_descriptors() {
        file as usize as *mut c_void
    } else {
        (&raw mut file).cast()
    };
    let mut handle = std::ptr::null_mut();
    // SAFETY: a place for one handle, and for the length of the call one with the descriptor, which the runtime judges.
    let status =
        unsafe { (functions.hipMemImportFromShareableHandle)(&raw mut handle, told, DESCRIPTOR) };
    hip.check("hipMemImportFromShareableHandle", status)?;
    placed(hip, functions, handle, len)
}
