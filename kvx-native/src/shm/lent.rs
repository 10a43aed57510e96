//! The regions that a peer lends over one connection, from which this end pulls the peer's writes.

use std::collections::HashMap;

use kvx_core::{RegionId, Result};

use super::memory::{CopyMethod, PeerRegion};

/// The approximate bytes of a region that is not mapped here: its entry.
const ENTRY: usize = 256;
/// The approximate bytes that a mapping takes, apart from the page tables of its content: its entry,
/// the kernel's records, and one page in each of three levels of page tables.
const MAPPING: usize = 16 << 10;

/// The lent regions. One that cannot be opened has the reason.
#[derive(Default)]
pub(crate) struct LentRegions {
    regions: HashMap<RegionId, Result<PeerRegion>>,
    mappings: usize,
}

impl LentRegions {
    pub(crate) fn get(&self, id: RegionId) -> Option<&Result<PeerRegion>> {
        self.regions.get(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns the number of regions that are mapped here, or opened on a device.
    pub(crate) fn mappings(&self) -> usize {
        self.mappings
    }

    /// Returns the bytes of memory that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.mappings * MAPPING + (self.len() - self.mappings) * ENTRY
    }

    /// Adds a region, or replaces one that could not be opened.
    pub(crate) fn insert(&mut self, id: RegionId, held: Result<PeerRegion>) {
        self.remove(id);
        self.mappings += usize::from(is_mapping(&held));
        self.regions.insert(id, held);
    }

    pub(crate) fn remove(&mut self, id: RegionId) -> Option<Result<PeerRegion>> {
        let held = self.regions.remove(&id)?;
        self.mappings -= usize::from(is_mapping(&held));
        Some(held)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

fn is_mapping(held: &Result<PeerRegion>) -> bool {
    held.as_ref().is_ok_and(|held| !matches!(held.place.method, CopyMethod::Remote))
}
