//! The caches that a worker has registered: their regions at its agent, and the memory that belongs
//! to them.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use kvx_core::backend::sync::Mutex;
use kvx_core::{Agent, Deadline, Error, ErrorKind, GridSet, Memory, MemoryKind, Region, Result};

use super::digests::{Digests, PeerDigests, Rows};
use super::grants::GrantedWrites;
use super::host_copies::HostCopies;
use super::peer_regions::{GRANT, POOL};
use super::scratch::Scratch;
use kvx_vllm::engine::Fresh;
use kvx_vllm::mapping::{Caches, Geometry, Pairing, RegionGrid};

/// The caches of a worker, and the memory that belongs to them.
#[derive(Debug)]
pub(super) struct RegisteredCaches {
    pub(super) agent: Agent,
    pub(super) caches: Caches,
    pub(super) scratch: Arc<Scratch>,
    regions: Vec<Region>,
    pub(super) words: Region,
    /// True if the engine's leases lie behind the generation counters.
    has_leases: bool,
    pub(super) digests: Option<Digests>,
    /// The host copies that peers see, if the caches lie on a device.
    pub(super) host_copies: Option<HostCopies>,
    /// The grants for requests, to be revoked with the caches.
    granted: Mutex<Vec<Weak<GrantedWrites>>>,
    /// Locked for reading while this process finishes, hashes or copies blocks.
    pub(super) finishing: tokio::sync::RwLock<()>,
}

impl RegisteredCaches {
    pub(super) fn new(
        (agent, scratch): (Agent, Arc<Scratch>),
        caches: Caches,
        memory: Vec<Arc<Memory>>,
        digests: bool,
        words: impl FnOnce(&Agent) -> Result<(Region, bool)>,
    ) -> Result<Self> {
        let digests =
            digests.then(|| Digests::new(&agent, caches.geometry(), &memory)).transpose()?;
        let (words, has_leases) = words(&agent)?;
        let mut regions: Vec<Region> = Vec::with_capacity(memory.len());
        for memory in memory {
            regions.push(agent.register(&format!("{POOL}{:x}", memory.address()), memory)?);
        }
        let finishing = tokio::sync::RwLock::new(());
        let (granted, host_copies) = (Mutex::default(), None);
        let registered = RegisteredCaches {
            agent,
            caches,
            scratch,
            regions,
            words,
            has_leases,
            digests,
            host_copies,
            granted,
            finishing,
        };
        for at in 0..registered.geometry().regions().len() {
            registered.place(at as u32)?;
        }
        Ok(registered)
    }

    pub(super) fn geometry(&self) -> &Geometry {
        self.caches.geometry()
    }

    /// Returns the regions that hold the caches.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }

    /// Returns the region with the engine's leases, by which NIXL agents confirm their reads. `None`
    /// on ranks on other hosts.
    pub(super) fn leases(&self) -> Option<&Region> {
        self.has_leases.then_some(&self.words)
    }

    /// Returns the kind of device memory in a fleet with this engine. A handshake does not name the
    /// vendor.
    pub(super) fn device_kind(&self) -> MemoryKind {
        let amd = self.pools().any(|pool| pool.memory().kind() == MemoryKind::Rocm);
        if amd { MemoryKind::Rocm } else { MemoryKind::Cuda }
    }

    /// Returns the registered memory that holds a region of the caches, and the region's offset in
    /// it.
    pub(super) fn place(&self, region: u32) -> Result<(&Region, u64)> {
        let held = &self.geometry().regions()[region as usize];
        let end = held.end().expect("checked when the geometry was made");
        let lies_in = |memory: &Memory| {
            held.base >= memory.address()
                && end <= memory.address().saturating_add(memory.len() as u64)
        };
        match self.regions.iter().find(|region| lies_in(region.memory())) {
            Some(memory) => Ok((memory, held.base - memory.memory().address())),
            None => Err(ErrorKind::Invalid.because(format!(
                "region {region} of the caches ({:#x} to {end:#x}, layer {}) lies in none of the \
                 {} pieces of memory: pass Rank::register all memory that holds the caches",
                held.base,
                held.layers.first().map_or("without a name", |name| &**name),
                self.regions.len()
            ))),
        }
    }

