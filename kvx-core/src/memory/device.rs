//! Copies of device memory and pinned host memory, which a crate that knows a GPU provides. Core calls no driver.

#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::completion::Completion;
use crate::{Deadline, Error, Kind, Memory, MemoryKind, Result, Ticket};

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
    Error::new(Kind::Unsupported, format!("this access to {kind} memory has no {what}"))
}

/// One copy, waited for.
///
/// # Safety
/// As [`DeviceAccess::copy`]; the memory need only live for the call.
pub(super) unsafe fn copy_and_wait(
    access: &Arc<dyn DeviceAccess>,
    direction: Direction,
    piece: Piece,
) -> Result<()> {
    if piece.len == 0 {
        return Ok(());
    }
    let (completion, ticket) = Completion::with_ticket();
    // SAFETY: the caller's promise; the wait below has no deadline because the memory is borrowed, and a driver that
    // forgets its ticket resolves it with an error.
    unsafe { access.copy(direction, &[piece], ticket) };
    completion.wait(Deadline::never())
}
