//! A Mooncake producer's writes: every byte of every head lands where the consumer reads it, and
//! false layouts are rejected.

use std::collections::BTreeSet;

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::engine::{PeerPlan, WorkerRank};
use kvx_vllm::mapping::{
    Caches, Heads, KvLayout, KvTensors, LayerCache, MemoryType, SendMap, Tp, tell_layout,
};
use kvx_vllm::wire::mooncake::PullRequest;

/// The bytes of a head in a block.
const HEAD: u64 = 8;
const BLOCKS: u32 = 5;

/// Returns the caches of a rank: these layers, each at a different address.
fn caches(layers: &[&str], heads: Heads, tp: u32, apart: bool, padding: u64) -> Caches {
    let block_len = HEAD * u64::from(heads.per_rank(tp));
    let layers = layers.iter().enumerate().map(|(at, name)| {
        let base = (1 + at as u64) << 20;
        LayerCache {
            name: (*name).into(),
            tensors: match apart {
                false => KvTensors::Together(base),
                true => KvTensors::Apart { k: base, v: base + (1 << 19) },
            },
            blocks: BLOCKS,
            block_len,
            block_stride: block_len + padding,
            group: 0,
            heads,
            memory: MemoryType::Dram,
        }
    });
    Caches::of_layers(layers.collect(), KvLayout::Lbhnc, 16, 1, 0).unwrap()
}

fn told(caches: &Caches, rank: u32, size: u32) -> PullRequest {
    let mut told = PullRequest::new("d", 1, size, rank);
    tell_layout(caches, &mut told).unwrap();
    told
}

/// Returns the first head of a rank.
fn first(heads: Heads, rank: u32, size: u32) -> u64 {
    match heads {
        Heads::Replicated => 0,
        Heads::Sharded(heads) => u64::from(rank * heads / size),
    }
}

/// Checks that the ranks of a producer write each byte of one worker exactly once: (layer and
/// tensor, block, head, byte of the head).
fn written(heads: Heads, (p_tp, d_tp, d_rank): (u32, u32, u32), stages: &[&[&str]], apart: bool) {
    let all: Vec<&str> = stages.concat();
    let consumer = caches(&all, heads, d_tp, apart, 0);
    let asked = told(&consumer, d_rank, d_tp);
    let ranks: Vec<u32> = match p_tp >= d_tp {
        true => (d_rank * (p_tp / d_tp)..(d_rank + 1) * (p_tp / d_tp)).collect(),
        false => vec![d_rank / (d_tp / p_tp)],
    };
    let mut bytes = BTreeSet::new();
    for (stage, p_rank) in
        stages.iter().flat_map(|stage| ranks.iter().map(move |rank| (stage, *rank)))
    {
        let producer = caches(stage, heads, p_tp, apart, 0);
        let map = SendMap::new(&producer, Tp::new(p_rank, p_tp).unwrap(), &asked).unwrap();
        for lane in map.lanes() {
            let from = &producer.geometry().regions()[lane.local.region as usize];
            let to = &consumer.geometry().regions()[lane.remote_region as usize];
            assert_eq!((&from.layers, from.base >> 19 & 1), (&to.layers, to.base >> 19 & 1));
            assert_eq!(lane.local.grid.length, lane.remote.length);
            for byte in 0..lane.remote.length {
                let source = lane.local.grid.base + byte;
                let target = lane.remote.base - to.base + byte;
                let head = |rank, size, at: u64| first(heads, rank, size) + at / HEAD;
                assert_eq!(
                    (head(p_rank, p_tp, source), source % HEAD),
                    (head(d_rank, d_tp, target), target % HEAD),
                    "{heads:?} {p_tp} -> {d_tp}, {p_rank} -> {d_rank}"
                );
                assert!(bytes.insert((lane.remote_region, target)), "{heads:?}: written twice");
            }
        }
    }
    let whole = consumer.geometry().regions().iter().map(|region| region.block_len).sum::<u64>();
    assert_eq!(bytes.len() as u64, whole, "{heads:?} {p_tp} -> {d_tp}, rank {d_rank}");
}

