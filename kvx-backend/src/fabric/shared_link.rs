//! The state that a link's handle shares with the machines of its lanes, and the regions that it
//! imports.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{ForeignRange, LinkId, RegionKey, RemoteRegion};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, MemoryKind, RegionId};

use crate::control::proof::Keys;

/// The state that a link's handle and the machines share.
pub(super) struct SharedLink {
    pub(super) id: LinkId,
    pub(super) peer: Identity,
    /// The keys that authenticate this end to the peer; `None` for an agent that is not kvx.
    pub(super) keys: Option<Keys>,
    /// The number of lanes whose handshake is not done.
    awaited: AtomicUsize,
    /// The library's description and capabilities, once the link is up.
    pub(super) known: Mutex<Option<(String, Arc<Capabilities>)>>,
    /// The reason why the link has ended.
    pub(super) gone: OnceLock<Error>,
}

impl SharedLink {
    pub(super) fn new(id: LinkId, peer: Identity, keys: Option<Keys>, lanes: usize) -> Self {
        let awaited = AtomicUsize::new(lanes);
        SharedLink { id, peer, keys, awaited, known: Mutex::new(None), gone: OnceLock::new() }
    }

    /// Records that a lane is up. Returns true if all lanes are.
    pub(super) fn lane_up(&self) -> bool {
        self.awaited.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Returns the reason why the link is unusable.
    pub(super) fn gone(&self) -> Error {
        self.gone.get().cloned().unwrap_or_else(|| ErrorKind::Closed.because("the link is not up"))
    }
}

/// A region of the peer, as this link knows it. The machine keeps the library's access under this
/// number.
pub(super) struct Import {
    pub(super) number: u64,
    pub(super) what: RemoteMemory,
}

/// The memory that an import names.
pub(super) enum RemoteMemory {
    Region { id: RegionId, key: RegionKey, len: u64, kind: MemoryKind, export: Box<[u8]> },
    Foreign(ForeignRange),
}

impl RemoteRegion for Import {}

/// Returns the import behind the remote region of a plan.
pub(super) fn import_of(region: &Arc<dyn RemoteRegion>) -> Option<&Import> {
    let any: &dyn Any = &**region;
    any.downcast_ref()
}
