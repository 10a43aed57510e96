//! A native library as the machine drives it: the traits that a backend implements, and their
//! types.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::{ForeignRange, RemoteSpec};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, Memory, RegionId, Result};

use super::job::Job;
use crate::reactor::{Armed, Turn};

/// The number of one end of a link within a [`Fabric`]. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub(crate) u64);

/// The number of a transfer within a [`Fabric`]. It is reused only after the last piece of its
/// transfer was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub(crate) usize);

impl EndpointId {
    /// Returns the number, for use in a C callback.
    pub fn number(self) -> u64 {
        self.0
    }

    /// Returns the endpoint with this [`number`](EndpointId::number).
    pub fn from_number(number: u64) -> Self {
        EndpointId(number)
    }
}

impl JobId {
    /// Returns the number, for use in a C callback.
    pub fn number(self) -> usize {
        self.0
    }

    /// Returns the job with this [`number`](JobId::number).
    pub fn from_number(number: usize) -> Self {
        JobId(number)
    }
}

/// A native library with its handles, as the machine drives it.
///
/// # Safety
///
/// The library touches local memory of a [`Job`] only for pieces that were posted and whose
/// completion [`Event::Completed`] has not reported yet. After [`stop`](Fabric::stop) has returned
/// true it touches none.
pub unsafe trait Fabric: Send + 'static {
    /// The library's registration of a local region. Dropped on any thread, once the region is no
    /// longer registered with kvx.
    type Local: Send + Sync + 'static;
    /// An endpoint's access to a region of its peer, such as an unpacked key. Dropped on a thread
    /// that has the machine, after the last piece that used it and before
    /// [`disconnect`](Fabric::disconnect).
    type Remote: Send + Sync + 'static;
    /// The state that the library keeps for each [`Job`].
    type State: Default + Send + 'static;

    /// Creates an endpoint to `address` and returns at once. Until the endpoint is ready,
    /// [`send`](Fabric::send) returns [`SendStatus::Later`]; if it never becomes ready,
    /// [`poll`](Fabric::poll) reports [`Event::Broken`].
    ///
    /// # Errors
    /// `Malformed` for an invalid address, `PeerLost` where no process listens.
    fn connect(&mut self, endpoint: EndpointId, peer: &Identity, address: &[u8]) -> Result<()>;

    /// Like [`connect`](Fabric::connect), for a link that the peer initiated: the endpoint carries
    /// only messages and no transfers.
    ///
    /// # Errors
    /// As [`connect`](Fabric::connect).
    fn accept(&mut self, endpoint: EndpointId, peer: &Identity, address: &[u8]) -> Result<()> {
        self.connect(endpoint, peer, address)
    }

    /// Returns how long the two libraries may take to set up a connection. The deadline of the
    /// handshake is extended by this time, because the peer creates its endpoint only when the
    /// hello arrives.
    fn setup_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Updates the peer's address to that of a newer generation.
    ///
    /// # Errors
    /// End the link.
    fn update(&mut self, _endpoint: EndpointId, _address: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Sends a message of at most [`max_message`](Fabric::max_message) bytes, which it copies.
    /// Messages may overtake each other; none may be lost while the endpoint lives.
    ///
    /// # Errors
    /// End the link.
    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus>;

    /// Returns the longest message that [`send`](Fabric::send) takes; at least 256 bytes.
    fn max_message(&self) -> usize;

    /// Makes a region that the peer has granted usable.
    ///
    /// # Errors
    /// `Unsupported` or `Malformed`; they fail the import.
    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Self::Remote>;

    /// Returns the longest piece of a [`Job`], in bytes.
    fn max_piece(&self) -> u64 {
        crate::reactor::SLICE
    }

    /// Posts some pieces of a job: at most about [`SLICE`](crate::reactor::SLICE) bytes or a few
    /// dozen pieces, fewer if the library has no capacity. Returns the number of bytes posted.
    /// After 0 with pieces left, it is called again once something has completed.
    ///
    /// # Errors
    /// Fail the job, after the pieces that were posted have ended.
    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64>
    where
        Self: Sized;

    /// Flushes a write, of which no more pieces are posted: all of them were, or it has failed.
    /// After [`FlushCompletion::Later`], [`Event::Flushed`] reports when all posted pieces are
    /// visible at the target.
    ///
    /// # Errors
    /// Fail the job.
    fn flush(&mut self, _endpoint: EndpointId, _job: JobId) -> Result<FlushCompletion> {
        Ok(FlushCompletion::WithPieces)
    }

    /// Ends the work of an endpoint whose peer is lost: posts nothing more, and lets posted pieces
    /// end as soon as possible.
    fn sever(&mut self, endpoint: EndpointId);

    /// Destroys an endpoint that has no more transfers.
    fn disconnect(&mut self, endpoint: EndpointId);

    /// Drives the library and appends its events. Returns how much it did, and how the machine is
    /// to be scheduled.
    fn poll(&mut self, events: &mut Vec<Event>) -> Turn;

    /// Prepares to sleep. `waiting` means that something is in flight. See
    /// [`Progress::arm`](crate::reactor::Progress::arm).
    ///
    /// # Errors
    /// Those of [`Progress::arm`](crate::reactor::Progress::arm).
    fn arm(&mut self, waiting: bool) -> Result<Armed>;

    /// Returns the descriptors that wake the machine, like
    /// [`Progress::fds`](crate::reactor::Progress::fds).
    fn fds(&self) -> &[RawFd];

    /// Describes an endpoint whose handshake is done: the text of its route, and its capabilities.
    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities);

    /// Returns why an endpoint whose handshake is done must not be used. Core then tries the next
    /// backend.
    fn rejection(&mut self, _endpoint: EndpointId) -> Option<Error> {
        None
    }

    /// Ends remote access to a local region that every peer has released. Its memory is freed when
    /// that is done. After [`Unregister::Later`] it is called again in each turn; a descriptor of
    /// [`fds`](Fabric::fds) wakes the machine when that is worthwhile.
    ///
    /// # Errors
    /// Quarantine the region: a peer may still reach it.
    fn unregister(&mut self, local: &Self::Local) -> Result<Unregister>;

    /// Shuts the library down; no other method is called afterwards. Returns true if the library
    /// certainly touches no local memory any more, and no peer reaches local memory through it.
    /// Otherwise all memory in flight and registered is quarantined.
    fn stop(&mut self) -> bool;

    /// Creates an endpoint to an agent that is not kvx, from that agent's own metadata.
    /// [`Event::Ready`] reports when it is up.
    ///
    /// # Errors
    /// End the link.
    fn connect_foreign(&mut self, _endpoint: EndpointId, _blob: &[u8]) -> Result<()> {
        Err(ErrorKind::Unsupported
            .because("this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }

    /// Makes a range of a foreign agent's memory usable.
    ///
    /// # Errors
    /// Fail the import.
    fn unpack_foreign(
        &mut self,
        _endpoint: EndpointId,
        _range: &ForeignRange,
    ) -> Result<Self::Remote> {
        Err(ErrorKind::Unsupported.because("this link leads to a kvx agent: use its regions"))
    }

    /// Sends a notification to a foreign agent, in that agent's own format.
    /// [`SendStatus::Taken`] settles it.
    ///
    /// # Errors
    /// Fail the notification.
    fn notify_foreign(&mut self, _endpoint: EndpointId, _bytes: &[u8]) -> Result<SendStatus> {
        Err(ErrorKind::Unsupported
            .because("this backend cannot send notifications to foreign agents"))
    }
}

/// Registers memory with the library, on the program's threads.
///
/// # Safety
///
/// From registration on, peers reach the memory through the library. `Local` keeps alive whatever
/// that requires.
pub unsafe trait Registrar<L>: Send + Sync + 'static {
    /// Registers memory. Returns the registration, and the bytes that peers need to reach it in
    /// addition to its id and key. May block.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, for memory that the library cannot serve.
    fn register(&self, id: RegionId, memory: &Arc<Memory>) -> Result<(L, Vec<u8>)>;

    /// Returns the bytes by which an agent that is not kvx reaches this one and the regions that
    /// are registered now, in its own protocol's format. They cannot be revoked. May block.
    ///
    /// # Errors
    /// `Unsupported` where the library has no such format.
    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        Err(ErrorKind::Unsupported
            .because("this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }
}

/// The result of [`Fabric::send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// The library has taken the message.
    Taken,
    /// The library has no capacity now, or the endpoint is not connected yet; the machine tries
    /// again.
    Later,
}

/// The result of [`Fabric::unregister`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unregister {
    /// No peer reaches the region any more.
    Now,
    /// The library is busy, and would have blocked the machine.
    Later,
}

/// The way in which the completion of a write's flush is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushCompletion {
    /// Each piece is reported once it is visible at the target.
    WithPieces,
    /// [`Event::Flushed`] follows.
    Later,
}

