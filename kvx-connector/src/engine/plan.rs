//! What a handshake has shown: between which workers and in which units blocks move.

use std::collections::BTreeSet;

use kvx_core::{Indices, Op};

use super::action::GroupMove;
use super::identity::{BlockLists, WorkerRank};
use super::step::ReceiveOrder;
use super::time::ClockOffset;
use crate::mapping::{Aligned, Clip, Geometry, LaneSet, PeerMap, Source, Tokens, Units};

/// One worker of a peer that blocks move from or to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLane {
    /// Which worker.
    pub rank: WorkerRank,
    /// How many moves it takes: one for each kind of memory that the regions lie in.
    pub parts: u8,
    /// Which KV cache groups move; `None`: all.
    pub groups: Option<Vec<usize>>,
    /// How many workers on this side move blocks from that one: what it has to wait for.
    pub readers: u32,
}

/// How one worker of this engine and those of a peer fit together. The grids that go with it stay with whoever posts
/// the moves.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerPlan {
    /// Workers that blocks move from, or to in push.
    pub lanes: Vec<PeerLane>,
    /// Workers that are only told, with the readers that each waits for.
    pub told: Vec<(WorkerRank, u32)>,
    /// Sizes of blocks. The consumer is who fills blocks, the producer who has them.
    pub units: Units,
    /// Units of a logical block on the consumer's side.
    pub consumer_units: u32,
    /// Units of a logical block on the producer's side.
    pub producer_units: u32,
    /// Logical blocks here.
    pub local_blocks: u32,
    /// Logical blocks there.
    pub remote_blocks: u32,
    /// The peer has a word for the generation of each block.
    pub generations: bool,
    /// The peer's clock, where its handshake has told.
    pub clock: Option<ClockOffset>,
    /// In push, how many completions a request of ours gets from this peer.
    pub completions: u32,
}

impl PeerPlan {
    /// One worker on each side, with equal pools.
    ///
    /// # Errors
    ///
    /// A block size of 0.
    pub fn one_to_one(block_size: u32, blocks: u32) -> kvx_core::Result<Self> {
        Ok(PeerPlan {
            lanes: vec![PeerLane { rank: WorkerRank::default(), parts: 1, groups: None, readers: 1 }],
            told: Vec::new(),
            units: Units::equal(block_size)?,
            consumer_units: 1,
            producer_units: 1,
            local_blocks: blocks,
            remote_blocks: blocks,
            generations: false,
            clock: None,
            completions: 1,
        })
    }
}

impl PeerPlan {
    /// From the map that a handshake has yielded, and the geometries of this worker and of any of the peer's.
    /// `generations` and `clock` are what the handshake says beside that.
    pub fn of(map: &PeerMap, local: &Geometry, remote: &Geometry) -> Self {
        let each = |geometry: &Geometry| geometry.kernel_per_logical().max(1);
        let logical = |geometry: &Geometry| {
            geometry.regions().iter().map(|region| region.blocks / each(geometry)).min().unwrap_or(0)
        };
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
            local_blocks: logical(local),
            remote_blocks: logical(remote),
            generations: false,
            clock: None,
            completions: u32::try_from(map.sources().len()).unwrap_or(u32::MAX),
        };
        for source in map.sources() {
            let memory: BTreeSet<_> = source.sets().iter().map(LaneSet::memory).collect();
            match u8::try_from(memory.len()).unwrap_or(u8::MAX) {
                0 => plan.told.push((rank(source), readers)),
                parts => plan.lanes.push(PeerLane { rank: rank(source), parts, groups: None, readers }),
            }
        }
        plan
    }
}

/// The lists of one KV cache group, paired.
#[derive(Debug)]
struct GroupPair {
    group: usize,
    aligned: Aligned,
    consumer: Indices,
    producer: Indices,
    consumer_units: u32,
    producer_units: u32,
}

