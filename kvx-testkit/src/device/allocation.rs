//! Memory of the test device: memory files, so that another process can open what this one shares.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use kvx_core::backend::IpcHandle;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// What is added to the host address of device memory. No program has memory there, so code that
/// takes a device address for a pointer faults at once, and a system call given one says `EFAULT`.
pub(super) const FAR: u64 = 1 << 52;

/// A memory file, mapped.
pub(super) struct Allocation {
    file: OwnedFd,
    base: NonNull<c_void>,
    mapped: usize,
}

// SAFETY: plain shared memory, touched only by raw copies.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

fn no_room(cause: rustix::io::Errno) -> Error {
    Error::os("no memory for the test device", cause).with_kind(ErrorKind::Exhausted)
}

impl Allocation {
    /// `len` bytes of zeros.
    pub(super) fn new(len: usize) -> Result<Self> {
        let file =
            rustix::fs::memfd_create("kvx-test-device", MemfdFlags::CLOEXEC).map_err(no_room)?;
        let len = len.max(1);
        rustix::fs::ftruncate(&file, len as u64).map_err(no_room)?;
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory of the
        // program.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)
        }
        .map_err(no_room)?;
        let base = NonNull::new(base).ok_or_else(|| no_room(rustix::io::Errno::FAULT))?;
        Ok(Allocation { file, base, mapped: len })
    }

    /// Its address on the device.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64 + FAR
    }

    /// Returns what another process opens: the descriptor in this process, and the file's number.
    pub(super) fn share(&self, offset: u64) -> Result<IpcHandle> {
        let stat = rustix::fs::fstat(self.file.as_fd()).map_err(no_room)?;
        let mut bytes = Vec::new();
        bytes.put_u32(std::process::id());
        bytes.put_u32(self.file.as_raw_fd().cast_unsigned());
        bytes.put_u64(stat.st_ino);
        Ok(IpcHandle { bytes, offset })
    }

    /// What another process shared. Errors: `Malformed`, `PeerLost` when its owner is gone,
    /// `Exhausted`.
    pub(super) fn open(handle: &IpcHandle) -> Result<Self> {
        let mut reader = Reader::new("handle of the test device", &handle.bytes);
        let (process, fd, inode) = (reader.u32()?, reader.u32()?, reader.u64()?);
        reader.end()?;
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
            return Err(Error::new(
                ErrorKind::PeerLost,
                format!("{path} is another file by now: it was freed"),
            ));
        }
        Self::map(file, usize::try_from(stat.st_size).unwrap_or(0))
    }

    pub(super) fn len(&self) -> usize {
        self.mapped
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the device copies only from and to allocations that it knows,
        // and forgets this one first.
        unsafe { rustix::mm::munmap(self.base.as_ptr(), self.mapped) }.ok();
    }
}
