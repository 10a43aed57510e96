//! One worker of the engine: its agent, and the caches that it has registered.

use std::fmt;
use std::sync::{Arc, Weak};

use kvx_core::sync::Mutex;
use kvx_core::{
    Agent, Completion, Deadline, Error, ErrorKind, GridSet, Memory, MemoryKind, PeerRegion, Place,
    Region, Result,
};

use super::connector::Connector;
use super::digests::{DIGESTS, Digests};
use super::host_copies::HostCopies;
use super::push::GrantedWrites;
use super::words::{Scratch, WORDS};
use crate::engine::WorkerRank;
use crate::mapping::{Caches, Geometry, RegionGrid};

/// Regions that hold blocks are named by where they begin at their owner, as its handshake tells addresses.
const POOL: &str = "kv@";
/// The same for what one request may be written by: with a number.
const GRANT: &str = "push";

/// A worker of the engine: [`Connector::rank`] gives it. Cheap to clone; nothing ends with it.
#[derive(Clone)]
pub struct Rank {
    pub(super) connector: Connector,
    pub(super) rank: WorkerRank,
}

impl Rank {
    /// Which one it is.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Registers the caches of this worker: `memory` holds all their regions, each in one piece of it. From now on
    /// peers may load from them. The first time, and after [`give_back`](Self::give_back). May block: registering can
    /// pin pages.
    ///
    /// # Errors
    /// `Invalid`: caches are registered already; memory that lacks a region; blocks of another size than the builder
    /// was told, or fewer or more of them than the engine's other workers have. What the agent says of the memory, or
    /// the dialect of the caches.
    pub fn register<M: Into<Arc<Memory>>>(
        self,
        caches: Caches,
        memory: impl IntoIterator<Item = M>,
    ) -> Result<Rank> {
        let memory = memory.into_iter().map(Into::into).collect();
        self.connector.shared().register(self.rank, caches, memory)?;
        Ok(self)
    }

    /// Gives the caches back, before sleep for example: peers are refused, and loads in flight end. When the completion
    /// is `Ok`, nobody else touches the memory any more, and caches may be [registered](Self::register) anew: peers
    /// that come back shake hands again.
    ///
    /// # Errors
    /// `StillShared`: that could not be known by the deadline, and the memory stays quarantined.
    pub fn give_back(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        self.connector.shared().give_back(self.rank, deadline.into())
    }

    /// Starts the loads of the engine's steps so far on this worker: from now on their blocks are written.
    pub fn start_load_kv(&self) {
        self.connector.shared().start_load_kv(self.rank);
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank(pp {}, tp {})", self.rank.pp, self.rank.tp)
    }
}

/// What a worker has registered.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) agent: Agent,
    pub(super) caches: Caches,
    pub(super) scratch: Arc<Scratch>,
    regions: Vec<Region>,
    pub(super) words: Region,
    pub(super) digests: Option<Digests>,
    /// Where the caches lie on a device and peers see copies of them.
    pub(super) host_copies: Option<HostCopies>,
    /// What peers may write into for requests.
    granted: Mutex<Vec<Weak<GrantedWrites>>>,
    /// Read while blocks are finished, hashed or copied: this process itself touches them then.
    pub(super) finishing: tokio::sync::RwLock<()>,
}

impl Registered {
    pub(super) fn new(
        (agent, scratch): (Agent, Arc<Scratch>),
        caches: Caches,
        memory: Vec<Arc<Memory>>,
        digests: bool,
        words: impl FnOnce(&Agent) -> Result<Region>,
    ) -> Result<Self> {
        let digests =
            digests.then(|| Digests::new(&agent, caches.geometry(), &memory)).transpose()?;
        let words = words(&agent)?;
        let mut regions: Vec<Region> = Vec::with_capacity(memory.len());
        for memory in memory {
            regions.push(agent.register(&format!("{POOL}{:x}", memory.address()), memory)?);
        }
        let finishing = tokio::sync::RwLock::new(());
        let (granted, host_copies) = (Mutex::default(), None);
        let registered = Registered {
            agent,
            caches,
            scratch,
            regions,
            words,
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

    /// What the caches lie in.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }

    /// What memory of a device is in a fleet of this engine's kind: a handshake does not tell the maker.
    pub(super) fn device_kind(&self) -> MemoryKind {
        let amd = self.pools().any(|pool| pool.memory().kind() == MemoryKind::Rocm);
        if amd { MemoryKind::Rocm } else { MemoryKind::Cuda }
    }

    /// The memory that a region of the caches lies in, and where in it.
    pub(super) fn place(&self, region: u32) -> Result<(&Region, u64)> {
        let held = &self.geometry().regions()[region as usize];
        let end = held.end().expect("checked when the geometry was made");
        let lies_in = |memory: &Memory| {
            held.base >= memory.address()
                && end <= memory.address().saturating_add(memory.len() as u64)
        };
        match self.regions.iter().find(|region| lies_in(region.memory())) {
            Some(memory) => Ok((memory, held.base - memory.memory().address())),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "region {region} of the caches ({:#x} to {end:#x}, layer {}) lies in none of the {} pieces of \
                     memory: give Rank::register all memory that the caches are in",
                    held.base,
                    held.layers.first().map_or("without a name", |name| &**name),
                    self.regions.len()
                ),
            )),
        }
    }

    pub(super) fn grids(&self, grids: impl Iterator<Item = RegionGrid>) -> Result<GridSet<Region>> {
        let placed = grids.map(|RegionGrid { region, grid }| {
            let (memory, offset) = self.place(region)?;
            Ok((memory.clone(), grid.at(grid.base + offset)))
        });
        GridSet::of(placed.collect::<Result<Vec<_>>>()?)
    }

    /// The memory once more, to be written into for one request. May block.
    pub(super) fn grant(&self, request: u64) -> Result<Vec<Region>> {
        self.host_copies.iter().for_each(HostCopies::wait_until_idle);
        let grant = |region: &Region| {
            let memory = Arc::clone(region.memory());
            self.agent.register(&format!("{GRANT}{request}@{:x}", memory.address()), memory)
        };
        self.regions.iter().map(grant).collect()
    }

    /// Notes what was granted: it is taken back with everything else.
    pub(super) fn has_granted(&self, granted: &Arc<GrantedWrites>) {
        let mut all = self.granted.lock();
        all.retain(|earlier| earlier.strong_count() > 0);
        all.push(Arc::downgrade(granted));
    }

    /// Takes everything back.
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

    /// Waits until no blocks are being finished, hashed or copied. Once the worker has them no more, none begins.
    ///
    /// Errors: `StillShared`: not by the deadline, or a device may go on for ever.
    pub(super) async fn finished(&self, deadline: Deadline) -> Result<()> {
        match tokio::time::timeout(deadline.left(), self.finishing.write()).await {
            Ok(_) => self.host_copies.as_ref().map_or(Ok(()), HostCopies::check),
            Err(_) => Err(Error::new(
                ErrorKind::StillShared,
                "blocks were still being finished, hashed or copied at the deadline: give it more time",
            )),
        }
    }
}

