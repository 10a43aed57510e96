//! Virtual memory management: separate addresses and physical memory.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kvx_core::ErrorKind;

use super::functions::{CallResult, VirtualMemoryFunctions};
use super::types::{Access, DeviceNumber, Location, MappedMemory, PhysicalMemory};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, and HIP's equivalent.
const DESCRIPTOR: i32 = 1;

/// The virtual memory of a device.
pub(crate) struct VirtualMemory<'a> {
    pub(crate) functions: &'a VirtualMemoryFunctions,
    pub(crate) device: DeviceNumber,
    /// True if other cards can access its memory.
    pub(crate) for_rdma: bool,
}

impl VirtualMemory<'_> {
    fn location(&self) -> Location {
        Location { kind: 1, id: self.device }
    }

    /// Creates physical memory and maps it.
    pub(crate) fn map(&self, len: usize) -> CallResult<MappedMemory> {
        let physical = PhysicalMemory {
            kind: 1,
            handles: DESCRIPTOR,
            location: self.location(),
            windows: std::ptr::null_mut(),
            compression: 0,
            for_rdma: u8::from(self.for_rdma),
            usage: 0,
            reserved: [0; 4],
        };
        let mut page = 0;
        // SAFETY: a location for one number; 0 requests the minimum granularity.
        unsafe { self.functions.granularity(&raw mut page, &raw const physical, 0) }?;
        let len = len.checked_next_multiple_of(page.max(1)).ok_or_else(|| {
            let sentence = format!("a pool of {len} bytes is larger than the address space");
            ErrorKind::Invalid.because(sentence)
        })?;
        let mut handle = 0;
        // SAFETY: a location for one handle.
        unsafe { self.functions.create(&raw mut handle, len, &raw const physical, 0) }?;
        self.place(handle, len)
    }

    /// Maps physical memory to new addresses. Releases it on failure.
    fn place(&self, handle: u64, len: usize) -> CallResult<MappedMemory> {
        let functions = self.functions;
        let access = Access { location: self.location(), flags: 3 };
        let mut address = 0;
        // SAFETY: the handle is for `len` bytes. Each step undoes the previous ones on failure,
        // when no caller has the address yet.
        let placed = unsafe {
            functions.reserve(&raw mut address, len, 0, 0, 0).and_then(|()| {
                let mapped = functions.map(address, len, 0, handle, 0).and_then(|()| {
                    let allowed = functions.set_access(address, len, &raw const access, 1);
                    allowed.inspect_err(|_| _ = functions.unmap(address, len))
                });
                mapped.inspect_err(|_| _ = functions.free_addresses(address, len))
            })
        };
        // SAFETY: after an error the memory is not mapped.
        placed.inspect_err(|_| _ = unsafe { functions.release(handle) })?;
        Ok(MappedMemory { address, len, handle })
    }

    /// Releases addresses and physical memory.
    ///
    /// # Safety
    /// `mapped` came from `map` or `import`, and nobody uses it afterwards.
    pub(crate) unsafe fn unmap(&self, mapped: MappedMemory) -> CallResult {
        let MappedMemory { address, len, handle } = mapped;
        // SAFETY: the caller guarantees that nobody uses it.
        let [unmapped, freed, released] = unsafe {
            [
                self.functions.unmap(address, len),
                self.functions.free_addresses(address, len),
                self.functions.release(handle),
            ]
        };
        unmapped.and(freed).and(released)
    }

    /// Exports the physical memory as a descriptor.
    pub(crate) fn export(&self, mapped: MappedMemory) -> CallResult<OwnedFd> {
        let mut file = -1;
        // SAFETY: a location for one descriptor; the handle came from `map`.
        unsafe { self.functions.export(&raw mut file, mapped.handle, DESCRIPTOR, 0) }?;
        // SAFETY: the driver created it for this call, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Maps physical memory that another process has exported. The interface takes the descriptor
    /// in place of a pointer or, with `by_pointer`, a pointer to it.
    pub(crate) fn import(
        &self,
        file: BorrowedFd<'_>,
        len: usize,
        by_pointer: bool,
    ) -> CallResult<MappedMemory> {
        let mut file = file.as_raw_fd();
        let shared = match by_pointer {
            true => (&raw mut file).cast(),
            false => file as usize as *mut c_void,
        };
        let mut handle = 0;
        // SAFETY: a location for one handle and, during the call, one with the descriptor, which
        // the driver validates.
        unsafe { self.functions.import(&raw mut handle, shared, DESCRIPTOR) }?;
        self.place(handle, len)
    }
}
