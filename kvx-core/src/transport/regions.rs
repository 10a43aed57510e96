//! Regions as a transport knows them: the agent's own and its peers'.

use std::any::Any;
use std::sync::Arc;

use crate::identity::RegionKey;
use crate::ticket::Ticket;
use crate::{Memory, MemoryKind, RegionId};

/// A region to be registered.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// Its number.
    pub id: RegionId,
    /// The key that peers must show.
    pub key: RegionKey,
    /// Its memory, to be kept alive until its revocation settles.
    pub memory: Arc<Memory>,
}

/// A region as its owner's transport knows it.
pub trait LocalRegion: Any + Send + Sync {
    /// Further bytes that peers need beside number, key and length; part of the metadata.
    fn export(&self) -> &[u8];

    /// Ends remote access; called when the agent's own transfers on it have settled. `done` settles when no remote
    /// operation reaches the region any more; with an error when that cannot be known.
    fn revoke(&self, done: Ticket);
}

/// One region of a peer as one link sees it: its keys, its mapping.
pub trait RemoteRegion: Any + Send + Sync {}

/// A peer's region, from its metadata.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSpec<'a> {
    /// Its number.
    pub id: RegionId,
    /// The key to show.
    pub key: RegionKey,
    /// Its length in bytes.
    pub len: u64,
    /// Its kind.
    pub kind: MemoryKind,
    /// The bytes of the peer's [`LocalRegion::export`].
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
