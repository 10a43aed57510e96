//! The result of a handshake: between which workers and in which units blocks move.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvx_core::{Indices, Op};

use super::action::GroupMove;
use super::step::ReceiveOrder;
use crate::ids::{BlockLists, WorkerRank};
use crate::mapping::{
    Aligned, Clip, Finishing, Geometry, MemoryType, Part, PeerMap, RegionGroup, SendMap, Source,
    Tokens, Units,
};
use crate::time::ClockOffset;

/// A worker of a peer that blocks move from or to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLane {
    /// The peer's worker.
    pub rank: WorkerRank,
    /// The kinds of memory here and there, at least one pair. Each pair takes a move of its own.
    pub memory: Vec<(MemoryType, MemoryType)>,
    /// The KV cache groups that move; `None`: all.
    pub groups: Option<Vec<usize>>,
    /// The number of workers on this side that transfer blocks from or to that worker. It waits for
    /// all of them.
    pub readers: u32,
}

impl PeerLane {
    /// Creates a lane that transfers all blocks of a worker in one move between GPU memories.
    pub fn whole(rank: WorkerRank, readers: u32) -> Self {
        PeerLane { rank, memory: vec![(MemoryType::Vram, MemoryType::Vram)], groups: None, readers }
    }

    /// Returns the groups that this lane moves. Lanes that move all groups share the list.
    pub(super) fn select(&self, groups: &Arc<[GroupMove]>) -> Arc<[GroupMove]> {
        match &self.groups {
            None => Arc::clone(groups),
            Some(own) => {
                groups.iter().filter(|group| own.contains(&group.group)).cloned().collect()
            }
        }
    }

    /// Returns the part for each of the lane's moves.
    pub(super) fn parts(&self) -> impl ExactSizeIterator<Item = Part> + '_ {
        self.memory.iter().map(|memory| Part { rank: self.rank, memory: *memory })
    }
}

/// The numbers of logical blocks in a worker's KV cache groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolBlocks {
    /// The groups whose numbers differ from `others`.
    pub groups: BTreeMap<u32, u32>,
    /// The number of blocks of all other groups.
    pub others: u32,
}

impl From<u32> for PoolBlocks {
    /// All groups have this many blocks.
    fn from(blocks: u32) -> Self {
        PoolBlocks { groups: BTreeMap::new(), others: blocks }
    }
}

impl PoolBlocks {
    /// Computes the numbers from a worker's memory. Each group has as many blocks as the smallest
    /// region that holds its blocks.
    pub fn of(geometry: &Geometry) -> Self {
        let each = geometry.kernel_per_logical().max(1);
        let least = |covers: &dyn Fn(RegionGroup) -> bool| {
            let regions = geometry.regions().iter().filter(|region| covers(region.group));
            regions.map(|region| region.blocks / each).min()
        };
        if geometry.names_no_groups() {
            return least(&|_| true).unwrap_or(0).into();
        }
        let named = geometry.regions().iter().filter_map(|region| match region.group {
            RegionGroup::Of(group) => Some(group),
            RegionGroup::Shared => None,
        });
        let named: BTreeSet<u32> = named.collect();
        let groups =
            named.into_iter().filter_map(|group| Some((group, least(&|of| of.covers(group))?)));
        // A pipeline stage need not have a layer of every group. Other stages then bound the blocks
        // of such a group.
        let most =
            || geometry.regions().iter().map(|region| region.blocks / each).max().unwrap_or(0);
        let others = least(&|of| of == RegionGroup::Shared).unwrap_or_else(most);
        PoolBlocks { groups: groups.collect(), others }
    }

    /// Returns the number of blocks of the largest group.
    pub fn most(&self) -> u32 {
        self.groups.values().copied().chain([self.others]).max().unwrap_or(0)
    }

    /// Returns the number of blocks of one group.
    pub fn of_group(&self, group: usize) -> u32 {
        let named = u32::try_from(group).ok().and_then(|group| self.groups.get(&group));
        named.copied().unwrap_or(self.others)
    }
}

/// The way in which one worker of this engine and the workers of a peer transfer blocks. The
/// component that posts the moves keeps the corresponding grids.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerPlan {
    /// The workers that blocks move from, or to in push mode.
    pub lanes: Vec<PeerLane>,
    /// The workers that only receive notifications, each with the number of readers it waits for.
    pub told: Vec<(WorkerRank, u32)>,
    /// The sizes of blocks. The consumer fills blocks that the producer holds.
    pub units: Units,
    /// Units per logical block on the consumer's side.
    pub consumer_units: u32,
    /// Units per logical block on the producer's side.
    pub producer_units: u32,
    /// The local logical blocks.
    pub local_blocks: PoolBlocks,
    /// The remote logical blocks.
    pub remote_blocks: PoolBlocks,
    /// True if blocks that were read must be reordered or cleared before use.
    pub finishes: bool,
    /// True if the peer has a generation counter for each block.
    pub generations: bool,
    /// True if blocks that were read are compared with digests that the peer published.
    pub digests: bool,
    /// The peer's clock, if its handshake reported it.
    pub clock: Option<ClockOffset>,
    /// The number of completions that a local request receives from this peer in push mode.
    pub completions: u32,
}

