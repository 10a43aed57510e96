//! Engines whose memory holds real bytes. Every element of a rank's KV cache encodes its position,
//! and moves are copies, so a wrong mapping shows as a wrong element.

use kvx_core::{Indices, Op, Result};
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{
    BlockPairs, Caches, Clip, Geometry, GroupKind, Heads, KvLayout, KvTensors, LayerCache,
    MappingOptions, MemoryType, Moves, PeerMap, RegionGrid, Remote, Tokens, Tp,
};

use super::rows::{Row, descriptor_ids, local_rows, remote_rows};

/// The memory layout of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Together,
    Apart,
    Halves,
}

/// The properties that both engines have in common.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) heads: Heads,
    /// The group of each layer.
    pub(crate) layers: Vec<u32>,
    pub(crate) groups: usize,
    /// A layer whose heads are distributed differently (a draft model with an MLA target).
    pub(crate) draft: Option<(usize, Heads)>,
    pub(crate) style: Style,
}

impl Model {
    pub(crate) fn heads_of(&self, layer: usize) -> Heads {
        match self.draft {
            Some((at, heads)) if at == layer => heads,
            _ => self.heads,
        }
    }
}

/// One engine.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) tp: u32,
    pub(crate) layout: KvLayout,
    /// The tokens in a kernel block.
    pub(crate) block_tokens: u32,
    pub(crate) kernel_per_logical: u32,
    /// The logical blocks in a pool.
    pub(crate) blocks: u32,
    /// The bytes of padding after each block.
    pub(crate) padding: u64,
    /// True if layers of one pool are adjacent in rows.
    pub(crate) rows: bool,
    /// True if layers of different groups share one pool.
    pub(crate) shared_pool: bool,
}

const ELEMENT: u64 = 4;
const POISON: u8 = 0xee;

/// Returns the content of a cache element: never 0 and never the poison.
fn word(layer: usize, v: bool, head: u32, token: u32) -> [u8; 4] {
    [layer as u8 + 1, u8::from(v) * 100 + head as u8, (token >> 8) as u8, token as u8]
}

/// One rank of an engine, and its memory.
pub(crate) struct Rank {
    pub(crate) tp: Tp,
    pub(crate) caches: Caches,
    base: u64,
    memory: Vec<u8>,
    engine: Engine,
    /// The start of the K and V of each layer, and the stride of its blocks.
    tensors: Vec<(u64, u64, u64)>,
}

impl Engine {
    pub(crate) fn logical_tokens(&self) -> u32 {
        self.block_tokens * self.kernel_per_logical
    }

    /// Creates a rank with the layers of `stage`, of `stages` equal parts of the model.
    pub(crate) fn rank(&self, model: &Model, rank: u32, stage: u32, stages: u32) -> Result<Rank> {
        let base =
            0x7f00_0000_0000 + u64::from(rank) * 0x1_0000_0000 + u64::from(stage) * 0x10_0000_0000;
        let count = self.blocks * self.kernel_per_logical;
        let layers: Vec<usize> = (0..model.layers.len())
            .filter(|layer| layer * stages as usize / model.layers.len() == stage as usize)
            .collect();
        let block_len = |layer: usize| {
            let kv = if model.style == Style::Apart { 1 } else { 2 };
            u64::from(model.heads_of(layer).per_rank(self.tp))
                * u64::from(self.block_tokens)
                * ELEMENT
                * kv
        };
        let row: u64 = layers.iter().map(|layer| block_len(*layer)).sum::<u64>() + self.padding;
        let mut end = base;
        let mut tensors = Vec::new();
        let mut given = Vec::new();
        for (position, layer) in layers.iter().enumerate() {
            let len = block_len(*layer);
            let stride = if self.rows { row } else { len + self.padding };
            let mut take = || {
                let start = end;
                end += u64::from(count) * stride;
                start
            };
            let kv = match (model.style, self.rows, self.shared_pool) {
                (Style::Apart, ..) => KvTensors::Apart { k: take(), v: take() },
                (style, rows, shared) => {
                    let start = if rows {
                        base + layers[..position].iter().map(|layer| block_len(*layer)).sum::<u64>()
                    } else if shared && position > 0 {
                        base
                    } else {
                        take()
                    };
                    if style == Style::Halves {
                        KvTensors::Halves(start)
                    } else {
                        KvTensors::Together(start)
                    }
                }
            };
            tensors.push(match kv {
                KvTensors::Together(base) => (base, base, stride),
                KvTensors::Halves(base) => (base, base + len / 2, stride),
                KvTensors::Apart { k, v } => (k, v, stride),
            });
            given.push(LayerCache {
                name: format!("model.layers.{layer}.attn").into(),
                tensors: kv,
                blocks: count,
                block_len: len,
                block_stride: stride,
                group: model.layers[*layer],
                heads: model.heads_of(*layer),
                memory: MemoryType::Dram,
            });
        }
        if self.rows {
            end = base + row * u64::from(count);
        }
        given.reverse(); // the order of an engine's layers must not matter
        let caches =
            Caches::of_layers(given, self.layout, self.block_tokens, self.kernel_per_logical, 0)?;
        let memory = vec![POISON; (end - base) as usize];
        let tp = Tp::new(rank, self.tp)?;
        Ok(Rank { tp, caches, base, memory, engine: self.clone(), tensors })
    }
}

