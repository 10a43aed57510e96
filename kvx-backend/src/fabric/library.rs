//! A native library as the machine drives it: the traits that a backend implements, and their
//! types.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::transport::{ForeignRange, RemoteSpec};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, Memory, RegionId, Result};

use super::job::Job;
use crate::reactor::{Armed, Turn};

/// One end of a link within a [`Fabric`]; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub(crate) u64);

/// A transfer within a [`Fabric`]. Not used again before its last piece has been reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub(crate) usize);

impl EndpointId {
    /// The number, for what a C callback carries.
    pub fn number(self) -> u64 {
        self.0
    }

    /// The endpoint behind a [`number`](EndpointId::number).
    pub fn from_number(number: u64) -> Self {
        EndpointId(number)
    }
}

impl JobId {
    /// The number, for what a C callback carries.
    pub fn number(self) -> usize {
        self.0
    }

    /// The job behind a [`number`](JobId::number).
    pub fn from_number(number: usize) -> Self {
        JobId(number)
    }
}

/// A native library with its handles, as the machine drives it.
///
/// # Safety
/// Local memory of a [`Job`] is touched only for pieces that were posted and whose end has not been
/// reported by [`Event::Completed`]; and after [`stop`](Fabric::stop) has returned true by nobody.
pub unsafe trait Fabric: Send + 'static {
    /// What the library made of a region of ours. Dropped when it is no longer registered with kvx,
    /// on any thread.
    type Local: Send + Sync + 'static;
    /// What an endpoint made of a region of its peer: its keys. Dropped on a thread that has the
    /// machine, after the last piece that used it and before [`disconnect`](Fabric::disconnect).
    type Remote: Send + Sync + 'static;
    /// What it keeps for each [`Job`].
    type State: Default + Send + 'static;

    /// Makes an endpoint that leads to `address`; returns at once. Until it is ready,
    /// [`send`](Fabric::send) says [`SendStatus::Later`]; if it never is, [`Event::Broken`]
    /// follows. Errors: `Malformed` for an address that makes no sense, `PeerLost` where nobody is
    /// there.
    fn connect(&mut self, endpoint: EndpointId, peer: &Identity, address: &[u8]) -> Result<()>;

    /// As [`connect`](Fabric::connect), for a link that the peer has begun: only messages go over
    /// it, and nothing is posted.
    fn accept(&mut self, endpoint: EndpointId, peer: &Identity, address: &[u8]) -> Result<()> {
        self.connect(endpoint, peer, address)
    }

    /// How long the two sides may be busy with a connection before the handshake can be answered:
    /// the peer makes its end of it when it is greeted, which is no silence. The handshake may take
    /// so much longer than the `peer_timeout`.
    fn setup_time(&self) -> Duration {
        Duration::ZERO
    }

    /// The peer's address of a newer generation.
    fn update(&mut self, _endpoint: EndpointId, _address: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Sends a message of at most [`max_message`](Fabric::max_message) bytes, which are copied. It
    /// may overtake others and must not be lost while the endpoint lives. Errors break the
    /// endpoint.
    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus>;

    /// The longest message that [`send`](Fabric::send) takes; at least 256 bytes.
    fn max_message(&self) -> usize;

    /// Makes a region of the peer usable that the peer has granted. Errors: `Unsupported`,
    /// `Malformed`.
    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Self::Remote>;

    /// The longest piece of a [`Job`], in bytes.
    fn max_piece(&self) -> u64 {
        crate::reactor::SLICE
    }

    /// Posts some pieces of a job: at most about [`SLICE`](crate::reactor::SLICE) bytes or a few
    /// dozen pieces, fewer if the library has no more room. Says how many bytes; none, with pieces
    /// left: it is called again when something has moved. Errors fail the job, after what was
    /// posted has ended.
    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64>
    where
        Self: Sized;

    /// No more pieces of a write are posted: all of them were, or it has failed.
    /// [`FlushCompletion::Later`]: [`Event::Flushed`] tells when all that was posted is visible at
    /// the target.
    fn flush(&mut self, _endpoint: EndpointId, _job: JobId) -> Result<FlushCompletion> {
        Ok(FlushCompletion::WithPieces)
    }

    /// Nothing more is to be posted to this endpoint, and what was posted is to end as soon as it
    /// can: the peer is lost.
    fn sever(&mut self, endpoint: EndpointId);

    /// Nothing is posted on this endpoint any more: it can go.
    fn disconnect(&mut self, endpoint: EndpointId);

    /// Lets the library work, and takes what has happened. Says how much it did, and how the
    /// machine is to be scheduled.
    fn poll(&mut self, events: &mut Vec<Event>) -> Turn;

    /// Before sleeping; `waiting`: something is in flight. As
    /// [`Progress::arm`](crate::reactor::Progress::arm).
    fn arm(&mut self, waiting: bool) -> Result<Armed>;

    /// As [`Progress::fds`](crate::reactor::Progress::fds).
    fn fds(&self) -> &[RawFd];

    /// What is known of an endpoint once its handshake is done: what the route says, and what it
    /// promises.
    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities);

    /// Why an endpoint whose handshake is done is not to be used all the same: by its error core
    /// goes to the next backend.
    fn rejection(&mut self, _endpoint: EndpointId) -> Option<Error> {
        None
    }

    /// Every peer has let go of a region of ours: ends remote access. Its memory is given back when
    /// that is done. After [`Unregister::Later`] it is asked again each turn, and a descriptor of
    /// [`fds`](Fabric::fds) wakes the machine when asking is worth it. Errors: it cannot be known
    /// that no peer reaches it, and it stays quarantined.
    fn unregister(&mut self, local: &Self::Local) -> Result<Unregister>;

    /// The last call. Says whether it is certain that the library touches no memory of ours any
    /// more, and that peers do not through it; false quarantines what was in flight and registered.
    fn stop(&mut self) -> bool;

    /// Makes an endpoint that leads to an agent that is not kvx, from that agent's own metadata. It
    /// is up when [`Event::Ready`] says so.
    fn connect_foreign(&mut self, _endpoint: EndpointId, _blob: &[u8]) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend speaks to kvx agents only: use RIXL or MOONCAKE",
        ))
    }

    /// Makes a range of a foreign agent's memory usable.
    fn unpack_foreign(
        &mut self,
        _endpoint: EndpointId,
        _range: &ForeignRange,
    ) -> Result<Self::Remote> {
        Err(Error::new(ErrorKind::Unsupported, "this link leads to a kvx agent: use its regions"))
    }

    /// Sends a foreign agent a notification in its own form. [`SendStatus::Taken`] settles it.
    fn notify_foreign(&mut self, _endpoint: EndpointId, _bytes: &[u8]) -> Result<SendStatus> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend has no notifications for foreign agents",
        ))
    }
}