impl PeerPlan {
    /// Creates a plan for one worker on each side, with equal pools.
    ///
    /// # Errors
    ///
    /// Fails if `block_size` is 0.
    pub fn one_to_one(block_size: u32, blocks: u32) -> kvx_core::Result<Self> {
        Ok(PeerPlan {
            lanes: vec![PeerLane::whole(WorkerRank::default(), 1)],
            told: Vec::new(),
            units: Units::equal(block_size)?,
            consumer_units: 1,
            producer_units: 1,
            local_blocks: blocks.into(),
            remote_blocks: blocks.into(),
            finishes: false,
            generations: false,
            digests: false,
            clock: None,
            completions: 1,
        })
    }
}

impl PeerPlan {
    /// Creates a plan from a prefill worker of a MooncakeConnector to the decode worker `rank`.
    /// `local` is the memory of the prefill worker.
    ///
    /// # Errors
    ///
    /// Fails if `local` has blocks without tokens.
    pub fn of_sends(map: &SendMap, local: &Geometry, rank: WorkerRank) -> kvx_core::Result<Self> {
        let each = local.kernel_per_logical().max(1);
        let memory = local.regions().iter().map(|region| region.memory).collect::<BTreeSet<_>>();
        // The decode does not report its kind of memory, so assume the local one.
        let memory: Vec<_> = memory.into_iter().map(|memory| (memory, memory)).collect();
        let sends = !map.lanes().is_empty();
        let lane = PeerLane { rank, memory, groups: None, readers: 1 };
        Ok(PeerPlan {
            lanes: if sends { vec![lane] } else { Vec::new() },
            units: Units::new(each, each, local.block_tokens())?,
            consumer_units: each,
            producer_units: each,
            local_blocks: PoolBlocks::of(local),
            remote_blocks: (map.blocks() / each).into(),
            ..PeerPlan::one_to_one(local.block_tokens(), 0)?
        })
    }

    /// Returns the workers of the peer.
    pub(super) fn ranks(&self) -> BTreeSet<WorkerRank> {
        let lanes = self.lanes.iter().map(|lane| lane.rank);
        lanes.chain(self.told.iter().map(|(rank, _)| *rank)).collect()
    }

    /// Creates a plan from the map of a handshake, and the geometries of this worker and of any
    /// worker of the peer. The caller sets `generations`, `digests` and `clock` from the rest of
    /// the handshake.
    pub fn of(map: &PeerMap, local: &Geometry, remote: &Geometry) -> Self {
        let each = |geometry: &Geometry| geometry.kernel_per_logical().max(1);
        let (consumer, producer) = match map.op() {
            Op::Read => (local, remote),
            Op::Write => (remote, local),
        };
        let consumer_units = each(consumer).saturating_mul(map.block_size_ratio());
        let producer_units = each(producer);
        let rank = |source: &Source| WorkerRank { pp: source.rank().pp, tp: source.rank().tp };
        let readers = map.consumers();
        let mut plan = PeerPlan {
            lanes: Vec::new(),
            told: Vec::new(),
            units: map.units(),
            consumer_units,
            producer_units,
            local_blocks: PoolBlocks::of(local),
            remote_blocks: PoolBlocks::of(remote),
            finishes: map.finishing().is_some_and(Finishing::changes_blocks),
            generations: false,
            digests: false,
            clock: None,
            completions: u32::try_from(map.sources().len()).unwrap_or(u32::MAX),
        };
        for source in map.sources() {
            match source.memories() {
                memory if memory.is_empty() => plan.told.push((rank(source), readers)),
                memory => {
                    plan.lanes.push(PeerLane { rank: rank(source), memory, groups: None, readers })
                }
            }
        }
        plan
    }
}

/// The paired lists of one KV cache group.
#[derive(Clone, Debug)]
struct GroupPair {
    group: usize,
    aligned: Aligned,
    consumer: Indices,
    producer: Indices,
    consumer_units: u32,
    producer_units: u32,
}

impl GroupPair {
    /// Returns the consumer's logical blocks that hold tokens of the producer's logical block at
    /// position `at` of [`Paired::producer_blocks`].
    fn consumer_blocks(&self, at: u64) -> impl Iterator<Item = u32> + '_ {
        let (own, theirs) = (u64::from(self.consumer_units), u64::from(self.producer_units));
        let first = (self.aligned.producer_skip / theirs + at) * theirs;
        let from = first.max(self.aligned.producer_skip) - self.aligned.producer_skip;
        let to =
            (first + theirs).saturating_sub(self.aligned.producer_skip).min(self.aligned.count);
        let place = move |unit: u64| (self.aligned.consumer_skip + unit) / own;
        let places = if from < to { place(from)..place(to - 1) + 1 } else { 0..0 };
        places.filter_map(|place| usize::try_from(place).ok()).map(|place| self.consumer.at(place))
    }
}

