//! The shape that binds every transport: what core asks, and what it promises in return.
//!
//! A transport is a crate and a plain value: its [`Factory`] goes into a [`Registry`](crate::Registry). It writes no
//! futures, wakers, timers or queues of its own; core has them, and one [`Reactor`](crate::reactor::Reactor) from
//! which it builds its thread.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::identity::{Generation, Identity, Incarnation, Sender};
use crate::registry::{Placement, Unavailable};
use crate::{
    Bound, Capabilities, DeviceAccess, Error, Kind, LinkId, Memory, MemoryKind, Options, RegionId, RegionKey,
    Result, Secret, Ticket, TransferId,
};

/// Makes transports of one backend. One per backend, a plain value in the registry.
pub trait Factory: Send + Sync {
    /// The backend's name, in capitals.
    fn name(&self) -> &'static str;

    /// Its place in the order of preference.
    fn placement(&self) -> Placement;

    /// Whether it can run on this machine with these options, and what it would use. Opens what it must to know.
    fn available(&self, options: &Options) -> Result<Availability, Unavailable>;

    /// Opens it for one agent. Errors name what to do next.
    fn open(&self, context: Context) -> Result<Arc<dyn Transport>>;
}

/// What an available backend would use.
#[derive(Clone, Debug)]
pub struct Availability {
    /// Version of the library, or of kvx for an embedded transport.
    pub version: String,
    /// The library's file; `None` for an embedded transport.
    pub library: Option<PathBuf>,
    /// Devices or interfaces it found.
    pub devices: Vec<String>,
    /// Whether it has an RDMA device.
    pub rdma: bool,
    /// What it promises.
    pub capabilities: Capabilities,
    /// What an operator should know before using it (a listener on all interfaces, say).
    pub caution: Option<String>,
}

/// What a transport is opened with.
#[derive(Clone)]
pub struct Context {
    /// The agent it serves.
    pub agent: Identity,
    /// All options; a backend reads the table of its own name.
    pub options: Options,
    /// Where notifications and changes of links go.
    pub events: Arc<dyn Events>,
    /// How device memory is copied, by kind.
    pub devices: Vec<Arc<dyn DeviceAccess>>,
    /// The shared secret of the fleet, if there is one.
    pub secret: Option<Secret>,
    /// How long a peer may be silent with work in flight before it counts as lost.
    pub peer_timeout: Duration,
}

/// One backend, opened for one agent. Dropping the last handle ends its threads without waiting for them.
///
/// # Safety
/// The memory of a registered region and of a posted plan is touched only as this contract allows: a plan's local
/// memory until its ticket settles, a region until its revocation settles.
pub unsafe trait Transport: Send + Sync {
    /// What it promises.
    fn capabilities(&self) -> &Capabilities;

    /// Its section of the agent's metadata; asked again for each generation.
    fn address(&self) -> Result<Vec<u8>>;

    /// Makes a region known to peers. May block. `Unsupported`, with the reason, for memory it cannot serve.
    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>>;

    /// Whether it moves memory of devices through buffers of the host, as `kv_buffer_device: "cpu"` asks
    /// ([`Builder::buffer_device`](crate::Builder::buffer_device)). Others are then not asked to register such memory.
    fn stages_devices(&self) -> bool {
        false
    }

    /// Starts a link to a peer and returns at once; `Up`, `Lost` or `Restarted` follows on [`Events::link`] within the
    /// `peer_timeout`, perhaps before this returns; a library that is busy before the two sides can talk may take as long as
    /// [`Fabric::sets_up_within`](crate::fabric::Fabric::sets_up_within) more. An error means that the section makes no
    /// sense, or that this peer cannot be reached at all.
    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>>;

    /// Starts a link to an agent that is not kvx, from its own metadata.
    fn link_foreign(&self, _id: LinkId, _blob: &[u8]) -> Result<Arc<dyn Link>> {
        Err(Error::new(Kind::Unsupported, "this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }

    /// What an agent that is not kvx needs to reach this one and the memory that is registered now. Memory that was told
    /// so is never given back. May block.
    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        Err(Error::new(Kind::Unsupported, "this backend speaks to kvx agents only: use RIXL or MOONCAKE"))
    }

    /// The queue of notifications has room again after a [`Full`].
    fn resume(&self) {}

    /// Ends everything: fails what is in flight, closes links, joins threads, then settles `done`.
    fn shutdown(&self, done: Ticket);
}

/// A region to be registered.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// Its number.
    pub id: RegionId,
    /// What peers must show.
    pub key: RegionKey,
    /// Its memory, to be kept alive until its revocation settles.
    pub memory: Arc<Memory>,
}

/// A region as its owner's transport knows it.
pub trait LocalRegion: Any + Send + Sync {
    /// What peers need beside number, key and length; part of the metadata.
    fn export(&self) -> &[u8];

