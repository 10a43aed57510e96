//! Every case of `kv_events.json`.

use kvx_testkit::test;
use kvx_vllm::events::{
    BlockHash, BlockRemoved, BlockStored, CacheEvent, EventBatch, Publication, ReplayAnswer,
    publication, replay_answer, replay_end, replay_request,
};
use serde_json::Value;

use crate::golden;

fn hashes(value: &Value) -> Vec<BlockHash> {
    let list = value.as_array().expect("a list of hashes").iter();
    list.map(|hash| BlockHash(hash.as_u64().expect("a hash"))).collect()
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().map(|number| u32::try_from(number).expect("a small number"))
}

/// Returns the event that a case describes, and the fields of which it says nothing as they are in
/// `got`.
fn expected(value: &Value, got: &CacheEvent) -> CacheEvent {
    if value == "cleared" {
        return CacheEvent::Cleared;
    }
    let (group, medium) = (number(&value["group"]), text(&value["medium"]));
    let locality = text(&value["locality"]);
    if let Some(removed) = value.get("removed") {
        let hashes = hashes(removed);
        return CacheEvent::Removed(Box::new(BlockRemoved { hashes, medium, group, locality }));
    }
    let list = |key: &str| value[key].as_array().expect("a list").iter();
    let CacheEvent::Stored(got) = got else { panic!("{got:?}, not {value}") };
    CacheEvent::Stored(Box::new(BlockStored {
        hashes: hashes(&value["hashes"]),
        parent: value["parent"].as_u64().map(BlockHash),
        tokens: list("tokens").map(|token| number(token).expect("a token")).collect(),
        block_size: number(&value["block_size"]).expect("a size"),
        lora_id: got.lora_id,
        medium,
        lora_name: text(&value["lora"]),
        extra_keys: list("extra_keys").map(|some| some.as_bool().expect("a flag")).collect(),
        group,
        kind: text(&value["kind"]),
        locality,
        has_salt: value["salt"] == true,
    }))
}

#[test]
fn batches_of_all_versions_are_read_and_those_of_today_are_written_the_same() {
    let file = golden::json("kv_events.json");
    let cases = file["cases"].as_array().expect("a list of cases");
    golden::require(cases.len(), "batch of events");
    let (mut written, mut plain) = (0, 0);
    for case in cases {
        let bytes = golden::hex(case["hex"].as_str().expect("hexadecimal text"));
        let batch = EventBatch::decode(&bytes).unwrap_or_else(|error| panic!("{case}: {error}"));
        let wanted = case["events"].as_array().expect("a list of events");
        assert_eq!(batch.events.len(), wanted.len(), "{case}");
        for (got, wanted) in batch.events.iter().zip(wanted) {
            assert_eq!(*got, expected(wanted, got), "{case}");
            if let CacheEvent::Stored(stored) = got {
                plain += usize::from(stored.plain_blocks().is_some());
            }
        }
        assert_eq!(batch.unknown as u64, case["unknown"].as_u64().unwrap_or(0), "{case}");
        if case["reencodes"] == true {
            assert_eq!(batch.encode(), bytes, "{case}");
            written += 1;
        }
    }
    if golden::own() {
        assert_eq!((cases.len(), written, plain), (13, 3, 10));
    }
}

#[test]
fn blocks_that_are_more_or_less_than_their_tokens_are_not_plain() {
    let plain = BlockStored {
        hashes: vec![BlockHash(1), BlockHash(2)],
        tokens: vec![1, 2, 3, 4],
        block_size: 2,
        extra_keys: vec![false, false],
        kind: Some("full_attention".to_owned()),
        ..BlockStored::default()
    };
    let blocks: Vec<_> = plain.plain_blocks().unwrap().collect();
    assert_eq!(blocks, [(BlockHash(1), &[1, 2][..]), (BlockHash(2), &[3, 4])]);
    let others = [
        BlockStored { lora_name: Some("sql".to_owned()), ..plain.clone() },
        BlockStored { lora_id: Some(1), ..plain.clone() },
        BlockStored { extra_keys: vec![false, true], ..plain.clone() },
        BlockStored { has_salt: true, ..plain.clone() },
        BlockStored { kind: Some("sliding_window".to_owned()), ..plain.clone() },
        BlockStored { kind: Some("mamba".to_owned()), ..plain.clone() },
        BlockStored { tokens: vec![1, 2, 3], ..plain.clone() },
        BlockStored { tokens: Vec::new(), block_size: 0, ..plain.clone() },
        BlockStored { block_size: u32::MAX, ..plain },
    ];
    for other in others {
        assert!(other.plain_blocks().is_none(), "{other:?}");
    }
}

#[test]
fn malformed_batches_are_errors() {
    for (bytes, words) in [
        (&b""[..], "1 bytes expected"),
        (b"\x91\xcb\0\0\0\0\0\0\0\0", "neither time nor events"),
        (b"\x92\x00\xdd\xff\xff\xff\xff", "do not fit"),
        (b"\x92\x00\x91\x80", "an event has no type"),
        (b"\x92\x00\x91\x91\xacBlockRemoved", "block_hashes: it is missing"),
        (b"\x92\x00\x91\x92\xacBlockRemoved\x91\xc4\x01a", "fewer than 8 bytes"),
        (b"\x92\x00\x90\x00", "unexpected bytes"),
    ] {
        let error = EventBatch::decode(bytes).unwrap_err().to_string();
        assert!(error.contains(words), "{}: {error}", bytes.escape_ascii());
    }
}

#[test]
fn frames_of_publications_and_of_both_forms_of_replays_are_read() {
    let frames = |frames: &[&[u8]]| frames.iter().map(|frame| frame.to_vec()).collect::<Vec<_>>();
    let (five, end) = (&5u64.to_be_bytes()[..], &[0xff; 8][..]);
    let wanted = Publication { sequence: 5, batch: b"batch" };
    assert_eq!(publication(&frames(&[b"topic", five, b"batch"])).unwrap(), wanted);
    for older in [frames(&[b"", five, b"batch"]), frames(&[b"", b"topic", five, b"batch"])] {
        assert_eq!(replay_answer(&older).unwrap(), ReplayAnswer::Publication(wanted));
    }
    for last in [frames(&[b"", end, b""]), replay_end("topic").to_vec()] {
        assert_eq!(replay_answer(&last).unwrap(), ReplayAnswer::End);
    }
    assert_eq!(replay_request(5), [vec![], five.to_vec()]);
    for bad in [
        frames(&[]),
        frames(&[b"", five]),
        frames(&[b"", b"five", b"batch"]),
        frames(&[b"x", five, b"batch"]),
        frames(&[b"", b"", b"", five, b"batch"]),
    ] {
        assert!(replay_answer(&bad).is_err(), "{bad:?}");
    }
    for bad in [frames(&[five, b"batch"]), frames(&[b"", b"5", b""]), frames(&[b"", end, b""])] {
        assert!(publication(&bad).is_err(), "{bad:?}");
    }
}