impl GroupPair {
    /// The consumer's logical blocks that hold tokens of the producer's logical block at this place of the words.
    fn consumer_blocks(&self, at: u64) -> impl Iterator<Item = u32> + '_ {
        let (own, theirs) = (u64::from(self.consumer_units), u64::from(self.producer_units));
        let first = (self.aligned.producer_skip / theirs + at) * theirs;
        let from = first.max(self.aligned.producer_skip) - self.aligned.producer_skip;
        let to = (first + theirs).saturating_sub(self.aligned.producer_skip).min(self.aligned.count);
        let place = move |unit: u64| (self.aligned.consumer_skip + unit) / own;
        let places = if from < to { place(from)..place(to - 1) + 1 } else { 0..0 };
        places.filter_map(|place| usize::try_from(place).ok()).map(|place| self.consumer.at(place))
    }
}

/// The lists of one request, paired.
#[derive(Debug)]
pub(super) struct Paired {
    pairs: Vec<GroupPair>,
}

/// A load paired with a peer's blocks: the consumer's lists are local.
pub(super) fn pair_load(
    plan: &PeerPlan,
    order: &ReceiveOrder,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    let remote = (&order.remote.blocks, plan.remote_blocks);
    pair(plan, &order.local, remote, plan.local_blocks, Some(order.tokens()), windows)
}

/// A push paired with the blocks that a peer waits for: the producer's lists are local.
pub(super) fn pair_push(
    plan: &PeerPlan,
    theirs: &BlockLists,
    ours: &BlockLists,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    pair(plan, theirs, (ours, plan.local_blocks), plan.remote_blocks, None, windows)
}

fn pair(
    plan: &PeerPlan,
    consumer: &BlockLists,
    (producer, producer_blocks): (&BlockLists, u32),
    consumer_blocks: u32,
    tokens: Option<Tokens>,
    windows: &[Option<u32>],
) -> Result<Paired, String> {
    if consumer.groups().len() != producer.groups().len() || producer.groups().len() > windows.len() {
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
            if let Some(beyond) = list.iter().find(|block| **block >= blocks) {
                return Err(format!("block {beyond} of a pool of {blocks} blocks"));
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
    /// Whether nothing moves.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.iter().all(|pair| pair.aligned.count == 0)
    }

    /// What moves, in units; the local side is the consumer's in a load.
    pub(super) fn load_moves(&self) -> Result<Vec<GroupMove>, String> {
        self.moves(|consumer, producer| (consumer, producer))
    }

    /// What moves, in units; the local side is the producer's in a push.
    pub(super) fn push_moves(&self) -> Result<Vec<GroupMove>, String> {
        self.moves(|consumer, producer| (producer, consumer))
    }

    fn moves(&self, sides: fn(Indices, Indices) -> (Indices, Indices)) -> Result<Vec<GroupMove>, String> {
        let some = self.pairs.iter().filter(|pair| pair.aligned.count > 0);
        let moves = some.map(|pair| {
            let consumer = pair.aligned.of_consumer(&pair.consumer)?;
            let (local, remote) = sides(consumer, pair.aligned.of_producer(&pair.producer)?);
            Ok(GroupMove { group: pair.group, local, remote })
        });
        moves.collect::<kvx_core::Result<_>>().map_err(|error| error.to_string())
    }

    /// The producer's logical blocks of which something moves: whose generations count.
    pub(super) fn producer_blocks(&self) -> Vec<Indices> {
        let some = self.pairs.iter().filter(|pair| pair.aligned.count > 0);
        some.map(|pair| pair.producer.slice(pair.producer_places())).collect()
    }

    /// The consumer's blocks that came from these places of [`producer_blocks`](Self::producer_blocks).
    pub(super) fn consumers_of(&self, places: &[u32]) -> Vec<u32> {
        let mut blocks = Vec::new();
        let mut start = 0;
        for pair in self.pairs.iter().filter(|pair| pair.aligned.count > 0) {
            let end = start + pair.producer_places().len() as u64;
            let own =
                places.iter().map(|place| u64::from(*place)).filter(|place| (start..end).contains(place));
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
