//! A bounded, seeded mutation fuzz of every decoder. Any bytes give an error or a value that
//! encodes and decodes back the same, never a panic. `cargo xtask fuzz` runs the same functions
//! without bounds; inputs that it found are tested here.

use kvx_testkit::test;
use kvx_vllm::engine::{
    BlockLists, ConnectorMeta, FailedLoad, LoadFailure, SendOrder, Time, WorkerOutput,
};
use kvx_vllm::wire::fuzz;
use kvx_vllm::{events, group, zmtp};

use crate::golden;

const CASES: u64 = 20_000;

/// msgpack markers at their limits, and text from JSON and events.
const PIECES: &[&[u8]] = &[
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc0",
    b"\x80",
    b"\x90",
    b"\x91",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\0\0\0\0\0\0\0",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xa1\xff",
    b"\xc1",
    b"HB:",
    b"PUSH_REG:",
    b":",
    b",",
    b":1",
    b"data: ",
    b"\n",
    b"[DONE]",
    b"null",
    b"[[",
    b"]",
    b"{",
    b"\"",
    b"-1",
    b"1e999",
    b"\xfe",
    b"\x04\x19\x05READY",
    b"\x02\0\0\0\0\0\0\x40\0",
    b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x01\0",
    b"\x0bSocket-Type\0\0\0\x03REQ",
];

fn run(name: &str, seeds: &[Vec<u8>], check: fn(&[u8])) {
    kvx_testkit::fuzz(name, seeds, PIECES, CASES, check);
}

/// Returns the cases of `msgpack_cases.json` whose bytes start like this.
fn cases(starts: &[&[u8]]) -> Vec<Vec<u8>> {
    let file = golden::json("msgpack_cases.json");
    let all = file["cases"]
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| golden::hex(case["hex"].as_str().expect("hex")));
    all.filter(|bytes| starts.iter().any(|start| bytes.starts_with(start))).collect()
}

#[test]
fn handshake_requests() {
    let mut seeds = cases(&[b"\x92", b"\x93"]);
    seeds.push([&b"\x93\xc4\x4ckvx_meta_msg"[..], &[7; 64], b"\x00\x01"].concat());
    seeds.push([&b"\x92\xc4\x2ckvx_meta_msg"[..], &[7; 32], b"\x01"].concat());
    seeds.push([&b"\x01\x00"[..], &[7; 32]].concat());
    run("request", &seeds, fuzz::handshake_request);
}

#[test]
fn messages_of_ranks() {
    let blocks = BlockLists::single(&[1, 2, 300][..]);
    let send = SendOrder { request: "r".into(), expires: Time::default(), push: Some(blocks) };
    let meta =
        ConnectorMeta { send: vec![send], cancel: vec!["c".into()], ..ConnectorMeta::default() };
    let failed = FailedLoad { request: "r".into(), failure: LoadFailure::Stale, invalid: vec![7] };
    let output = WorkerOutput {
        finished_recving: vec!["r".into()],
        failed_recving: vec![failed],
        ..WorkerOutput::default()
    };
    let seeds = [
        [&[4][..], &meta.encode().expect("short")].concat(),
        [&[3][..], &output.encode().expect("short")].concat(),
        b"\x00\xa2{}".to_vec(),
        b"\x00\x92\xa51.0.0\x92\x00\x01".to_vec(),
        b"\x01\x92\x40\x91\x92\x01\x20".to_vec(),
        b"\x02\x92\xc4\x03abc\x01".to_vec(),
        b"\x06\x92\x07\xa3bad".to_vec(),
        b"\x0b\x94\x01\x02\x01\x91\x93\x00\x05\x03".to_vec(),
        b"\x05\xc0".to_vec(),
        b"\x05\xcd\x10\x00".to_vec(),
    ];
    run("group", &seeds, group::fuzz::group);
}

// vLLM 3: arbitrary bytes as a handshake payload cause no panic
#[test]
fn handshake_payloads() {
    run(
        "payload",
        &[cases(&[b"\x82\xb2"]), vec![golden::bytes("handshake/prefill.reply0.bin")]].concat(),
        fuzz::handshake_payload,
    );
}

#[test]
fn agent_metadata() {
    run("metadata", &cases(&[b"\xde", b"\x8c"]), fuzz::agent_metadata);
}