impl Rank {
    pub(crate) fn geometry(&self) -> &Geometry {
        self.caches.geometry()
    }

    /// Returns the address of a head's K or V of a token.
    fn address(
        &self,
        model: &Model,
        layer: usize,
        v: bool,
        head: u32,
        blocks: &[u32],
        token: u32,
    ) -> usize {
        let engine = &self.engine;
        let logical = blocks[(token / engine.logical_tokens()) as usize];
        let within = token % engine.logical_tokens();
        let block = u64::from(logical * engine.kernel_per_logical + within / engine.block_tokens);
        let token = u64::from(within % engine.block_tokens);
        let heads = u64::from(model.heads_of(layer).per_rank(engine.tp));
        let place = match engine.layout.heads_before_tokens() {
            true => u64::from(head) * u64::from(engine.block_tokens) + token,
            false => token * heads + u64::from(head),
        };
        let (k_base, v_base, stride) = self.tensors[layer];
        let offset = match model.style {
            Style::Together => k_base + (place * 2 + u64::from(v)) * ELEMENT,
            _ => (if v { v_base } else { k_base }) + place * ELEMENT,
        };
        (offset + block * stride - self.base) as usize
    }

    fn heads(&self, model: &Model, layer: usize) -> std::ops::Range<u32> {
        let first = match model.heads_of(layer) {
            Heads::Replicated => 0,
            Heads::Sharded(heads) => self.tp.rank() * heads / self.tp.size(),
        };
        first..first + model.heads_of(layer).per_rank(self.tp.size())
    }

    /// Returns each element of the tokens, and its expected content. `layers` are the layers that
    /// this rank holds.
    fn elements<'a>(
        &'a self,
        model: &'a Model,
        layers: &'a [usize],
        lists: &'a [Vec<u32>],
        tokens: std::ops::Range<u32>,
    ) -> impl Iterator<Item = (usize, [u8; 4])> + 'a {
        layers.iter().enumerate().flat_map(move |(position, layer)| {
            let tokens = tokens.clone();
            self.heads(model, *layer).flat_map(move |head| {
                let own = head - self.heads(model, *layer).start;
                let tokens = tokens.clone();
                [false, true].into_iter().flat_map(move |v| {
                    tokens.clone().map(move |token| {
                        let blocks = &lists[model.layers[*layer] as usize];
                        let at = self.address(model, position, v, own, blocks, token);
                        (at, word(*layer, v, head, token))
                    })
                })
            })
        })
    }

    pub(crate) fn fill(
        &mut self,
        model: &Model,
        layers: &[usize],
        lists: &[Vec<u32>],
        tokens: u32,
    ) {
        let elements: Vec<_> = self.elements(model, layers, lists, 0..tokens).collect();
        for (at, word) in elements {
            self.memory[at..at + 4].copy_from_slice(&word);
        }
    }

    /// Checks the elements of these tokens.
    pub(crate) fn check(
        &self,
        model: &Model,
        layers: &[usize],
        lists: &[Vec<u32>],
        filled: std::ops::Range<u32>,
    ) {
        for (at, word) in self.elements(model, layers, lists, filled) {
            assert_eq!(self.memory[at..at + 4], word, "at {at:#x} of rank {:?}", self.tp);
        }
    }

    /// Checks that these tokens' elements are zero.
    pub(crate) fn check_zero(
        &self,
        model: &Model,
        layers: &[usize],
        lists: &[Vec<u32>],
        tokens: std::ops::Range<u32>,
    ) {
        for (at, _) in self.elements(model, layers, lists, tokens) {
            assert_eq!(self.memory[at..at + 4], [0; 4], "at {at:#x} of rank {:?}", self.tp);
        }
    }

    /// Checks that only the elements of these tokens were written: no padding and no other block.
    pub(crate) fn check_untouched(
        &self,
        model: &Model,
        layers: &[usize],
        lists: &[Vec<u32>],
        but: std::ops::Range<u32>,
    ) {
        let mut written = vec![false; self.memory.len()];
        for (at, _) in self.elements(model, layers, lists, but) {
            written[at..at + 4].fill(true);
        }
        let stray =
            self.memory.iter().zip(written).position(|(byte, written)| !written && *byte != POISON);
        assert_eq!(stray, None, "of rank {:?}", self.tp);
    }

    fn range(&self, side: RegionGrid, index: u32) -> std::ops::Range<usize> {
        assert!(index < side.grid.count, "index {index} of {:?}", side.grid);
        let region = &self.geometry().regions()[side.region as usize];
        let start = region.base + side.grid.offset(index) - self.base;
        start as usize..(start + side.grid.length) as usize
    }

    fn row_range(&self, rows: &[Row], id: u64) -> std::ops::Range<usize> {
        let mut first = 0;
        for row in rows {
            if id < first + row.count {
                let start = row.address + (id - first) * row.stride - self.base;
                return start as usize..(start + row.len) as usize;
            }
            first += row.count;
        }
        panic!("descriptor {id} of {first}");
    }

    /// Finishes the blocks that a request filled.
    pub(crate) fn finish(&mut self, map: &PeerMap, moves: &Moves) {
        let finishing = map.finishing().expect("a consumer finishes its blocks");
        let mut scratch = Vec::new();
        for covered in &moves.covered {
            for at in finishing.regions_of(covered.group) {
                let region = &self.caches.geometry().regions()[at as usize];
                for (block, filled) in covered.blocks() {
                    let start = region.base - self.base + u64::from(block) * region.block_stride;
                    let bytes =
                        &mut self.memory[start as usize..(start + region.block_len) as usize];
                    finishing.finish(at, bytes, filled, &mut scratch).unwrap();
                }
            }
        }
    }
}

