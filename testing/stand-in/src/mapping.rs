//! Pages: memory files, and where they are mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::code::{Answer, Code};

/// What is added to a host address to make a device address. No program has memory there, so code
/// that takes a device address for a pointer faults at once.
const FAR: u64 = 1 << 52;

/// Bytes of a page.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// A memory file of whole pages. Errors: `OUT_OF_MEMORY`.
pub(crate) fn file(len: usize) -> Answer<OwnedFd> {
    let file =
        memfd_create("kvx-stand-in", MemfdFlags::CLOEXEC).map_err(|_| Code::OUT_OF_MEMORY)?;
    ftruncate(&file, len as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// How long a file is, and its number, which no other memory file has.
pub(crate) fn length_and_number(file: impl AsFd) -> Answer<(usize, u64)> {
    let stat = fstat(file).map_err(|_| Code::INVALID_VALUE)?;
    Ok((stat.st_size as usize, stat.st_ino))
}

pub(crate) fn again(file: BorrowedFd<'_>) -> Answer<OwnedFd> {
    file.try_clone_to_owned().map_err(|_| Code::OUT_OF_MEMORY)
}

/// Pages of this process; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is pages, which belong to no thread; who accesses them is the program's matter, as on
// a device.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// All of a file, for reading and writing.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: usize) -> Answer<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses where, so nothing else is mapped there.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) };
        Mapping::new(start, len)
    }

    /// Pages that nobody can touch until files are put there.
    pub(crate) fn reserved(len: usize) -> Answer<Self> {
        // SAFETY: as above.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        };
        Mapping::new(start, len)
    }

    /// Pages of this process alone.
    pub(crate) fn private(len: usize) -> Answer<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        Mapping::new(start, len)
    }

    fn new(start: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Answer<Self> {
        let start =
            start.ok().and_then(|start| NonNull::new(start.cast())).ok_or(Code::OUT_OF_MEMORY)?;
        Ok(Mapping { start, len })
    }

    /// Puts a file in place of reserved pages, or takes it away. The range must lie within.
    pub(crate) fn replace(
        &self,
        offset: usize,
        len: usize,
        file: Option<BorrowedFd<'_>>,
    ) -> Answer {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range lies within"
        );
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let [shared, private] =
            [MapFlags::SHARED, MapFlags::PRIVATE].map(|flags| flags | MapFlags::FIXED);
        // SAFETY: the range is within these pages, which are this struct's.
        let mapped = unsafe {
            let start = self.start.as_ptr().add(offset).cast();
            match file {
                Some(file) => mmap(start, len, access, shared, file, 0),
                None => mmap_anonymous(start, len, ProtFlags::empty(), private),
            }
        };
        mapped.map(|_| ()).map_err(|_| Code::OUT_OF_MEMORY)
    }

    /// Where the host has them.
    pub(crate) fn host(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Where the device has them.
    pub(crate) fn address(&self) -> u64 {
        self.host() + FAR
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: they were mapped by this struct; the table of memory drops it only when no stream
        // copies, because copies hold the table's lock.
        _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns whether an address is one that a device has.
pub(crate) fn is_of_device(address: u64) -> bool {
    address >= FAR
}

/// The host's pointer to device memory, which the caller has found to be mapped.
pub(crate) fn pointer(address: u64) -> *mut u8 {
    (address - FAR) as *mut u8
}
