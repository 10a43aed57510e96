//! Regions of peers: those that hold the addresses of a handshake, and those that a decode grants
//! to a write.

use kvx_core::backend::Metadata;
use kvx_core::{ErrorKind, GridSet, MemoryKind, Peer, PeerRegion, Place as _, Result};

use super::digests::DIGESTS;
use crate::nixl::NixlPeer;
use kvx_vllm::engine::{Move, Part};
use kvx_vllm::mapping::{Geometry, MemorySpan, MemoryType, RegionGrid};
use kvx_vllm::wire::nixl::GENERATIONS_REGION;

/// The prefix of regions that hold blocks. The rest of the name is the region's first address at
/// its owner, because a handshake names addresses.
pub(super) const POOL: &str = "kv@";
/// The prefix of regions that are granted to one request. A number follows, then `@` and the
/// address.
pub(super) const GRANT: &str = "push";

/// The regions of a peer's worker, by the addresses that its handshake names.
#[derive(Debug)]
pub(super) struct PeerRegions {
    /// First addresses and regions.
    pools: Vec<(u64, PeerRegion)>,
    pub(super) words: Option<PeerRegion>,
    pub(super) digests: Option<PeerRegion>,
}

impl PeerRegions {
    /// Finds the regions of a kvx agent by their names.
    pub(super) fn named(peer: &Peer, metadata: &Metadata) -> Result<Self> {
        let mut regions = PeerRegions { pools: Vec::new(), words: None, digests: None };
        for info in &metadata.regions {
            if let Some(address) =
                info.name.strip_prefix(POOL).and_then(|hex| u64::from_str_radix(hex, 16).ok())
            {
                regions.pools.push((address, peer.region(&info.name)?));
            } else if *info.name == *GENERATIONS_REGION {
                regions.words = Some(peer.region(GENERATIONS_REGION)?);
            } else if *info.name == *DIGESTS {
                regions.digests = Some(peer.region(DIGESTS)?);
            }
        }
        Ok(regions)
    }

    /// Takes the regions of a NIXL agent with the backend KVX.
    pub(super) fn in_nixl(peer: &NixlPeer) -> Self {
        let pools = peer.regions().map(|(address, region)| (address, region.clone())).collect();
        PeerRegions { pools, words: None, digests: None }
    }

    /// Takes the regions that a kvx agent has granted for one request.
    pub(super) fn granted(learned: &[PeerRegion]) -> Result<Self> {
        let pool = |region: &PeerRegion| {
            let name = region.name().and_then(|name| name.strip_prefix(GRANT)?.split_once('@'));
            let address = name.and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
            let malformed = || {
                ErrorKind::Malformed
                    .because("the grant of a push names a region without an address")
            };
            Ok((address.ok_or_else(malformed)?, region.clone()))
        };
        Ok(PeerRegions {
            pools: learned.iter().map(pool).collect::<Result<_>>()?,
            words: None,
            digests: None,
        })
    }

    /// Registers the ranges that the handshake of an agent other than kvx names. `device` is the
    /// kind of its device memory.
    pub(super) fn foreign(peer: &Peer, geometry: &Geometry, device: MemoryKind) -> Result<Self> {
        let region = |span: MemorySpan| {
            let kind = match span.memory {
                MemoryType::Dram => MemoryKind::Host,
                MemoryType::Vram => device,
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

    /// Returns the region that holds an address of the peer, and the offset in it.
    pub(super) fn at(&self, base: u64) -> Result<(&PeerRegion, u64)> {
        let within = |(address, region): &&(u64, PeerRegion)| {
            base >= *address && base - address < region.len()
        };
        match self.pools.iter().find(within) {
            Some((address, region)) => Ok((region, base - address)),
            None => Err(ErrorKind::Malformed.because(format!(
                "the peer names blocks at {base:#x}, where its agent has not registered memory"
            ))),
        }
    }
}

/// Regions that a decode has granted to a write. They stay imported until this is dropped.
pub(super) struct ImportedRegions {
    peer: Peer,
    pub(super) regions: Vec<PeerRegion>,
}

impl ImportedRegions {
    /// Imports the grants for the worker that a write goes to. Returns `None` if the decode grants
    /// nothing, because it is not a kvx engine.
    pub(super) fn of(order: &Move, peer: &Peer) -> Result<Option<Self>> {
        let Part { rank, .. } = order.part;
        let Some(grant) =
            order.grants.iter().find(|grant| (grant.pp, grant.tp) == (rank.pp, rank.tp))
        else {
            return match order.grants.is_empty() {
                true => Ok(None),
                false => Err(ErrorKind::Malformed
                    .because("the decode's registration has no grant for this worker")),
            };
        };
        let mut imported = ImportedRegions {
            peer: peer.clone(),
            regions: Vec::with_capacity(grant.regions.len()),
        };
        for bytes in &grant.regions {
            imported.regions.push(peer.import_region(bytes)?);
        }
        Ok(Some(imported))
    }
}

impl Drop for ImportedRegions {
    fn drop(&mut self) {
        self.regions.iter().for_each(|region| self.peer.forget(region));
    }
}
