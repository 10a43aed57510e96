//! The memory of a decode's worker, as one worker of a prefill writes into it: drawn up once for
//! each layout.

use std::collections::BTreeMap;

use kvx_core::{
    Blocks, Error, ErrorKind, Grid, GridSet, MemoryKind, Peer, PeerRegion, Place as _, Region,
    Result,
};

use super::super::caches::RegisteredCaches;
use super::super::link::Grids;
use super::super::peer_regions::{ImportedRegions, PeerRegions};
use kvx_vllm::engine::Move;
use kvx_vllm::mapping::{MemoryType, SendLane, SendMap};

/// The way to a worker of a decode.
#[derive(Debug)]
pub(in super::super) struct WriteRoute {
    pub(super) peer: Peer,
    /// A plain Mooncake agent, which is written to by address; else by what is granted for each
    /// request.
    pub(super) foreign: bool,
    /// By KV cache group and where its blocks lie here.
    pub(super) lanes: BTreeMap<(u32, MemoryType), Lanes>,
}

#[derive(Debug)]
pub(super) struct Lanes {
    ours: Grids<Region>,
    /// At addresses of the decode.
    theirs: Vec<Grid>,
    /// Of the decode's memory. Nobody tells it: as here.
    kind: MemoryKind,
}

/// What one write of a request moves. What was imported for it is forgotten with the last of it.
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
    /// What a write moves. Errors: `Malformed`: the decode names memory that it grants nothing of;
    /// `Invalid`: it grants nothing at all.
    pub(in super::super) fn pairs(&self, order: &Move) -> Result<RoutePairs> {
        let imported = match self.foreign {
            true => None,
            false => Some(ImportedRegions::of(order, &self.peer)?.ok_or_else(|| {
                Error::new(
                    ErrorKind::Malformed,
                    "the decode is one of kvx, and grants nothing to write into",
                )
            })?),
        };
        let regions = imported
            .as_ref()
            .map(|imported| PeerRegions::granted(&imported.regions))
            .transpose()?;
        let mut pairs = Vec::new();
        for group in order.groups.iter() {
            let number = u32::try_from(group.group).unwrap_or(u32::MAX);
            // A group without layers in memory of this kind.
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
    /// The decode's grids in regions that it has granted: as many blocks as lie in them.
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

    /// The decode's grids by address: how many blocks there are, only the decode knows.
    fn at(&self, peer: &Peer) -> Result<GridSet<PeerRegion>> {
        let count = self.theirs.iter().map(|grid| grid.count).min().unwrap_or(0);
        let placed = self.theirs.iter().map(|there| {
            let grid = Grid { count, ..there.at(0) };
            let beyond =
                || Error::new(ErrorKind::Malformed, "blocks of a decode lie beyond all addresses");
            let len = grid.end().ok_or_else(beyond)?;
            Ok((peer.foreign(there.base, len, self.kind, 0)?, grid))
        });
        GridSet::of(placed.collect::<Result<Vec<_>>>()?)
    }
}
