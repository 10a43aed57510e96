//! Regions: the memory that an agent registers, and the regions of its peers.

pub(crate) mod core;
mod remote;

use std::fmt;
use std::sync::Arc;

use crate::agent::inner::AgentInner;
use crate::completion::{Completion, Promise};
use crate::deadline::Reason;
use crate::fault_injection::injected;
use crate::grid::{Grid, GridSet, Place, sealed};
use crate::identity::RegionId;
use crate::metadata::encode_region;
use crate::{Deadline, Error, Memory, MemoryKind, Result, fork};

pub(crate) use core::RegionCore;
#[cfg(all(test, kvx_loom))]
pub(crate) use core::core_of;
pub use remote::PeerRegion;
pub(crate) use remote::What;

/// Memory registered with an agent. Cheap to clone.
///
/// Peers may reach it until it is revoked. Dropping the last clone never blocks: the memory is
/// quarantined, and freed once every transport has reported that remote access has ended.
#[derive(Clone)]
pub struct Region(Arc<RegionHandle>);

struct RegionHandle {
    agent: Arc<AgentInner>,
    core: Arc<RegionCore>,
}

impl Region {
    pub(crate) fn new(agent: Arc<AgentInner>, core: RegionCore) -> Self {
        Region(Arc::new(RegionHandle { agent, core: Arc::new(core) }))
    }

    pub(crate) fn core(&self) -> &Arc<RegionCore> {
        &self.0.core
    }

    /// Returns the region's number.
    pub fn id(&self) -> RegionId {
        self.0.core.id
    }

    /// Returns the name by which peers find the region.
    pub fn name(&self) -> &str {
        &self.0.core.name
    }

    /// Returns the region's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.core.memory
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// As [`Memory::copy_in`].
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.core.memory.copy_in(offset, bytes)
    }

    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// As [`Memory::copy_out`].
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.core.memory.copy_out(offset, bytes)
    }

    /// Lays a grid on this region.
    ///
    /// # Errors
    /// `Invalid` if the grid has blocks of length 0 or a stride below the length; `OutOfBounds` if
    /// it does not fit into the region; `Forked`.
    pub fn grid(&self, grid: Grid) -> Result<GridSet<Region>> {
        GridSet::of([(self.clone(), grid)])
    }

    /// Returns the bytes that a peer needs to use this region alone. A peer that already knows the
    /// agent passes them to [`Peer::import_region`](crate::Peer::import_region). The metadata of
    /// all regions, one by one, costs as much as the agent's metadata once.
    ///
    /// # Errors
    /// `Revoked` if the region is revoked; `Exhausted` if a backend's data about the region is too
    /// long; `Forked`.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        fork::check()?;
        match self.0.agent.region_info(self.id()) {
            Some(info) => encode_region(&self.0.agent.identity, &info),
            None => Err(core::revoked(self.name())),
        }
    }

    /// Returns the backends that do not serve the region, each with the reason.
    pub fn refusals(&self) -> Vec<(&'static str, Error)> {
        let names = self.0.agent.transports.iter().map(|open| open.name);
        let refused = |(name, local): (_, &Result<_>)| {
            local.as_ref().err().map(|error| (name, error.clone()))
        };
        names.zip(&self.0.core.locals).filter_map(refused).collect()
    }

    /// Ends remote access and returns the memory.
    ///
    /// New transfers that use the region are rejected at once, and local ones in flight are
    /// cancelled. Once the completion is `Ok`, nothing else touches the memory.
    ///
    /// # Errors
    /// `StillShared` if remote access is not proven to have ended by the deadline; the memory stays
    /// quarantined until it is. `Closed` if the agent is shut down meanwhile; `Forked`.
    pub fn revoke(&self, deadline: impl Into<Deadline>) -> Completion<Arc<Memory>> {
        if let Err(error) = crate::fork::check() {
            return Completion::ready(Err(error));
        }
        let agent = &self.0.agent;
        let promise = Promise::new();
        let core = Arc::downgrade(&self.0.core);
        promise.by(&agent.clock, deadline.into(), move || {
            if let Some(core) = core.upgrade() {
                core.quarantine("its revocation has not ended by its deadline");
            }
            core::still_shared()
        });
        agent.forget_region(self.id());
        self.0.core.revoke(Some(Arc::clone(&promise)), false);
        agent.clock.interrupt(&Reason::Region(self.id()));
        Completion::of(promise)
    }

    pub(crate) fn same_agent(&self, other: &Region) -> bool {
        Arc::ptr_eq(&self.0.agent, &other.0.agent)
    }

    pub(crate) fn is_of(&self, agent: &Arc<AgentInner>) -> bool {
        Arc::ptr_eq(&self.0.agent, agent)
    }
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        if crate::fork::check().is_err() {
            // A forked child must not drop anything that belongs to a transport.
            return std::mem::forget(Arc::clone(&self.core));
        }
        if injected("drop-frees") {
            return;
        }
        self.agent.forget_region(self.core.id);
        self.core.revoke(None, true);
        self.core.warn_if_held(&self.agent.clock);
    }
}

impl sealed::Sealed for Region {}

impl Place for Region {
    fn len(&self) -> u64 {
        self.0.core.memory.len() as u64
    }
    fn kind(&self) -> MemoryKind {
        self.0.core.memory.kind()
    }
    fn is_read_only(&self) -> bool {
        self.0.core.memory.is_read_only()
    }
    fn origin(&self) -> (u64, u64) {
        let memory = &self.0.core.memory;
        (memory.kind() as u64, memory.address())
    }
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.core, &other.0.core)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?}, {:?})", self.0.core.name, self.0.core.memory)
    }
}
