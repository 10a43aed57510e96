//! Memory that can be registered: kvx's own pools, adopted host memory, and device memory.

mod bytes;
mod device;
#[cfg(all(target_os = "linux", not(kvx_portable)))]
mod file;
#[cfg(all(target_os = "linux", not(kvx_portable)))]
mod pool;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use bytes::copy_shared;
#[cfg(unix)]
pub use device::DmaBuf;
pub use device::{DeviceAccess, DeviceId, Direction, Hop, IpcHandle, Piece};
#[cfg(all(target_os = "linux", not(kvx_portable)))]
pub use pool::{HugePages, PageSize, PoolBuilder, PoolProperties};

use crate::fault_injection::injected;
use crate::{Error, ErrorKind, Result, fork};

/// The refusal of a write to `what`.
pub(crate) fn read_only(what: &str) -> Error {
    Error::new(
        ErrorKind::PermissionDenied,
        format!("{what} may only be read: its owner registered it by Memory::adopt_shared"),
    )
}

/// The kind of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Ordinary host memory.
    Host = 0,
    /// Host memory that a GPU driver has pinned.
    Pinned = 1,
    /// Memory of an NVIDIA device.
    Cuda = 2,
    /// Memory of an AMD device.
    Rocm = 3,
}

impl MemoryKind {
    /// Every kind.
    pub const ALL: [MemoryKind; 4] =
        [MemoryKind::Host, MemoryKind::Pinned, MemoryKind::Cuda, MemoryKind::Rocm];

    /// True if the CPU reaches it by pointer.
    pub fn is_host(self) -> bool {
        matches!(self, MemoryKind::Host | MemoryKind::Pinned)
    }

    /// As it travels in metadata.
    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryKind::Host => "host",
            MemoryKind::Pinned => "pinned",
            MemoryKind::Cuda => "cuda",
            MemoryKind::Rocm => "rocm",
        })
    }
}

/// A range of memory and what keeps it alive. Register it with an agent to make it a [`Region`](crate::Region).
///
/// Peers and transports may read and write it at any time, so the safe API lends no slices of it: bytes go in and out
/// by copy. What is copied while a transfer writes to the same bytes is unspecified, but it is bytes.
///
/// ```
/// # use kvx_core as kvx;
/// let memory = kvx::Memory::owned(vec![0; 4096]);
/// memory.copy_in(8, b"hello")?;
/// let mut back = [0; 5];
/// memory.copy_out(8, &mut back)?;
/// assert_eq!(&back, b"hello");
/// # Ok::<(), kvx::Error>(())
/// ```
pub struct Memory {
    base: u64,
    len: usize,
    kind: MemoryKind,
    device: DeviceId,
    /// Its owner keeps references into it: nobody writes to it, here or at a peer.
    read_only: bool,
    backing: Backing,
}

enum Backing {
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    Pool(pool::PoolMapping),
    Adopted {
        /// Keeps the memory alive; dropped when nobody can touch it any more.
        _owner: Box<dyn Any + Send + Sync>,
    },
    Device(device::OnDevice),
}

/// Owns a buffer that is only ever touched through raw pointers.
struct OwnedBuffer {
    pointer: *mut [u8],
}

// SAFETY: the buffer is owned, and touched only through `Memory`, whose accesses are raw copies.
unsafe impl Send for OwnedBuffer {}
// SAFETY: as above; `OwnedBuffer` itself hands out nothing.
unsafe impl Sync for OwnedBuffer {}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        // SAFETY: `pointer` came from `Box::into_raw` in `Memory::owned` and is freed once, here.
        drop(unsafe { Box::from_raw(self.pointer) });
    }
}

impl Memory {
    /// A pool of kvx's own: shared memory that other processes of this host read without a copy through a kernel,
    /// pre-touched. Says how to ask for huge pages and a NUMA node; `build` makes it.
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub fn pool(len: usize) -> PoolBuilder {
        PoolBuilder::new(len)
    }

    /// Takes over a buffer of the program's. To peers it is like [adopted](Memory::adopt) memory.
    pub fn owned(bytes: impl Into<Box<[u8]>>) -> Self {
        let pointer = Box::into_raw(bytes.into());
        Memory {
            base: pointer.cast::<u8>() as u64,
            len: pointer.len(),
            kind: MemoryKind::Host,
            device: DeviceId::HOST,
            read_only: false,
            backing: Backing::Adopted { _owner: Box::new(OwnedBuffer { pointer }) },
        }
    }

