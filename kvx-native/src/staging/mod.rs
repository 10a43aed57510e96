//! The staging adaptor: device memory for transports that move bytes with the CPU, through pinned
//! bounce buffers.
//!
//! A [`Stager`] belongs to one machine (a [`Progress`](kvx_backend::reactor::Progress), on Linux)
//! and one device's [`DeviceAccess`]. The machine makes a [`Fetch`] for blocks that it is to send
//! and a [`Store`] for blocks that it is to receive; both are streams of bytes in the order of
//! their [`Extents`], and neither ever blocks. Several bounce buffers of one stream are in flight
//! at a time, so that copying and sending overlap.
//!
//! Sending, on each turn of the machine; all bytes are sent when nothing is [`left`](Fetch::left):
//!
//! ```text
//! loop {
//!     fetch.resume()?; // an error: the stream has failed; stop it
//!     if fetch.bytes().is_empty() { break }
//!     match socket.write(fetch.bytes()) { Ok(n) => fetch.sent(n), WouldBlock => break }
//! }
//! ```
//!
//! Receiving; all bytes are on the device when nothing is [`left`](Store::left):
//!
//! ```text
//! while let Some(room) = store.room()? {
//!     match socket.read(room) { Ok(n) => store.received(n), WouldBlock => { store.pause(); break } }
//! }
//! ```
//!
//! When a stream can go on, because a copy has ended or a buffer has come free, its token is handed
//! to the function that the stager was made with: it tells the machine to give that stream a turn.
//! It is called on any thread, perhaps in the middle of a call into this module and so of the
//! machine's own turn, without any lock: let it submit a command. It may come for nothing, and once
//! more after a stream is dropped.
//!
//! **Who may settle.** A transfer, or a revocation, that concerns the device memory of a stream may
//! settle only when [`copies`](Fetch::copies) of a stopped or finished stream says
//! [`Settled`](Copies::Settled); at [`Lost`](Copies::Lost) its ticket must be dropped: the device
//! may still touch the memory. Dropping a stream frees nothing early: each copy keeps its buffer
//! and its memory.
//!
//! **Limits.** Fetches and stores have a pool of buffers each. With one pool two agents that read
//! from each other could fill theirs with bytes to be sent and have none left to receive the
//! other's. Streams that wait for a buffer get it in the order in which they asked. A receiving
//! stream whose socket is dry gives its buffer back when others wait ([`Store::pause`]), and a
//! sending one whose peer does not read gives back all of its ([`Fetch::rewind`]): no peer can keep
//! the buffers from the others.

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
use kvx_core::{DeviceAccess, Error, ErrorKind, Memory, Result};

pub(crate) use ends::{Fetch, Store};
use pool::Pool;
use stream::{SharedStream, Stream, StreamBlocks};

/// How many bounce buffers there are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffers {
    /// Bytes of one.
    pub(crate) len: usize,
    /// The most of them for fetches, and again for stores. Made when first needed.
    pub(crate) count: usize,
    /// The most that one stream has in use at a time.
    pub(crate) depth: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers { len: 1 << 20, count: 16, depth: 4 }
    }
}

/// Where the copies of a stream stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// The device may touch the stream's memory.
    InFlight,
    /// It does not.
    Settled,
    /// A copy's ticket was lost: it may, for ever. Drop the ticket of whatever waits for this.
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
    /// A stager for memory of `access`; `wake` is called with the token of a stream that can go on.
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

    /// Makes all buffers now: pinning memory takes time that a machine should not spend in a turn.
    /// Call it where blocking is allowed, as in `register`. Errors: what the device says; `Invalid`
    /// if it gives no host memory.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.fetches.fill()?;
        self.stores.fill()
    }

    /// Some streams may keep their buffers for long: the others have as many without these, if
    /// there are few.
    pub(crate) fn do_without_some(&self) {
        self.fetches.do_without_some();
        self.stores.do_without_some();
    }

    /// The device whose memory it moves.
    pub(crate) fn access(&self) -> &Arc<dyn DeviceAccess> {
        &self.access
    }

    /// A stream of bytes from the device: the blocks of `extents`, whose region `i` lies in
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

    /// A stream of bytes to the device; see [`fetch`](Stager::fetch).
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
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{} memory of another device: stage it with the access it was adopted with",
                        memory.kind()
                    ),
                ));
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
