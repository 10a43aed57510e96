//! The mapping functions against golden numbers: every case of every set that `KVX_VECTORS` names.

use kvx_core::Indices;
use kvx_testkit::test;
use kvx_vllm::mapping::{
    Clip, GroupKind, Heads, Mapping, RegionGroup, RemoteRegionRow, Row, SenderPair, SenderPlan, Tp,
    Units, descriptor_ids, expand, handshake_ranks, remote_row, strided_rows,
};
use serde_json::Value;

use crate::golden;

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
        let kinds: Vec<GroupKind> = case["groups"]
            .as_array()
            .unwrap()
            .iter()
            .map(|kind| match kind.as_str() {
                Some("fa") => GroupKind::Attention,
                Some("ssm") => GroupKind::StateSpace,
                other => panic!("group of kind {other:?}"),
            })
            .collect();
        let tp = Tp::new(number(&case["rank"]), number(&case["tp"])).unwrap();
        let remote = number(&case["remote_tp"]);
        let mapping = Mapping::new(tp, remote, 1, heads(case), &kinds).unwrap();
        let slots = case["rank_to_attention_slot"].as_object().unwrap();
        let slots =
            slots.iter().map(|(rank, slot)| (rank.parse().unwrap(), number(slot))).collect();
        assert_eq!(mapping.sources_per_group(), lists(&case["source_ranks_per_group"]), "{case}");
        assert_eq!(mapping.sources(), numbers::<u32>(&case["all_source_ranks"]), "{case}");
        assert_eq!(*mapping.slots(), slots, "{case}");
        assert_eq!(mapping.rank_offset(), number::<u32>(&case["rank_offset_factor"]), "{case}");
        assert_eq!(mapping.consumers(), number::<u32>(&case["local_consumers"]), "{case}");
        assert_eq!(mapping.handshake_ranks(), numbers::<u32>(&case["handshake_ranks"]), "{case}");
        assert_eq!(
            handshake_ranks(tp, remote, 1).unwrap(),
            numbers::<u32>(&case["handshake_ranks"]),
            "{case}"
        );
        assert_eq!(mapping.ratio(), number::<i64>(&case["tp_ratio"]), "{case}");
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
        let groups = [GroupKind::Attention];
        let mapping = Mapping::new(tp, remote, remote_dcp, Heads::Replicated, &groups).unwrap();
        assert_eq!(mapping.sources(), numbers::<u32>(&case["all_source_ranks"]), "{case}");
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

// vLLM 45: descriptor ids follow from the group and the capacity of each region
#[test]
fn golden_descriptor_ids() {
    let file = golden::json("descriptors.json");
    for case in cases(&file, "descriptor_ids") {
        let groups: Vec<RegionGroup> = numbers(&case["region_group_ids"])
            .into_iter()
            .map(|id| RegionGroup::from_wire(id).unwrap())
            .collect();
        let blocks = numbers(&case["region_num_blocks"]);
        let ids = descriptor_ids(&blocks, &groups, &lists(&case["blocks_per_group"])).unwrap();
        assert_eq!(ids, numbers::<u64>(&case["ids"]), "{case}");
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
    let file = golden::json("descriptors.json");
    for case in cases(&file, "strided_rows") {
        let made = strided_rows(
            number(&case["base"]),
            number(&case["part_len"]),
            number(&case["block_stride"]),
            number(&case["blocks"]),
            number(&case["parts_per_block"]),
            number(&case["device"]),
        );
        assert_eq!(made.unwrap(), rows(&case["rows"]), "{case}");
    }
}

#[test]
fn golden_remote_rows() {
    let file = golden::json("descriptors.json");
    for case in cases(&file, "remote_rows") {
        let made = remote_row(RemoteRegionRow {
            base: number(&case["base"]),
            stride: number(&case["remote_stride"]),
            blocks: number(&case["blocks"]),
            device: number(&case["device"]),
            local_block_len: number(&case["local_block_len"]),
            sources: case["source_ranks"].as_array().unwrap().len() as u32,
            rank_offset: number(&case["rank_offset_factor"]),
            ratio: number(&case["block_size_ratio"]),
        });
        assert_eq!([made.unwrap()], rows(&case["rows"])[..], "{case}");
    }
}
