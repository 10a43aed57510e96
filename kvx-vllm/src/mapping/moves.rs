//! The moves for one request: index lists, paired once per group for all layers.

use std::ops::Range;

use kvx_core::{Error, ErrorKind, Indices, Op, Result};

use super::align::{Aligned, Tokens};
use super::lanes::{LaneSet, Source};
use super::peer::PeerMap;

/// The logical blocks of a request on both sides, one list for each KV cache group.
#[derive(Clone, Copy, Debug)]
pub struct BlockPairs<'a> {
    /// The blocks of this rank.
    pub local: &'a [Indices],
    /// The blocks of the peer, not yet checked.
    pub remote: &'a [Indices],
    /// The ends of the lists, if both sides reported them. Otherwise the producer's list is the
    /// whole sequence.
    pub tokens: Option<Tokens>,
}

/// The paired blocks of one set: a pair of a plan.
#[derive(Clone, Debug)]
pub struct Pairing {
    /// The position in [`Source::sets`].
    pub set: usize,
    /// The local indices, below the local grids' count.
    pub local: Indices,
    /// The remote indices, as many as local ones, below the remote grids' count.
    pub remote: Indices,
}

/// The moves between this rank and one rank of the peer.
#[derive(Clone, Debug)]
pub struct RankMoves {
    /// The position in [`PeerMap::sources`].
    pub source: usize,
    /// At least one pairing; none is empty.
    pub pairings: Vec<Pairing>,
}

/// The part of a group's local blocks that is filled.
#[derive(Clone, Debug)]
pub struct Covered {
    /// The KV cache group.
    pub group: usize,
    list: Indices,
    kernel_per_logical: u32,
    ratio: u32,
    filled: Range<u64>,
}

impl Covered {
    /// Returns the local kernel blocks, and the filled sub-blocks of each.
    pub fn blocks(&self) -> impl Iterator<Item = (u32, Range<u32>)> + '_ {
        let ratio = u64::from(self.ratio);
        let each = u64::from(self.kernel_per_logical);
        (0..self.list.len() as u64 * each).map(move |position| {
            let block = self.list.at((position / each) as usize) * self.kernel_per_logical;
            let within = |unit: u64| unit.saturating_sub(position * ratio).min(ratio) as u32;
            (block + (position % each) as u32, within(self.filled.start)..within(self.filled.end))
        })
    }

    /// Returns whether every sub-block of every block is filled.
    pub fn is_complete(&self) -> bool {
        let all =
            self.list.len() as u64 * u64::from(self.kernel_per_logical) * u64::from(self.ratio);
        self.filled == (0..all)
    }
}

/// The moves for one request.
#[derive(Clone, Debug, Default)]
pub struct Moves {
    /// The ranks of the peer that blocks move from or to.
    pub ranks: Vec<RankMoves>,
    /// The ranks that get a bare notification, by position in [`PeerMap::sources`].
    pub notify_only: Vec<usize>,
    /// For a consumer: the filled part of each group with blocks, for
    /// [`Finishing`](super::Finishing).
    pub covered: Vec<Covered>,
    /// The number of blocks: indices times lanes.
    pub blocks: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// The paired lists of one group.
struct Lists {
    consumer: Indices,
    producer: Indices,
}

impl Lists {
    /// Returns the pairs for this sub-block of the consumer's blocks, with indices of the
    /// consumer's whole blocks.
    fn phase(&self, phase: u32, ratio: u32) -> Lists {
        let chosen = (0..self.consumer.len()).filter(|at| self.consumer.at(*at) % ratio == phase);
        let (consumer, producer): (Vec<u32>, Vec<u32>) =
            chosen.map(|at| (self.consumer.at(at) / ratio, self.producer.at(at))).unzip();
        Lists { consumer: consumer.into(), producer: producer.into() }
    }
}

/// The lists as local and remote, with their largest indices.
struct SideLists {
    local: Indices,
    remote: Indices,
    local_max: u32,
    remote_max: u32,
}

impl SideLists {
    fn of(op: Op, lists: Lists) -> Option<Self> {
        let (local, remote) = match op {
            Op::Read => (lists.consumer, lists.producer),
            Op::Write => (lists.producer, lists.consumer),
        };
        let (local_max, remote_max) = (local.max()?, remote.max()?);
        Some(SideLists { local, remote, local_max, remote_max })
    }