    /// Adopts host memory that `owner` keeps alive and in place. Over SHM peers copy it through the kernel, at about
    /// half the speed of a [`pool`](Memory::pool) or of an [adopted file](Memory::adopt_file), which they map.
    ///
    /// # Safety
    /// `base..base + len` is readable and writable until `owner` is dropped, and nobody holds a reference into it
    /// while it is registered: peers and transports write to it at any time. kvx drops `owner` when nobody can touch
    /// the memory any more, which may be never (quarantine).
    pub unsafe fn adopt(base: *mut u8, len: usize, owner: impl Any + Send + Sync) -> Self {
        Memory {
            base: base as u64,
            len,
            kind: MemoryKind::Host,
            device: DeviceId::HOST,
            read_only: false,
            backing: Backing::Adopted { _owner: Box::new(owner) },
        }
    }

    /// Adopts host memory that peers may only read: its owner keeps references into it and reads it meanwhile.
    ///
    /// Whoever would write to it is refused with `PermissionDenied`: [`copy_in`](Memory::copy_in), a plan that reads into it, and
    /// each peer's plan that writes to it. A backend whose writes have the isolation `Owner` or `Nic` also refuses
    /// a peer that writes all the same; [`Peer::route`](crate::Peer::route) says of which that does not hold.
    ///
    /// # Safety
    /// `base..base + len` is readable until `owner` is dropped, and nobody writes to it while it is registered.
    /// Registered over a backend whose writes are isolated as [`Cooperative`](crate::Isolation::Cooperative), that
    /// includes every peer: connect only such as are trusted not to.
    pub unsafe fn adopt_shared(base: *const u8, len: usize, owner: impl Any + Send + Sync) -> Self {
        // SAFETY: the caller's promise; what would write looks at `read_only` first.
        Memory { read_only: true, ..unsafe { Memory::adopt(base.cast_mut(), len, owner) } }
    }

    /// Adopts host memory that a GPU driver has pinned; otherwise as [`adopt`](Memory::adopt).
    ///
    /// # Safety
    /// As [`adopt`](Memory::adopt); it stays pinned until `owner` is dropped.
    pub unsafe fn adopt_pinned(base: *mut u8, len: usize, owner: impl Any + Send + Sync) -> Self {
        // SAFETY: the caller's promise.
        Memory { kind: MemoryKind::Pinned, ..unsafe { Memory::adopt(base, len, owner) } }
    }

    /// Adopts memory of `device`, which only `access` can copy: its own, or that of another device which it reaches.
    ///
    /// # Safety
    /// As [`adopt`](Memory::adopt), for addresses as `access` understands them.
    pub unsafe fn adopt_device(
        base: u64,
        len: usize,
        device: DeviceId,
        access: Arc<dyn DeviceAccess>,
        owner: impl Any + Send + Sync,
    ) -> Self {
        let kind = access.kind();
        let backing = Backing::Device(device::OnDevice { access, owner: Arc::new(owner) });
        Memory { base, len, kind, device, read_only: false, backing }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its kind.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The device that holds it; [`DeviceId::HOST`] for host memory.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// True if nobody may write to it: see [`adopt_shared`](Memory::adopt_shared).
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// For whoever would write to it. Errors: `PermissionDenied`.
    pub fn check_writable(&self) -> Result<()> {
        if self.read_only && !injected("read-only") {
            Err(read_only("this memory"))
        } else {
            Ok(())
        }
    }

    /// Its address: a host pointer, or what the device calls one.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// Its first byte. Only host memory may be read or written through it, and only by raw accesses while registered.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base as *mut u8
    }

    /// Copies its bytes, for memory that the CPU does not reach.
    pub fn device_access(&self) -> Option<&Arc<dyn DeviceAccess>> {
        match &self.backing {
            Backing::Device(device) => Some(&device.access),
            _ => None,
        }
    }

    /// The properties that the builder was granted; `None` for memory that is no pool.
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub fn pool_properties(&self) -> Option<&PoolProperties> {
        match &self.backing {
            Backing::Pool(pool) => Some(pool.pool_properties()),
            _ => None,
        }
    }

