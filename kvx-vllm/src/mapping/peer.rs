//! The map between this rank and one peer, computed once.

use std::collections::HashMap;

use kvx_core::{ErrorKind, Op, Result};

use super::align::{Clip, Units};
use super::caches::Caches;
use super::drawing::Drawing;
use super::geometry::{Geometry, KvRegion, MemoryType};
use super::lanes::Source;
use super::layout::LayoutMatch;
use super::permute::{BlockShape, Finishing};
use super::ranks::{GroupKind, Heads, Mapping, Tp, handshake_ranks, reader_ranks};
use crate::ids::{MAX_RANKS, WorkerRank};

/// The part of a peer that one move involves. [`PeerMap::part`] finds its grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// The worker of the peer.
    pub rank: WorkerRank,
    /// The memory types of the blocks, here and at the peer.
    pub memory: (MemoryType, MemoryType),
}

/// A peer's description of itself.
#[derive(Clone, Copy, Debug)]
pub struct Remote<'a> {
    /// The tensor-parallel size.
    pub tp_size: u32,
    /// The number of pipeline stages.
    pub pp_size: u32,
    /// The decode-context-parallel size.
    pub dcp_size: u32,
    /// The ranks: all stages of all ranks in [`handshake_ranks`].
    pub ranks: &'a [(WorkerRank, Geometry)],
}

/// The settings of this engine.
#[derive(Clone, Debug)]
pub struct MappingOptions {
    /// The KV cache groups, in the order of the block lists.
    pub groups: Vec<(GroupKind, Clip)>,
    /// `enable_permute_local_kv`.
    pub permute: bool,
    /// True if blocks go through a buffer in host memory.
    pub host_buffer: bool,
}

impl Default for MappingOptions {
    fn default() -> Self {
        MappingOptions {
            groups: vec![(GroupKind::Attention, Clip::Whole)],
            permute: false,
            host_buffer: false,
        }
    }
}

/// The map between this rank and one peer: computed once, after the handshake, and immutable.
#[derive(Clone, Debug)]
pub struct PeerMap {
    pub(super) op: Op,
    pub(super) units: Units,
    pub(super) ratio: u32,
    /// The number of local kernel blocks in a logical block.
    pub(super) kernel_per_logical: u32,
    pub(super) clips: Vec<Clip>,
    pub(super) sources: Vec<Source>,
    finishing: Option<Finishing>,
    consumers: u32,
    completions: u32,
}

impl PeerMap {
    /// Creates the map of a rank that reads from (`Op::Read`: this rank consumes) or writes to
    /// (`Op::Write`: this rank produces) the ranks of a peer.
    ///
    /// # Errors
    /// `Invalid` for a missing or unexpected rank and sizes that do not divide; `Incompatible`,
    /// with both sides' numbers, if block lengths, block sizes, layouts, layers or groups do not
    /// match; `OutOfBounds` for a slice outside a peer's block; `Unsupported` for state-space
    /// groups and differing context parallelism.
    pub fn new(
        op: Op,
        local: &Caches,
        tp: Tp,
        remote: &Remote<'_>,
        options: &MappingOptions,
    ) -> Result<Self> {
        let ranks = match op {
            Op::Read => handshake_ranks(tp, remote.tp_size, remote.dcp_size)?,
            Op::Write => reader_ranks(tp, remote.tp_size)?,
        };
        let stages = stages_of(&ranks, remote)?;
        let uniform = uniform(remote)?;
        let ours = local.geometry();
        let (consumer, producer) = match op {
            Op::Read => (ours, uniform),
            Op::Write => (uniform, ours),
        };
        let ratio = block_ratio(op, consumer, producer, options)?;
        let layout = match local.any_sharded() {
            true => {
                let permute = options.permute && op == Op::Read;
                LayoutMatch::of(
                    consumer.layout(),
                    producer.layout(),
                    permute,
                    options.groups.len(),
                )?
            }
            false => LayoutMatch::Same,
        };
        check_kinds(tp, remote, consumer, producer, options)?;
        if consumer.transposed_keys && (ratio > 1 || layout == LayoutMatch::Permute) {
            return Err(ErrorKind::Incompatible.because(
                "blocks with transposed keys can only be moved whole: give both sides the same block size and \
                 layout",
            ));
        }
        let units = Units::new(
            consumer.kernel_per_logical().saturating_mul(ratio),
            producer.kernel_per_logical(),
            producer.block_tokens(),
        )?;
        let drawing = Drawing {
            op,
            local,
            tp,
            remote,
            ratio,
            contiguous: producer.layout().has_contiguous_heads(),
        };
        let mut sources = Vec::with_capacity(stages.len() * remote.pp_size as usize);
        for (rank, stages) in ranks.iter().zip(&stages) {
            drawing.sources(*rank, stages, options, &mut sources)?;
        }
        let peer = |rank| Tp::new(rank, remote.tp_size)?.with_dcp(remote.dcp_size);
        let (reader, source) = match op {
            Op::Read => (tp, peer(ranks[0])?),
            Op::Write => (peer(ranks[0])?, tp),
        };
        Ok(PeerMap {
            op,
            units,
            ratio,
            kernel_per_logical: ours.kernel_per_logical(),
            clips: options.groups.iter().map(|(_, clip)| *clip).collect(),
            finishing: finishing(op, local, tp, ratio, layout)?,
            consumers: Mapping::new(reader, source.size(), source.dcp(), Heads::Replicated)?
                .consumers(),
            completions: remote.pp_size.saturating_mul((source.size() / reader.size()).max(1)),
            sources,
        })
    }