/// Performs the moves of a map for one request, by grids, and checks that descriptors give the
/// same. `others` are the ranks of the peer.
pub(crate) fn carry_out(
    map: &PeerMap,
    moves: &Moves,
    own: &mut Rank,
    others: &mut [(WorkerRank, Rank)],
) {
    let mut bytes = 0;
    for rank in &moves.ranks {
        let source = &map.sources()[rank.source];
        let (_, other) =
            others.iter_mut().find(|(at, _)| *at == source.rank()).expect("a rank of the peer");
        let local_rows = local_rows(source, own.geometry());
        let remote_rows = remote_rows(source, other.geometry());
        for pairing in &rank.pairings {
            let (local_ids, remote_ids) = descriptor_ids(source, pairing);
            let mut ids = local_ids.into_iter().zip(remote_ids);
            assert_eq!(pairing.local.len(), pairing.remote.len());
            for (local, remote) in source.grids(pairing.set) {
                assert_eq!(local.grid.length, remote.grid.length);
                for at in 0..pairing.local.len() {
                    let here = own.range(local, pairing.local.at(at));
                    let there = other.range(remote, pairing.remote.at(at));
                    let (local_id, remote_id) = ids.next().expect("an id for each block and lane");
                    assert_eq!(own.row_range(&local_rows, local_id), here);
                    assert_eq!(other.row_range(&remote_rows, remote_id), there);
                    bytes += here.len() as u64;
                    match map.op() {
                        Op::Read => own.memory[here].copy_from_slice(&other.memory[there]),
                        Op::Write => other.memory[there].copy_from_slice(&own.memory[here]),
                    }
                }
            }
            assert_eq!(ids.next(), None);
        }
    }
    assert_eq!(bytes, moves.bytes);
}

pub(crate) fn lists(of: &[Vec<u32>]) -> Vec<Indices> {
    of.iter().map(|list| Indices::from(&list[..])).collect()
}

pub(crate) fn options(model: &Model, permute: bool) -> MappingOptions {
    MappingOptions {
        groups: vec![(GroupKind::Attention, Clip::Whole); model.groups],
        permute,
        host_buffer: false,
    }
}

/// A request's blocks on both sides.
pub(crate) struct Request {
    pub(crate) producer_lists: Vec<Vec<u32>>,
    /// The consumer's lists, with the cached prefix.
    pub(crate) consumer_lists: Vec<Vec<u32>>,
    /// The number of the consumer's blocks that are cached.
    pub(crate) cached: usize,
    pub(crate) tokens: u32,
    pub(crate) told: bool,
}

impl Request {
    pub(crate) fn moves(&self, map: &PeerMap) -> Result<Moves> {
        let uncached: Vec<Vec<u32>> =
            self.consumer_lists.iter().map(|list| list[self.cached..].to_vec()).collect();
        let (consumer, producer) = (lists(&uncached), lists(&self.producer_lists));
        let tokens = self.told.then_some(Tokens { producer: self.tokens, wanted: self.tokens });
        match map.op() {
            Op::Read => map.moves(&BlockPairs { local: &consumer, remote: &producer, tokens }),
            Op::Write => map.moves(&BlockPairs { local: &producer, remote: &consumer, tokens }),
        }
    }
}

pub(crate) fn remote<'a>(
    engine: &Engine,
    stages: u32,
    ranks: &'a [(WorkerRank, Geometry)],
) -> Remote<'a> {
    Remote { tp_size: engine.tp, pp_size: stages, dcp_size: 1, ranks }
}
