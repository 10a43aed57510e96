//! Copies of device memory and pinned host memory. A crate for the GPU provides them; core calls no
//! driver.

use std::any::Any;
#[cfg(unix)]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::completion::Completion;
use crate::ticket::Ticket;
use crate::{Error, ErrorKind, Memory, MemoryKind, Result, kept};

/// A device, by its UUID or PCI address. Ordinals differ from process to process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(pub [u8; 16]);

impl DeviceId {
    /// Host memory, which is on no device.
    pub const HOST: DeviceId = DeviceId([0; 16]);
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// A contiguous copy between a device and the host.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The address on the device.
    pub device: u64,
    /// The address on the host.
    pub host: *mut u8,
    /// The length in bytes.
    pub len: usize,
}

// SAFETY: a piece consists of two addresses. Callers of `DeviceAccess::copy` uphold when they may
// be accessed.
unsafe impl Send for Piece {}
// SAFETY: a piece has no methods; callers of `DeviceAccess::copy` uphold when its addresses may be
// accessed.
unsafe impl Sync for Piece {}

/// A contiguous copy within a device, or between two devices that reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The address to read from.
    pub from: u64,
    /// The address to write to.
    pub to: u64,
    /// The length in bytes.
    pub len: usize,
}

/// A range of device memory that another process of this host can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The driver's name for the allocation; at most [`IpcHandle::LONGEST`] bytes.
    pub bytes: Vec<u8>,
    /// The offset of the range in the allocation.
    pub offset: u64,
}

impl IpcHandle {
    /// The maximum number of bytes in a handle.
    pub const LONGEST: usize = 256;
}

/// The process at the other end of a link, as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub struct LinkProcess<'a> {
    /// Its number in the PID namespace of this process; 0 if it is not visible here.
    pub number: u32,
    /// A pidfd of it; `None` if the kernel provides none.
    #[cfg(unix)]
    pub pidfd: Option<BorrowedFd<'a>>,
    /// This system has no pidfds.
    #[cfg(not(unix))]
    pub pidfd: Option<&'a std::convert::Infallible>,
}

/// A range of device memory, as a descriptor that other vendors' network cards can register.
#[cfg(unix)]
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub file: OwnedFd,
    /// The offset of the range in the descriptor's memory.
    pub offset: u64,
}

/// Receives memory, or the reason why there is none, on any thread. That may be the thread that
/// makes the device's blocking calls: it must not wait there for the device, as
/// [`pinned`](DeviceAccess::pinned), [`open`](DeviceAccess::open) and building a pool do.
pub type MemoryReceiver = Box<dyn FnOnce(Result<Memory>) + Send>;

/// Access to the memory of a GPU. `kvx-cuda` and `kvx-rocm` implement it; `kvx-testkit` has a
/// simple one.
///
/// # Safety
/// The implementation accesses the memory of a [`copy`](DeviceAccess::copy) only until its ticket
/// settles.
pub unsafe trait DeviceAccess: Send + Sync {
    /// Returns the kind of memory that this access copies.
    fn kind(&self) -> MemoryKind;

    /// Returns the device whose memory this access copies.
    fn device(&self) -> DeviceId;

    /// Returns the number that the driver gives the device in this process, for libraries that need
    /// it.
    fn ordinal(&self) -> u32;

    /// Allocates host memory that copies access at full speed. May wait for the driver.
    ///
    /// # Errors
    /// An error of the driver.
    fn pinned(&self, len: usize) -> Result<Memory>;

    /// Like [`pinned`](DeviceAccess::pinned), for threads that must not wait for the driver. The
    /// default implementation waits.
    fn pinned_later(self: Arc<Self>, len: usize, done: MemoryReceiver) {
        done(self.pinned(len));
    }

