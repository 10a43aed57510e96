//! Pairs of engines: pairs that match, pairs that are rejected and why, and the moves of a request.

use kvx_core::{Error, ErrorKind, Indices, Op, Result};
use kvx_testkit::test;
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{
    BlockPairs, Caches, Clip, Geometry, GroupKind, Heads, KvLayout, KvTensors, LayerCache,
    MappingOptions, MemoryType, Moves, Pairing, PeerMap, Remote, Tokens, Tp, handshake_ranks,
};

/// One engine; `heads` are the heads of all layers except the draft's.
#[derive(Clone, Copy)]
struct Side {
    tp: u32,
    dcp: u32,
    layout: KvLayout,
    tokens: u32,
    kernel: u32,
    layers: u32,
    heads: Heads,
    /// The heads of the last layer.
    draft: Option<Heads>,
    blocks: u32,
}

const SIDE: Side = Side {
    tp: 1,
    dcp: 1,
    layout: KvLayout::Lbhnc,
    tokens: 16,
    kernel: 1,
    layers: 2,
    heads: Heads::Sharded(8),
    draft: None,
    blocks: 64,
};

impl Side {
    fn caches(self) -> Caches {
        self.caches_with(|_| ())
    }

    fn caches_with(self, change: impl Fn(&mut LayerCache)) -> Caches {
        let layer = |at: u32| {
            let heads = self.draft.filter(|_| at + 1 == self.layers).unwrap_or(self.heads);
            let block_len = u64::from(heads.per_rank(self.tp) * self.tokens) * 256;
            let mut layer = LayerCache {
                name: format!("layers.{at}").into(),
                tensors: KvTensors::Together(0x1_0000_0000 + u64::from(at) * 0x1000_0000),
                blocks: self.blocks,
                block_len,
                block_stride: block_len,
                group: 0,
                heads,
                memory: MemoryType::Vram,
            };
            change(&mut layer);
            layer
        };
        Caches::of_layers(
            (0..self.layers).map(layer).collect(),
            self.layout,
            self.tokens,
            self.kernel,
            0,
        )
        .unwrap()
    }

    fn reads(self, rank: u32, peer: Side, options: &MappingOptions) -> Result<PeerMap> {
        self.reads_geometry(rank, peer, peer.caches().geometry(), options)
    }

    fn reads_geometry(
        self,
        rank: u32,
        peer: Side,
        theirs: &Geometry,
        options: &MappingOptions,
    ) -> Result<PeerMap> {
        let tp = Tp::new(rank, self.tp)?.with_dcp(self.dcp)?;
        let ranks: Vec<(WorkerRank, Geometry)> = handshake_ranks(tp, peer.tp, peer.dcp)?
            .into_iter()
            .map(|tp| (WorkerRank { pp: 0, tp }, theirs.clone()))
            .collect();
        let remote = Remote { tp_size: peer.tp, pp_size: 1, dcp_size: peer.dcp, ranks: &ranks };
        PeerMap::new(Op::Read, &self.caches(), tp, &remote, options)
    }
}

fn groups(count: usize) -> MappingOptions {
    MappingOptions {
        groups: vec![(GroupKind::Attention, Clip::Whole); count],
        ..MappingOptions::default()
    }
}

fn refused(result: Result<PeerMap>, kind: ErrorKind, word: &str) -> Error {
    let error = result.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(word), "{error}");
    error
}

fn one(list: &[u32]) -> Vec<Indices> {
    vec![list.into()]
}

fn moves(map: &PeerMap, local: &[u32], remote: &[u32]) -> Result<Moves> {
    map.moves(&BlockPairs { local: &one(local), remote: &one(remote), tokens: None })
}

/// Returns the ranks that blocks move from, and the ranks that only get a notification.
fn ranks(map: &PeerMap, moves: &Moves) -> (Vec<u32>, Vec<u32>) {
    let rank = |source: usize| map.sources()[source].rank().tp;
    let read = moves.ranks.iter().map(|moves| rank(moves.source)).collect();
    (read, moves.notify_only.iter().map(|source| rank(*source)).collect())
}

