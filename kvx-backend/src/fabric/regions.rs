//! Local regions, from their registration to the proof that no peer reaches them any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{LocalRegion, RegionKey, RegionSpec, Ticket};
use kvx_core::{Memory, RegionId, Result};

use crate::control::RegionTable;
use crate::control::errors::still_shared;

/// A local region.
pub(super) struct RegionRecord<L> {
    pub(super) id: RegionId,
    pub(super) key: RegionKey,
    pub(super) local: L,
    /// The number of lanes that have not released the region.
    holders: AtomicUsize,
    /// The region's memory, until it is freed.
    memory: Mutex<Option<Arc<Memory>>>,
}

impl<L> RegionRecord<L> {
    pub(super) fn new(spec: RegionSpec, local: L, lanes: usize) -> Self {
        let (holders, memory) = (AtomicUsize::new(lanes), Mutex::new(Some(spec.memory)));
        RegionRecord { id: spec.id, key: spec.key, local, holders, memory }
    }

    /// Records that no peer reaches the region over one lane any more. Returns true for the last
    /// lane.
    pub(super) fn release(&self) -> bool {
        self.holders.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Releases the memory, which no peer reaches any more.
    pub(super) fn free(&self) {
        let memory = self.memory.lock().take();
        drop(memory);
    }

    /// Leaks the region with its memory and the library's registration, because a peer may reach it
    /// for ever. The same lane must not have called [`release`](RegionRecord::release), so that no
    /// lane becomes the last one.
    pub(super) fn quarantine(self: Arc<Self>) {
        std::mem::forget(self);
    }
}

/// The regions that peers may request, over any lane.
pub(super) struct Regions<L>(Mutex<RegionTables<L>>);

struct RegionTables<L> {
    /// The number of lanes that have not ended.
    lanes: usize,
    table: RegionTable<Arc<RegionRecord<L>>>,
}

impl<L> Regions<L> {
    pub(super) fn new(lanes: usize) -> Self {
        Regions(Mutex::new(RegionTables { lanes, table: RegionTable::default() }))
    }

    pub(super) fn open(&self, region: Arc<RegionRecord<L>>) {
        self.0.lock().table.open(region.id, region.key, region);
    }

    /// Revokes a region for all peers. Returns `None` if it was already revoked.
    pub(super) fn revoke(&self, id: RegionId) -> Option<Arc<RegionRecord<L>>> {
        self.0.lock().table.revoke(id)
    }

    /// Checks that a peer with this key may use the region. Returns `Unregistered`, `WrongKey` or
    /// `Revoked` otherwise.
    pub(super) fn check(&self, id: RegionId, key: &RegionKey) -> Result<()> {
        self.0.lock().table.check(id, key).map(|_| ())
    }

    /// Ends a lane. Returns all open regions, and keeps them if other lanes are left.
    pub(super) fn close(&self) -> Vec<Arc<RegionRecord<L>>> {
        let mut all = self.0.lock();
        all.lanes -= 1;
        if all.lanes == 0 { all.table.drain() } else { all.table.iter().cloned().collect() }
    }
}

/// The handle of a region, which core holds.
pub(super) struct RegionHandle<L> {
    pub(super) record: Arc<RegionRecord<L>>,
    pub(super) export: Vec<u8>,
    pub(super) regions: Arc<Regions<L>>,
    /// The function that has every lane recall the region; the ticket settles when all of them
    /// have.
    pub(super) revoke: Box<dyn Fn(Arc<RegionRecord<L>>, Ticket) + Send + Sync>,
}

impl<L: Send + Sync + 'static> LocalRegion for RegionHandle<L> {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        match self.regions.revoke(self.record.id) {
            Some(region) => (self.revoke)(region, done),
            None => done.settle(Err(still_shared(self.record.id))),
        }
    }
}
