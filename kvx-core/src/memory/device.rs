//! What core asks of a crate that knows a GPU: asynchronous copies and pinned host memory. Core calls no driver.

use std::sync::Arc;

use crate::completion::Completion;
use crate::{Deadline, Memory, MemoryKind, Result, Ticket};

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

/// A GPU's memory as core needs it. `kvx-cuda` and `kvx-rocm` implement it; the test kit has a plain one.
///
/// # Safety
/// The memory of a [`copy`](DeviceAccess::copy) is touched only until its ticket settles.
pub unsafe trait DeviceAccess: Send + Sync {
    /// The kind of memory it copies.
    fn kind(&self) -> MemoryKind;

    /// Host memory that copies reach at full speed.
    fn pinned(&self, len: usize) -> Result<Memory>;

    /// Starts the copies and returns; `done` settles when all bytes have arrived, from any thread.
    ///
    /// # Safety
    /// Each piece names valid memory on both sides until `done` has settled.
    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket);
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