    fn check(&self, group: usize, set: &LaneSet) -> Result<()> {
        let beyond = [
            ("local", self.local_max, set.local_count),
            ("remote", self.remote_max, set.remote_count),
        ];
        match beyond.into_iter().find(|(_, max, count)| max >= count) {
            None => Ok(()),
            Some((side, max, count)) => Err(ErrorKind::OutOfBounds.because(format!(
                "KV cache group {group}: {side} block {max} is outside regions of {count} blocks"
            ))),
        }
    }
}

/// The lists of one group, in all forms that the lane sets need.
struct Forms {
    whole: Option<SideLists>,
    /// One for each sub-block; empty if no set needs them.
    phases: Vec<Option<SideLists>>,
}

impl PeerMap {
    /// Returns the moves for one request. A group without local blocks moves nothing. If no group
    /// has local blocks (the whole prompt is cached, or the request was aborted), all ranks get a
    /// bare notification.
    ///
    /// # Errors
    /// `Invalid` if the number of lists differs from the number of groups; `OutOfBounds` for blocks
    /// beyond a region, and lists that are too short. Nothing moves then.
    pub fn moves(&self, lists: &BlockPairs<'_>) -> Result<Moves> {
        let groups = self.clips.len();
        let nothing = lists.local.iter().all(Indices::is_empty);
        if !nothing && (lists.local.len() != groups || lists.remote.len() != groups) {
            return Err(ErrorKind::Invalid.because(format!(
                "block lists for {} local and {} remote KV cache groups, but the model has \
                 {groups}",
                lists.local.len(),
                lists.remote.len()
            )));
        }
        let mut moves = Moves::default();
        let mut grouped = Vec::with_capacity(groups);
        if !nothing {
            for group in 0..groups {
                grouped.push(self.group(group, lists, &mut moves)?);
            }
        }
        for (source, peer) in self.sources.iter().enumerate() {
            let mut pairings = Vec::new();
            for (group, forms) in grouped.iter().enumerate() {
                forms.pairings(peer, group, &mut pairings)?;
            }
            for pairing in &pairings {
                let set = &peer.sets[pairing.set];
                let indices = pairing.local.len() as u64;
                moves.blocks =
                    moves.blocks.saturating_add(indices.saturating_mul(set.lanes.len() as u64));
                moves.bytes = moves.bytes.saturating_add(indices.saturating_mul(set.bytes));
            }
            match pairings.is_empty() {
                true => moves.notify_only.push(source),
                false => moves.ranks.push(RankMoves { source, pairings }),
            }
        }
        Ok(moves)
    }

    /// Returns the pairings of one source for units that were paired elsewhere. `local` and
    /// `remote` come from [`Aligned`](super::Aligned) for the lists of `group`.
    ///
    /// # Errors
    /// `Invalid` for an unknown source and lists of different length; `OutOfBounds` for units
    /// beyond a region.
    pub fn pairings(
        &self,
        source: usize,
        group: usize,
        local: &Indices,
        remote: &Indices,
    ) -> Result<Vec<Pairing>> {
        let Some(peer) = self.sources.get(source).filter(|_| local.len() == remote.len()) else {
            return Err(ErrorKind::Invalid.because(format!(
                "cannot pair {} local with {} remote units of source {source} of {}",
                local.len(),
                remote.len(),
                self.sources.len()
            )));
        };
        let (consumer, producer) = match self.op {
            Op::Read => (local.clone(), remote.clone()),
            Op::Write => (remote.clone(), local.clone()),
        };
        let mut pairings = Vec::new();
        self.forms(Lists { consumer, producer }).pairings(peer, group, &mut pairings)?;
        Ok(pairings)
    }

    /// Returns the part of a group's local blocks that is filled once all common units of `aligned`
    /// have moved.
    pub fn covered(&self, group: usize, list: &Indices, aligned: &Aligned) -> Covered {
        Covered {
            group,
            list: list.clone(),
            kernel_per_logical: self.kernel_per_logical,
            ratio: self.ratio,
            filled: aligned.consumer_skip..aligned.consumer_skip + aligned.count,
        }
    }

    fn group(&self, group: usize, lists: &BlockPairs<'_>, moves: &mut Moves) -> Result<Forms> {
        let (consumer, producer) = match self.op {
            Op::Read => (&lists.local[group], &lists.remote[group]),
            Op::Write => (&lists.remote[group], &lists.local[group]),
        };
        let context =
            |error: Error| Error::new(error.kind(), format!("KV cache group {group}: {error}"));
        let aligned =
            self.units.align(consumer.len(), producer.len(), lists.tokens, self.clips[group]);
        let aligned = aligned.map_err(context)?;
        let paired = Lists {
            consumer: aligned.of_consumer(consumer).map_err(context)?,
            producer: aligned.of_producer(producer).map_err(context)?,
        };
        if self.op == Op::Read && !consumer.is_empty() {
            moves.covered.push(self.covered(group, consumer, &aligned));
        }
        Ok(self.forms(paired))
    }

    fn forms(&self, lists: Lists) -> Forms {
        let phased =
            self.sources.iter().flat_map(|source| &source.sets).any(|set| set.key.phase.is_some());
        let phases = if phased { 0..self.ratio } else { 0..0 };
        let phases =
            phases.map(|phase| SideLists::of(self.op, lists.phase(phase, self.ratio))).collect();
        Forms { phases, whole: SideLists::of(self.op, lists) }
    }
}

impl Forms {
    /// Adds a source's pairings of one group.
    fn pairings(&self, source: &Source, group: usize, pairings: &mut Vec<Pairing>) -> Result<()> {
        for (set, lanes) in source.sets.iter().enumerate() {
            if lanes.key.group.is_some_and(|only| only as usize != group) {
                continue;
            }
            let form = match lanes.key.phase {
                None => &self.whole,
                Some(phase) => &self.phases[phase as usize],
            };
            let Some(sided) = form else { continue };
            sided.check(group, lanes)?;
            pairings.push(Pairing {
                set,
                local: sided.local.clone(),
                remote: sided.remote.clone(),
            });
        }
        Ok(())
    }
}
