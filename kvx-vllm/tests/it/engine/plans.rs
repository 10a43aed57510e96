//! From the result of a handshake to the ranks that a worker reads from.

use kvx_core::Op;
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{Allocation, BlockLists, Part, PeerPlan, PoolBlocks, Settings, WorkerRank};
use kvx_vllm::mapping::{
    Caches, Heads, KvLayout, KvTensors, LayerCache, MappingOptions, MemoryType, PeerMap, Remote,
    Tp, handshake_ranks,
};
use kvx_vllm::params::TransferParams;

use super::rig::{BLOCK, BLOCKS, Rig, at, note_of, pairs, prefilled, reads, settings};

/// Returns the caches of one of `size` ranks of a model with two layers.
fn caches(heads: Heads, size: u64, kernel_per_logical: u32) -> Caches {
    let whole = if heads == Heads::Replicated { 4096 } else { 32768 / size };
    let block_len = whole / u64::from(kernel_per_logical);
    let layer = |layer: u64| LayerCache {
        name: format!("layers.{layer}").into(),
        tensors: KvTensors::Together((layer + 1) << 32),
        block_len,
        block_stride: block_len,
        blocks: BLOCKS * kernel_per_logical,
        group: 0,
        memory: if layer == 0 { MemoryType::Vram } else { MemoryType::Dram },
        heads,
    };
    let block = BLOCK / kernel_per_logical;
    Caches::of_layers(vec![layer(0), layer(1)], KvLayout::Lbhnc, block, kernel_per_logical, 0)
        .unwrap()
}

fn plan(heads: Heads, (d, rank): (u32, u32), p: u32, kernel_per_logical: u32) -> PeerPlan {
    let own = caches(heads, d.into(), 1);
    let theirs = caches(heads, p.into(), kernel_per_logical);
    let tp = Tp::new(rank, d).unwrap();
    let ranks: Vec<_> = handshake_ranks(tp, p, 1)
        .unwrap()
        .into_iter()
        .map(|tp| (WorkerRank { pp: 0, tp }, theirs.geometry().clone()))
        .collect();
    let remote = Remote { tp_size: p, pp_size: 1, dcp_size: 1, ranks: &ranks };
    let map = PeerMap::new(Op::Read, &own, tp, &remote, &MappingOptions::default()).unwrap();
    PeerPlan::of(&map, own.geometry(), theirs.geometry())
}

fn ranks(plan: &PeerPlan) -> (Vec<u32>, Vec<u32>) {
    let told = plan.told.iter().map(|(rank, _)| rank.tp).collect();
    (plan.lanes.iter().map(|lane| lane.rank.tp).collect(), told)
}

#[test]
fn heads_that_are_divided_are_read_from_every_rank_and_a_latent_from_one() {
    assert_eq!(ranks(&plan(Heads::Sharded(8), (2, 1), 4, 1)), (vec![2, 3], vec![]));
    assert_eq!(ranks(&plan(Heads::Replicated, (2, 1), 4, 1)), (vec![2], vec![3]));
    let shared = plan(Heads::Sharded(8), (4, 3), 2, 1);
    assert_eq!((ranks(&shared), shared.lanes[0].readers), ((vec![1], vec![]), 2));
}

#[test]
fn regions_in_two_kinds_of_memory_take_two_moves_of_each_lane() {
    let plan = plan(Heads::Sharded(8), (1, 0), 1, 1);
    assert_eq!(plan.lanes[0].memory.len(), 2);
    assert_eq!((plan.local_blocks, plan.remote_blocks), (BLOCKS.into(), BLOCKS.into()));
    assert_eq!(plan.completions, 1);
}

