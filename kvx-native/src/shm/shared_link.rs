//! The state that a link's handle shares with the machine, and the regions that it imports.

use std::sync::OnceLock;

use kvx_backend::control::proof::Keys;
use kvx_core::backend::{LinkId, RegionKey, RemoteRegion};
use kvx_core::{Error, ErrorKind, Identity, RegionId, Result};

use super::error::error;
use super::memory::Reach;
use super::window::Shutter;

/// The handshake's result for foreign memory: whether each side can read the other's.
#[derive(Debug)]
pub(crate) struct Reachability {
    /// `Ok` if this end can read the peer's memory, otherwise the reason.
    pub(crate) ours: Result<()>,
    /// `Ok` if the peer can read this end's memory, otherwise the reason.
    pub(crate) theirs: Result<()>,
}

/// The state that a link's handle and the machine share.
pub(crate) struct SharedLink {
    pub(crate) id: LinkId,
    pub(crate) peer: Identity,
    /// The keys that authenticate this end to the peer.
    pub(crate) keys: Keys,
    /// The result of the handshake, set before the link is reported up.
    pub(crate) reachability: OnceLock<Reachability>,
    /// The reason why the link has ended.
    pub(crate) gone: OnceLock<Error>,
}

impl SharedLink {
    /// Returns the reason why the link is unusable.
    pub(crate) fn gone(&self) -> Error {
        self.gone.get().cloned().unwrap_or_else(|| error(ErrorKind::Closed, "the link is not up"))
    }
}

/// A region of the peer, as this link knows it. The machine keeps the grant under this number.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) number: u64,
    pub(crate) id: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) len: u64,
    pub(crate) reach: Reach,
    /// Open while the region may be read.
    pub(crate) shutter: Shutter,
}

impl RemoteRegion for Import {}