// vLLM 55: every byte of every head is written once, for any TP sizes, for MLA and for separate
//     pipeline stages
#[test]
fn every_byte_of_every_head_is_written_once_between_engines_of_any_sizes() {
    let kinds = [Heads::Replicated, Heads::Sharded(1), Heads::Sharded(2), Heads::Sharded(8)];
    for heads in kinds {
        for (p_tp, d_tp) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (1, 8), (4, 4), (8, 4)]
        {
            for d_rank in 0..d_tp {
                for apart in [false, true] {
                    written(heads, (p_tp, d_tp, d_rank), &[&["l.0", "l.1"]], apart);
                    written(heads, (p_tp, d_tp, d_rank), &[&["l.0"], &["l.10", "l.2"]], apart);
                }
            }
        }
    }
}

/// A vLLM rejects a request with a different layer number; its error message is the only source of
/// this rule.
// vLLM 55: a layer is identified by its number, without which a vLLM rejects the request *(seen
//     with 0.32)*
#[test]
fn a_layer_is_told_by_the_number_in_its_name() {
    let layers = [
        "model.layers.0.self_attn.attn",
        "model.layers.2.self_attn.attn",
        "model.layers.10.self_attn.attn",
    ];
    for apart in [false, true] {
        let asked = told(&caches(&layers, Heads::Sharded(2), 1, apart, 0), 0, 1);
        let named = asked.registered_layer_names.iter().zip(&asked.registered_layer_indices);
        for (name, number) in named {
            assert_eq!(*name, format!("model.layers.{number}.self_attn.attn"));
        }
        assert_eq!(asked.registered_layer_indices.len(), if apart { 6 } else { 3 });
    }
    let without = caches(&["the only one"], Heads::Sharded(2), 1, false, 0);
    assert_eq!(told(&without, 0, 1).registered_layer_indices, [0]);
}

// vLLM 55: regions are paired by layer name and occurrence, or else by position
#[test]
fn regions_are_paired_by_name_and_occurrence_or_else_by_position() {
    let heads = Heads::Sharded(2);
    let tp = Tp::new(0, 1).unwrap();
    let producer = caches(&["a", "b"], heads, 1, true, 0);
    let places = |told: &PullRequest| {
        let map = SendMap::new(&producer, tp, told).unwrap();
        map.lanes().iter().map(|lane| (lane.local.region, lane.remote_region)).collect::<Vec<_>>()
    };
    // K and V have the same name, so they are paired in order.
    let mut asked = told(&caches(&["b", "a"], heads, 1, true, 0), 0, 1);
    assert_eq!(asked.registered_layer_names, ["a", "a", "b", "b"]);
    assert_eq!(places(&asked), [(0, 0), (1, 1), (2, 2), (3, 3)]);
    asked.registered_layer_names.rotate_left(2);
    assert_eq!(places(&asked), [(0, 2), (1, 3), (2, 0), (3, 1)]);
    // A consumer's stage with other layers gets nothing from this producer.
    asked.registered_layer_names = ["a", "a", "c", "c"].map(str::to_owned).to_vec();
    assert_eq!(places(&asked), [(0, 0), (1, 1)]);
    asked.registered_layer_names.clear();
    assert_eq!(places(&asked), [(0, 0), (1, 1), (2, 2), (3, 3)]);
    asked.registered_layer_names = ["a", "c", "c", "c"].map(str::to_owned).to_vec();
    assert!(
        SendMap::new(&producer, tp, &asked)
            .unwrap_err()
            .to_string()
            .contains("is in 2 regions here but in 1 at the peer")
    );
    let mut asked = told(&caches(&["b", "a"], heads, 1, true, 0), 0, 1);
    asked.registered_group_indices = vec![1; 4];
    let why = SendMap::new(&producer, tp, &asked).unwrap_err().to_string();
    assert!(why.contains("in KV cache group 0 here and 1 at the peer"), "{why}");
}