    /// Returns the direction.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Returns the peer's ranks that get notifications, each with all its stages.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Returns the source of a [`Move`](crate::engine::Move), and the positions in [`Source::sets`]
    /// of the sets that it moves. `None`: nothing moves for this part.
    pub fn part(&self, part: Part) -> Option<(&Source, Vec<usize>)> {
        let source = self.sources.iter().find(|source| source.rank() == part.rank)?;
        let sets = source.sets().iter().enumerate();
        let sets: Vec<_> = sets
            .filter(|(_, set)| set.memory() == part.memory)
            .map(|(position, _)| position)
            .collect();
        (!sets.is_empty()).then_some((source, sets))
    }

    /// Returns the number of consumer ranks that notify each producer rank when they are done.
    pub fn consumers(&self) -> u32 {
        self.consumers
    }

    /// Returns the number of producer ranks that notify this rank after their writes: all stages of
    /// all ranks that it pairs with. Meaningful only for a map with the peer as producer,
    /// `Op::Read`.
    pub fn completions(&self) -> u32 {
        self.completions
    }

    /// Returns the common division of a sequence on both sides.
    pub fn units(&self) -> Units {
        self.units
    }

    /// Returns the number of the producer's kernel blocks in one of the consumer's.
    pub fn block_size_ratio(&self) -> u32 {
        self.ratio
    }

    /// Returns the work on this rank's blocks after they are filled; `None` if it writes.
    pub fn finishing(&self) -> Option<&Finishing> {
        self.finishing.as_ref()
    }
}

/// Returns the stages of each rank, in order.
fn stages_of<'a>(ranks: &[u32], remote: &Remote<'a>) -> Result<Vec<Vec<&'a Geometry>>> {
    if remote.pp_size == 0 || remote.pp_size > MAX_RANKS {
        return Err(ErrorKind::Invalid
            .because(format!("{} pipeline stages: expected 1 to {MAX_RANKS}", remote.pp_size)));
    }
    let mut given: HashMap<WorkerRank, &Geometry> = HashMap::new();
    for (rank, geometry) in remote.ranks {
        if rank.pp >= remote.pp_size
            || !ranks.contains(&rank.tp)
            || given.insert(*rank, geometry).is_some()
        {
            return Err(ErrorKind::Invalid.because(format!(
                "rank (pp {}, tp {}) of a peer with {} stages is not a handshake rank, or is listed twice",
                rank.pp, rank.tp, remote.pp_size
            )));
        }
    }
    let stage =
        |tp: u32, pp: u32| match given.get(&WorkerRank { pp, tp }) {
            Some(geometry) => Ok(*geometry),
            None => Err(ErrorKind::Invalid
                .because(format!("rank (pp {pp}, tp {tp}) of the peer is missing"))),
        };
    ranks.iter().map(|tp| (0..remote.pp_size).map(|pp| stage(*tp, pp)).collect()).collect()
}

