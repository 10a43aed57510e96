//! The staging adaptor: device memory for transports that move bytes with the CPU, through pinned
//! bounce buffers.
//!
//! A [`Stager`] belongs to one machine (a [`Progress`](kvx_backend::reactor::Progress), on Linux)
//! and one device's [`DeviceAccess`]. The machine creates a [`Fetch`] for blocks to send and a
//! [`Store`] for blocks to receive. Both are streams of bytes in the order of their [`Extents`],
//! and neither ever blocks. Several bounce buffers of one stream are in flight concurrently, so
//! that copying and sending overlap.
//!
//! Sending, on each turn of the machine; all bytes are sent when none is [`left`](Fetch::left):
//!
//! ```text
//! loop {
//!     fetch.resume()?; // an error: the stream has failed; stop it
//!     if fetch.bytes().is_empty() { break }
//!     match socket.write(fetch.bytes()) { Ok(n) => fetch.sent(n), WouldBlock => break }
//! }
//! ```
//!
//! Receiving; all bytes are on the device when none is [`left`](Store::left):
//!
//! ```text
//! while let Some(room) = store.room()? {
//!     match socket.read(room) { Ok(n) => store.received(n), WouldBlock => { store.pause(); break } }
//! }
//! ```
//!
//! When a stream can continue, because a copy has ended or a buffer is free, the stager calls the
//! function that it was created with, with the stream's token. The function makes the machine give
//! that stream a turn. Any thread may call it, possibly during a call into this module and so
//! during the machine's own turn, but never under a lock: let it submit a command. A call may be
//! spurious, and may happen once more after a stream is dropped.
//!
//! **Settling.** A transfer or revocation that uses the device memory of a stream may settle only
//! when [`copies`](Fetch::copies) of a stopped or finished stream returns
//! [`Settled`](Copies::Settled). On [`Lost`](Copies::Lost) its ticket must be dropped, because the
//! device may still touch the memory. Dropping a stream frees nothing early: each copy keeps its
//! buffer and its memory.
//!
//! **Limits.** Fetches and stores have separate pools of buffers. With one pool, two agents that
//! read from each other could fill theirs with bytes to send and have none left to receive the
//! other's. Streams that wait for a buffer get it in the order of their requests. A receiving
//! stream without available bytes returns its buffer when others wait ([`Store::pause`]), and a
//! sending one whose peer does not read returns all of its buffers ([`Fetch::rewind`]), so that no
//! peer can withhold the buffers from the others.

mod ends;
mod pool;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use kvx_core::backend::Extents;
use kvx_core::backend::sync::Mutex;
use kvx_core::{DeviceAccess, ErrorKind, Memory, Result};

pub(crate) use ends::{Fetch, Store};
use pool::Pool;
use stream::{SharedStream, Stream, StreamBlocks};

/// The number and size of bounce buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffers {
    /// The size of one buffer in bytes.
    pub(crate) len: usize,
    /// The limit for buffers of fetches, and separately for those of stores. They are allocated
    /// when first needed.
    pub(crate) count: usize,
    /// The limit for the buffers of one stream at a time.
    pub(crate) depth: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers { len: 1 << 20, count: 16, depth: 4 }
    }
}

/// The state of a stream's copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// The device may touch the stream's memory.
    InFlight,
    /// The device does not touch the stream's memory.
    Settled,
    /// A copy's ticket was lost: the device may touch the memory for ever. Drop the ticket of each
    /// operation that waits for this.
    Lost,
}

/// Moves the memory of one device through bounce buffers. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Stager {
    access: Arc<dyn DeviceAccess>,
    depth: usize,
    fetches: Arc<Pool>,
    stores: Arc<Pool>,
    wake: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Stager {
    /// Creates a stager for memory of `access`. It calls `wake` with the token of a stream that can
    /// continue.
    pub(crate) fn new(
        access: Arc<dyn DeviceAccess>,
        buffers: Buffers,
        wake: impl Fn(u64) + Send + Sync + 'static,
    ) -> Self {
        let pool = || {
            Arc::new(Pool {
                access: Arc::clone(&access),
                len: buffers.len.max(1),
                count: buffers.count.max(1),
                state: Mutex::default(),
            })
        };
        let (fetches, stores) = (pool(), pool());
        Stager { access, depth: buffers.depth.max(1), fetches, stores, wake: Arc::new(wake) }
    }

    /// Allocates all buffers now, because pinning memory takes time that a machine should not spend
    /// in a turn. Call it where blocking is allowed, as in `register`. Returns the device's error,
    /// or `Invalid` if the device provides no host memory.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.fetches.fill()?;
        self.stores.fill()
    }

    /// Allows additional buffers if none is free: some streams may keep theirs for long.
    pub(crate) fn do_without_some(&self) {
        self.fetches.do_without_some();
        self.stores.do_without_some();
    }

    /// Returns the device whose memory it moves.
    pub(crate) fn access(&self) -> &Arc<dyn DeviceAccess> {
        &self.access
    }

    /// Creates a stream of bytes from the device: the blocks of `extents`, whose region `i` lies in
    /// `memories[i]`.
    ///
    /// # Errors
    /// `Unsupported` for memory of another device.
    pub(crate) fn fetch(
        &self,
        token: u64,
        memories: Vec<Arc<Memory>>,
        extents: Extents,
    ) -> Result<Fetch> {
        let stream = self.stream(token, memories, extents, &self.fetches)?;
        Ok(Fetch { stream, copied: VecDeque::new(), at: 0 })
    }

    /// Creates a stream of bytes to the device; see [`fetch`](Stager::fetch).
    ///
    /// # Errors
    /// `Unsupported` for memory of another device.
    pub(crate) fn store(
        &self,
        token: u64,
        memories: Vec<Arc<Memory>>,
        extents: Extents,
    ) -> Result<Store> {
        let stream = self.stream(token, memories, extents, &self.stores)?;
        Ok(Store { stream, filling: None })
    }

    fn stream(
        &self,
        token: u64,
        memories: Vec<Arc<Memory>>,
        extents: Extents,
        pool: &Arc<Pool>,
    ) -> Result<Stream> {
        for memory in &memories {
            let ours =
                memory.device_access().is_some_and(|access| Arc::ptr_eq(access, &self.access));
            if !ours {
                return Err(ErrorKind::Unsupported.because(format!(
                    "{} memory of another device: stage it with the access it was adopted with",
                    memory.kind()
                )));
            }
        }
        let shared = SharedStream { token, wake: Arc::clone(&self.wake), events: Mutex::default() };
        Ok(Stream {
            access: Arc::clone(&self.access),
            depth: self.depth,
            pool: Arc::clone(pool),
            blocks: StreamBlocks { extents, back: VecDeque::new() },
            shared: Arc::new(shared),
            memories: memories.into(),
            planned: Vec::new(),
            pieces: Vec::new(),
            started: VecDeque::new(),
            first: 0,
            spare: Vec::new(),
            failed: None,
        })
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Stager({}, {:?} to fetch, {:?} to store)",
            self.access.kind(),
            self.fetches,
            self.stores
        )
    }
}