/// The paired lists of one request.
#[derive(Clone, Debug)]
pub(super) struct Paired {
    pairs: Vec<GroupPair>,
}

/// Pairs a load's local blocks, which are the consumer's, with the peer's blocks.
pub(super) fn pair_load(
    plan: &PeerPlan,
    order: &ReceiveOrder,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    let (here, there) =
        ((&order.local, &plan.local_blocks), (&order.remote.blocks, &plan.remote_blocks));
    pair(plan, here, there, Some(order.tokens()), windows)
}

/// Pairs a push's local blocks, which are the producer's, with the blocks that a peer waits for.
pub(super) fn pair_push(
    plan: &PeerPlan,
    theirs: &BlockLists,
    ours: &BlockLists,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    pair(plan, (theirs, &plan.remote_blocks), (ours, &plan.local_blocks), None, windows)
}

fn pair(
    plan: &PeerPlan,
    (consumer, consumer_blocks): (&BlockLists, &PoolBlocks),
    (producer, producer_blocks): (&BlockLists, &PoolBlocks),
    tokens: Option<Tokens>,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    if consumer.groups().len() != producer.groups().len() || producer.groups().len() > windows.len()
    {
        return Err(format!(
            "{} KV cache groups here and {} there",
            consumer.groups().len(),
            producer.groups().len()
        ));
    }
    let lists = consumer.groups().iter().zip(producer.groups()).zip(windows).enumerate();
    let mut pairs = Vec::with_capacity(consumer.groups().len());
    for (group, ((consumer, producer), window)) in lists {
        for (list, blocks) in [(consumer, consumer_blocks), (producer, producer_blocks)] {
            let blocks = blocks.of_group(group);
            if let Some(beyond) = list.iter().find(|block| **block >= blocks) {
                return Err(format!("block {beyond} is outside a pool of {blocks} blocks"));
            }
        }
        let clip = if window.is_some() { Clip::Window } else { Clip::Whole };
        let aligned = plan
            .units
            .align(consumer.len(), producer.len(), tokens, clip)
            .map_err(|error| error.to_string())?;
        pairs.push(GroupPair {
            group,
            aligned,
            consumer: consumer.clone().into(),
            producer: producer.clone().into(),
            consumer_units: plan.consumer_units.max(1),
            producer_units: plan.producer_units.max(1),
        });
    }
    Ok(Paired { pairs })
}

impl Paired {
    /// Returns whether nothing moves.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.iter().all(|pair| pair.aligned.count == 0)
    }

    /// Returns the moves of a load, in units. The local side is the consumer's.
    pub(super) fn load_moves(&self) -> Result<Vec<GroupMove>, String> {
        self.moves(|consumer, producer| (consumer, producer))
    }

    /// Returns the moves of a push, in units. The local side is the producer's.
    pub(super) fn push_moves(&self) -> Result<Vec<GroupMove>, String> {
        self.moves(|consumer, producer| (producer, consumer))
    }

    fn moves(
        &self,
        sides: fn(Indices, Indices) -> (Indices, Indices),
    ) -> Result<Vec<GroupMove>, String> {
        let some = self.pairs.iter().filter(|pair| pair.aligned.count > 0);
        let moves = some.map(|pair| {
            let consumer = pair.aligned.of_consumer(&pair.consumer)?;
            let (local, remote) = sides(consumer, pair.aligned.of_producer(&pair.producer)?);
            Ok(GroupMove { group: pair.group, local, remote })
        });
        moves.collect::<kvx_core::Result<_>>().map_err(|error| error.to_string())
    }

    /// Returns the producer's logical blocks that move at least in part. Their generations decide
    /// whether the data is valid.
    pub(super) fn producer_blocks(&self) -> Vec<Indices> {
        let some = self.pairs.iter().filter(|pair| pair.aligned.count > 0);
        some.map(|pair| pair.producer.slice(pair.producer_places())).collect()
    }

    /// Returns the numbers of the same blocks.
    pub(super) fn producer_numbers(&self) -> impl Iterator<Item = u32> {
        self.producer_blocks()
            .into_iter()
            .flat_map(|list| (0..list.len()).map(move |at| list.at(at)))
    }

    /// Returns the consumer's blocks that came from these positions of
    /// [`producer_blocks`](Self::producer_blocks).
    pub(super) fn consumers_of(&self, places: &[u32]) -> Vec<u32> {
        let mut blocks = Vec::new();
        let mut start = 0;
        for pair in self.pairs.iter().filter(|pair| pair.aligned.count > 0) {
            let end = start + pair.producer_places().len() as u64;
            let own = places
                .iter()
                .map(|place| u64::from(*place))
                .filter(|place| (start..end).contains(place));
            blocks.extend(own.flat_map(|place| pair.consumer_blocks(place - start)));
            start = end;
        }
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }
}

impl GroupPair {
    fn producer_places(&self) -> std::ops::Range<usize> {
        let units = u64::from(self.producer_units);
        let first = self.aligned.producer_skip / units;
        let end = (self.aligned.producer_skip + self.aligned.count).div_ceil(units);
        first as usize..end as usize
    }
}