// vLLM 45: block ids of a KV cache group are limited by the regions of that group
#[test]
fn each_kv_cache_group_is_bounded_by_its_own_regions() {
    let layer = |at: u64, group: u32, blocks: u32| LayerCache {
        name: format!("layers.{at}").into(),
        tensors: KvTensors::Together((at + 1) << 32),
        block_len: 4096,
        block_stride: 4096,
        blocks,
        group,
        memory: MemoryType::Vram,
        heads: Heads::Replicated,
    };
    let caches = |layers| Caches::of_layers(layers, KvLayout::Lbhnc, BLOCK, 1, 0).unwrap();
    let two = caches(vec![layer(0, 0, 1000), layer(1, 1, 40), layer(2, 1, 50)]);
    let pools = PoolBlocks::of(two.geometry());
    assert_eq!([pools.of_group(0), pools.of_group(1)], [1000, 40]);
    // Versions without groups: any block may be in any region.
    let one = PoolBlocks::of(caches(vec![layer(0, 0, 1000), layer(1, 0, 40)]).geometry());
    assert_eq!([one.of_group(0), one.of_group(1)], [40, 40]);

    let mut decode = Rig::new(Settings { groups: vec![None, None], ..settings("d") });
    let mut from = super::rig::remote("p", "p-r", vec![900], 16);
    from.block_ids = vec![vec![900], vec![39]];
    decode.arrive(0.0, "r", 16, &TransferParams::prefilled(from, Version::default()));
    let fill = BlockLists::new([[800], [38]]);
    let allocation = Allocation { fill, computed: 0, external: 16 };
    decode.scheduler.update_state_after_alloc(at(0.0), &"r".into(), allocation);
    let connection = decode.step_to_handshake(0.0);
    let plan = PeerPlan { local_blocks: pools.clone(), remote_blocks: pools, ..super::rig::plan() };
    assert_eq!(pairs(&reads(&decode.connected(0.0, connection, plan))[0]), [(800, 900), (38, 39)]);
}

#[test]
fn a_move_identifies_its_source_and_sets() {
    let (own, theirs) = (caches(Heads::Sharded(8), 1, 1), caches(Heads::Sharded(8), 2, 1));
    let ranks = [0, 1].map(|tp| (WorkerRank { pp: 0, tp }, theirs.geometry().clone()));
    let remote = Remote { tp_size: 2, pp_size: 1, dcp_size: 1, ranks: &ranks };
    let map =
        PeerMap::new(Op::Read, &own, Tp::new(0, 1).unwrap(), &remote, &MappingOptions::default())
            .unwrap();
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 24, &prefilled("p", "p-r", 24));
    let connection = decode.step_to_handshake(0.0);
    let plan = PeerPlan::of(&map, own.geometry(), theirs.geometry());
    assert!(!plan.finishes);
    let moves = reads(&decode.connected(0.0, connection, plan));
    let mut seen = Vec::new();
    for what in &moves {
        let (source, sets) = map.part(what.part).unwrap();
        let regions = sets.iter().flat_map(|set| source.grids(*set)).map(|(local, _)| local.region);
        seen.push((source.rank().tp, regions.collect::<Vec<_>>()));
    }
    // Layer 0 is in device memory, layer 1 in host memory.
    assert_eq!(seen, [(0, vec![0]), (0, vec![1]), (1, vec![0]), (1, vec![1])]);
    let nowhere = Part { memory: (MemoryType::Vram, MemoryType::Dram), ..moves[0].part };
    assert!(map.part(nowhere).is_none());
    assert!(map.part(Part { rank: WorkerRank { pp: 0, tp: 2 }, ..moves[0].part }).is_none());
}

#[test]
fn blocks_of_the_peer_use_its_kernel_units() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 24, &prefilled("p", "p-r", 24));
    let connection = decode.step_to_handshake(0.0);
    let plan = plan(Heads::Sharded(8), (1, 0), 1, 2);
    assert_eq!(plan.lanes[0].rank, WorkerRank::default());
    let moves = reads(&decode.connected(0.0, connection, plan));
    // 24 tokens are three kernel blocks of eight; one of the prefill's logical blocks is two kernel
    // blocks.
    assert_eq!(pairs(&moves[0]), [(200, 1000), (201, 1001), (202, 1002)]);
    assert_eq!(note_of(&moves[0]), None, "there are two moves, and the notification follows both");
}
