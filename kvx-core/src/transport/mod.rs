//! The contract of every transport: the calls of core, and its promises in return.
//!
//! A transport is a crate and a plain value: its [`Factory`] goes into a [`Registry`](crate::Registry). It writes no
//! futures, wakers, timers or queues of its own; core has them, and one `kvx_backend::reactor::Reactor` from
//! which it builds its thread.

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
use crate::{Capabilities, Error, ErrorKind, Result, TransferId};

/// One backend, opened for one agent. Dropping the last handle ends its threads without waiting for them.
///
/// # Safety
/// The memory of a registered region and of a posted plan is touched only as this contract allows: a plan's local
/// memory until its ticket settles, a region until its revocation settles.
pub unsafe trait Transport: Send + Sync {
    /// Its promises.
    fn capabilities(&self) -> &Capabilities;

    /// Its section of the agent's metadata; asked again for each generation.
    fn address(&self) -> Result<Vec<u8>>;

    /// Makes a region known to peers. May block. `Unsupported`, with the reason, for memory it cannot serve.
    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>>;

    /// True if it moves memory of devices through buffers of the host, as `kv_buffer_device: "cpu"` asks
    /// ([`AgentBuilder::stage_device_memory`](crate::AgentBuilder::stage_device_memory)). Others are then not asked to register
    /// such memory.
    fn stages_devices(&self) -> bool {
        false
    }

    /// Starts a link to a peer and returns at once; `Up`, `Lost` or `Restarted` follows on [`Events::link`] within
    /// the `peer_timeout`, perhaps before this returns; a library that is busy before the two sides can talk may take
    /// as long as `setup_time` of a `kvx_backend::fabric::Fabric` more. An error means that the section makes no
    /// sense, or that this peer cannot be reached at all.
    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>>;

    /// Starts a link to an agent that is not kvx, from its own metadata.
    fn link_foreign(&self, _id: LinkId, _blob: &[u8]) -> Result<Arc<dyn Link>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend speaks to kvx agents only: use RIXL or MOONCAKE",
        ))
    }

    /// The bytes that an agent that is not kvx needs to reach this one and the memory that is registered now. Memory
    /// that was told so is never given back. May block.
    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend speaks to kvx agents only: use RIXL or MOONCAKE",
        ))
    }

    /// The queue of notifications has room again after a [`QueueFull`].
    fn resume(&self) {}

    /// Ends everything: fails what is in flight, closes links, joins threads, then settles `done`. May block; called on
    /// a thread of its own.
    fn shutdown(&self, done: Ticket);
}

/// A peer's section of its metadata.
#[derive(Clone, Copy, Debug)]
pub struct PeerSection<'a> {
    /// Which agent, which life.
    pub identity: &'a Identity,
    /// Which version of the metadata.
    pub generation: Generation,
    /// What the handshake must prove to have.
    pub invitation: Invitation,
    /// The bytes of the peer's [`Transport::address`].
    pub address: &'a [u8],
}

/// A connected peer over one transport.
///
/// # Safety
/// As [`Transport`].
pub unsafe trait Link: Send + Sync {
    /// Its promises as far as they are known; changes come as [`LinkState::Changed`].
    fn capabilities(&self) -> Arc<Capabilities>;

    /// A text for the route: lanes, protocol, how memory is reached.
    fn describe(&self) -> String;

    /// A newer generation of the same incarnation.
    fn update(&self, peer: PeerSection<'_>) -> Result<()>;

    /// Makes a region of the peer usable: after `Up`, before a plan uses it, twice only in a race. Returns at once and
    /// decides from what is known since `Up`: it may run on the reactor's own thread, so what needs the peer or the
    /// library waits for the first post. `Unsupported`, with the reason, for memory this link cannot reach.
    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>>;

    /// The same for a foreign agent's memory.
    fn import_foreign(&self, _range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        Err(Error::new(ErrorKind::Unsupported, "this link leads to a kvx agent: use its regions"))
    }

    /// Starts a transfer. Never blocks; may do a little at once ([`INLINE_BYTES`] and [`INLINE_SEGMENTS`] in all).
    /// `Ok` of a write says that the data is visible at the target: core sends notifications after it. `Unsupported`
    /// says that nothing was moved: core tries the next backend. Let go of `plan` before settling.
    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket);

    /// Sends a notification; `done` settles when the peer's agent has it (a foreign agent's: when the library has taken
    /// it). Never blocks.
    fn notify(&self, bytes: &[u8], done: Ticket);

    /// Stops a transfer as soon as possible. Best effort; the ticket still settles.
    fn cancel(&self, id: TransferId);

    /// Makes progress on the calling thread, if that is possible.
    fn drive(&self) -> Turn {
        Turn::did(0)
    }

    /// The calling thread, which drove, goes to sleep: whatever comes now is the transport's own thread's to see to.
    fn stop_driving(&self) {}

    /// Ends the link. What is in flight settles with `Closed`, each when it is proven that nobody touches its memory.
    fn close(&self);
}

/// The most bytes that a post may move on the calling thread.
pub const INLINE_BYTES: u64 = 64 << 10;
/// The most segments that a post may move on the calling thread.
pub const INLINE_SEGMENTS: u64 = 16;

/// The largest notification, in bytes.
pub const MAX_NOTIFICATION: usize = 64 << 10;

/// The largest notification that is taken from a foreign agent, in bytes. vLLM names all requests that wait for a
/// peer in one.
pub const MAX_FOREIGN_NOTIFICATION: usize = 16 << 20;