// vLLM 6: a layout mismatch is rejected; `enable_permute_local_kv` permutes LBHNC into LBNHC
#[test]
fn a_layout_mismatch_is_refused_or_permuted() {
    let tokens_first = Side { layout: KvLayout::Lbnhc, ..SIDE };
    refused(
        tokens_first.reads(0, SIDE, &groups(1)),
        ErrorKind::Incompatible,
        "enable_permute_local_kv",
    );
    let permute = MappingOptions { permute: true, ..groups(1) };
    let map = tokens_first.reads(0, SIDE, &permute).unwrap();
    assert!(map.finishing().unwrap().reorders());
    refused(SIDE.reads(0, tokens_first, &permute), ErrorKind::Incompatible, "only LBHNC");
    refused(
        tokens_first.reads(0, SIDE, &MappingOptions { permute: true, ..groups(2) }),
        ErrorKind::Incompatible,
        "several",
    );
    // Without heads no permutation is needed.
    let (a, b) = (
        Side { heads: Heads::Replicated, ..tokens_first },
        Side { heads: Heads::Replicated, ..SIDE },
    );
    assert!(!a.reads(0, b, &groups(1)).unwrap().finishing().unwrap().reorders());
}

// vLLM 7: block lengths of replicated GQA heads are accepted and wrong ones rejected; a split of
//     heads needs contiguous heads
#[test]
fn block_lengths_follow_heads_and_wrong_ones_are_refused() {
    // Two heads on eight ranks and on four ranks: every rank holds one.
    let replicated = Side { heads: Heads::Sharded(2), ..SIDE };
    let (wide, narrow) = (Side { tp: 8, ..replicated }, Side { tp: 4, ..replicated });
    let map = wide.reads(5, narrow, &groups(1)).unwrap();
    assert_eq!(map.sources()[0].lanes()[0].remote.grid, map.sources()[0].lanes()[0].local.grid);
    let wrong = Side { tp: 4, heads: Heads::Sharded(8), ..SIDE };
    refused(wide.reads(5, wrong, &groups(1)), ErrorKind::Incompatible, "must have 4096 bytes");
    // vLLM rejects copies of heads at a producer with more ranks.
    refused(narrow.reads(0, wide, &groups(1)), ErrorKind::Incompatible, "copies of 2 KV heads");
}

#[test]
fn heads_are_divided_only_where_they_are_ranges_of_bytes() {
    let half = Side { tp: 2, layout: KvLayout::Lbnhc, ..SIDE };
    refused(half.reads(1, Side { tp: 1, ..half }, &groups(1)), ErrorKind::Incompatible, "LBHNC");
    assert!(half.reads(1, half, &groups(1)).is_ok());
    // One head per rank is never divided.
    let one_head = Side { heads: Heads::Sharded(1), ..half };
    assert!(one_head.reads(1, Side { tp: 1, ..one_head }, &groups(1)).is_ok());
    let rows = Side { layout: KvLayout::Blhnc, ..half };
    let map = rows.reads(1, Side { tp: 1, ..rows }, &groups(1)).unwrap();
    let lane = map.sources()[0].lanes()[0];
    assert_eq!((lane.remote.grid.base, lane.remote.grid.length), (4 * 4096, 4 * 4096));
}

// vLLM 16: with more producer ranks than consumer ranks, each source rank is read once
#[test]
fn a_producer_of_more_ranks_is_read_once_per_rank() {
    let (two, eight) = (Side { tp: 2, ..SIDE }, Side { tp: 8, ..SIDE });
    let map = two.reads(1, eight, &groups(1)).unwrap();
    let moved = moves(&map, &[3, 4], &[8, 9]).unwrap();
    assert_eq!(ranks(&map, &moved), (vec![4, 5, 6, 7], vec![]));
    assert!(moved.ranks.iter().all(|rank| rank.pairings.len() == 1));
    let starts: Vec<u64> =
        map.sources().iter().map(|source| source.lanes()[0].local.grid.base).collect();
    assert_eq!(starts, [0, 4096, 2 * 4096, 3 * 4096]);
    assert_eq!(map.consumers(), 1);
}