    /// Starts the copies and returns. `done` settles when all bytes have arrived, from any thread.
    ///
    /// # Safety
    /// Each piece names valid memory on both sides until `done` has settled.
    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket);

    /// Starts copies within the device, or from memory that was [`open`](DeviceAccess::open)ed,
    /// like [`copy`](DeviceAccess::copy).
    ///
    /// # Safety
    /// Each hop names valid memory on both sides until `done` has settled.
    unsafe fn hop(&self, hops: &[Hop], done: Ticket) {
        _ = hops;
        done.settle(Err(cannot(self.kind(), "copies within the device")));
    }

    /// Returns true if the device sees what network cards have written to its memory only after a
    /// [`flush`](DeviceAccess::flush). Does not call the driver.
    fn needs_flush(&self) -> bool {
        false
    }

    /// Makes what network cards have written to the device's memory so far visible to the device.
    /// Returns at once; `done` settles when it is visible, in the order of the calls.
    fn flush(&self, done: Ticket) {
        done.settle(Ok(()));
    }

    /// Lets other processes of this host open memory of the device, as long as this process lives
    /// and the memory is not freed.
    ///
    /// # Errors
    /// `Unsupported`, with the reason and the cure, if the driver cannot share the memory.
    fn share(&self, memory: &Arc<Memory>) -> Result<IpcHandle> {
        _ = memory;
        Err(cannot(self.kind(), "sharing with other processes"))
    }

    /// Opens memory that the peer in `process` shared. The memory is on the device `owner`, which
    /// may differ from this one if the two reach each other. Dropping the returned memory closes
    /// it.
    ///
    /// A handle comes from the peer, and may name any process. If it names another process than
    /// `process`, it is not opened, even if that process has shared the memory with this one.
    ///
    /// The bytes are unspecified once the process that shared them has died. After a copy, check
    /// that it was still alive.
    ///
    /// May wait for the driver.
    ///
    /// # Errors
    /// `Unsupported` if the driver cannot open it; `Malformed` for a wrong handle;
    /// `PermissionDenied` for one that names another process; `PeerLost` if the process that shared
    /// it is gone.
    fn open(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<Memory> {
        _ = (owner, process, handle, len);
        Err(cannot(self.kind(), "memory of other processes"))
    }

    /// Like [`open`](DeviceAccess::open), for threads that must not wait for the driver. The
    /// default implementation waits.
    fn open_later(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
        done: MemoryReceiver,
    ) {
        done(self.open(owner, process, handle, len));
    }

    /// Settles `done` once all memory of other processes is closed that was dropped before. Until
    /// then its owner must not free it. The default implementation settles at once, for memory that
    /// is closed when it is dropped.
    fn after_closes(&self, done: Ticket) {
        done.settle(Ok(()));
    }

    /// Returns a descriptor of a range of the device's memory.
    ///
    /// # Errors
    /// `Unsupported`, with the reason and the cure.
    #[cfg(unix)]
    fn dma_buf(&self, address: u64, len: usize) -> Result<DmaBuf> {
        _ = (address, len);
        Err(cannot(self.kind(), "dma-buf descriptors"))
    }
}

fn cannot(kind: MemoryKind, what: &str) -> Error {
    ErrorKind::Unsupported.because(format!("this access to {kind} memory has no {what}"))
}

/// How long a caller waits for one part of its copy.
pub(super) const LONGEST: Duration = Duration::from_secs(30);
/// The maximum number of bytes in a part.
const PART: usize = 64 << 20;

/// Device memory, its access and its owner.
pub(super) struct OnDevice {
    pub(super) access: Arc<dyn DeviceAccess>,
    pub(super) owner: Arc<dyn Any + Send + Sync>,
}

impl OnDevice {
    /// Copies `bytes` to `device` and waits.
    ///
    /// # Safety
    /// The range is memory of this device that the owner keeps alive.
    pub(super) unsafe fn copy_in(
        &self,
        device: u64,
        bytes: &[u8],
        longest: Duration,
    ) -> Result<()> {
        for (at, part) in bytes.chunks(PART).enumerate() {
            // SAFETY: the part lies within the range for which the caller upholds the contract.
            unsafe {
                self.part(Direction::ToDevice, device + (at * PART) as u64, part.into(), longest)
            }?;
        }
        Ok(())
    }

    /// Copies from `device` into `bytes` and waits.
    ///
    /// # Safety
    /// As for [`copy_in`](Self::copy_in).
    pub(super) unsafe fn copy_out(
        &self,
        device: u64,
        bytes: &mut [u8],
        longest: Duration,
    ) -> Result<()> {
        for (at, part) in bytes.chunks_mut(PART).enumerate() {
            let room = vec![0; part.len()].into();
            // SAFETY: the part lies within the range for which the caller upholds the contract.
            let got = unsafe {
                self.part(Direction::ToHost, device + (at * PART) as u64, room, longest)
            }?;
            part.copy_from_slice(&got);
        }
        Ok(())
    }

