//! The owner's regions, and the end of remote access to them.

use std::any::Any;
use std::sync::Arc;

use kvx_backend::control::RegionTable;
use kvx_core::backend::sync::{Mutex, MutexGuard};
use kvx_core::backend::{BoundPlan, Pair, RegionKey, RegionSpec, RemoteRegion};
use kvx_core::{ErrorKind, Memory, RegionId, Result};

use crate::tcp::memory::stages::DeviceStage;

/// A region that peers may reach.
#[derive(Debug)]
pub(crate) struct ServedRegion {
    pub(crate) id: RegionId,
    pub(crate) memory: Arc<Memory>,
    /// The bounce buffers of the region, if it lies on a device.
    pub(crate) stage: Option<Arc<DeviceStage>>,
}

/// Regions of the owner, in the order of a request.
pub(crate) type ServedRegions = Arc<[Arc<ServedRegion>]>;

/// All regions of one agent that TCP serves.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<RegionTable<Arc<ServedRegion>>>);

impl Regions {
    fn table(&self) -> MutexGuard<'_, RegionTable<Arc<ServedRegion>>> {
        self.0.lock()
    }

    pub(crate) fn add(
        &self,
        spec: RegionSpec,
        stage: Option<Arc<DeviceStage>>,
    ) -> Arc<ServedRegion> {
        let RegionSpec { id, key, memory } = spec;
        let served = Arc::new(ServedRegion { id, memory, stage });
        self.table().open(id, key, Arc::clone(&served));
        served
    }

    pub(crate) fn remove(&self, served: &ServedRegion) {
        let revoked = self.table().revoke(served.id);
        drop(revoked); // without the lock: it may be the last to hold the memory
    }

    /// Returns the regions that a request names, if it shows their keys. Returns `Unregistered`,
    /// `Revoked` or `WrongKey` otherwise.
    pub(crate) fn open(&self, shown: &[(RegionId, RegionKey)]) -> Result<Vec<Arc<ServedRegion>>> {
        let table = self.table();
        shown.iter().map(|(id, key)| table.check(*id, key).cloned()).collect()
    }
}

/// Encodes the export for peers: the number of its stage, or nothing for host memory.
pub(crate) fn export(stage: Option<&DeviceStage>) -> Vec<u8> {
    stage.map_or_else(Vec::new, |stage| stage.number.to_le_bytes().to_vec())
}

/// Decodes the number of a peer's stage; 0 for host memory. Later versions may append fields.
/// Returns `Malformed` for an invalid export.
pub(crate) fn import(export: &[u8]) -> Result<u32> {
    match (export, export.first_chunk()) {
        ([], _) => Ok(0),
        (_, Some(number)) => Ok(u32::from_le_bytes(*number)),
        (_, None) => {
            Err(ErrorKind::Malformed
                .because("malformed export of a region: the metadata was altered"))
        }
    }
}

/// A region of the peer. Its id, key and bounds are all that TCP needs, and a plan has those.
pub(crate) struct TcpRemote {
    /// The number of the region's stage at the peer; 0 for host memory.
    pub(crate) stage: u32,
}

impl RemoteRegion for TcpRemote {}

fn remote_stage(plan: &BoundPlan, region: u32) -> u32 {
    let any: &dyn Any = &*plan.remote(region).region;
    any.downcast_ref::<TcpRemote>().map_or(0, |remote| remote.stage)
}

/// Returns true if a plan has device memory on either side.
pub(crate) fn is_staged(plan: &BoundPlan) -> bool {
    // Each side has one kind of memory, so the first one is representative.
    let local = plan.locals().first().is_some_and(|local| local.memory.device_access().is_some());
    local || !plan.remotes().is_empty() && remote_stage(plan, 0) != 0
}

/// Returns true if a grid of a plan lies on the same stages as the one before it, so that one
/// request may name both.
pub(crate) fn share_stages(plan: &BoundPlan, pair: &Pair, grid: usize) -> bool {
    // A stage of this end belongs to one device.
    let device =
        |grid: usize| plan.local(pair.local[grid].region).memory.device_access().map(Arc::as_ptr);
    let stage = |grid: usize| remote_stage(plan, pair.remote[grid].region);
    let same_device = match (device(grid - 1), device(grid)) {
        (Some(before), Some(now)) => std::ptr::addr_eq(before, now),
        (before, now) => before.is_none() && now.is_none(),
    };
    same_device && stage(grid - 1) == stage(grid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(id: u64, key: u8) -> RegionSpec {
        RegionSpec {
            id: RegionId(id),
            key: RegionKey([key; 16]),
            memory: Arc::new(Memory::owned(vec![0; 8])),
        }
    }

    #[test]
    fn each_reason_to_refuse_has_its_own_kind() {
        let regions = Regions::default();
        let kept = regions.add(spec(1, 1), None);
        let gone = regions.add(spec(2, 2), None);
        let open = |id, key| {
            regions.open(&[(RegionId(id), RegionKey([key; 16]))]).map(|served| served[0].id)
        };
        assert_eq!(open(1, 1).unwrap(), kept.id);
        assert_eq!(open(1, 2).unwrap_err().kind(), ErrorKind::WrongKey);
        assert_eq!(open(3, 1).unwrap_err().kind(), ErrorKind::Unregistered);
        regions.remove(&gone);
        assert_eq!(open(2, 2).unwrap_err().kind(), ErrorKind::Revoked);
    }

    #[test]
    fn exports_name_the_stage_of_memory() {
        assert_eq!(import(&export(None)).unwrap(), 0);
        assert_eq!(import(&7u32.to_le_bytes()).unwrap(), 7);
        assert_eq!(import(&[7, 0, 0, 0, 99]).unwrap(), 7);
        assert_eq!(import(&[7, 0, 0]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