// vLLM 12: empty block lists move nothing and notify every rank
// vLLM 16: MLA: one rank is read, and the other ranks get a notification only
#[test]
fn a_replicated_latent_is_read_once_and_the_other_ranks_are_told() {
    let latent = Side { heads: Heads::Replicated, ..SIDE };
    let map = Side { tp: 2, ..latent }.reads(1, Side { tp: 8, ..latent }, &groups(1)).unwrap();
    let moved = moves(&map, &[3, 4], &[8, 9]).unwrap();
    assert_eq!(ranks(&map, &moved), (vec![4], vec![5, 6, 7]));
    // The whole prompt is cached, or the request was aborted: all ranks are notified and nothing
    // moves.
    for (local, remote) in [(one(&[]), one(&[8, 9])), (vec![], vec![])] {
        let nothing =
            map.moves(&BlockPairs { local: &local, remote: &remote, tokens: None }).unwrap();
        assert_eq!(ranks(&map, &nothing), (vec![], vec![4, 5, 6, 7]));
        assert_eq!((nothing.blocks, nothing.covered.len()), (0, 0));
    }
    let map = Side { tp: 4, ..latent }.reads(3, Side { tp: 2, ..latent }, &groups(1)).unwrap();
    assert_eq!((map.consumers(), map.sources()[0].rank().tp), (2, 1));
}

// vLLM 7: an MLA target is combined with the head slices of a draft model (without NVFP4)
#[test]
fn heads_of_a_draft_are_divided_beside_a_latent() {
    let draft = Side { heads: Heads::Replicated, draft: Some(Heads::Sharded(8)), ..SIDE };
    for (rank, tp, producer, offset) in [(3, 8, 1, 3), (5, 8, 2, 1), (5, 16, 1, 2)] {
        let map =
            Side { tp, ..draft }.reads(rank, Side { tp: producer, ..draft }, &groups(1)).unwrap();
        let lanes = map.sources()[0].lanes();
        assert_eq!((lanes[0].remote.grid.base, lanes[0].remote.grid.length), (0, 4096));
        assert_eq!((lanes[1].remote.grid.base, lanes[1].remote.grid.length), (offset * 4096, 4096));
    }
    // From more ranks: the latent from one, the draft's heads from each.
    let map = Side { tp: 2, ..draft }.reads(0, Side { tp: 8, ..draft }, &groups(1)).unwrap();
    let lanes: Vec<usize> = map.sources().iter().map(|source| source.lanes().len()).collect();
    assert_eq!(lanes, [2, 1, 1, 1]);
    let moved = moves(&map, &[1], &[2]).unwrap();
    assert_eq!(ranks(&map, &moved), (vec![0, 1, 2, 3], vec![]));
    // The draft's heads need a matching layout even if the latent does not.
    let other = Side { layout: KvLayout::Lbnhc, ..draft };
    refused(other.reads(0, draft, &groups(1)), ErrorKind::Incompatible, "layouts differ");
}

// vLLM 22: block sizes that do not divide each other are rejected
#[test]
fn block_sizes_that_do_not_divide_are_declined() {
    for (own, theirs, word) in [(16, 32, "multiple"), (48, 32, "multiple"), (16, 5, "multiple")] {
        let (own, theirs) = (Side { tokens: own, ..SIDE }, Side { tokens: theirs, ..SIDE });
        refused(own.reads(0, theirs, &groups(1)), ErrorKind::Incompatible, word);
    }
    let small = Side { tokens: 4, ..SIDE };
    let map = SIDE.reads(0, small, &groups(1)).unwrap();
    assert_eq!((map.block_size_ratio(), map.sources()[0].lanes()[0].local.grid.count), (4, 256));
    let buffered = MappingOptions { host_buffer: true, ..groups(1) };
    refused(SIDE.reads(0, small, &buffered), ErrorKind::Incompatible, "host memory");
    refused(
        SIDE.reads(0, Side { tp: 2, ..small }, &groups(1)),
        ErrorKind::Incompatible,
        "same block size",
    );
    let latent = Side { heads: Heads::Replicated, ..SIDE };
    assert!(latent.reads(0, Side { tp: 2, tokens: 4, ..latent }, &groups(1)).is_ok());
    // A producer that writes cannot finish the consumer's blocks.
    let peer = [(WorkerRank { pp: 0, tp: 0 }, SIDE.caches().geometry().clone())];
    let remote = Remote { tp_size: 1, pp_size: 1, dcp_size: 1, ranks: &peer };
    let written =
        PeerMap::new(Op::Write, &small.caches(), Tp::new(0, 1).unwrap(), &remote, &groups(1));
    refused(written, ErrorKind::Incompatible, "equal sizes");
}

