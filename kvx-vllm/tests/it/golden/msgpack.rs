//! Every case of `msgpack_cases.json`: values encode to exactly these bytes, and the bytes decode
//! to these values.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::wire::mooncake::{PullRequest, PullResponse, PullStatus, PulledRequest};
use kvx_vllm::wire::{
    ClockReading, CompatibilityHash, EngineNotification, HandshakePayload, HandshakeRequest,
    NixlAgentMetadata, PackedMember, PushRegistration,
};
use serde_json::Value;

use crate::golden;

struct Case {
    name: String,
    value: Value,
    bytes: Vec<u8>,
}

fn cases() -> Vec<Case> {
    let file = golden::json("msgpack_cases.json");
    let cases = file["cases"].as_array().expect("a list of cases");
    cases
        .iter()
        .map(|case| Case {
            name: case["name"].as_str().expect("a name").to_owned(),
            value: case["value"].clone(),
            bytes: golden::hex(case["hex"].as_str().expect("hexadecimal text")),
        })
        .collect()
}

/// Runs `check` on the cases that `pick` selects. The crate's own vectors have some of each kind.
fn each<'a, T>(
    cases: &'a [Case],
    pick: impl Fn(&'a Case) -> Option<T>,
    check: impl Fn(&'a Case, T),
) {
    let mut count = 0;
    for case in cases {
        if let Some(picked) = pick(case) {
            check(case, picked);
            count += 1;
        }
    }
    golden::require(count, "case of this kind");
}

fn object<'a>(case: &'a Case, key: &str) -> Option<&'a Value> {
    case.value.get(key).map(|_| &case.value)
}

fn numbers<T: TryFrom<i128>>(value: &Value) -> Vec<T> {
    let number = |value: &Value| {
        let wide =
            value.as_u64().map(i128::from).or(value.as_i64().map(i128::from)).expect("an integer");
        T::try_from(wide).unwrap_or_else(|_| panic!("{wide} does not fit"))
    };
    value.as_array().expect("a list").iter().map(number).collect()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().expect("a list").iter().map(text).collect()
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

fn uint<T: TryFrom<u64>>(value: &Value) -> T {
    let number = value.as_u64().expect("an integer");
    T::try_from(number).unwrap_or_else(|_| panic!("{number} does not fit"))
}

fn groups(value: &Value) -> Vec<Vec<u32>> {
    value.as_array().expect("groups").iter().map(numbers).collect()
}

fn optional<T>(value: &Value, read: impl Fn(&Value) -> T) -> Option<T> {
    (!value.is_null()).then(|| read(value))
}

fn metadata(value: &Value) -> NixlAgentMetadata {
    let mut metadata = NixlAgentMetadata::new(text(&value["engine_id"]), Version::V0_33);
    metadata.agent_metadata =
        golden::hex(value["agent_metadata"].as_str().unwrap().strip_prefix("bin:").unwrap());
    metadata.kv_caches_base_addr = numbers(&value["kv_caches_base_addr"]);
    metadata.device_id = uint(&value["device_id"]);
    metadata.num_blocks = uint(&value["num_blocks"]);
    metadata.block_lens = numbers(&value["block_lens"]);
    metadata.block_strides = numbers(&value["block_strides"]);
    metadata.kv_cache_layout = text(&value["kv_cache_layout"]);
    metadata.block_size = uint(&value["block_size"]);
    let sizes: Vec<u64> = numbers(&value["ssm_sizes"]);
    metadata.ssm_sizes = (sizes[0], sizes[1]);
    metadata.attn_backend_name = text(&value["attn_backend_name"]);
    metadata.physical_blocks_per_logical_kv_block =
        uint(&value["physical_blocks_per_logical_kv_block"]);
    metadata.region_num_blocks = optional(&value["region_num_blocks"], numbers);
    metadata.region_group_ids = optional(&value["region_group_ids"], numbers);
    metadata.region_names = optional(&value["region_names"], texts);
    metadata.region_mem_types = optional(&value["region_mem_types"], texts);
    metadata.dcp_size = uint(&value["dcp_size"]);
    metadata.pcp_size = uint(&value["pcp_size"]);
    metadata.ple_block_len = optional(&value["ple_block_len"], uint);
    metadata.region_members =
        value["region_members"].as_array().unwrap().iter().map(texts).collect();
    let packed = value["packed_member_layouts"].as_object().unwrap();
    metadata.packed_member_layouts = packed
        .iter()
        .map(|(layer, place)| PackedMember {
            layer: layer.clone(),
            offset: uint(&place[0]),
            len: uint(&place[1]),
        })
        .collect();
    metadata
}

/// Parses `as "NAME"` and the text after it, with which a case refers to another one.
fn variant<'a>(case: &'a Case, cases: &'a [Case]) -> Option<(&'a Case, &'a str)> {
    let (name, further) = case.value.as_str()?.strip_prefix("as \"")?.split_once('"')?;
    let base =
        cases.iter().find(|base| base.name == name).unwrap_or_else(|| panic!("no case {name:?}"));
    Some((base, further.trim()))
}

