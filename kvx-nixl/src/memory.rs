//! Memory of this agent and of peers that NIXL's user registers or loads.

use std::sync::{Arc, OnceLock};

use kvx::{Peer, PeerRegion, Region};

use crate::status::{NixlResult, NixlStatus};

/// A registered range, as prepared lists refer to it.
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) owner: RangeOwner,
}

/// The owner of a range.
pub(crate) enum RangeOwner {
    /// Memory of this agent.
    Ours(Region),
    /// A peer.
    Theirs(Peer, PeerRegion),
    /// Memory of this agent, as the remote end of transfers to itself.
    Mirror(Arc<Range>, OnceLock<PeerRegion>),
}

impl Range {
    /// Returns the offset of an address in the range.
    pub(crate) fn offset(&self, address: u64, len: u64) -> NixlResult<u64> {
        let offset = address.checked_sub(self.base).ok_or(NixlStatus::InvalidParam)?;
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(offset),
            _ => Err(NixlStatus::InvalidParam),
        }
    }
}