// vLLM 22: blocks split for a peer's block size stay within the request's blocks
#[test]
fn sub_blocks_stay_within_the_requests_blocks() {
    let map = SIDE.reads(0, Side { tokens: 4, ..SIDE }, &groups(1)).unwrap();
    let moved = moves(&map, &[1, 2, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).unwrap();
    let pairing = &moved.ranks[0].pairings[0];
    assert_eq!(pairing.local.as_list().unwrap(), (4..14).collect::<Vec<u32>>());
    assert_eq!(pairing.remote.as_list().unwrap(), (1..=10).collect::<Vec<u32>>());
    let covered: Vec<(u32, u32)> =
        moved.covered[0].blocks().map(|(block, filled)| (block, filled.end)).collect();
    assert_eq!(covered, [(1, 4), (2, 4), (3, 2)]);
    assert!(!moved.covered[0].is_complete());
    // With a cached block, the two sub-blocks of the last block keep their position.
    let moved = moves(&map, &[3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).unwrap();
    assert_eq!(moved.ranks[0].pairings[0].local.as_list().unwrap(), [12, 13]);
    assert_eq!(moved.ranks[0].pairings[0].remote.as_list().unwrap(), [9, 10]);
}

// vLLM 45: post-processing zeroes the tail that was not transferred
#[test]
fn what_was_not_filled_becomes_zero() {
    let map = SIDE.reads(0, Side { tokens: 4, ..SIDE }, &groups(1)).unwrap();
    let finishing = map.finishing().unwrap();
    let len = 8 * 16 * 256;
    let mut block = vec![7; len];
    finishing.finish(0, &mut block, 0..2, &mut Vec::new()).unwrap();
    // Eight heads of sixteen tokens: the first eight tokens of each are filled.
    for (at, row) in block.chunks_exact(256).enumerate() {
        assert_eq!(row, if at % 16 < 8 { [7; 256] } else { [0; 256] }, "row {at}");
    }
    let mut scratch = Vec::new();
    assert!(finishing.finish(2, &mut block, 0..2, &mut scratch).is_err());
    assert!(finishing.finish(0, &mut block[1..], 0..2, &mut scratch).is_err());
    assert!(finishing.finish(0, &mut block, 0..5, &mut scratch).is_err());
}

#[test]
fn index_lists_are_shared_by_all_layers_and_ranks() {
    let large = Side { layers: 60, blocks: 4096, ..SIDE };
    let map = large.reads(0, Side { tp: 2, ..large }, &groups(1)).unwrap();
    let (local, remote): (Vec<u32>, Vec<u32>) = ((0..2000).collect(), (2000..4000).rev().collect());
    let (local, remote) = (one(&local), one(&remote));
    let moved = map.moves(&BlockPairs { local: &local, remote: &remote, tokens: None }).unwrap();
    assert_eq!((moved.ranks.len(), moved.blocks), (2, 2 * 60 * 2000));
    for rank in &moved.ranks {
        assert_eq!(rank.pairings.len(), 1);
        assert_eq!(map.sources()[rank.source].grids(rank.pairings[0].set).len(), 60);
        let same =
            |a: &Indices, b: &Indices| std::ptr::eq(a.as_list().unwrap(), b.as_list().unwrap());
        assert!(
            same(&rank.pairings[0].local, &local[0]) && same(&rank.pairings[0].remote, &remote[0])
        );
    }
}

#[test]
fn units_that_were_paired_elsewhere_give_the_same_moves() {
    let small = Side { tokens: 4, ..SIDE };
    let padded = SIDE.caches_with(|layer| layer.block_stride += 64);
    let ranks = [(WorkerRank { pp: 0, tp: 0 }, small.caches().geometry().clone())];
    let remote = Remote { tp_size: 1, pp_size: 1, dcp_size: 1, ranks: &ranks };
    for (caches, sets) in [(SIDE.caches(), 1), (padded, 4)] {
        let map =
            PeerMap::new(Op::Read, &caches, Tp::new(0, 1).unwrap(), &remote, &groups(1)).unwrap();
        assert_eq!(map.sources()[0].sets().len(), sets);
        let (local, theirs) = (one(&[5, 9]), one(&[1, 2, 3, 4, 5, 6, 7]));
        let moved =
            map.moves(&BlockPairs { local: &local, remote: &theirs, tokens: None }).unwrap();
        let aligned = map.units().align(2, 7, None, Clip::Whole).unwrap();
        let (own, peers) =
            (aligned.of_consumer(&local[0]).unwrap(), aligned.of_producer(&theirs[0]).unwrap());
        let again = map.pairings(0, 0, &own, &peers).unwrap();
        let text = |pairings: &[Pairing]| {
            let part = |pairing: &Pairing| {
                let list = |indices: &Indices| indices.as_list().unwrap().to_vec();
                (pairing.set, list(&pairing.local), list(&pairing.remote))
            };
            pairings.iter().map(part).collect::<Vec<_>>()
        };
        assert_eq!(text(&moved.ranks[0].pairings), text(&again));
        let covered: Vec<_> = map.covered(0, &local[0], &aligned).blocks().collect();
        assert_eq!(covered, moved.covered[0].blocks().collect::<Vec<_>>());
        assert!(
            map.pairings(1, 0, &own, &peers).is_err()
                && map.pairings(0, 0, &own, &theirs[0].slice(0..1)).is_err()
        );
        let far: Indices = [u32::MAX].into();
        assert_eq!(map.pairings(0, 0, &far, &far).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
}

// vLLM 47: a consumer expects completions from all stages and ranks of a producer that writes
#[test]
fn completions_count_all_stages_and_ranks_that_write() {
    for (consumer, producer, expected) in [(1, 1, 1), (2, 1, 1), (1, 4, 4), (2, 8, 4)] {
        let latent = Side { heads: Heads::Replicated, ..SIDE };
        let map = Side { tp: consumer, ..latent }
            .reads(0, Side { tp: producer, ..latent }, &groups(1))
            .unwrap();
        assert_eq!(map.completions(), expected);
    }
}

// vLLM 28: regions in different kinds of memory are paired separately
#[test]
fn kinds_of_memory_are_moved_apart() {
    let mixed = SIDE.caches_with(|layer| {
        if &*layer.name == "layers.1" {
            layer.memory = MemoryType::Dram;
        }
    });
    let map = SIDE.reads_geometry(0, SIDE, mixed.geometry(), &groups(1)).unwrap();
    let kinds: Vec<_> =
        map.sources()[0].sets().iter().map(|set| (set.memory(), set.lanes())).collect();
    let (vram, dram) = (MemoryType::Vram, MemoryType::Dram);
    assert_eq!(kinds, [((vram, vram), 1), ((vram, dram), 1)]);
    assert_eq!(map.sources()[0].memories(), [(vram, vram), (vram, dram)]);
    assert_eq!(moves(&map, &[1], &[2]).unwrap().ranks[0].pairings.len(), 2);
}

// vLLM 45: each KV cache group has its own block lists, windows and cached prefixes
#[test]
fn groups_have_lists_of_their_own() {
    let two_groups = |side: Side| {
        side.caches_with(|layer| layer.group = if &*layer.name == "layers.0" { 0 } else { 1 })
    };
    let caches = two_groups(SIDE);
    let ranks = [(WorkerRank { pp: 0, tp: 0 }, caches.geometry().clone())];
    let remote = Remote { tp_size: 1, pp_size: 1, dcp_size: 1, ranks: &ranks };
    // The second group has a sliding window of 32 tokens: three blocks of 16 are sent.
    let options = MappingOptions {
        groups: vec![(GroupKind::Attention, Clip::Whole), (GroupKind::Attention, Clip::Window)],
        ..MappingOptions::default()
    };
    let map = PeerMap::new(Op::Read, &caches, Tp::new(0, 1).unwrap(), &remote, &options).unwrap();
    let local: Vec<Indices> = vec![[1, 2, 3, 4].into(), [7, 8].into()];
    let theirs: Vec<Indices> = vec![[10, 11, 12, 13, 14, 15].into(), [20, 21, 22].into()];
    let tokens = Some(Tokens { producer: 90, wanted: 90 });
    let moved = map.moves(&BlockPairs { local: &local, remote: &theirs, tokens }).unwrap();
    let pairs: Vec<(&[u32], &[u32])> = moved.ranks[0]
        .pairings
        .iter()
        .map(|pairing| (pairing.local.as_list().unwrap(), pairing.remote.as_list().unwrap()))
        .collect();
    assert_eq!(pairs, [(&[1, 2, 3, 4][..], &[12, 13, 14, 15][..]), (&[7, 8], &[21, 22])]);
    let flat = map.moves(&BlockPairs { local: &local, remote: &theirs[..1], tokens }).unwrap_err();
    assert!(flat.to_string().contains("1 remote KV cache groups"), "{flat}");
    let missing = PeerMap::new(Op::Read, &caches, Tp::new(0, 1).unwrap(), &remote, &groups(1));
    refused(missing, ErrorKind::Invalid, "group 1, but there are 1");
    // A model whose regions all belong to one group takes the blocks of all lists.
    let map = SIDE.reads(0, SIDE, &groups(2)).unwrap();
    let moved = map.moves(&BlockPairs { local: &local, remote: &theirs, tokens: None }).unwrap();
    assert_eq!((moved.ranks[0].pairings.len(), moved.blocks), (2, 2 * 6));
}

#[test]
fn ids_that_a_peer_makes_up_are_refused() {
    let map = SIDE.reads(0, SIDE, &groups(1)).unwrap();
    assert!(moves(&map, &[63], &[63]).is_ok());
    for (local, remote) in
        [(&[1][..], &[64][..]), (&[64], &[1]), (&[1], &[u32::MAX]), (&[1, 2], &[1])]
    {
        assert_eq!(moves(&map, local, remote).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
}

#[test]
fn a_map_needs_every_rank_it_reads_and_no_other() {
    let (one, two) = (SIDE, Side { tp: 2, ..SIDE });
    let geometry = two.caches().geometry().clone();
    let draw = |tps: &[u32], pp_size| {
        let ranks: Vec<_> =
            tps.iter().map(|tp| (WorkerRank { pp: 0, tp: *tp }, geometry.clone())).collect();
        let remote = Remote { tp_size: 2, pp_size, dcp_size: 1, ranks: &ranks };
        PeerMap::new(Op::Read, &one.caches(), Tp::new(0, 1).unwrap(), &remote, &groups(1))
    };
    assert!(draw(&[1, 0], 1).is_ok());
    refused(draw(&[0], 1), ErrorKind::Invalid, "(pp 0, tp 1) of the peer is missing");
    refused(draw(&[0, 1], 2), ErrorKind::Invalid, "(pp 1, tp 0) of the peer is missing");
    refused(draw(&[0, 1, 1], 1), ErrorKind::Invalid, "twice");
    refused(draw(&[0, 1, 2], 1), ErrorKind::Invalid, "not a handshake rank");
    refused(draw(&[0, 1], 0), ErrorKind::Invalid, "pipeline stages");
    let other = Side { tokens: 8, ..two }.caches().geometry().clone();
    let ranks =
        [(WorkerRank { pp: 0, tp: 0 }, geometry.clone()), (WorkerRank { pp: 0, tp: 1 }, other)];
    let remote = Remote { tp_size: 2, pp_size: 1, dcp_size: 1, ranks: &ranks };
    let uneven = PeerMap::new(Op::Read, &one.caches(), Tp::new(0, 1).unwrap(), &remote, &groups(1));
    refused(uneven, ErrorKind::Incompatible, "another layout or block size");
}

#[test]
fn unsupported_pairs_are_rejected_with_a_reason() {
    let state = MappingOptions {
        groups: vec![(GroupKind::StateSpace, Clip::Whole)],
        ..MappingOptions::default()
    };
    refused(SIDE.reads(0, SIDE, &state), ErrorKind::Unsupported, "state-space");
    let latent = Side { heads: Heads::Replicated, tp: 4, ..SIDE };
    let sharded = Side { dcp: 4, ..latent };
    refused(
        latent.reads(0, sharded, &groups(1)),
        ErrorKind::Unsupported,
        "decode-context-parallel sizes 1 and 4",
    );
    let map = sharded.reads(2, sharded, &groups(1)).unwrap();
    assert_eq!((map.sources()[0].rank().tp, map.consumers()), (2, 1));
    let heads = Side { heads: Heads::Sharded(8), ..sharded };
    refused(heads.reads(2, heads, &groups(1)), ErrorKind::Invalid, "MLA only");
}
