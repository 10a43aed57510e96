//! The state that a link's handle shares with the machines of its lanes, and the regions that it
//! imports.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvx_core::sync::Mutex;
use kvx_core::transport::{ForeignRange, RemoteRegion};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, LinkId, MemoryKind, RegionId, RegionKey};

use crate::control::proof::Keys;

/// What a link's handle and the machines share.
pub(super) struct SharedLink {
    pub(super) id: LinkId,
    pub(super) peer: Identity,
    /// What we prove ourselves to the peer by; `None` for an agent that is not kvx.
    pub(super) keys: Option<Keys>,
    /// Lanes whose handshake is not done.
    awaited: AtomicUsize,
    /// What the library knows, once the link is up.
    pub(super) known: Mutex<Option<(String, Arc<Capabilities>)>>,
    /// Set when it is gone.
    pub(super) gone: OnceLock<Error>,
}

impl SharedLink {
    pub(super) fn new(id: LinkId, peer: Identity, keys: Option<Keys>, lanes: usize) -> Self {
        let awaited = AtomicUsize::new(lanes);
        SharedLink { id, peer, keys, awaited, known: Mutex::new(None), gone: OnceLock::new() }
    }

    /// A lane is up. Says whether all of them are now.
    pub(super) fn lane_up(&self) -> bool {
        self.awaited.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Why nothing goes over this link any more.
    pub(super) fn gone(&self) -> Error {
        self.gone
            .get()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Closed, "the link is not up"))
    }
}

/// A region of the peer as this link knows it. The machine holds what was made of it, under this
/// number.
pub(super) struct Import {
    pub(super) number: u64,
    pub(super) what: RemoteMemory,
}

/// What is imported.
pub(super) enum RemoteMemory {
    Region { id: RegionId, key: RegionKey, len: u64, kind: MemoryKind, export: Box<[u8]> },
    Foreign(ForeignRange),
}

impl RemoteRegion for Import {}

/// The handle that a plan's remote side keeps.
pub(super) fn import_of(region: &Arc<dyn RemoteRegion>) -> Option<&Import> {
    let any: &dyn Any = &**region;
    any.downcast_ref()
}