/// Checks that all ranks have a common layout, and returns the first rank's geometry.
fn uniform<'a>(remote: &Remote<'a>) -> Result<&'a Geometry> {
    let Some((_, first)) = remote.ranks.first() else {
        return Err(ErrorKind::Invalid.because("a peer without ranks"));
    };
    let common = |geometry: &Geometry| {
        (
            geometry.layout,
            geometry.block_tokens,
            geometry.kernel_per_logical,
            geometry.halves,
            geometry.transposed_keys,
        )
    };
    match remote.ranks.iter().find(|(_, geometry)| common(geometry) != common(first)) {
        None => Ok(first),
        Some((rank, _)) => Err(ErrorKind::Incompatible.because(format!(
            "rank (pp {}, tp {}) of the peer has another layout or block size than the peer's other ranks",
            rank.pp, rank.tp
        ))),
    }
}

fn block_ratio(
    op: Op,
    consumer: &Geometry,
    producer: &Geometry,
    options: &MappingOptions,
) -> Result<u32> {
    let (own, theirs) = (consumer.block_tokens(), producer.block_tokens());
    let ratio = own / theirs;
    let why = if own % theirs != 0 {
        "the consumer's must be a multiple of the producer's"
    } else if ratio > 1 && options.host_buffer {
        "a buffer in host memory needs equal sizes"
    } else if ratio > 1 && op == Op::Write {
        "a producer that writes needs equal sizes"
    } else {
        return Ok(ratio);
    };
    Err(ErrorKind::Incompatible.because(format!(
        "kernel blocks of {own} tokens at the consumer and {theirs} at the producer: {why}"
    )))
}

fn check_kinds(
    tp: Tp,
    remote: &Remote<'_>,
    consumer: &Geometry,
    producer: &Geometry,
    options: &MappingOptions,
) -> Result<()> {
    if consumer.parts() != producer.parts() {
        return Err(
            ErrorKind::Incompatible.because("K and V are halves of a block on one side only")
        );
    }
    if consumer.transposed_keys != producer.transposed_keys {
        return Err(ErrorKind::Incompatible.because(
            "only one side has K with dimensions before tokens (CPU_ATTN): use the same attention backend",
        ));
    }
    if options.groups.is_empty() {
        return Err(ErrorKind::Invalid.because("a model needs at least one KV cache group"));
    }
    if options.groups.iter().any(|(kind, _)| *kind == GroupKind::StateSpace) {
        return Err(
            ErrorKind::Unsupported.because("state-space (Mamba) groups cannot be transferred")
        );
    }
    if tp.dcp() != remote.dcp_size {
        return Err(ErrorKind::Unsupported.because(format!(
            "decode-context-parallel sizes {} and {} differ: give both sides the same size",
            tp.dcp(),
            remote.dcp_size
        )));
    }
    Ok(())
}

fn finishing(
    op: Op,
    local: &Caches,
    tp: Tp,
    ratio: u32,
    layout: LayoutMatch,
) -> Result<Option<Finishing>> {
    if op == Op::Write {
        return Ok(None);
    }
    let geometry = local.geometry();
    let parts = geometry.parts() as usize;
    let reorders =
        layout == LayoutMatch::Permute || (ratio > 1 && geometry.layout().heads_before_tokens());
    let shape = |(at, region): (usize, &KvRegion)| {
        let len = usize::try_from(region.block_len).map_err(|_| {
            ErrorKind::Invalid
                .because(format!("region {at} has blocks of {} bytes", region.block_len))
        })?;
        // Without reordering, a sub-block is any range of bytes.
        let (heads, tokens) = match local.heads(at).per_rank(tp.size()) {
            heads if reorders && heads > 1 => (heads as usize, geometry.block_tokens() as usize),
            _ => (1, ratio as usize),
        };
        BlockShape::of_block(len / parts, heads, tokens)
    };
    let shapes = geometry.regions().iter().enumerate().map(shape).collect::<Result<_>>()?;
    let heads_before_tokens = geometry.layout().heads_before_tokens();
    let groups = geometry.regions().iter().map(|region| region.group).collect();
    Ok(Some(Finishing { ratio, layout, heads_before_tokens, parts, shapes, groups }))
}
