//! Regions of ours, from their registration to the proof that nobody reaches them any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{LocalRegion, RegionKey, RegionSpec, Ticket};
use kvx_core::{Memory, RegionId, Result};

use crate::control::RegionTable;
use crate::control::errors::still_shared;

/// A region of ours.
pub(super) struct RegionRecord<L> {
    pub(super) id: RegionId,
    pub(super) key: RegionKey,
    pub(super) local: L,
    /// Lanes that have not let go of it.
    holders: AtomicUsize,
    /// Until it is given back.
    memory: Mutex<Option<Arc<Memory>>>,
}

impl<L> RegionRecord<L> {
    pub(super) fn new(spec: RegionSpec, local: L, lanes: usize) -> Self {
        let (holders, memory) = (AtomicUsize::new(lanes), Mutex::new(Some(spec.memory)));
        RegionRecord { id: spec.id, key: spec.key, local, holders, memory }
    }

    /// Nobody reaches it over one lane any more. Says whether that was the last.
    pub(super) fn release(&self) -> bool {
        self.holders.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Nobody reaches it any more.
    pub(super) fn free(&self) {
        let memory = self.memory.lock().take();
        drop(memory);
    }

    /// Somebody may reach it for ever: neither its memory nor what the library made of it is freed.
    /// Not after [`let_go`](RegionRecord::release) of the same lane, so that there is no last one.
    pub(super) fn quarantine(self: Arc<Self>) {
        std::mem::forget(self);
    }
}

/// What peers may ask for, over any lane.
pub(super) struct Regions<L>(Mutex<RegionTables<L>>);

struct RegionTables<L> {
    /// Lanes that have not ended.
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

    /// Nobody is granted it from now on. `None`: it was revoked before.
    pub(super) fn revoke(&self, id: RegionId) -> Option<Arc<RegionRecord<L>>> {
        self.0.lock().table.revoke(id)
    }

    /// Returns whether who shows this key may use the region. Errors: `Unregistered`, `WrongKey`,
    /// `Revoked`.
    pub(super) fn check(&self, id: RegionId, key: &RegionKey) -> Result<()> {
        self.0.lock().table.check(id, key).map(|_| ())
    }

    /// A lane has ended: gives all that are still open, and keeps them for the other lanes, if
    /// there are any.
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
    /// Has every lane recall the region; the ticket settles when all of them have.
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
