//! Regions: memory registered with an agent, and the regions of its peers.

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
/// Peers may reach it until it is revoked. Dropping the last clone never blocks: the memory is quarantined, and
/// freed only when every transport has said that remote access has ended.
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

    /// Its number.
    pub fn id(&self) -> RegionId {
        self.0.core.id
    }

    /// Its name, by which peers find it.
    pub fn name(&self) -> &str {
        &self.0.core.name
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.core.memory
    }

    /// Copies `bytes` to `offset`; see [`Memory::copy_in`].
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.core.memory.copy_in(offset, bytes)
    }

    /// Copies bytes from `offset` out; see [`Memory::copy_out`].
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.core.memory.copy_out(offset, bytes)
    }

    /// A grid on this region. Errors: `Invalid`, `OutOfBounds`.
    pub fn grid(&self, grid: Grid) -> Result<GridSet<Region>> {
        GridSet::of([(self.clone(), grid)])
    }

    /// What a peer needs to use this region alone, in bytes: for [`Peer::import_region`](crate::Peer::import_region), at a peer that
    /// knows the agent already. All of an agent's regions one by one cost as much as its metadata once. Errors:
    /// `Revoked`.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        fork::check()?;
        match self.0.agent.region_info(self.id()) {
            Some(info) => encode_region(&self.0.agent.identity, &info),
            None => Err(core::revoked(self.name())),
        }
    }

    /// The backends that do not serve it, and why.
    pub fn refusals(&self) -> Vec<(&'static str, Error)> {
        let names = self.0.agent.transports.iter().map(|open| open.name);
        let refused = |(name, local): (_, &Result<_>)| {
            local.as_ref().err().map(|error| (name, error.clone()))
        };
        names.zip(&self.0.core.locals).filter_map(refused).collect()
    }

    /// Ends remote access and gives the memory back.
    ///
    /// New transfers on it are refused at once and the own ones in flight are cancelled. When the completion is `Ok`,
    /// nobody else touches the memory any more. Errors: `StillShared` when that could not be known by the deadline:
    /// the memory stays quarantined until it is.
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
            return std::mem::forget(Arc::clone(&self.core)); // in a fork nothing of a transport is dropped
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
