//! The mapping functions against golden numbers: every case of every set that `KVX_VECTORS` names.

use kvx_core::{Indices, Op};
use kvx_testkit::test;
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{
    BlockPairs, Caches, Clip, GroupKind, Heads, KvLayout, LayerCache, Mapping, MappingOptions,
    PeerMap, RegionGroup, Remote, SenderPair, SenderPlan, Tp, Units, expand, handshake_ranks,
};
use serde_json::Value;

use crate::golden;
use crate::mapping::rows::{Row, descriptor_ids, local_rows, remote_rows};

fn number<N: TryFrom<i64>>(value: &Value) -> N {
    let number = value.as_i64().and_then(|number| N::try_from(number).ok());
    number.unwrap_or_else(|| panic!("{value} is not a number of the expected kind"))
}

fn numbers<N: TryFrom<i64>>(value: &Value) -> Vec<N> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn lists(value: &Value) -> Vec<Vec<u32>> {
    value.as_array().unwrap().iter().map(numbers).collect()
}

/// Returns the cases of a list, which must not be empty.
fn cases<'a>(file: &'a Value, key: &str) -> &'a [Value] {
    let cases = file[key].as_array().unwrap_or_else(|| panic!("no {key}"));
    assert!(!cases.is_empty(), "{key} is empty");
    cases
}

fn heads(case: &Value) -> Heads {
    match case["mla"].as_bool().unwrap() {
        true => Heads::Replicated,
        false => Heads::Sharded(number(&case["kv_heads"])),
    }
}

// vLLM 43: TP ranks are mapped in both directions, with GQA replication and consumer counts
#[test]
fn golden_tensor_parallel_mapping() {
    let file = golden::json("golden_tp_mapping.json");
    for case in cases(&file, "tp") {
        let tp = Tp::new(number(&case["rank"]), number(&case["tp"])).unwrap();
        let remote = number(&case["remote_tp"]);
        let mapping = Mapping::new(tp, remote, 1, heads(case)).unwrap();
        let sources = mapping.attention_sources();
        // kvx transfers no state-space groups, which may have other sources.
        let kinds = case["groups"].as_array().unwrap();
        for (kind, of_group) in kinds.iter().zip(lists(&case["source_ranks_per_group"])) {
            assert!(kind == "ssm" || of_group == sources, "{case}");
        }
        if kinds.iter().all(|kind| kind == "fa") {
            assert_eq!(sources, numbers::<u32>(&case["all_source_ranks"]), "{case}");
        }
        for (slot, rank) in sources.iter().enumerate() {
            assert_eq!(case["rank_to_attention_slot"][rank.to_string()], slot, "{case}");
        }
        assert_eq!(mapping.rank_offset(), number::<u32>(&case["rank_offset_factor"]), "{case}");
        assert_eq!(mapping.consumers(), number::<u32>(&case["local_consumers"]), "{case}");
        assert_eq!(
            handshake_ranks(tp, remote, 1).unwrap(),
            numbers::<u32>(&case["handshake_ranks"]),
            "{case}"
        );
    }
}

// vLLM 43: DCP ranks are mapped, with consumer counts
#[test]
fn golden_context_parallel_mapping() {
    let file = golden::json("golden_tp_mapping.json");
    for case in cases(&file, "dcp") {
        let tp = Tp::new(number(&case["rank"]), number(&case["tp"])).unwrap();
        let tp = tp.with_dcp(number(&case["dcp"])).unwrap();
        let (remote, remote_dcp) = (number(&case["remote_tp"]), number(&case["remote_dcp"]));
        let mapping = Mapping::new(tp, remote, remote_dcp, Heads::Replicated).unwrap();
        assert_eq!(
            mapping.attention_sources(),
            numbers::<u32>(&case["all_source_ranks"]),
            "{case}"
        );
        assert_eq!(mapping.consumers(), number::<u32>(&case["local_consumers"]), "{case}");
    }
}

