//! The owner's regions, and how remote access to them ends.

use std::any::Any;
use std::sync::Arc;

use kvx_backend::control::RegionTable;
use kvx_core::sync::{Mutex, MutexGuard};
use kvx_core::transport::{LocalRegion, RegionSpec};
use kvx_core::{Bound, Error, ErrorKind, Memory, Placed, RegionId, RegionKey, Result, Ticket};

use super::ending::Concern;
use super::progress::Command;
use super::staging::DeviceStage;
use super::transport::Handle;

/// A region that peers may reach.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) id: RegionId,
    pub(super) memory: Arc<Memory>,
    /// Where it bounces, if it lies on a device.
    pub(super) stage: Option<Arc<DeviceStage>>,
}

/// All regions of one agent that TCP serves.
#[derive(Debug, Default)]
pub(super) struct Regions(Mutex<RegionTable<Arc<Served>>>);

impl Regions {
    fn table(&self) -> MutexGuard<'_, RegionTable<Arc<Served>>> {
        self.0.lock()
    }

    pub(super) fn add(&self, spec: RegionSpec, stage: Option<Arc<DeviceStage>>) -> Arc<Served> {
        let RegionSpec { id, key, memory } = spec;
        let served = Arc::new(Served { id, memory, stage });
        self.table().open(id, key, Arc::clone(&served));
        served
    }

    pub(super) fn remove(&self, served: &Served) {
        let revoked = self.table().revoke(served.id);
        drop(revoked); // without the lock: it may be the last to hold the memory
    }

    /// The regions that a request names, if it shows their keys. Errors: `Unregistered`, `Revoked`, `WrongKey`.
    pub(super) fn open(&self, shown: &[(RegionId, RegionKey)]) -> Result<Vec<Arc<Served>>> {
        let table = self.table();
        shown.iter().map(|(id, key)| table.check(*id, key).cloned()).collect()
    }
}

/// A registered region.
pub(super) struct TcpRegion {
    pub(super) served: Arc<Served>,
    handle: Arc<Handle>,
    export: Vec<u8>,
}

/// What peers are told: the number of its stage; nothing of host memory.
fn export(stage: Option<&DeviceStage>) -> Vec<u8> {
    stage.map_or_else(Vec::new, |stage| stage.number.to_le_bytes().to_vec())
}

/// The number of a peer's stage; 0 for host memory. Later versions may say more. Errors: `Malformed`.
pub(super) fn import(export: &[u8]) -> Result<u32> {
    match (export, export.first_chunk()) {
        ([], _) => Ok(0),
        (_, Some(number)) => Ok(u32::from_le_bytes(*number)),
        (_, None) => Err(Error::new(
            ErrorKind::Malformed,
            "malformed export of a region: the metadata was altered",
        )),
    }
}

impl TcpRegion {
    /// May block: a device's first region makes its bounce buffers. Errors: the device's.
    pub(super) fn register(spec: RegionSpec, handle: Arc<Handle>) -> Result<Self> {
        let shared = &handle.shared;
        let stage = shared.stages.of(&spec.memory, &shared.ending)?;
        let export = export(stage.as_deref());
        Ok(TcpRegion { served: shared.regions.add(spec, stage), handle, export })
    }
}

impl TcpRegion {
    /// The regions that these grids of a plan lie on, and the grids on them. Errors: `Invalid` for regions of another
    /// transport.
    pub(super) fn of(plan: &Bound, grids: &[Placed]) -> Result<(Vec<Arc<Served>>, Arc<[Placed]>)> {
        let mut order: Vec<u32> = Vec::new();
        let grids = grids.iter().map(|placed| {
            let known = order.iter().position(|region| *region == placed.region);
            let region = known.unwrap_or_else(|| {
                order.push(placed.region);
                order.len() - 1
            });
            Placed { region: region as u32, grid: placed.grid }
        });
        let grids = grids.collect();
        let served = |region: u32| {
            let any: &dyn Any = &*plan.local(region).region;
            let region = any.downcast_ref::<TcpRegion>().map(|region| Arc::clone(&region.served));
            region.ok_or_else(|| {
                Error::new(
                    ErrorKind::Invalid,
                    "a plan over TCP names a region of another transport",
                )
            })
        };
        Ok((order.into_iter().map(served).collect::<Result<_>>()?, grids))
    }
}

impl LocalRegion for TcpRegion {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        self.handle.shared.regions.remove(&self.served);
        let region = self.served.id;
        let ending = Arc::clone(&self.handle.shared.ending);
        // Nothing new reaches it then; copies that a device has begun, and a turn that hangs, may still do.
        let done = Ticket::new(move |result| {
            let concerns = |concern: &Concern| concern.touches(region);
            if let Some((done, result)) = ending.hold(concerns, done, result) {
                done.settle(result);
            }
        });
        self.handle.reactor.submit(Command::Revoke { region, done });
    }
}

impl Drop for TcpRegion {
    fn drop(&mut self) {
        // A forked child may have inherited the lock as somebody else's.
        if self.handle.is_at_home() {
            self.handle.shared.regions.remove(&self.served);
        }
    }
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
    fn exports_say_on_which_stage_memory_lies() {
        assert_eq!(import(&export(None)).unwrap(), 0);
        assert_eq!(import(&7u32.to_le_bytes()).unwrap(), 7);
        assert_eq!(import(&[7, 0, 0, 0, 99]).unwrap(), 7);
        assert_eq!(import(&[7, 0, 0]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
