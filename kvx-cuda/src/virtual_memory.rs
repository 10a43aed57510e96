//! Virtual memory management: addresses and physical memory apart.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::{Driver as _, Mapped};

use crate::driver::Cuda;
use crate::ffi::{self, Access, Location, Physical, VirtualMemory, attribute};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: i32 = 1;

fn functions(cuda: &Cuda) -> Result<&VirtualMemory> {
    let has = |what| cuda.attribute(what) != 0;
    match &cuda.library.virtual_memory {
        Some(functions) if has(attribute::VIRTUAL_MEMORY) && has(attribute::FILE_DESCRIPTORS) => {
            Ok(functions)
        }
        _ => Err(cuda.cannot("no virtual memory that can be shared: make the pool without")),
    }
}

fn on(cuda: &Cuda) -> Location {
    Location { kind: 1, id: cuda.number }
}

/// New physical memory with addresses.
pub(crate) fn map(cuda: &Cuda, len: usize) -> Result<Mapped> {
    let functions = functions(cuda)?;
    let for_rdma = u8::from(cuda.attribute(attribute::RDMA_WITH_VIRTUAL_MEMORY) != 0);
    let physical = Physical {
        kind: 1,
        handles: DESCRIPTOR,
        location: on(cuda),
        windows: std::ptr::null_mut(),
        compression: 0,
        for_rdma,
        usage: 0,
        reserved: [0; 4],
    };
    let mut page = 0;
    // SAFETY: a place for one number; 0 asks for the least that works.
    let status =
        unsafe { (functions.cuMemGetAllocationGranularity)(&raw mut page, &raw const physical, 0) };
    cuda.check("cuMemGetAllocationGranularity", status)?;
    let len = len.checked_next_multiple_of(page.max(1)).ok_or_else(|| {
        Error::new(
            ErrorKind::Invalid,
            format!("a pool of {len} bytes is larger than the address space"),
        )
    })?;
    let mut handle = 0;
    // SAFETY: a place for one handle.
    let status = unsafe { (functions.cuMemCreate)(&raw mut handle, len, &raw const physical, 0) };
    cuda.check("cuMemCreate", status)?;
    placed(cuda, functions, handle, len)
}

/// Gives physical memory addresses; releases it if that fails.
fn placed(cuda: &Cuda, functions: &VirtualMemory, handle: u64, len: usize) -> Result<Mapped> {
    let mut address = 0;
    let access = Access { location: on(cuda), flags: 3 };
    // SAFETY: the handle is one that the caller got for `len` bytes. Each step undoes those before it if it fails, and
    // nobody has seen the address then.
    unsafe {
        let reserved = (functions.cuMemAddressReserve)(&raw mut address, len, 0, 0, 0);
        let mut result = cuda.check("cuMemAddressReserve", reserved);
        if result.is_ok() {
            result = cuda.check("cuMemMap", (functions.cuMemMap)(address, len, 0, handle, 0));
            if result.is_ok() {
                let allowed = (functions.cuMemSetAccess)(address, len, &raw const access, 1);
                result = cuda.check("cuMemSetAccess", allowed);
                if result.is_err() {
                    (functions.cuMemUnmap)(address, len);
                }
            }
            if result.is_err() {
                (functions.cuMemAddressFree)(address, len);
            }
        }
        if result.is_err() {
            (functions.cuMemRelease)(handle);
        }
        result.map(|()| Mapped { address, len, handle })
    }
}

/// Gives both back.
///
/// # Safety
/// It came from [`map`] or [`import`], and nobody uses it any more.
pub(crate) unsafe fn unmap(cuda: &Cuda, mapped: Mapped) -> Result<()> {
    let functions = functions(cuda)?;
    let Mapped { address, len, handle } = mapped;
    // SAFETY: the caller's promise.
    let statuses = unsafe {
        [
            ("cuMemUnmap", (functions.cuMemUnmap)(address, len)),
            ("cuMemAddressFree", (functions.cuMemAddressFree)(address, len)),
            ("cuMemRelease", (functions.cuMemRelease)(handle)),
        ]
    };
    statuses.into_iter().try_for_each(|(call, status)| cuda.check(call, status))
}

/// A descriptor of the physical memory.
pub(crate) fn export(cuda: &Cuda, mapped: Mapped) -> Result<OwnedFd> {
    let mut file = -1;
    // SAFETY: a place for one descriptor; the handle is one of `map`'s.
    let status = unsafe {
        (functions(cuda)?.cuMemExportToShareableHandle)(&raw mut file, mapped.handle, DESCRIPTOR, 0)
    };
    cuda.check("cuMemExportToShareableHandle", status)?;
    // SAFETY: the driver made it for this call, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Maps what another process has exported.
pub(crate) fn import(cuda: &Cuda, file: BorrowedFd<'_>, len: usize) -> Result<Mapped> {
    let functions = functions(cuda)?;
    let mut handle = 0;
    // The interface takes the descriptor in the place of a pointer.
    let file = file.as_raw_fd() as usize as *mut c_void;
    // SAFETY: a place for one handle; the driver judges the descriptor.
    let status =
        unsafe { (functions.cuMemImportFromShareableHandle)(&raw mut handle, file, DESCRIPTOR) };
    if status != ffi::SUCCESS {
        return Err(cuda.library.error("cuMemImportFromShareableHandle", status));
    }
    placed(cuda, functions, handle, len)
}
