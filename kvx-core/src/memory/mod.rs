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
#[cfg(test)]
pub(crate) use device::tests::FaultyDevice;
pub use device::{
    DeviceAccess, DeviceId, Direction, Hop, IpcHandle, LinkProcess, MemoryReceiver, Piece,
};
#[cfg(all(target_os = "linux", not(kvx_portable)))]
pub use pool::{HugePages, PageSize, PoolBuilder, PoolProperties};

use crate::fault_injection::injected;
use crate::{Error, ErrorKind, Result, fork};

/// Returns the error of a write to `what`.
pub(crate) fn read_only(what: &str) -> Error {
    ErrorKind::PermissionDenied
        .because(format!("{what} is read-only: its owner adopted it with Memory::adopt_shared"))
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

    /// Returns true if the CPU can access it through a pointer.
    pub fn is_host(self) -> bool {
        matches!(self, MemoryKind::Host | MemoryKind::Pinned)
    }

    /// Converts the kind from its byte in metadata.
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

/// A range of memory, together with what keeps it alive. Register it with an agent to make it a
/// [`Region`](crate::Region).
///
/// Peers and transports may read and write it at any time, so the safe API does not lend slices of
/// it: bytes are copied in and out. A copy of bytes that a transfer is writing has unspecified
/// content, but it is initialised.
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
    /// True if the owner keeps references into the memory, so that neither this process nor a peer
    /// may write to it.
    read_only: bool,
    backing: Backing,
}

enum Backing {
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    Pool(pool::PoolMapping),
    Adopted {
        /// Keeps the memory alive; dropped when nothing can touch it any more.
        _owner: Box<dyn Any + Send + Sync>,
    },
    Device(device::OnDevice),
}

/// The owner of a buffer that is only accessed through raw pointers.
struct OwnedBuffer {
    pointer: *mut [u8],
}

// SAFETY: `Memory` owns the buffer and accesses it only by raw copies, which any thread may make.
unsafe impl Send for OwnedBuffer {}
// SAFETY: `OwnedBuffer` has no methods, and `Memory` accesses the buffer only by raw copies.
unsafe impl Sync for OwnedBuffer {}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        // SAFETY: `pointer` came from `Box::into_raw` in `Memory::owned` and is freed once, here.
        drop(unsafe { Box::from_raw(self.pointer) });
    }
}

impl Memory {
    /// Configures a kvx pool: pre-touched shared memory, which other processes of this host read
    /// directly, without a copy by the kernel. The builder can request huge pages and a NUMA node.
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub fn pool(len: usize) -> PoolBuilder {
        PoolBuilder::new(len)
    }

    /// Takes ownership of a buffer. To peers it is like [adopted](Memory::adopt) memory.
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

    /// Adopts host memory that `owner` keeps alive and in place. Over SHM, peers copy it through
    /// the kernel, at about half the speed of a [`pool`](Memory::pool) or an [adopted
    /// file](Memory::adopt_file), which they map.
    ///
    /// # Safety
    /// `base..base + len` is readable and writable until `owner` is dropped. No reference into it
    /// exists while it is registered, because peers and transports write to it at any time. kvx
    /// drops `owner` when nothing can touch the memory any more, which may be never (quarantine).
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

    /// Adopts host memory that peers may only read, because its owner keeps references into it and
    /// reads it meanwhile.
    ///
    /// Writes fail with `PermissionDenied`: [`copy_in`](Memory::copy_in), plans that read into this
    /// memory, and peers' plans that write to it. A backend whose writes have the isolation `Owner`
    /// or `Nic` also stops peers that write anyway. [`Peer::route`](crate::Peer::route) says which
    /// backends do not.
    ///
    /// # Safety
    /// `base..base + len` is readable until `owner` is dropped, and nothing writes to it while it
    /// is registered. If it is registered over a backend whose writes are isolated as
    /// [`Cooperative`](crate::Isolation::Cooperative), that includes every peer: connect only to
    /// peers that are trusted not to write.
    pub unsafe fn adopt_shared(base: *const u8, len: usize, owner: impl Any + Send + Sync) -> Self {
        // SAFETY: the caller upholds the contract of `adopt`, except that the memory may be
        // read-only; every write checks `read_only` first.
        Memory { read_only: true, ..unsafe { Memory::adopt(base.cast_mut(), len, owner) } }
    }

    /// Adopts host memory that a GPU driver has pinned; otherwise like [`adopt`](Memory::adopt).
    ///
    /// # Safety
    /// As for [`adopt`](Memory::adopt); the memory stays pinned until `owner` is dropped.
    pub unsafe fn adopt_pinned(base: *mut u8, len: usize, owner: impl Any + Send + Sync) -> Self {
        // SAFETY: the caller upholds the contract of `adopt`.
        Memory { kind: MemoryKind::Pinned, ..unsafe { Memory::adopt(base, len, owner) } }
    }