    /// The sealed file behind a pool, to be passed to a process that may read it. Its bytes start at offset 0.
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub fn shared_file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.backing {
            Backing::Pool(pool) => Some(pool.file()),
            _ => None,
        }
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        fork::check()?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("bytes {offset}..+{len} lie outside the memory of {} bytes", self.len),
            ));
        }
        Ok(())
    }

    /// Copies `bytes` to `offset`. Blocks for device memory, for 30 seconds at most (64 MiB at a time): a device that
    /// hangs then is `TimedOut`, and the memory is never freed. Other errors: `OutOfBounds`, `PermissionDenied` for memory that
    /// may only be read, or what the device says.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        self.check_writable()?;
        if let Backing::Device(device) = &self.backing {
            // SAFETY: the range was checked, and its owner keeps it.
            return unsafe { device.copy_in(self.base + offset as u64, bytes, device::LONGEST) };
        }
        // SAFETY: the range was checked, the memory lives as long as `self`, and `bytes` cannot overlap it because no
        // references into registered memory exist. Whoever else touches it copies like this, or is no Rust.
        unsafe { copy_shared(bytes.as_ptr(), self.as_ptr().add(offset), bytes.len()) };
        Ok(())
    }

    /// Copies bytes from `offset` out. Blocks for device memory, as [`copy_in`](Memory::copy_in). Errors:
    /// `OutOfBounds`, or what the device says.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        if let Backing::Device(device) = &self.backing {
            // SAFETY: as in `copy_in`.
            return unsafe { device.copy_out(self.base + offset as u64, bytes, device::LONGEST) };
        }
        // SAFETY: as in `copy_in`.
        unsafe { copy_shared(self.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies ranges of this memory, which lies on a device, from or to the same ranges of `host`, which the device
    /// reaches at full speed if its [`DeviceAccess::pinned`] made it. Waits for at most `longest`: a device that hangs
    /// then is `TimedOut`, and neither memory is ever freed. Other errors: `OutOfBounds`, `PermissionDenied` for memory that may
    /// only be read, `Unsupported` unless this is memory of a device and that is of the host, what the device says.
    pub fn exchange(
        &self,
        direction: Direction,
        host: &Arc<Memory>,
        ranges: &[Range<usize>],
        longest: Duration,
    ) -> Result<()> {
        let Backing::Device(device) = &self.backing else {
            let why = format!("{} memory is copied by copy_in and copy_out", self.kind);
            return Err(Error::new(ErrorKind::Unsupported, why));
        };
        if !host.kind.is_host() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "two devices: one of two memories is to be of the host",
            ));
        }
        match direction {
            Direction::ToDevice => self.check_writable()?,
            Direction::ToHost => host.check_writable()?,
        }
        let mut pieces = Vec::with_capacity(ranges.len());
        for range in ranges {
            let len = range.len();
            self.check(range.start, len)?;
            host.check(range.start, len)?;
            let there = host.as_ptr().wrapping_add(range.start);
            pieces.push(Piece { device: self.base + range.start as u64, host: there, len });
        }
        if pieces.is_empty() {
            return Ok(());
        }
        // SAFETY: the ranges were checked; this memory's owner keeps the one side, `host` the other.
        unsafe { device.exchange(direction, &pieces, host, longest) }
    }

    /// The bytes of `range`, in place.
    ///
    /// # Safety
    /// While the slice lives, nobody writes to the range: no transfer into it is in flight and no peer may write it.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` for device memory.
    pub unsafe fn block(&self, range: Range<usize>) -> Result<&[u8]> {
        self.check(range.start, range.end.saturating_sub(range.start))?;
        if !self.kind.is_host() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "device memory has no slice: use copy_out",
            ));
        }
        // SAFETY: the range was checked and the memory lives as long as `self`; the caller keeps writers away.
        Ok(unsafe {
            std::slice::from_raw_parts(
                self.as_ptr().add(range.start),
                range.end.saturating_sub(range.start),
            )
        })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes, {})", self.len, self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_outside_are_refused_and_write_nothing() {
        let memory = Memory::owned(vec![1; 16]);
        for (offset, len) in [(16, 1), (0, 17), (usize::MAX, 2)] {
            assert_eq!(
                memory.copy_in(offset, &vec![9; len]).unwrap_err().kind(),
                ErrorKind::OutOfBounds
            );
        }
        let mut all = [0; 16];
        memory.copy_out(0, &mut all).unwrap();
        assert_eq!(all, [1; 16]);
    }

    #[test]
    fn shared_memory_is_read_and_not_written() {
        let owner: Arc<[u8]> = (*b"weights").into();
        // SAFETY: the Arc keeps the bytes, and nobody writes to them.
        let memory =
            unsafe { Memory::adopt_shared(owner.as_ptr(), owner.len(), Arc::clone(&owner)) };
        assert_eq!(memory.copy_in(0, b"W").unwrap_err().kind(), ErrorKind::PermissionDenied);
        let mut back = [0; 7];
        memory.copy_out(0, &mut back).unwrap();
        assert_eq!((&back, &*owner), (b"weights", &b"weights"[..]));
    }

    #[test]
    fn an_adopted_owner_lives_as_long_as_the_memory() {
        let owner = Arc::new(vec![0u8; 8].into_boxed_slice());
        let base = owner.as_ptr().cast_mut();
        // SAFETY: the test touches the bytes only through `memory`, and the Arc keeps them.
        let memory = unsafe { Memory::adopt(base, 8, owner.clone()) };
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
