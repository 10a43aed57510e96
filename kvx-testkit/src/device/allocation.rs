//! The memory of the test device: memory files, so that another process can open what this one
//! shares.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{IpcHandle, LinkProcess};
use kvx_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// The difference between a device address and the host address. No program has memory there, so
/// code that uses a device address as a pointer faults at once, and a system call returns `EFAULT`.
pub(super) const FAR: u64 = 1 << 52;

/// A mapped memory file.
pub(super) struct Allocation {
    file: OwnedFd,
    base: NonNull<c_void>,
    mapped: usize,
}

// SAFETY: an allocation is plain shared memory, and the device accesses it only by raw copies.
unsafe impl Send for Allocation {}
// SAFETY: the methods do not access the bytes; the device accesses them only by raw copies.
unsafe impl Sync for Allocation {}

fn no_room(cause: rustix::io::Errno) -> Error {
    Error::os("no memory for the test device", cause).with_kind(ErrorKind::Exhausted)
}

impl Allocation {
    /// Allocates `len` zeroed bytes.
    pub(super) fn new(len: usize) -> Result<Self> {
        let file =
            rustix::fs::memfd_create("kvx-test-device", MemfdFlags::CLOEXEC).map_err(no_room)?;
        let len = len.max(1);
        rustix::fs::ftruncate(&file, len as u64).map_err(no_room)?;
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused address, so the new mapping disturbs no memory of
        // the program.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)
        }
        .map_err(no_room)?;
        let base = NonNull::new(base).ok_or_else(|| no_room(rustix::io::Errno::FAULT))?;
        Ok(Allocation { file, base, mapped: len })
    }

    /// Returns the address on the device.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64 + FAR
    }

    /// Returns a handle for another process: this process's descriptor, and the inode number of the
    /// file.
    pub(super) fn share(&self, offset: u64) -> Result<IpcHandle> {
        let stat = rustix::fs::fstat(self.file.as_fd()).map_err(no_room)?;
        let mut bytes = Vec::new();
        bytes.put_u32(std::process::id());
        bytes.put_u32(self.file.as_raw_fd().cast_unsigned());
        bytes.put_u64(stat.st_ino);
        Ok(IpcHandle { bytes, offset })
    }

    /// Opens the memory that the process at the other end of a link shared.
    ///
    /// # Errors
    /// `Malformed` for a wrong handle; `PermissionDenied` for one of another process; `PeerLost` if
    /// its owner is gone; `Exhausted` if this process lacks descriptors or memory.
    pub(super) fn open(owner: LinkProcess<'_>, handle: &IpcHandle) -> Result<Self> {
        let mut reader = Reader::new("handle of the test device", &handle.bytes);
        let (process, fd, inode) = (reader.u32()?, reader.u32()?, reader.u64()?);
        reader.end()?;
        if process != owner.number {
            let why = format!("the peer is process {}, and names {process}", owner.number);
            return Err(ErrorKind::PermissionDenied.because(why));
        }
        let path = format!("/proc/{process}/fd/{fd}");
        let gone = |cause| {
            let short = matches!(cause, Errno::MFILE | Errno::NFILE);
            let kind = if short { ErrorKind::Exhausted } else { ErrorKind::PeerLost };
            Error::os(format!("{path} cannot be opened"), cause).with_kind(kind)
        };
        let file =
            rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(gone)?;
        let stat = rustix::fs::fstat(&file).map_err(gone)?;
        if stat.st_ino != inode {
            return Err(ErrorKind::PeerLost
                .because(format!("{path} is now another file: the memory was freed")));
        }
        Self::map(file, usize::try_from(stat.st_size).unwrap_or(0))
    }

    pub(super) fn len(&self) -> usize {
        self.mapped
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: this is the allocation's own mapping. The device copies only to and from
        // allocations in its table, and removes this one first.
        unsafe { rustix::mm::munmap(self.base.as_ptr(), self.mapped) }.ok();
    }
}
