//! Regions of peers.

use std::fmt;
use std::sync::Arc;

use crate::grid::{Grid, GridSet, Place, sealed};
use crate::identity::{Identity, RegionId, RegionKey};
use crate::metadata::RegionInfo;
use crate::transport::ForeignRange;
use crate::{MemoryKind, Result};

/// A region of a peer, as the peer's metadata describes it. Cheap to clone.
#[derive(Clone)]
pub struct PeerRegion(Arc<PeerRegionInner>);

struct PeerRegionInner {
    peer: Identity,
    what: What,
}

/// A region that metadata names, or a range of a foreign agent's memory.
pub(crate) enum What {
    Named(Arc<RegionInfo>),
    Foreign(ForeignRange),
}

impl PeerRegion {
    pub(crate) fn new(peer: Identity, what: What) -> Self {
        PeerRegion(Arc::new(PeerRegionInner { peer, what }))
    }

    pub(crate) fn peer(&self) -> &Identity {
        &self.0.peer
    }

    pub(crate) fn what(&self) -> &What {
        &self.0.what
    }

    /// Returns the region's number at the peer; `RegionId(0)` for a foreign range, which has none.
    pub fn id(&self) -> RegionId {
        match &self.0.what {
            What::Named(info) => info.id,
            What::Foreign(_) => RegionId(0),
        }
    }

    pub(crate) fn key(&self) -> RegionKey {
        match &self.0.what {
            What::Named(info) => info.key,
            What::Foreign(_) => RegionKey([0; 16]),
        }
    }

    /// Returns the region's name; `None` for a foreign range.
    pub fn name(&self) -> Option<&str> {
        match &self.0.what {
            What::Named(info) => Some(&info.name),
            What::Foreign(_) => None,
        }
    }

    /// Lays a grid on this region.
    ///
    /// # Errors
    /// `Invalid` if the grid has blocks of length 0 or a stride below the length; `OutOfBounds` if
    /// it does not fit into the region; `Forked`.
    pub fn grid(&self, grid: Grid) -> Result<GridSet<PeerRegion>> {
        GridSet::of([(self.clone(), grid)])
    }
}

impl sealed::Sealed for PeerRegion {}

impl Place for PeerRegion {
    fn len(&self) -> u64 {
        match &self.0.what {
            What::Named(info) => info.len,
            What::Foreign(range) => range.len,
        }
    }
    fn kind(&self) -> MemoryKind {
        match &self.0.what {
            What::Named(info) => info.kind,
            What::Foreign(range) => range.kind,
        }
    }
    fn is_read_only(&self) -> bool {
        matches!(&self.0.what, What::Named(info) if info.read_only)
    }
    fn origin(&self) -> (u64, u64) {
        match &self.0.what {
            // A space for each region, because a peer does not say where its regions lie.
            What::Named(info) => (info.id.0 << 1 | 1, 0),
            What::Foreign(range) => (range.device << 1, range.address),
        }
    }
    fn is(&self, other: &Self) -> bool {
        match (&self.0.what, &other.0.what) {
            (What::Named(a), What::Named(b)) => self.0.peer == other.0.peer && a.id == b.id,
            _ => Arc::ptr_eq(&self.0, &other.0),
        }
    }
}

impl fmt::Debug for PeerRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PeerRegion({:?} of {:?}, {} bytes)",
            self.name().unwrap_or("foreign"),
            self.0.peer,
            self.len()
        )
    }
}