    pub(super) fn grids(&self, grids: impl Iterator<Item = RegionGrid>) -> Result<GridSet<Region>> {
        let placed = grids.map(|RegionGrid { region, grid }| {
            let (memory, offset) = self.place(region)?;
            Ok((memory.clone(), grid.at(grid.base + offset)))
        });
        GridSet::of(placed.collect::<Result<Vec<_>>>()?)
    }

    /// Reads a block of a grid within a region of the caches.
    fn read(
        &self,
        RegionGrid { region, grid }: &RegionGrid,
        index: u32,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (memory, base) = self.place(*region)?;
        let at = usize::try_from(base + grid.offset(index)).unwrap_or(usize::MAX);
        memory.memory().copy_out(at, bytes)
    }

    /// Writes the digests of blocks that no peer knows of yet.
    pub(super) fn publish_digests(&self, fresh: &[Fresh]) {
        if let Some(digests) = &self.digests {
            let read = |place: &RegionGrid, index, bytes: &mut [u8]| self.read(place, index, bytes);
            digests.write(self.geometry(), fresh, read);
        }
    }

    /// Returns the peer's kernel blocks whose local bytes do not match their digests. Blocks while
    /// it hashes.
    pub(super) fn wrong(
        &self,
        peer: &PeerDigests,
        read: &[Pairing],
        rows: &Rows,
    ) -> Result<BTreeSet<u32>> {
        peer.wrong(read, rows, |place, index, bytes| self.read(place, index, bytes))
    }

    /// Returns the copies of these caches on the host.
    pub(super) fn copies(&self) -> Result<&HostCopies> {
        self.host_copies.as_ref().ok_or_else(caches_are_gone)
    }

    /// Registers the memory again, for the writes of one request. May block.
    pub(super) fn grant(&self, request: u64) -> Result<Vec<Region>> {
        self.host_copies.iter().for_each(HostCopies::wait_until_idle);
        let grant = |region: &Region| {
            let memory = Arc::clone(region.memory());
            self.agent.register(&format!("{GRANT}{request}@{:x}", memory.address()), memory)
        };
        self.regions.iter().map(grant).collect()
    }

    /// Records a grant, so that it is revoked with the caches.
    pub(super) fn has_granted(&self, granted: &Arc<GrantedWrites>) {
        let mut all = self.granted.lock();
        all.retain(|earlier| earlier.strong_count() > 0);
        all.push(Arc::downgrade(granted));
    }

    /// Revokes everything that is registered.
    pub(super) async fn revoke(&self, deadline: Deadline) -> Result<()> {
        let digests = self.digests.iter().map(|digests| &digests.region);
        let grants: Vec<_> = self.granted.lock().iter().filter_map(Weak::upgrade).collect();
        let lies_here = |granted: &&Region| {
            self.regions.iter().any(|region| Arc::ptr_eq(region.memory(), granted.memory()))
        };
        let granted = grants.iter().flat_map(|granted| granted.regions()).filter(lies_here);
        let regions = self.regions.iter().chain([&self.words]).chain(digests).chain(granted);
        let revoked: Vec<_> = regions.map(|region| region.revoke(deadline)).collect();
        let mut result = self.finished(deadline).await;
        for revoked in revoked {
            result = result.and(revoked.await.map(drop));
        }
        result
    }

    /// Waits until no block is being finished, hashed or copied. None starts once the worker no
    /// longer has the caches.
    ///
    /// Errors: `StillShared` if one has not ended by the deadline, or if a device may never end.
    pub(super) async fn finished(&self, deadline: Deadline) -> Result<()> {
        match tokio::time::timeout(deadline.left(), self.finishing.write()).await {
            Ok(_) => self.host_copies.as_ref().map_or(Ok(()), HostCopies::check),
            Err(_) => Err(ErrorKind::StillShared.because(
                "blocks were still being finished, hashed or copied at the deadline: allow more \
                 time",
            )),
        }
    }
}

pub(super) fn caches_are_gone() -> Error {
    ErrorKind::Revoked.because("the caches were given back before the blocks were finished")
}