/// An event of the library, which [`Fabric::poll`] reports.
#[derive(Debug)]
pub enum Event {
    /// A message arrived, from any sender.
    Message(Vec<u8>),
    /// A foreign endpoint is ready. For an endpoint to a kvx agent it only means that waiting
    /// messages can be tried again.
    Ready(EndpointId),
    /// An endpoint is unusable. Pieces that were posted are still reported when they have ended.
    Broken {
        /// The endpoint.
        endpoint: EndpointId,
        /// The reason, of kind `PeerLost` if the peer is lost.
        why: Error,
        /// True if it is certain that the peer reaches no local memory any more.
        gone: bool,
    },
    /// Pieces of a job have ended; none of them touches memory any more.
    Completed {
        /// The job.
        job: JobId,
        /// The number of pieces.
        pieces: u32,
        /// The result; an error fails the job.
        result: Result<()>,
    },
    /// The result of [`describe`](Fabric::describe) for this endpoint has changed.
    Changed(EndpointId),
    /// The flush of a write has ended.
    Flushed {
        /// The job.
        job: JobId,
        /// `Ok` if all pieces are visible at the target.
        result: Result<()>,
    },
    /// A foreign agent sent a notification.
    Notification {
        /// The agent's name in its own protocol.
        from: Arc<str>,
        /// The payload.
        bytes: Vec<u8>,
    },
}
