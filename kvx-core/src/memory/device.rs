//! Copies of device memory and pinned host memory, which a crate that knows a GPU provides. Core calls no driver.

use std::any::Any;
#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::completion::Completion;
use crate::ticket::Ticket;
use crate::{Error, ErrorKind, Memory, MemoryKind, Result, kept};

/// A device, by the UUID or PCI address that its crate gives it: ordinals differ from process to process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(pub [u8; 16]);

impl DeviceId {
    /// No device: host memory.
    pub const HOST: DeviceId = DeviceId([0; 16]);
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// One contiguous copy between a device and the host.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Address on the device.
    pub device: u64,
    /// Address on the host.
    pub host: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: a piece is two addresses; who may touch them is what the contract of `DeviceAccess::copy` settles.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// One contiguous copy within a device, or between two that reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Address it is read from.
    pub from: u64,
    /// Address it is written to.
    pub to: u64,
    /// Bytes.
    pub len: usize,
}

/// A range of device memory as another process of this host opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The name of the allocation with the driver; at most [`IpcHandle::LONGEST`] bytes.
    pub bytes: Vec<u8>,
    /// The offset of the range in the allocation.
    pub offset: u64,
}

impl IpcHandle {
    /// The most bytes that a handle has.
    pub const LONGEST: usize = 256;
}

/// A range of device memory as a descriptor that cards of other makers register.
#[cfg(unix)]
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub file: OwnedFd,
    /// The offset of the range in it.
    pub offset: u64,
}

/// A GPU's memory as core needs it. `kvx-cuda` and `kvx-rocm` implement it; the test kit has a plain one.
///
/// # Safety
/// The memory of a [`copy`](DeviceAccess::copy) is touched only until its ticket settles.
pub unsafe trait DeviceAccess: Send + Sync {
    /// The kind of memory it copies.
    fn kind(&self) -> MemoryKind;

    /// The device whose memory it copies.
    fn device(&self) -> DeviceId;

    /// The number that the driver gives the device in this process, for libraries that ask for one.
    fn ordinal(&self) -> u32;

    /// Host memory that copies reach at full speed.
    fn pinned(&self, len: usize) -> Result<Memory>;

    /// Starts the copies and returns; `done` settles when all bytes have arrived, from any thread.
    ///
    /// # Safety
    /// Each piece names valid memory on both sides until `done` has settled.
    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket);

    /// Starts copies within the device, or from memory that was [`open`](DeviceAccess::open)ed; as
    /// [`copy`](DeviceAccess::copy).
    ///
    /// # Safety
    /// Each hop names valid memory on both sides until `done` has settled.
    unsafe fn hop(&self, hops: &[Hop], done: Ticket) {
        _ = hops;
        done.settle(Err(cannot(self.kind(), "copies within the device")));
    }

    /// Lets other processes of this host open a range of its memory, for as long as this process lives and the memory
    /// is not freed. Errors: `Unsupported`, with the reason and the cure, for memory that the driver cannot share.
    fn share(&self, address: u64, len: usize) -> Result<IpcHandle> {
        _ = (address, len);
        Err(cannot(self.kind(), "sharing with other processes"))
    }

    /// Opens what another process shared: memory of the device `owner`, which may be another than this one if the two
    /// reach each other. It is closed when the memory is dropped. What its bytes are when the owner has died is not
    /// said: whoever copies from it looks whether the owner lives, afterwards. Errors: `Unsupported`, `Malformed`,
    /// `PeerLost` for an owner that is gone.
    fn open(self: Arc<Self>, owner: DeviceId, handle: &IpcHandle, len: usize) -> Result<Memory> {
        _ = (owner, handle, len);
        Err(cannot(self.kind(), "memory of other processes"))
    }

    /// A descriptor of a range of its memory. Errors: `Unsupported`, with the reason and the cure.
    #[cfg(unix)]
    fn dma_buf(&self, address: u64, len: usize) -> Result<DmaBuf> {
        _ = (address, len);
        Err(cannot(self.kind(), "dma-buf descriptors"))
    }
}

fn cannot(kind: MemoryKind, what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this access to {kind} memory has no {what}"))
}

/// The longest that a caller waits for a part of its copy.
pub(super) const LONGEST: Duration = Duration::from_secs(30);
/// The most bytes of a part.
const PART: usize = 64 << 20;

/// Device memory, and who copies it and keeps it.
pub(super) struct OnDevice {
    pub(super) access: Arc<dyn DeviceAccess>,
    pub(super) owner: Arc<dyn Any + Send + Sync>,
}