    /// Copies ranges between this device and registered host memory, and waits.
    ///
    /// # Safety
    /// Each piece names memory of this device that the owner keeps alive, and memory that `host`
    /// keeps alive.
    pub(super) unsafe fn exchange(
        &self,
        direction: Direction,
        pieces: &[Piece],
        host: &Arc<Memory>,
        longest: Duration,
    ) -> Result<()> {
        let (completion, ticket) = Completion::with_ticket();
        // SAFETY: the caller promises valid pieces, and `kept` keeps both sides for ever if the
        // device does not report the end.
        unsafe { self.access.copy(direction, pieces, ticket) };
        let ended = completion.wait_blocking(longest);
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        ended.map_err(|error| self.kept(&error, bytes, longest, Arc::clone(host)).unwrap_or(error))
    }

    /// Keeps the memory of a copy that may never end, and returns the error that says so. Returns
    /// `None` if the copy has ended.
    fn kept<T: 'static>(
        &self,
        error: &Error,
        len: usize,
        longest: Duration,
        host: T,
    ) -> Option<Error> {
        let late = match error.kind() {
            ErrorKind::TimedOut => {
                format!("has not copied {len} bytes within {longest:?}: check whether it hangs")
            }
            ErrorKind::Forgotten => {
                format!("lost the copy of {len} bytes: report this as a bug in its access")
            }
            _ => return None,
        };
        kept::note(len as u64, "device memory", "a device has not ended a copy");
        std::mem::forget((Arc::clone(&self.owner), host));
        let why = format!("the device {late}; the memory on both sides is never freed");
        Some(Error::new(error.kind(), why))
    }

    /// Copies one part through a buffer that can be left to the device if it does not finish in
    /// time.
    ///
    /// # Safety
    /// As for [`copy_in`](Self::copy_in), for `buffer.len()` bytes.
    unsafe fn part(
        &self,
        direction: Direction,
        device: u64,
        buffer: Box<[u8]>,
        longest: Duration,
    ) -> Result<Box<[u8]>> {
        let (completion, ticket) = Completion::with_ticket();
        let (len, host) = (buffer.len(), Box::into_raw(buffer));
        // SAFETY: the caller upholds the contract for the device's side. The host's side is a
        // buffer that is freed below once the ticket has settled, and otherwise never.
        unsafe { self.access.copy(direction, &[Piece { device, host: host.cast(), len }], ticket) };
        if let Err(error) = completion.wait_blocking(longest) {
            // A buffer that is left to the device is a raw pointer, so it is never freed.
            if let Some(late) = self.kept(&error, len, longest, ()) {
                return Err(late);
            }
            // SAFETY: `host` came from `into_raw`, and the device has finished with it.
            drop(unsafe { Box::from_raw(host) });
            return Err(error);
        }
        // SAFETY: `host` came from `into_raw`, and the device has finished with it.
        Ok(unsafe { Box::from_raw(host) })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sync::Mutex;

    /// A device without memory, which keeps the tickets of its copies for ever and loses the ticket
    /// of its first flush.
    #[derive(Default)]
    pub(crate) struct FaultyDevice {
        copies: Mutex<Vec<Ticket>>,
        flushed: Mutex<bool>,
    }

    // SAFETY: it accesses no memory.
    unsafe impl DeviceAccess for FaultyDevice {
        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda
        }
        fn device(&self) -> DeviceId {
            DeviceId([1; 16])
        }
        fn ordinal(&self) -> u32 {
            0
        }
        fn pinned(&self, len: usize) -> Result<Memory> {
            Ok(Memory::owned(vec![0; len]))
        }
        unsafe fn copy(&self, _: Direction, _: &[Piece], done: Ticket) {
            self.copies.lock().push(done);
        }
        fn needs_flush(&self) -> bool {
            true
        }
        fn flush(&self, done: Ticket) {
            if std::mem::replace(&mut *self.flushed.lock(), true) {
                done.settle(Ok(()));
            }
        }
    }

    #[test]
    fn a_copy_on_a_device_that_hangs_ends_by_its_deadline_and_its_memory_is_kept() {
        let (kept, before) = (Arc::new([0_u8; 64]), kept::quarantined_bytes());
        let access = Arc::new(FaultyDevice::default());
        let device = OnDevice { access, owner: Arc::clone(&kept) as _ };
        let soon = Duration::from_millis(20);
        // SAFETY: the access touches no memory.
        let (in_, out) =
            unsafe { (device.copy_in(64, &[7; 8], soon), device.copy_out(64, &mut [0; 8], soon)) };
        for late in [in_, out] {
            let late = late.unwrap_err();
            assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
            assert!(late.to_string().contains("hangs"), "{late}");
        }
        drop(device);
        assert_eq!(Arc::strong_count(&kept), 3, "one for each copy that may still happen");
        assert!(kept::quarantined_bytes() >= before + 16);
    }
}