// vLLM 55: sender plans equal vLLM's, with replicated heads in both directions
#[test]
fn golden_mooncake_sender_plans() {
    let file = golden::json("golden_mooncake_plan.json");
    for case in cases(&file, "plans") {
        let pair = SenderPair {
            producer: Tp::new(number(&case["p_rank"]), number(&case["p_tp"])).unwrap(),
            consumer: Tp::new(number(&case["d_rank"]), number(&case["d_tp"])).unwrap(),
            producer_len: number(&case["p_len"]),
            consumer_len: number(&case["d_len"]),
            kv_heads: case["kv_heads"].as_i64().map(|heads| heads.try_into().unwrap()),
            producer_replicated: case["p_replicated"].as_bool().unwrap(),
        };
        let plan = &case["plan"];
        let expected = SenderPlan {
            sends: plan[0].as_bool().unwrap(),
            source_offset: number(&plan[1]),
            destination_offset: number(&plan[2]),
            len: number(&plan[3]),
        };
        assert_eq!(pair.plan().unwrap(), expected, "{case}");
    }
}

/// Returns the map of a lone rank with these layers to a rank like it.
fn to_itself(own: &Caches, groups: usize) -> PeerMap {
    let ranks = [(WorkerRank::default(), own.geometry().clone())];
    let options = MappingOptions {
        groups: vec![(GroupKind::Attention, Clip::Whole); groups],
        ..MappingOptions::default()
    };
    let remote = Remote { tp_size: 1, pp_size: 1, dcp_size: 1, ranks: &ranks };
    PeerMap::new(Op::Read, own, Tp::new(0, 1).unwrap(), &remote, &options).unwrap()
}

// vLLM 45: descriptor ids follow from the group and the capacity of each region
#[test]
fn golden_descriptor_ids() {
    let file = golden::json("descriptors.json");
    for case in cases(&file, "descriptor_ids") {
        let lists = lists(&case["blocks_per_group"]);
        let lists: Vec<_> = lists.iter().map(|list| Indices::from(&list[..])).collect();
        let blocks = numbers::<u32>(&case["region_num_blocks"]);
        let groups = numbers::<i64>(&case["region_group_ids"]);
        let mut layers = Vec::new();
        for (region, (blocks, group)) in blocks.into_iter().zip(groups).enumerate() {
            let group = RegionGroup::from_wire(group).unwrap();
            for group in (0..lists.len() as u32).filter(|of| group.covers(*of)) {
                let (name, base) = (format!("layers.{region}.{group}"), (region as u64 + 1) << 20);
                let layer = LayerCache::packed(name, base, blocks, 4096, Heads::Sharded(8));
                layers.push(LayerCache { group, ..layer });
            }
        }
        let own = Caches::of_layers(layers, KvLayout::Lbhnc, 16, 1, 0).unwrap();
        let map = to_itself(&own, lists.len());
        let moves = map.moves(&BlockPairs { local: &lists, remote: &lists, tokens: None }).unwrap();
        let pairings = moves.ranks[0].pairings.iter();
        let (here, there): (Vec<_>, Vec<_>) =
            pairings.map(|pairing| descriptor_ids(&map.sources()[0], pairing)).unzip();
        assert_eq!(here.concat(), numbers::<u64>(&case["ids"]), "{case}");
        assert_eq!(there.concat(), numbers::<u64>(&case["ids"]), "{case}");
    }
}

fn list(indices: &Indices) -> Vec<u32> {
    (0..indices.len()).map(|at| indices.at(at)).collect()
}

#[test]
fn golden_prefix_trim() {
    let file = golden::json("descriptors.json");
    for case in cases(&file, "prefix_trim") {
        let [local, remote] =
            ["local", "remote"].map(|side| Indices::from(numbers::<u32>(&case[side])));
        let aligned =
            Units::equal(16).unwrap().align(local.len(), remote.len(), None, Clip::Whole).unwrap();
        assert_eq!(
            list(&aligned.of_consumer(&local).unwrap()),
            numbers::<u32>(&case["read_local"]),
            "{case}"
        );
        assert_eq!(
            list(&aligned.of_producer(&remote).unwrap()),
            numbers::<u32>(&case["read_remote"]),
            "{case}"
        );
    }
}

#[test]
fn golden_block_size_ratio() {
    let file = golden::json("descriptors.json");
    for case in cases(&file, "block_size_ratio") {
        let [local, remote] =
            ["local", "remote"].map(|side| Indices::from(numbers::<u32>(&case[side])));
        let ratio = number(&case["ratio"]);
        let units = Units::new(ratio, 1, 4).unwrap();
        let aligned = units.align(local.len(), remote.len(), None, Clip::Whole).unwrap();
        let sub_blocks = aligned.of_consumer(&local).unwrap();
        assert_eq!(list(&sub_blocks), numbers::<u32>(&case["local_sub_blocks"]), "{case}");
        assert_eq!(
            list(&aligned.of_producer(&remote).unwrap()),
            numbers::<u32>(&case["remote_blocks"]),
            "{case}"
        );
        let all = expand(&local, ratio, 0..local.len() as u64 * u64::from(ratio)).unwrap();
        assert_eq!(list(&all)[..sub_blocks.len()], list(&sub_blocks), "{case}");
    }
}

