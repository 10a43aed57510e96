//! The owner's regions, and how remote access to them ends.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvx_core::transport::{LocalRegion, RegionSpec};
use kvx_core::{Error, Kind, Memory, RegionId, RegionKey, Result, Ticket};

use super::progress::Command;
use super::transport::Handle;

/// How many revoked regions are remembered by number, so that a late request hears `Revoked`.
const REMEMBERED: usize = 4096;

/// A region that peers may reach.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) id: RegionId,
    key: RegionKey,
    pub(super) memory: Arc<Memory>,
}

/// All regions of one agent that TCP serves.
#[derive(Debug, Default)]
pub(super) struct Regions(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    served: HashMap<RegionId, Arc<Served>>,
    revoked: VecDeque<RegionId>,
}

impl Regions {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, spec: RegionSpec) -> Arc<Served> {
        let RegionSpec { id, key, memory } = spec;
        let served = Arc::new(Served { id, key, memory });
        self.table().served.insert(id, Arc::clone(&served));
        served
    }

    fn remove(&self, served: &Served) {
        let mut table = self.table();
        if table.served.remove(&served.id).is_some() {
            if table.revoked.len() == REMEMBERED {
                table.revoked.pop_front();
            }
            table.revoked.push_back(served.id);
        }
    }

    /// The regions that a request names, if it shows their keys. Errors: `Unregistered`, `Revoked`, `WrongKey`.
    pub(super) fn open(&self, shown: &[(RegionId, RegionKey)]) -> Result<Vec<Arc<Served>>> {
        let table = self.table();
        shown
            .iter()
            .map(|(id, key)| match table.served.get(id) {
                Some(served) if served.key.matches(key) => Ok(Arc::clone(served)),
                Some(_) => Err(Error::new(
                    Kind::WrongKey,
                    format!("wrong key for region {id}: use its owner's metadata"),
                )),
                None if table.revoked.contains(id) => {
                    Err(Error::new(Kind::Revoked, format!("region {id} was revoked by its owner")))
                }
                None => Err(Error::new(
                    Kind::Unregistered,
                    format!("region {id} is not registered with its owner for TCP: fetch its new metadata"),
                )),
            })
            .collect()
    }
}

/// A registered region.
pub(super) struct TcpRegion {
    served: Arc<Served>,
    handle: Arc<Handle>,
}

impl TcpRegion {
    /// Errors: `Unsupported` for device memory.
    pub(super) fn register(spec: RegionSpec, handle: Arc<Handle>) -> Result<Self> {
        let kind = spec.memory.kind();
        if !kind.is_host() {
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "TCP moves host memory, not {kind}: register a host pool, or use a backend that reaches the device"
                ),
            ));
        }
        Ok(TcpRegion { served: handle.shared.regions.add(spec), handle })
    }
}

impl LocalRegion for TcpRegion {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        self.handle.shared.regions.remove(&self.served);
        self.handle.submit(Command::Revoke { region: self.served.id, done });
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
        let kept = regions.add(spec(1, 1));
        let gone = regions.add(spec(2, 2));
        let open = |id, key| regions.open(&[(RegionId(id), RegionKey([key; 16]))]).map(|served| served[0].id);
        assert_eq!(open(1, 1).unwrap(), kept.id);
        assert_eq!(open(1, 2).unwrap_err().kind(), Kind::WrongKey);
        assert_eq!(open(3, 1).unwrap_err().kind(), Kind::Unregistered);
        regions.remove(&gone);
        assert_eq!(open(2, 2).unwrap_err().kind(), Kind::Revoked);
    }

    #[test]
    fn the_memory_of_revoked_regions_is_forgotten_after_a_while() {
        let regions = Regions::default();
        for id in 0..REMEMBERED as u64 + 10 {
            let served = regions.add(spec(id, 1));
            regions.remove(&served);
        }
        assert_eq!(regions.table().revoked.len(), REMEMBERED);
        assert!(regions.table().served.is_empty());
    }
}
