//! The contract of transports: the calls that core makes, and what it promises in return.
//!
//! A transport is a crate that exports a plain value: its [`Factory`], which goes into a
//! [`Registry`](crate::Registry). It needs no futures, wakers, timers or queues of its own: core
//! has them, and `kvx_backend::reactor::Reactor` provides the thread.

mod events;
mod factory;
mod regions;
mod turn;

use std::sync::Arc;

pub use events::{Events, LinkState, QueueFull};
pub use factory::{Admission, AutoOpen, Availability, Context, Factory, Placement, Unavailable};
pub use regions::{ForeignRange, LocalRegion, RegionSpec, RemoteRegion, RemoteSpec};
pub use turn::Turn;

use crate::bound::BoundPlan;
use crate::identity::{Generation, Identity, Invitation, LinkId};
use crate::ticket::Ticket;
use crate::{Capabilities, ErrorKind, Result, TransferId};

/// A backend, opened for one agent. Dropping the last handle ends its threads without waiting for
/// them.
///
/// # Safety
/// The implementation touches the memory of registered regions and posted plans only as this
/// contract allows: the local memory of a plan until its ticket settles, a region until its
/// revocation settles.
pub unsafe trait Transport: Send + Sync {
    /// Returns the capabilities that hold for all links of the transport.
    fn capabilities(&self) -> &Capabilities;

    /// Returns the transport's section of the agent's metadata. Called for each generation.
    ///
    /// # Errors
    /// Any error of the backend; the agent then has no metadata.
    fn address(&self) -> Result<Vec<u8>>;

    /// Registers a region so that peers can reach it. May block.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, for memory that the transport cannot serve.
    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>>;

    /// Returns true if the transport moves device memory through host buffers, as
    /// `kv_buffer_device: "cpu"` requires
    /// ([`AgentBuilder::stage_device_memory`](crate::AgentBuilder::stage_device_memory)). Core then
    /// does not ask other transports to register such memory. Transports around a native library
    /// return false: staging needs the target's CPU, which these libraries are there to avoid.
    fn stages_devices(&self) -> bool {
        false
    }

    /// Starts a link to a peer and returns at once.
    ///
    /// The transport reports `Up`, `Lost` or `Restarted` to [`Events::link`] within the
    /// `peer_timeout`, perhaps before this function returns. If the library needs time before the
    /// two sides can talk, the report may take longer by the `setup_time` of a
    /// `kvx_backend::fabric::Fabric`.
    ///
    /// # Errors
    /// Any error if the section is malformed or this peer cannot be reached at all.
    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>>;

    /// Starts a link to an agent that is not kvx, from that agent's own metadata.
    ///
    /// # Errors
    /// `Unsupported` if the backend connects to kvx agents only.
    fn link_foreign(&self, _id: LinkId, _blob: &[u8]) -> Result<Arc<dyn Link>> {
        Err(ErrorKind::Unsupported
            .because("this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }

    /// Returns the bytes that an agent that is not kvx needs to reach this agent and the memory
    /// that is registered now. Memory that these bytes name is never returned. May block.
    ///
    /// # Errors
    /// `Unsupported` if the backend connects to kvx agents only.
    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        Err(ErrorKind::Unsupported
            .because("this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }

    /// Called when the notification queue has space again after a [`QueueFull`].
    fn resume(&self) {}

    /// Shuts the transport down: fails what is in flight, closes links, joins threads, then settles
    /// `done`. May block; core calls it on a thread of its own.
    fn shutdown(&self, done: Ticket);
}

/// A peer's section of its metadata.
#[derive(Clone, Copy, Debug)]
pub struct PeerSection<'a> {
    /// The peer's name and incarnation.
    pub identity: &'a Identity,
    /// The version of the metadata.
    pub generation: Generation,
    /// The invitation that the handshake must prove.
    pub invitation: Invitation,
    /// The bytes of the peer's [`Transport::address`].
    pub address: &'a [u8],
}

/// A link to a peer over one transport.
///
/// # Safety
/// As for [`Transport`].
pub unsafe trait Link: Send + Sync {
    /// Returns the capabilities as far as they are known; a change is reported as
    /// [`LinkState::Changed`].
    fn capabilities(&self) -> Arc<Capabilities>;

    /// Returns a description for the route: lanes, protocol, how memory is reached.
    fn describe(&self) -> String;

    /// Passes a newer generation of the same incarnation's metadata to the link.
    ///
    /// # Errors
    /// Any error if the section is malformed.
    fn update(&self, peer: PeerSection<'_>) -> Result<()>;

    /// Prepares a region of the peer for use: after `Up`, before a plan uses it, and twice only in
    /// a race.
    ///
    /// Returns at once and decides from what is known since `Up`, because it may run on the
    /// reactor's thread. Work that needs the peer or the library waits for the first post.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, for memory that this link cannot reach.
    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>>;

    /// Prepares a foreign agent's memory for use, as [`import`](Self::import).
    ///
    /// # Errors
    /// `Unsupported` if the link leads to a kvx agent.
    fn import_foreign(&self, _range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        Err(ErrorKind::Unsupported.because("this link leads to a kvx agent: use its regions"))
    }

    /// Starts a transfer. Never blocks, but may move up to [`INLINE_BYTES`] in [`INLINE_SEGMENTS`]
    /// on the calling thread.
    ///
    /// When `done` of a write settles with `Ok`, the data is visible at the target: core sends
    /// notifications after it. `Unsupported` means that nothing was moved: core tries the next
    /// backend. The implementation drops `plan` before it settles `done`.
    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket);

    /// Sends a notification. `done` settles when the peer's agent has it; for a foreign agent, when
    /// the library has accepted it. Never blocks.
    fn notify(&self, bytes: &[u8], done: Ticket);

    /// Cancels a transfer as soon as possible, on a best-effort basis. Its ticket still settles.
    fn cancel(&self, id: TransferId);

    /// Makes progress on the calling thread, if possible.
    fn drive(&self) -> Turn {
        Turn::did(0)
    }

    /// Called when a thread that called [`drive`](Self::drive) goes to sleep: the transport's own
    /// thread takes over.
    fn stop_driving(&self) {}

    /// Closes the link. What is in flight settles with `Closed`, each transfer when it is proven
    /// that nothing touches its memory.
    fn close(&self);
}

/// The maximum number of bytes that a post may move on the calling thread.
pub const INLINE_BYTES: u64 = 64 << 10;
/// The maximum number of segments that a post may move on the calling thread.
pub const INLINE_SEGMENTS: u64 = 16;

/// The maximum size of a notification, in bytes.
pub const MAX_NOTIFICATION: usize = 64 << 10;

/// The maximum size of a notification from a foreign agent, in bytes. vLLM names all requests that
/// wait for a peer in one notification.
pub const MAX_FOREIGN_NOTIFICATION: usize = 16 << 20;