impl OnDevice {
    /// Copies `bytes` to `device`, and waits.
    ///
    /// # Safety
    /// The range is memory of this device that the owner keeps.
    pub(super) unsafe fn copy_in(
        &self,
        device: u64,
        bytes: &[u8],
        longest: Duration,
    ) -> Result<()> {
        for (at, part) in bytes.chunks(PART).enumerate() {
            // SAFETY: within the caller's range.
            unsafe {
                self.part(Direction::ToDevice, device + (at * PART) as u64, part.into(), longest)
            }?;
        }
        Ok(())
    }

    /// Copies from `device` into `bytes`, and waits.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    pub(super) unsafe fn copy_out(
        &self,
        device: u64,
        bytes: &mut [u8],
        longest: Duration,
    ) -> Result<()> {
        for (at, part) in bytes.chunks_mut(PART).enumerate() {
            let room = vec![0; part.len()].into();
            // SAFETY: within the caller's range.
            let got = unsafe {
                self.part(Direction::ToHost, device + (at * PART) as u64, room, longest)
            }?;
            part.copy_from_slice(&got);
        }
        Ok(())
    }

    /// Copies ranges between this device and memory of the host that is registered too, and waits.
    ///
    /// # Safety
    /// Each piece names memory of this device that the owner keeps, and memory that `host` keeps.
    pub(super) unsafe fn exchange(
        &self,
        direction: Direction,
        pieces: &[Piece],
        host: &Arc<Memory>,
        longest: Duration,
    ) -> Result<()> {
        let (completion, ticket) = Completion::with_ticket();
        // SAFETY: the caller's promise; both sides are kept for ever if the device does not say that it is done.
        unsafe { self.access.copy(direction, pieces, ticket) };
        let ended = completion.wait_blocking(longest);
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        ended.map_err(|error| self.kept(&error, bytes, longest, Arc::clone(host)).unwrap_or(error))
    }

    /// What is said of a copy that may go on for ever, whose memory nobody frees then. `None`: it has ended.
    fn kept<T: 'static>(
        &self,
        error: &Error,
        len: usize,
        longest: Duration,
        host: T,
    ) -> Option<Error> {
        let late = match error.kind() {
            ErrorKind::TimedOut => {
                format!("has not copied {len} bytes within {longest:?}: see whether it hangs")
            }
            ErrorKind::Forgotten => {
                format!("lost the copy of {len} bytes: report this as a bug of its access")
            }
            _ => return None,
        };
        kept::note(len as u64, "device memory", "a device has not ended a copy");
        std::mem::forget((Arc::clone(&self.owner), host));
        let why = format!("the device {late}; the memory on both sides is never freed");
        Some(Error::new(error.kind(), why))
    }

    /// One copy by a buffer that can be left to the device, should it not say in time that it is done.
    unsafe fn part(
        &self,
        direction: Direction,
        device: u64,
        buffer: Box<[u8]>,
        longest: Duration,
    ) -> Result<Box<[u8]>> {
        let (completion, ticket) = Completion::with_ticket();
        let (len, host) = (buffer.len(), Box::into_raw(buffer));
        // SAFETY: the caller's promise for the device's side; the host's is a buffer that is freed below, once the
        // ticket has settled, and else never.
        unsafe { self.access.copy(direction, &[Piece { device, host: host.cast(), len }], ticket) };
        if let Err(error) = completion.wait_blocking(longest) {
            // A buffer that is left to the device is a pointer, and so never freed.
            if let Some(late) = self.kept(&error, len, longest, ()) {
                return Err(late);
            }
            // SAFETY: it came from `into_raw`, and the device is done with it.
            drop(unsafe { Box::from_raw(host) });
            return Err(error);
        }
        // SAFETY: as above.
        Ok(unsafe { Box::from_raw(host) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    /// Keeps each ticket for ever.
    #[derive(Default)]
    struct Hangs(Mutex<Vec<Ticket>>);

    // SAFETY: it touches no memory.
    unsafe impl DeviceAccess for Hangs {
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
            self.0.lock().push(done);
        }
    }

    #[test]
    fn a_copy_on_a_device_that_hangs_ends_by_its_deadline_and_its_memory_is_kept() {
        let (kept, before) = (Arc::new([0_u8; 64]), kept::quarantined_bytes());
        let device = OnDevice { access: Arc::new(Hangs::default()), owner: Arc::clone(&kept) as _ };
        let soon = Duration::from_millis(20);
        // SAFETY: the access touches nothing.
        let (in_, out) =
            unsafe { (device.copy_in(64, &[7; 8], soon), device.copy_out(64, &mut [0; 8], soon)) };
        for late in [in_, out] {
            let late = late.unwrap_err();
            assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
            assert!(late.to_string().contains("hangs"), "{late}");
        }
        drop(device);
        assert_eq!(Arc::strong_count(&kept), 3, "one for each copy that may still come");
        assert!(kept::quarantined_bytes() >= before + 16);
    }
}