    /// Adopts memory of `device`. Only `access` can copy it: memory of its own device, or of
    /// another device that it reaches.
    ///
    /// # Safety
    /// As for [`adopt`](Memory::adopt), for addresses as `access` understands them.
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

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the kind of memory.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Returns the device that holds the memory; [`DeviceId::HOST`] for host memory.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns true if nothing may write to the memory: see [`adopt_shared`](Memory::adopt_shared).
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Checks that the memory may be written.
    ///
    /// # Errors
    /// `PermissionDenied` if it is read-only.
    pub fn check_writable(&self) -> Result<()> {
        if self.read_only && !injected("read-only") {
            Err(read_only("this memory"))
        } else {
            Ok(())
        }
    }

    /// Returns the address: a host pointer, or the device's equivalent.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// Returns a pointer to the first byte. Only host memory may be accessed through it, and only
    /// by raw accesses while the memory is registered.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base as *mut u8
    }

    /// Returns the access that copies the memory, if the CPU cannot reach it.
    pub fn device_access(&self) -> Option<&Arc<dyn DeviceAccess>> {
        match &self.backing {
            Backing::Device(device) => Some(&device.access),
            _ => None,
        }
    }

    /// Returns the properties that the pool was given; `None` for memory that is not a pool.
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub fn pool_properties(&self) -> Option<&PoolProperties> {
        match &self.backing {
            Backing::Pool(pool) => Some(pool.pool_properties()),
            _ => None,
        }
    }

    /// Returns the sealed file behind a pool, to pass to a process that may read it. The memory
    /// starts at offset 0 of the file.
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
            return Err(ErrorKind::OutOfBounds.because(format!(
                "bytes {offset}..+{len} lie outside the memory of {} bytes",
                self.len
            )));
        }
        Ok(())
    }

    /// Copies `bytes` to `offset`. Blocks for device memory, for at most 30 seconds per 64 MiB.
    ///
    /// # Errors
    /// `OutOfBounds` if the bytes do not fit; `PermissionDenied` if the memory is read-only;
    /// `TimedOut` if the device hangs, after which the memory is never freed; an error of the
    /// device; `Forked`.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        self.check_writable()?;
        if let Backing::Device(device) = &self.backing {
            // SAFETY: `check` has checked the range, and the memory's owner keeps it alive as long
            // as `self`.
            return unsafe { device.copy_in(self.base + offset as u64, bytes, device::LONGEST) };
        }
        // SAFETY: `check` has checked the range, and `self` keeps the memory alive. `bytes` cannot
        // overlap it, because no references into registered memory exist. All others that access it
        // copy in the same way, or are not Rust code.
        unsafe { copy_shared(bytes.as_ptr(), self.as_ptr().add(offset), bytes.len()) };
        Ok(())
    }

    /// Fills `bytes` from `offset`. Blocks for device memory, as [`copy_in`](Memory::copy_in).
    ///
    /// # Errors
    /// `OutOfBounds` if the memory ends before; `TimedOut` if the device hangs, after which the
    /// memory is never freed; an error of the device; `Forked`.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        if let Backing::Device(device) = &self.backing {
            // SAFETY: `check` has checked the range, and the memory's owner keeps it alive as long
            // as `self`.
            return unsafe { device.copy_out(self.base + offset as u64, bytes, device::LONGEST) };
        }
        // SAFETY: `check` has checked the range, `self` keeps the memory alive, and `bytes` cannot
        // overlap it because no references into registered memory exist.
        unsafe { copy_shared(self.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies ranges between this device memory and the same ranges of `host`. The copy has full
    /// speed if [`DeviceAccess::pinned`] of the device created `host`. Blocks for at most
    /// `longest`.
    ///
    /// # Errors
    /// - `Unsupported` unless this is device memory and `host` is host memory.
    /// - `OutOfBounds` if a range does not fit into both.
    /// - `PermissionDenied` if the destination is read-only.
    /// - `TimedOut` if the device hangs, after which neither memory is ever freed.
    /// - An error of the device; `Forked`.
    pub fn exchange(
        &self,
        direction: Direction,
        host: &Arc<Memory>,
        ranges: &[Range<usize>],
        longest: Duration,
    ) -> Result<()> {
        let Backing::Device(device) = &self.backing else {
            let why = format!("for {} memory use copy_in and copy_out", self.kind);
            return Err(ErrorKind::Unsupported.because(why));
        };
        if !host.kind.is_host() {
            return Err(ErrorKind::Unsupported
                .because("both memories are on devices: pass host memory as `host`"));
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
        // SAFETY: `check` has checked the ranges on both sides; this memory's owner keeps the
        // device side alive, and `host` the host side.
        unsafe { device.exchange(direction, &pieces, host, longest) }
    }

    /// Returns the bytes of `range`, in place.
    ///
    /// # Safety
    /// Nothing writes to the range while the slice lives: no transfer into it is in flight, and no
    /// peer may write to it.
    ///
    /// # Errors
    /// `OutOfBounds` if the range does not fit; `Unsupported` for device memory; `Forked`.
    pub unsafe fn block(&self, range: Range<usize>) -> Result<&[u8]> {
        self.check(range.start, range.end.saturating_sub(range.start))?;
        if !self.kind.is_host() {
            return Err(ErrorKind::Unsupported.because("device memory has no slice: use copy_out"));
        }
        // SAFETY: `check` has checked the range and `self` keeps the memory alive; the caller
        // promises that nothing writes to it.
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