/// The regions of a peer's worker by the addresses that its handshake tells.
#[derive(Debug)]
pub(super) struct PeerRegions {
    /// First address, region.
    pools: Vec<(u64, PeerRegion)>,
    pub(super) words: Option<PeerRegion>,
    pub(super) digests: Option<PeerRegion>,
}

impl PeerRegions {
    /// Of a kvx agent: what it has named.
    pub(super) fn named(peer: &kvx_core::Peer, metadata: &kvx_core::Metadata) -> Result<Self> {
        let mut regions = PeerRegions { pools: Vec::new(), words: None, digests: None };
        for info in &metadata.regions {
            if let Some(address) =
                info.name.strip_prefix(POOL).and_then(|hex| u64::from_str_radix(hex, 16).ok())
            {
                regions.pools.push((address, peer.region(&info.name)?));
            } else if *info.name == *WORDS {
                regions.words = Some(peer.region(WORDS)?);
            } else if *info.name == *DIGESTS {
                regions.digests = Some(peer.region(DIGESTS)?);
            }
        }
        Ok(regions)
    }

    /// Of a NIXL agent with the backend KVX.
    pub(super) fn in_nixl(peer: &crate::nixl::NixlPeer) -> Self {
        let pools = peer.regions().map(|(address, region)| (address, region.clone())).collect();
        PeerRegions { pools, words: None, digests: None }
    }

    /// Of a kvx agent, for one request.
    pub(super) fn granted(learned: &[PeerRegion]) -> Result<Self> {
        let pool = |region: &PeerRegion| {
            let name = region.name().and_then(|name| name.strip_prefix(GRANT)?.split_once('@'));
            let address = name.and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
            let malformed = || {
                Error::new(ErrorKind::Malformed, "a grant of a push is a region without an address")
            };
            Ok((address.ok_or_else(malformed)?, region.clone()))
        };
        Ok(PeerRegions {
            pools: learned.iter().map(pool).collect::<Result<_>>()?,
            words: None,
            digests: None,
        })
    }

    /// Of an agent that is not kvx: the ranges that its handshake tells. `device`: what memory of its devices is.
    pub(super) fn foreign(
        peer: &kvx_core::Peer,
        geometry: &Geometry,
        device: MemoryKind,
    ) -> Result<Self> {
        let region = |span: crate::mapping::MemorySpan| {
            let kind = match span.memory {
                crate::mapping::MemoryType::Dram => MemoryKind::Host,
                crate::mapping::MemoryType::Vram => device,
            };
            Ok((span.address, peer.foreign(span.address, span.len, kind, geometry.device())?))
        };
        let pools = geometry.spans().into_iter().map(region).collect::<Result<_>>()?;
        Ok(PeerRegions { pools, words: None, digests: None })
    }

    pub(super) fn grids(
        &self,
        geometry: &Geometry,
        grids: impl Iterator<Item = RegionGrid>,
    ) -> Result<GridSet<PeerRegion>> {
        let placed = grids.map(|RegionGrid { region, grid }| {
            let (region, offset) = self.at(geometry.regions()[region as usize].base)?;
            Ok((region.clone(), grid.at(grid.base + offset)))
        });
        GridSet::of(placed.collect::<Result<Vec<_>>>()?)
    }

    /// The region that an address of the peer lies in, and where in it.
    pub(super) fn at(&self, base: u64) -> Result<(&PeerRegion, u64)> {
        let within = |(address, region): &&(u64, PeerRegion)| {
            base >= *address && base - address < region.len()
        };
        match self.pools.iter().find(within) {
            Some((address, region)) => Ok((region, base - address)),
            None => Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "the peer names blocks at {base:#x}, where its agent has registered nothing"
                ),
            )),
        }
    }
}
