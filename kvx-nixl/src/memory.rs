//! Memory that NIXL's user registers: ours, and what we know of a peer's.

use std::sync::{Arc, OnceLock};

use kvx::{Peer, PeerRegion, Region};

use crate::status::{NixlResult, NixlStatus};

/// A registered range, as prepared lists name it.
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) owner: RangeOwner,
}

/// Whose memory it is.
pub(crate) enum RangeOwner {
    /// This agent's.
    Ours(Region),
    /// A peer's.
    Theirs(Peer, PeerRegion),
    /// This agent's, as the other end of transfers to itself.
    Mirror(Arc<Range>, OnceLock<PeerRegion>),
}

impl Range {
    /// Returns where an address lies in it.
    pub(crate) fn offset(&self, address: u64, len: u64) -> NixlResult<u64> {
        let offset = address.checked_sub(self.base).ok_or(NixlStatus::InvalidParam)?;
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(offset),
            _ => Err(NixlStatus::InvalidParam),
        }
    }
}