// vLLM 55: a pipeline stage that has none of the consumer's layers writes nothing
#[test]
fn a_stage_without_a_layer_of_the_consumers_writes_nothing() {
    let heads = Heads::Sharded(2);
    let asked = told(&caches(&["a"], heads, 1, false, 0), 0, 1);
    let map =
        SendMap::new(&caches(&["b"], heads, 1, false, 0), Tp::new(0, 1).unwrap(), &asked).unwrap();
    assert!(map.lanes().is_empty());
}

#[test]
fn false_layouts_are_rejected() {
    let heads = Heads::Sharded(4);
    let producer = caches(&["a", "b"], heads, 1, false, 0);
    let good = told(&producer, 0, 1);
    let refused = |change: &dyn Fn(&mut PullRequest)| {
        let mut bad = good.clone();
        change(&mut bad);
        SendMap::new(&producer, Tp::new(0, 1).unwrap(), &bad).unwrap_err()
    };
    assert!(SendMap::new(&producer, Tp::new(0, 1).unwrap(), &good).is_ok());
    for change in [
        &(|bad: &mut PullRequest| bad.block_lens.truncate(1)) as &dyn Fn(&mut PullRequest),
        &|bad| bad.kv_block_lens.push(1),
        &|bad| bad.registered_group_indices.truncate(1),
        &|bad| bad.kv_block_lens[1] = 0,
        &|bad| bad.kv_block_lens[1] = 1 << 40,
        &|bad| bad.kv_caches_base_addr[1] = u64::MAX,
        &|bad| bad.kv_caches_base_addr[1] = bad.kv_caches_base_addr[0],
    ] {
        assert_eq!(refused(change).kind(), ErrorKind::Malformed);
    }
    for change in [
        &(|bad: &mut PullRequest| bad.kv_block_lens[0] = 16) as &dyn Fn(&mut PullRequest),
        &|bad| (bad.block_lens[0], bad.kv_block_lens[0]) = (64, 64),
        &|bad| bad.registered_group_indices[1] = 3,
        &|bad| bad.registered_layer_names[1] = "a".into(),
    ] {
        assert_eq!(refused(change).kind(), ErrorKind::Incompatible);
    }
    assert_eq!(refused(&|bad| bad.remote_tp_rank = 7).kind(), ErrorKind::Invalid);
    // No block that addresses can reach is outside the address space.
    let mut far = good.clone();
    far.kv_caches_base_addr[1] = u64::MAX - 10 * 32;
    let map = SendMap::new(&producer, Tp::new(0, 1).unwrap(), &far).unwrap();
    assert_eq!(map.blocks(), 10);
    let rank = WorkerRank { pp: 0, tp: 0 };
    let plan = PeerPlan::of_sends(&map, producer.geometry(), rank).unwrap();
    assert_eq!((plan.remote_blocks.most(), plan.local_blocks.most()), (10, BLOCKS));
    assert_eq!(plan.lanes[0].memory, [(MemoryType::Dram, MemoryType::Dram)]);
}

#[test]
fn heads_are_divided_only_where_they_are_ranges_of_bytes() {
    let heads = Heads::Sharded(4);
    let padded = caches(&["a"], heads, 1, false, 8);
    let tp = Tp::new(0, 2).unwrap();
    let asked = told(&padded, 0, 1);
    let error = SendMap::new(&caches(&["a"], heads, 2, false, 0), tp, &asked).unwrap_err();
    assert!(error.to_string().contains("padded"), "{error}");
    // Whole blocks may be padded, and the padding is not moved.
    let map = SendMap::new(&padded, Tp::new(0, 1).unwrap(), &asked).unwrap();
    assert_eq!((map.lanes()[0].local.grid.stride, map.lanes()[0].remote.length), (40, 32));
}
