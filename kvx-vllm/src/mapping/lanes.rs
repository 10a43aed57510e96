//! Lanes: pairs of a local grid and a peer's grid, and the sets of lanes that share index lists.

use std::sync::Arc;

use kvx_core::Grid;

use super::geometry::MemoryType;
use crate::ids::WorkerRank;

/// A grid in a region of a [`Geometry`](super::Geometry). Its base is relative to the region's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionGrid {
    /// The position in [`Geometry::regions`](super::Geometry::regions).
    pub region: u32,
    /// The grid.
    pub grid: Grid,
}

/// A local and a remote grid of equal block length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The grid on this rank.
    pub local: RegionGrid,
    /// The grid on the peer's rank.
    pub remote: RegionGrid,
}

/// The properties that lanes must have in common to share their index lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SetKey {
    /// The group whose blocks use the lanes; `None` for the blocks of all groups.
    pub(super) group: Option<u32>,
    /// The sub-block of each block, if sub-blocks have no common stride; otherwise `None` for all.
    pub(super) phase: Option<u32>,
    /// The memory type here and at the peer.
    pub(super) memory: (MemoryType, MemoryType),
}

/// Lanes of one group that share their index lists: those of all layers.
#[derive(Clone, Debug)]
pub struct LaneSet {
    pub(super) key: SetKey,
    pub(super) lanes: Arc<[u32]>,
    /// The number of blocks that all lanes of the set have.
    pub(super) local_count: u32,
    pub(super) remote_count: u32,
    /// The bytes of one index through all lanes.
    pub(super) bytes: u64,
}

impl LaneSet {
    /// Creates a set of at least one of the `lanes`.
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

    /// Returns the memory types of the blocks, here and at the peer.
    pub fn memory(&self) -> (MemoryType, MemoryType) {
        self.key.memory
    }

    /// Returns the number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Returns the KV cache group whose blocks use it, or `None` for the blocks of all groups.
    pub fn group(&self) -> Option<u32> {
        self.key.group
    }

    /// Returns the number of blocks in the set's grids, here and at the peer. Every index is below
    /// it.
    pub fn counts(&self) -> (u32, u32) {
        (self.local_count, self.remote_count)
    }
}

/// One rank of the peer, and the lanes between it and this rank.
#[derive(Clone, Debug)]
pub struct Source {
    rank: WorkerRank,
    pub(super) lanes: Vec<Lane>,
    pub(super) sets: Vec<LaneSet>,
}

impl Source {
    pub(super) fn new(rank: WorkerRank, lanes: Vec<Lane>, sets: Vec<(SetKey, Vec<u32>)>) -> Self {
        Source {
            rank,
            sets: sets
                .into_iter()
                .map(|(key, members)| LaneSet::new(key, members, &lanes))
                .collect(),
            lanes,
        }
    }

    /// Returns the rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns all lanes.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Returns the sets. If there is none, this rank exchanges only bare notifications with that
    /// rank.
    pub fn sets(&self) -> &[LaneSet] {
        &self.sets
    }

    /// Returns the pairs of memory types that the source's sets connect, here and at the peer. A
    /// request takes one plan for each.
    pub fn memories(&self) -> Vec<(MemoryType, MemoryType)> {
        let mut memories: Vec<_> = self.sets.iter().map(LaneSet::memory).collect();
        memories.sort_unstable();
        memories.dedup();
        memories
    }

    /// Returns the lanes of a set as pairs of grids, for the pair of a plan. All grids have the
    /// count that the set shares. `set` is a position in [`sets`](Source::sets).
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
}
