//! Memory files, and their mappings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::code::{Answer, Code};

/// The offset of device addresses from host addresses. No program has memory there, so using a
/// device address as a pointer faults at once.
const FAR: u64 = 1 << 52;

/// Returns the page size.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// Creates a memory file of whole pages. Fails with `OUT_OF_MEMORY`.
pub(crate) fn file(len: usize) -> Answer<OwnedFd> {
    let file =
        memfd_create("kvx-stand-in", MemfdFlags::CLOEXEC).map_err(|_| Code::OUT_OF_MEMORY)?;
    ftruncate(&file, len as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// Returns the length of a file and its inode number, which identifies the memory file.
pub(crate) fn length_and_number(file: impl AsFd) -> Answer<(usize, u64)> {
    let stat = fstat(file).map_err(|_| Code::INVALID_VALUE)?;
    Ok((stat.st_size as usize, stat.st_ino))
}

pub(crate) fn again(file: BorrowedFd<'_>) -> Answer<OwnedFd> {
    file.try_clone_to_owned().map_err(|_| Code::OUT_OF_MEMORY)
}

/// Pages of this process, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages are not tied to a thread. As on a device, the program synchronises accesses to
// them.
unsafe impl Send for Mapping {}
// SAFETY: a `Mapping` dereferences nothing itself; the program synchronises accesses to the pages.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of a file for reading and writing.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: usize) -> Answer<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so the mapping replaces no other one.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) };
        Mapping::new(start, len)
    }

    /// Reserves pages that cannot be accessed until files are mapped there.
    pub(crate) fn reserved(len: usize) -> Answer<Self> {
        // SAFETY: the kernel chooses the place, so the mapping replaces no other one.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        };
        Mapping::new(start, len)
    }

    /// Maps private pages of this process.
    pub(crate) fn private(len: usize) -> Answer<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so the mapping replaces no other one.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        Mapping::new(start, len)
    }

    fn new(start: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Answer<Self> {
        let start =
            start.ok().and_then(|start| NonNull::new(start.cast())).ok_or(Code::OUT_OF_MEMORY)?;
        Ok(Mapping { start, len })
    }

    /// Maps a file over reserved pages, or removes it. The range must be within them.
    pub(crate) fn replace(
        &self,
        offset: usize,
        len: usize,
        file: Option<BorrowedFd<'_>>,
    ) -> Answer {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range must be within the mapping"
        );
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let [shared, private] =
            [MapFlags::SHARED, MapFlags::PRIVATE].map(|flags| flags | MapFlags::FIXED);
        // SAFETY: the assertion ensures that the range is within these pages, which belong to this
        // struct.
        let mapped = unsafe {
            let start = self.start.as_ptr().add(offset).cast();
            match file {
                Some(file) => mmap(start, len, access, shared, file, 0),
                None => mmap_anonymous(start, len, ProtFlags::empty(), private),
            }
        };
        mapped.map(|_| ()).map_err(|_| Code::OUT_OF_MEMORY)
    }

    /// Returns the host's address of the pages.
    pub(crate) fn host(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the device's address of the pages.
    pub(crate) fn address(&self) -> u64 {
        self.host() + FAR
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this struct mapped the pages. The memory table drops it only when no stream
        // copies, because copies hold the table's lock.
        _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns whether an address is a device address.
pub(crate) fn is_of_device(address: u64) -> bool {
    address >= FAR
}

/// Returns the host's pointer to device memory; the caller ensures that the memory is mapped.
pub(crate) fn pointer(address: u64) -> *mut u8 {
    (address - FAR) as *mut u8
}