#[test]
fn golden_handshake_requests() {
    let cases = cases();
    let pick = |case: &Case| {
        (case.value.get(0)?.as_str()? == "bin:get_meta_msg")
            .then(|| numbers::<u32>(&case.value.as_array().unwrap()[1..].to_vec().into()))
    };
    each(&cases, pick, |case, ranks| {
        let (rank, versions) = match ranks[..] {
            [tp] => (WorkerRank { pp: 0, tp }, [Version::V0_16, Version::V0_20]),
            [pp, tp] => (WorkerRank { pp, tp }, [Version::V0_32, Version::V0_33]),
            _ => panic!("{}: {ranks:?}", case.name),
        };
        for version in versions {
            assert_eq!(
                HandshakeRequest::new(rank, version).unwrap().encode(),
                case.bytes,
                "{}",
                case.name
            );
        }
        assert_eq!(HandshakeRequest::decode(&case.bytes).unwrap().rank(), rank, "{}", case.name);
    });
}

#[test]
fn golden_clock_frames() {
    each(
        &cases(),
        |case| case.value.as_f64(),
        |case, seconds| {
            assert_eq!(ClockReading(seconds).encode()[..], case.bytes, "{}", case.name);
            assert_eq!(
                ClockReading::decode(&case.bytes).unwrap(),
                ClockReading(seconds),
                "{}",
                case.name
            );
        },
    );
}

#[test]
fn golden_agent_metadata() {
    each(
        &cases(),
        |case| object(case, "engine_id"),
        |case, value| {
            let typed = metadata(value);
            assert_eq!(typed.encode(), case.bytes, "{}", case.name);
            let read = NixlAgentMetadata::decode(&case.bytes, Version::V0_33).unwrap();
            assert_eq!(read, typed, "{}", case.name);
            assert_eq!(read.encode(), case.bytes, "{}", case.name);
        },
    );
}

#[test]
fn golden_agent_metadata_with_unknown_and_absent_keys() {
    let cases = cases();
    each(
        &cases,
        |case| variant(case, &cases),
        |case, (base, further)| {
            let read = NixlAgentMetadata::decode(&case.bytes, Version::V0_33);
            let base = metadata(&base.value);
            if let Some(absent) = further.strip_prefix("without ") {
                let error = read.unwrap_err();
                assert_eq!(error.kind(), kvx_core::ErrorKind::Malformed);
                assert!(error.to_string().contains(absent), "{}: {error}", case.name);
                return;
            }
            let read = read.unwrap_or_else(|error| panic!("{}: {error}", case.name));
            assert_eq!(read.encode(), case.bytes, "{}", case.name);
            let unknown: Vec<_> = read.unknown().map(|(key, _)| key.to_owned()).collect();
            match further.strip_prefix("plus ") {
                Some(plus) => assert_eq!(unknown, [plus.split(' ').next().unwrap()]),
                None => assert_eq!(read, base, "{}: absent keys take their defaults", case.name),
            }
            assert_eq!(read.kv_caches_base_addr, base.kv_caches_base_addr);
            assert_eq!(read.attn_backend_name, base.attn_backend_name);
        },
    );
}

#[test]
fn golden_payload() {
    let cases = cases();
    each(
        &cases,
        |case| object(case, "compatibility_hash"),
        |case, value| {
            let inner = text(&value["agent_metadata_bytes"]);
            let inner = match inner.split('"').nth(1) {
                Some(name) => cases
                    .iter()
                    .find(|case| case.name == name)
                    .expect("the case it names")
                    .bytes
                    .clone(),
                None => golden::hex(inner.strip_prefix("bin:").expect("bytes")),
            };
            let typed = HandshakePayload::new(
                CompatibilityHash::foreign(text(&value["compatibility_hash"])),
                inner,
            );
            assert_eq!(typed.encode(), case.bytes, "{}", case.name);
            let read = HandshakePayload::decode(&case.bytes).unwrap();
            assert_eq!(read, typed, "{}", case.name);
            assert_eq!(read.encode(), case.bytes, "{}", case.name);
        },
    );
}