#[test]
fn notifications() {
    let mut seeds = cases(&[b"PUSH_REG:"]);
    seeds.extend([&b"cmpl-u-0-bbb18847:1"[..], b"HB:one,two,three", b"a:b:2"].map(<[u8]>::to_vec));
    run("notification", &seeds, fuzz::notification);
}

#[test]
fn mooncake_messages() {
    run("mooncake", &cases(&[b"\x88\xaf", b"\x82\xa6", b"\x85\xa6"]), fuzz::mooncake);
}

#[test]
fn bodies_of_a_bootstrap_server() {
    let seeds = [
        r#"{"engine_id":"e0","dp_rank":1,"tp_rank":3,"pp_rank":2,"addr":"tcp://10.0.0.1:4711","kvx_ttl":30}"#,
        r#"{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://a:1","1":"tcp://a:2"},"1":{"0":"tcp://a:3"}}},
            "1":{"engine_id":"e1","worker_addr":{}}}"#,
    ];
    run("bootstrap", &seeds.map(|body| body.as_bytes().to_vec()), fuzz::bootstrap);
}

#[test]
fn nixl_blobs() {
    let seeds = ["prefill", "decode"]
        .map(|side| golden::bytes(&format!("handshake/{side}.nixl_agent_blob.bin")));
    run("blob", &seeds, fuzz::nixl_blob);
}

#[test]
fn nixl_notes() {
    let part = |at: u8, count: u8| {
        [&b"\xf8kvx\x01\0\0\0\0\0\0\0"[..], &[at, 0, 0, 0, count, 0, 0, 0]].concat()
    };
    let parts =
        [&part(0, 2)[..], b"first\xfe", &part(1, 2), b"second\xfe", &part(0, 1), b"whole"].concat();
    run("notes", &[parts, b"HB:one,two".to_vec()], fuzz::nixl_notes);
}

#[test]
fn params_and_streams() {
    let capture = golden::json("http/first.json");
    let params = &capture["prefill"]["response"]["kv_transfer_params"];
    let mut seeds: Vec<Vec<u8>> = [params, &capture["prefill"]["request"]["kv_transfer_params"]]
        .map(|value| value.to_string().into_bytes())
        .to_vec();
    let mooncake = serde_json::json!({
        "do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://h:8998",
        "remote_engine_id": "e", "transfer_id": "x",
    });
    let chunk =
        serde_json::json!({"choices": [{"finish_reason": "length"}], "kv_transfer_params": params});
    seeds.push(mooncake.to_string().into_bytes());
    seeds.push(format!("data: {chunk}\n\ndata: [DONE]\n\n").into_bytes());
    run("params", &seeds, fuzz::params);
}

#[test]
fn frames_of_zeromq() {
    let request = b"\x01\x00\x00\x10\x93\xc4\x0cget_meta_msg\x00\x01".to_vec();
    let ready = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity\0\0\0\0".to_vec();
    let long = [&b"\x02\0\0\0\0\0\0\x02\0"[..], &[0x55; 512]].concat();
    let greeting = [&b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL"[..], &[0; 48]].concat();
    let others = [b"\x04\x0a\x04PING\0\x05ctx".to_vec(), b"\x04\x09\x05ERROR\x02no".to_vec()];
    let all = [ready.clone(), request.clone()].concat();
    let seeds = [&[request, ready, long, greeting, all][..], &others].concat();
    run("zmtp", &seeds, zmtp::fuzz::zmtp);
}

#[test]
fn batches_of_cache_events() {
    let file = golden::json("kv_events.json");
    let batches = file["cases"].as_array().expect("cases").iter();
    let mut seeds: Vec<Vec<u8>> =
        batches.map(|case| golden::hex(case["hex"].as_str().expect("hex"))).collect();
    seeds.push(b"topic\xfe\0\0\0\0\0\0\0\x07\xfe\x92\0\x90".to_vec());
    run("events", &seeds, events::fuzz::events);
}

#[test]
fn what_fuzzing_found_is_held() {
    let all = [fuzz::TARGETS, events::fuzz::TARGETS, group::fuzz::TARGETS, zmtp::fuzz::TARGETS];
    for targets in all {
        kvx_testkit::replay(targets);
    }
}