    /// Ends remote access; called when the agent's own transfers on it have settled. `done` settles when no remote operation reaches the region any more; with an error when
    /// that cannot be known.
    fn revoke(&self, done: Ticket);
}

/// One region of a peer as one link sees it: its keys, its mapping.
pub trait RemoteRegion: Any + Send + Sync {}

/// A peer's section of its metadata.
#[derive(Clone, Copy, Debug)]
pub struct PeerSection<'a> {
    /// Which agent, which life: the handshake must name both.
    pub identity: &'a Identity,
    /// Which version of the metadata.
    pub generation: Generation,
    /// What the peer's [`Transport::address`] said.
    pub address: &'a [u8],
}

/// A peer's region, from its metadata.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSpec<'a> {
    /// Its number.
    pub id: RegionId,
    /// What to show.
    pub key: RegionKey,
    /// Its length in bytes.
    pub len: u64,
    /// Its kind.
    pub kind: MemoryKind,
    /// What the peer's [`LocalRegion::export`] said.
    pub export: &'a [u8],
}

/// A range of memory of a foreign agent.
#[derive(Clone, Copy, Debug)]
pub struct ForeignRange {
    /// Address in the peer's process or device.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Its kind.
    pub kind: MemoryKind,
    /// The device, as the foreign protocol numbers it.
    pub device: u64,
}

/// A connected peer over one transport.
///
/// # Safety
/// As [`Transport`].
pub unsafe trait Link: Send + Sync {
    /// What is known so far; changes come as [`LinkState::Changed`].
    fn capabilities(&self) -> Arc<Capabilities>;

    /// What the route says of it: lanes, protocol, how memory is reached.
    fn describe(&self) -> String;

    /// A newer generation of the same incarnation.
    fn update(&self, peer: PeerSection<'_>) -> Result<()>;

    /// Makes a region of the peer usable: after `Up`, before a plan uses it, twice only in a race. Returns at once and
    /// decides from what is known since `Up`: it may run on the reactor's own thread, so what needs the peer or the
    /// library waits for the first post. `Unsupported`, with the reason, for memory this link cannot reach.
    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>>;

    /// The same for a foreign agent's memory.
    fn import_foreign(&self, _range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        Err(Error::new(Kind::Unsupported, "this link leads to a kvx agent: use its regions"))
    }

    /// Starts a transfer. Never blocks; may do a little at once ([`INLINE_BYTES`] and [`INLINE_SEGMENTS`] in all).
    /// `Ok` of a write says that the data is visible at the target: core sends notifications after it. `Unsupported`
    /// says that nothing was moved: core tries the next backend. Let go of `plan` before settling.
    fn post(&self, plan: Arc<Bound>, id: TransferId, done: Ticket);

    /// Sends a notification; `done` settles when the peer's agent has it (a foreign agent's: when the library has taken
    /// it). Never blocks.
    fn notify(&self, bytes: &[u8], done: Ticket);

    /// Stops a transfer as soon as possible. Best effort; the ticket still settles.
    fn cancel(&self, id: TransferId);

    /// Makes progress on the calling thread, if that is possible. Says whether anything moved.
    fn drive(&self) -> bool {
        false
    }

    /// Whether threads of the library move what is posted, and its end is only found by asking. A caller that waits for at most
    /// [`INLINE_SEGMENTS`] pieces then calls [`drive`](Link::drive) for up to a millisecond before it sleeps.
    fn ends_unannounced(&self) -> bool {
        false
    }

    /// The calling thread, which drove, goes to sleep: whatever comes now is the transport's own thread's to see to.
    fn hand_over(&self) {}

    /// Ends the link. What is in flight settles with `Closed`, each when it is proven that nobody touches its memory.
    fn close(&self);
}

/// The most bytes that a post may move on the calling thread.
pub const INLINE_BYTES: u64 = 64 << 10;
/// The most segments that a post may move on the calling thread.
pub const INLINE_SEGMENTS: u64 = 16;

/// Where a transport reports. Called without locks of the transport but the one that makes it the only one to make
/// progress; may call wakers.
pub trait Events: Send + Sync {
    /// A peer sent `bytes`. [`Full`]: keep them, acknowledge nothing and let a bounded number follow; try again at
    /// [`Transport::resume`]. May let go of the core for whoever waits for them.
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), Full>;

    /// A link changed.
    fn link(&self, id: LinkId, state: LinkState);
}

/// The queue of notifications has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What happened to a link.
#[derive(Clone, Debug)]
pub enum LinkState {
    /// The handshake is done: plans may be posted.
    Up,
    /// Its capabilities or its description changed.
    Changed,
    /// It is gone for good, or never came up. Core resolves what is in flight with this error at once; each ticket
    /// settles when it is proven that nobody touches its memory.
    Lost(Error),
    /// Another incarnation answered under the peer's name.
    Restarted(Incarnation),
}

/// The largest notification, in bytes.
pub const MAX_NOTIFICATION: usize = 64 << 10;

/// The largest notification that is taken from a foreign agent, in bytes. vLLM names all requests that wait for a peer in one.
pub const MAX_FOREIGN_NOTIFICATION: usize = 16 << 20;
