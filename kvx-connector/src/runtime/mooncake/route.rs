//! The memory of a decode's worker, as one worker of a prefill writes into it. Built once for each
//! layout.

use std::collections::BTreeMap;

use kvx_core::{
    Blocks, ErrorKind, Grid, GridSet, MemoryKind, Peer, PeerRegion, Place as _, Region, Result,
};

use super::super::caches::RegisteredCaches;
use super::super::link::Grids;
use super::super::peer_regions::{ImportedRegions, PeerRegions};
use kvx_vllm::engine::Move;
use kvx_vllm::mapping::{MemoryType, SendLane, SendMap};

/// The connection to a worker of a decode, with the places to write to.
#[derive(Debug)]
pub(in super::super) struct WriteRoute {
    pub(super) peer: Peer,
    /// True for a plain Mooncake agent, which is written to by address. A kvx engine is written to
    /// through the grants of each request.
    pub(super) foreign: bool,
    /// The lanes, by KV cache group and the kind of local memory.
    pub(super) lanes: BTreeMap<(u32, MemoryType), Lanes>,
}

#[derive(Debug)]
pub(super) struct Lanes {
    ours: Grids<Region>,
    /// The decode's grids, by address.
    theirs: Vec<Grid>,
    /// The kind of the decode's memory. The protocol does not tell it, so it is assumed to be the
    /// local kind.
    kind: MemoryKind,
}

/// The blocks that one write of a request moves. Dropping it forgets the imported regions.
pub(in super::super) struct RoutePairs {
    pub(in super::super) peer: Peer,
    pub(in super::super) pairs: Vec<(Blocks<Region>, Blocks<PeerRegion>)>,
    pub(in super::super) imported: Option<ImportedRegions>,
}

pub(super) fn lanes(
    own: &RegisteredCaches,
    map: &SendMap,
) -> Result<BTreeMap<(u32, MemoryType), Lanes>> {
    let mut by_group: BTreeMap<_, Vec<&SendLane>> = BTreeMap::new();
    for lane in map.lanes() {
        let memory = own.geometry().regions()[lane.local.region as usize].memory;
        by_group.entry((lane.group, memory)).or_default().push(lane);
    }
    let drawn = |((group, memory), lanes): ((u32, MemoryType), Vec<&SendLane>)| {
        let ours = Grids(own.grids(lanes.iter().map(|lane| lane.local))?);
        let kind = match memory {
            MemoryType::Dram => MemoryKind::Host,
            MemoryType::Vram => own.device_kind(),
        };
        let theirs = lanes.iter().map(|lane| lane.remote).collect();
        Ok(((group, memory), Lanes { ours, theirs, kind }))
    };
    by_group.into_iter().map(drawn).collect()
}

impl WriteRoute {
    /// Returns the blocks that a write moves. Errors: `Malformed` if the decode grants no memory,
    /// or names memory outside its grants.
    pub(in super::super) fn pairs(&self, order: &Move) -> Result<RoutePairs> {
        let imported = match self.foreign {
            true => None,
            false => Some(ImportedRegions::of(order, &self.peer)?.ok_or_else(|| {
                ErrorKind::Malformed
                    .because("the decode runs kvx, but grants no memory to write into")
            })?),
        };
        let regions = imported
            .as_ref()
            .map(|imported| PeerRegions::granted(&imported.regions))
            .transpose()?;
        let mut pairs = Vec::new();
        for group in order.groups.iter() {
            let number = u32::try_from(group.group).unwrap_or(u32::MAX);
            // The group has no layers in memory of this kind.
            let Some(lanes) = self.lanes.get(&(number, order.part.memory.0)) else { continue };
            let theirs = match &regions {
                Some(regions) => lanes.within(regions)?,
                None => lanes.at(&self.peer)?,
            };
            pairs.push((
                lanes.ours.0.blocks(group.local.clone()),
                theirs.blocks(group.remote.clone()),
            ));
        }
        Ok(RoutePairs { peer: self.peer.clone(), pairs, imported })
    }
}

impl Lanes {
    /// Places the decode's grids in the regions that it has granted, limited to the blocks that lie
    /// in them.
    fn within(&self, regions: &PeerRegions) -> Result<GridSet<PeerRegion>> {
        let mut placed = Vec::with_capacity(self.theirs.len());
        let mut count = u32::MAX;
        for grid in &self.theirs {
            let (region, offset) = regions.at(grid.base)?;
            let left = (region.len() - offset).checked_sub(grid.length);
            let fit = left.map_or(0, |left| left / grid.stride.max(1) + 1);
            count = count.min(u32::try_from(fit).unwrap_or(u32::MAX));
            placed.push((region.clone(), grid.at(offset)));
        }
        GridSet::of(placed.into_iter().map(|(region, grid)| (region, Grid { count, ..grid })))
    }

    /// Places the decode's grids by address. Only the decode knows how many blocks there are.
    fn at(&self, peer: &Peer) -> Result<GridSet<PeerRegion>> {
        let count = self.theirs.iter().map(|grid| grid.count).min().unwrap_or(0);
        let placed = self.theirs.iter().map(|there| {
            let grid = Grid { count, ..there.at(0) };
            let beyond =
                || ErrorKind::Malformed.because("blocks of a decode lie beyond the address space");
            let len = grid.end().ok_or_else(beyond)?;
            Ok((peer.foreign(there.base, len, self.kind, 0)?, grid))
        });
        GridSet::of(placed.collect::<Result<Vec<_>>>()?)
    }
}
