//! Virtual memory management: addresses and physical memory apart.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kvx_core::{Error, ErrorKind};

use super::functions::{CallResult, VirtualMemoryFunctions};
use super::types::{Access, DeviceNumber, Location, MappedMemory, PhysicalMemory};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, and the same of HIP.
const DESCRIPTOR: i32 = 1;

/// The virtual memory of a device.
pub(crate) struct VirtualMemory<'a> {
    pub(crate) functions: &'a VirtualMemoryFunctions,
    pub(crate) device: DeviceNumber,
    /// Other cards access its memory.
    pub(crate) for_rdma: bool,
}

impl VirtualMemory<'_> {
    fn location(&self) -> Location {
        Location { kind: 1, id: self.device }
    }

    /// Creates physical memory with addresses.
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
        // SAFETY: a place for one number; 0 asks for the least that works.
        unsafe { self.functions.granularity(&raw mut page, &raw const physical, 0) }?;
        let len = len.checked_next_multiple_of(page.max(1)).ok_or_else(|| {
            let sentence = format!("a pool of {len} bytes is larger than the address space");
            Error::new(ErrorKind::Invalid, sentence)
        })?;
        let mut handle = 0;
        // SAFETY: a place for one handle.
        unsafe { self.functions.create(&raw mut handle, len, &raw const physical, 0) }?;
        self.place(handle, len)
    }

    /// Gives physical memory addresses. Releases it if that fails.
    fn place(&self, handle: u64, len: usize) -> CallResult<MappedMemory> {
        let functions = self.functions;
        let access = Access { location: self.location(), flags: 3 };
        let mut address = 0;
        // SAFETY: the handle is one that the caller got for `len` bytes. Each step undoes those
        // before it if it fails, when no caller has the address yet.
        let placed = unsafe {
            functions.reserve(&raw mut address, len, 0, 0, 0).and_then(|()| {
                let mapped = functions.map(address, len, 0, handle, 0).and_then(|()| {
                    let allowed = functions.set_access(address, len, &raw const access, 1);
                    allowed.inspect_err(|_| _ = functions.unmap(address, len))
                });
                mapped.inspect_err(|_| _ = functions.free_addresses(address, len))
            })
        };
        // SAFETY: nothing maps the memory after an error.
        placed.inspect_err(|_| _ = unsafe { functions.release(handle) })?;
        Ok(MappedMemory { address, len, handle })
    }

    /// Releases addresses and physical memory.
    ///
    /// # Safety
    /// It came from `map` or `import`, and nobody uses it any more.
    pub(crate) unsafe fn unmap(&self, mapped: MappedMemory) -> CallResult {
        let MappedMemory { address, len, handle } = mapped;
        // SAFETY: the caller promises that nobody uses it.
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
        // SAFETY: a place for one descriptor; the handle is one of `map`'s.
        unsafe { self.functions.export(&raw mut file, mapped.handle, DESCRIPTOR, 0) }?;
        // SAFETY: the driver made it for this call, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Maps what another process has exported. The interface takes the descriptor in the place of a
    /// pointer, or, `by_pointer`, a pointer to it.
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
        // SAFETY: a place for one handle, and for the length of the call one with the descriptor,
        // which the driver judges.
        unsafe { self.functions.import(&raw mut handle, shared, DESCRIPTOR) }?;
        self.place(handle, len)
    }
}