fn rows(value: &Value) -> Vec<Row> {
    let row = |row: &Value| Row {
        address: number(&row[0]),
        len: number(&row[1]),
        device: number(&row[2]),
        stride: number(&row[3]),
        count: number(&row[4]),
    };
    value.as_array().unwrap().iter().map(row).collect()
}

// vLLM 22: MLA is a single region, and rows may be strided
#[test]
fn golden_strided_rows() {
    // vLLM lists the parts of a block, and kvx moves blocks whole.
    let bytes = |rows: &[Row]| {
        let blocks = rows.iter().flat_map(|row| {
            (0..row.count).map(move |block| (row.device, row.address + block * row.stride, row.len))
        });
        let bytes = blocks
            .flat_map(|(device, start, len)| (start..start + len).map(move |at| (device, at)));
        bytes.collect::<Vec<_>>()
    };
    let file = golden::json("descriptors.json");
    for case in cases(&file, "strided_rows") {
        let len = number::<u64>(&case["part_len"]) * number::<u64>(&case["parts_per_block"]);
        let (base, blocks) = (number(&case["base"]), number(&case["blocks"]));
        let latent = LayerCache {
            block_stride: number(&case["block_stride"]),
            ..LayerCache::packed("layers.0", base, blocks, len, Heads::Replicated)
        };
        let device = number(&case["device"]);
        let own = Caches::of_layers(vec![latent], KvLayout::Lbhnc, 16, 1, device).unwrap();
        let map = to_itself(&own, 1);
        let made = local_rows(&map.sources()[0], own.geometry());
        assert_eq!(made.len(), 1, "{case}");
        assert_eq!(bytes(&made), bytes(&rows(&case["rows"])), "{case}");
    }
}

#[test]
fn golden_remote_rows() {
    const HEADS: Heads = Heads::Sharded(4);
    const TOKENS: u32 = 10;
    let file = golden::json("descriptors.json");
    for case in cases(&file, "remote_rows") {
        let sources = numbers::<u32>(&case["source_ranks"]);
        let (local_len, remote_len) =
            (number::<u64>(&case["local_block_len"]), number::<u64>(&case["remote_stride"]));
        let (blocks, ratio) =
            (number::<u32>(&case["blocks"]), number::<u32>(&case["block_size_ratio"]));
        let theirs =
            LayerCache::packed("layers.0", number(&case["base"]), blocks, remote_len, HEADS);
        let device = number(&case["device"]);
        let theirs = Caches::of_layers(vec![theirs], KvLayout::Lbhnc, TOKENS, 1, device).unwrap();
        let own = LayerCache::packed("layers.0", 4096, blocks, local_len, HEADS);
        let own = Caches::of_layers(vec![own], KvLayout::Lbhnc, TOKENS * ratio, 1, 0).unwrap();
        // The sizes follow from the heads in a block of either side.
        let tp_size = sources.last().unwrap() + 1;
        let own_size = u64::from(tp_size * ratio) * remote_len / local_len;
        let rank = u64::from(sources[0]) * own_size / u64::from(tp_size)
            + number::<u64>(&case["rank_offset_factor"]);
        let tp = Tp::new(rank as u32, own_size as u32).unwrap();
        assert_eq!(handshake_ranks(tp, tp_size, 1).unwrap(), sources, "{case}");
        let ranks: Vec<_> = sources
            .iter()
            .map(|tp| (WorkerRank { pp: 0, tp: *tp }, theirs.geometry().clone()))
            .collect();
        let remote = Remote { tp_size, pp_size: 1, dcp_size: 1, ranks: &ranks };
        let map = PeerMap::new(Op::Read, &own, tp, &remote, &MappingOptions::default()).unwrap();
        assert_eq!(map.sources().len(), sources.len(), "{case}");
        for source in map.sources() {
            assert_eq!(remote_rows(source, theirs.geometry()), rows(&case["rows"]), "{case}");
        }
    }
}