/// Registers memory with the library, on the program's threads.
///
/// # Safety
/// What is registered is reached by peers from then on: `Local` keeps whatever that needs.
pub unsafe trait Registrar<L>: Send + Sync + 'static {
    /// Registers memory, and says what peers need to reach it beside number and key. May block.
    /// Errors: `Unsupported`, with the reason, for memory that the library cannot serve.
    fn register(&self, id: RegionId, memory: &Arc<Memory>) -> Result<(L, Vec<u8>)>;

    /// What an agent that is not kvx needs to reach this one and what is registered now, in its own
    /// protocol's form. What was told so cannot be taken back. May block.
    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend speaks to kvx agents only: use RIXL or MOONCAKE",
        ))
    }
}

/// Whether a message was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// The library has it.
    Taken,
    /// There is no room now, or no connection yet: it is tried again.
    Later,
}

/// Whether the library has let go of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unregister {
    /// Nobody reaches it any more.
    Now,
    /// It is busy, and would have kept the machine waiting.
    Later,
}

/// How the end of a write's flush is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushCompletion {
    /// Each piece is reported when it is visible at the target.
    WithPieces,
    /// [`Event::Flushed`] follows.
    Later,
}

/// What a library has to tell.
#[derive(Debug)]
pub enum Event {
    /// A message came, from whomever.
    Message(Vec<u8>),
    /// A foreign endpoint can be used. Of one that leads to a kvx agent it says only that what
    /// waited can be tried again.
    Ready(EndpointId),
    /// An endpoint cannot be used any more. `gone`: it is certain that the peer reaches no memory
    /// of ours any more. What was posted is still reported, when it has ended.
    Broken {
        /// Which.
        endpoint: EndpointId,
        /// Why: of kind `PeerLost`, if that is what it is.
        why: Error,
        /// See above.
        gone: bool,
    },
    /// Pieces of a job have ended: none of them touches memory any more.
    Completed {
        /// Which.
        job: JobId,
        /// How many.
        pieces: u32,
        /// An error fails the job.
        result: Result<()>,
    },
    /// [`describe`](Fabric::describe) says something else of an endpoint than before.
    Changed(EndpointId),
    /// The flush of a write has ended.
    Flushed {
        /// Which.
        job: JobId,
        /// Whether all of it is visible at the target.
        result: Result<()>,
    },
    /// A foreign agent sent a notification.
    Notification {
        /// Its name, as its protocol tells it.
        from: Arc<str>,
        /// What it sent.
        bytes: Vec<u8>,
    },
}