#[test]
fn golden_mooncake_requests() {
    each(
        &cases(),
        |case| object(case, "remote_hostname"),
        |case, value| {
            let mut typed = PullRequest::new(
                text(&value["remote_hostname"]),
                uint(&value["remote_port"]),
                uint(&value["remote_tp_size"]),
                uint(&value["remote_tp_rank"]),
            );
            let requests = value["req_blocks"].as_object().unwrap().iter();
            typed.req_blocks = requests
                .map(|(id, pulled)| PulledRequest {
                    request_id: id.clone(),
                    transfer_id: text(&pulled[0]),
                    block_ids: groups(&pulled[1]),
                })
                .collect();
            typed.kv_caches_base_addr = numbers(&value["kv_caches_base_addr"]);
            typed.block_lens = numbers(&value["block_lens"]);
            typed.kv_block_lens = numbers(&value["kv_block_lens"]);
            for (key, value) in value.as_object().unwrap() {
                match key.as_str() {
                    "registered_layer_names" => typed.registered_layer_names = texts(value),
                    "registered_layer_indices" => typed.registered_layer_indices = numbers(value),
                    "registered_group_indices" => typed.registered_group_indices = numbers(value),
                    "registered_shared_group_ids" => {
                        typed.registered_shared_group_ids =
                            value.as_array().unwrap().iter().map(numbers).collect();
                    }
                    "registered_row_offsets" => typed.registered_row_offsets = numbers(value),
                    "remote_pp_size" => typed.remote_pp_size = uint(value),
                    "layout_id" => typed.layout_id = uint(value),
                    _ => {}
                }
            }
            assert_eq!(typed.encode(), case.bytes, "{}", case.name);
            let read = PullRequest::decode(&case.bytes).unwrap();
            assert_eq!(read, typed, "{}", case.name);
            assert_eq!(read.encode(), case.bytes, "{}", case.name);
        },
    );
}

#[test]
fn golden_mooncake_responses() {
    each(
        &cases(),
        |case| object(case, "status"),
        |case, value| {
            let statuses = [
                PullStatus::Finish,
                PullStatus::Continue,
                PullStatus::Error,
                PullStatus::LayoutMiss,
            ];
            let mut typed = PullResponse::new(statuses[uint::<usize>(&value["status"])]);
            typed.ok_reqs = optional(&value["ok_reqs"], texts);
            typed.err_reqs = optional(&value["err_reqs"], texts);
            typed.err_msg = optional(&value["err_msg"], text);
            typed.layout_id = optional(&value["layout_id"], uint).unwrap_or(0);
            assert_eq!(typed.encode(), case.bytes, "{}", case.name);
            let read = PullResponse::decode(&case.bytes).unwrap();
            assert_eq!(read, typed, "{}", case.name);
            assert_eq!(read.encode(), case.bytes, "{}", case.name);
        },
    );
}

// vLLM 47: PUSH_REG notifications equal vLLM's byte for byte, prefix and payload
#[test]
fn golden_push_registrations() {
    let pick = |case: &'_ Case| {
        (case.value.get(0)?.as_str()? == "raw:PUSH_REG:").then(|| case.value[1].clone())
    };
    each(&cases(), pick, |case, value| {
        let mut typed =
            PushRegistration::new(text(&value["request_id"]), groups(&value["local_block_ids"]));
        for (key, value) in value.as_object().unwrap() {
            match key.as_str() {
                "decode_engine_id" => typed.decode_engine_id = Some(text(value)),
                "decode_host" => typed.decode_host = Some(text(value)),
                "decode_port" => typed.decode_port = Some(uint(value)),
                "decode_tp_size" => typed.decode_tp_size = Some(uint(value)),
                "remote_engine_id" => typed.remote_engine_id = Some(text(value)),
                "remote_host" => typed.remote_host = Some(text(value)),
                "remote_port" => typed.remote_port = Some(uint(value)),
                "remote_tp_size" => typed.remote_tp_size = Some(uint(value)),
                "remote_pp_size" => typed.remote_pp_size = Some(uint(value)),
                _ => {}
            }
        }
        let typed = EngineNotification::Registration(Box::new(typed));
        assert_eq!(typed.encode(), case.bytes, "{}", case.name);
        let read = EngineNotification::decode(&case.bytes).unwrap();
        assert_eq!(read, typed, "{}", case.name);
        assert_eq!(read.encode(), case.bytes, "{}", case.name);
    });
}

/// No case goes untested: each belongs to one of the kinds above.
#[test]
fn golden_cases_are_all_of_a_known_kind() {
    let cases = cases();
    for case in &cases {
        let tag = case.value.get(0).and_then(Value::as_str);
        let known = case.value.is_number()
            || matches!(tag, Some("bin:get_meta_msg" | "raw:PUSH_REG:"))
            || ["engine_id", "compatibility_hash", "remote_hostname", "status"]
                .iter()
                .any(|key| object(case, key).is_some())
            || variant(case, &cases).is_some();
        assert!(known, "no test covers the kind of {}", case.name);
    }
}
