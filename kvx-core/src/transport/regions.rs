//! Regions as a transport knows them: those of its agent and those of peers.

use std::any::Any;
use std::sync::Arc;

use crate::identity::RegionKey;
use crate::ticket::Ticket;
use crate::{Memory, MemoryKind, RegionId};

/// A region to register.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// The region's number.
    pub id: RegionId,
    /// The key that peers must present.
    pub key: RegionKey,
    /// The memory; the transport keeps it alive until the revocation settles.
    pub memory: Arc<Memory>,
}

/// A region as its owner's transport knows it.
pub trait LocalRegion: Any + Send + Sync {
    /// Returns the bytes that peers need in addition to number, key and length; they become part of
    /// the metadata.
    fn export(&self) -> &[u8];

    /// Ends remote access. Core calls it when the agent's own transfers on the region have settled.
    /// `done` settles when no remote operation reaches the region any more, or with an error if
    /// that cannot be known.
    fn revoke(&self, done: Ticket);
}

/// A region of a peer as one link knows it, with its keys and its mapping.
pub trait RemoteRegion: Any + Send + Sync {}

/// A region of a peer, from the peer's metadata.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSpec<'a> {
    /// The region's number.
    pub id: RegionId,
    /// The key to present.
    pub key: RegionKey,
    /// The length in bytes.
    pub len: u64,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The bytes of the peer's [`LocalRegion::export`].
    pub export: &'a [u8],
}

/// A range of a foreign agent's memory.
#[derive(Clone, Copy, Debug)]
pub struct ForeignRange {
    /// The address in the peer's process or device.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The device, as the foreign protocol numbers it.
    pub device: u64,
}
