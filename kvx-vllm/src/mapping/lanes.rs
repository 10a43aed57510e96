//! Lanes: a grid here and a grid at a peer, and which of them share their index lists.

use std::sync::Arc;

use kvx_core::Grid;

use super::descriptors::Row;
use super::geometry::{Geometry, MemoryType};
use crate::ids::WorkerRank;

/// A grid of a region of a [`Geometry`]; its base counts from the region's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionGrid {
    /// Position in [`Geometry::regions`].
    pub region: u32,
    /// The grid.
    pub grid: Grid,
}

/// A local and a remote grid of equal block length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// On this rank.
    pub local: RegionGrid,
    /// On the peer's.
    pub remote: RegionGrid,
}

/// What lanes have in common that share their index lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SetKey {
    /// The group whose blocks go through it; `None` for the blocks of all.
    pub(super) group: Option<u32>,
    /// Which sub-block of each block, where sub-blocks do not run on evenly; else all of them.
    pub(super) phase: Option<u32>,
    /// Here and at the peer.
    pub(super) memory: (MemoryType, MemoryType),
}

/// Lanes of one group that share their index lists: the layers.
#[derive(Clone, Debug)]
pub struct LaneSet {
    pub(super) key: SetKey,
    pub(super) lanes: Arc<[u32]>,
    /// Blocks that all its lanes have.
    pub(super) local_count: u32,
    pub(super) remote_count: u32,
    /// Bytes of one index through all lanes.
    pub(super) bytes: u64,
}

impl LaneSet {
    /// The set of these of the `lanes`: at least one.
    pub(super) fn new(key: SetKey, members: Vec<u32>, lanes: &[Lane]) -> Self {
        let of = |lane: &u32| &lanes[*lane as usize];
        LaneSet {
            key,
            local_count: members.iter().map(|lane| of(lane).local.grid.count).min().unwrap_or(0),
            remote_count: members.iter().map(|lane| of(lane).remote.grid.count).min().unwrap_or(0),
            bytes: members
                .iter()
                .fold(0, |bytes: u64, lane| bytes.saturating_add(of(lane).local.grid.length)),
            lanes: members.into(),
        }
    }

    /// Where the blocks lie, here and at the peer.
    pub fn memory(&self) -> (MemoryType, MemoryType) {
        self.key.memory
    }

    /// Number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The KV cache group whose blocks go through it; `None`: the blocks of all groups.
    pub fn group(&self) -> Option<u32> {
        self.key.group
    }

    /// Blocks of its grids, here and at the peer: every index lies below.
    pub fn counts(&self) -> (u32, u32) {
        (self.local_count, self.remote_count)
    }
}

/// One rank of the peer, and what moves between it and this rank.
#[derive(Clone, Debug)]
pub struct Source {
    rank: WorkerRank,
    device: u64,
    bases: Vec<u64>,
    pub(super) lanes: Vec<Lane>,
    pub(super) sets: Vec<LaneSet>,
}

impl Source {
    pub(super) fn new(
        rank: WorkerRank,
        geometry: &Geometry,
        lanes: Vec<Lane>,
        sets: Vec<(SetKey, Vec<u32>)>,
    ) -> Self {
        Source {
            rank,
            device: geometry.device(),
            bases: geometry.regions().iter().map(|region| region.base).collect(),
            sets: sets
                .into_iter()
                .map(|(key, members)| LaneSet::new(key, members, &lanes))
                .collect(),
            lanes,
        }
    }

    /// The rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// All lanes, in the order of descriptor rows.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The sets. None: this rank exchanges bare notifications only with that one.
    pub fn sets(&self) -> &[LaneSet] {
        &self.sets
    }

    /// The kinds of memory that its sets connect, here and at the peer: as many plans does a request take.
    pub fn memories(&self) -> Vec<(MemoryType, MemoryType)> {
        let mut memories: Vec<_> = self.sets.iter().map(LaneSet::memory).collect();
        memories.sort_unstable();
        memories.dedup();
        memories
    }

    /// The lanes of a set as pairs of grids, all of the count that the set shares: what a plan's pair is made of. `set`
    /// is a position in [`sets`](Source::sets).
    pub fn grids(
        &self,
        set: usize,
    ) -> impl ExactSizeIterator<Item = (RegionGrid, RegionGrid)> + '_ {
        let set = &self.sets[set];
        let of = |side: RegionGrid, count| RegionGrid { grid: Grid { count, ..side.grid }, ..side };
        set.lanes.iter().map(move |lane| {
            let lane = &self.lanes[*lane as usize];
            (of(lane.local, set.local_count), of(lane.remote, set.remote_count))
        })
    }

    /// The rows of the remote descriptor list, in the order of [`lanes`](Source::lanes).
    pub fn remote_rows(&self) -> Vec<Row> {
        self.lanes.iter().map(|lane| row(lane.remote, &self.bases, self.device)).collect()
    }
}

/// The row of a grid. Addresses are numbers: a geometry is checked when it is made.
pub(super) fn row(side: RegionGrid, bases: &[u64], device: u64) -> Row {
    Row {
        address: bases[side.region as usize] + side.grid.base,
        len: side.grid.length,
        device,
        stride: side.grid.stride,
        count: u64::from(side.grid.count),
    }
}
