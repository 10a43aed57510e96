//! Handshakes captured from a live vLLM: decoded, encoded, and repeated with kvx's listener and
//! requester.

use std::time::Duration;

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{Time, WorkerRank};
use kvx_vllm::wire::{
    ClockReading, Expectation, Handshake, HandshakePayload, HandshakeRequest, Listener,
    NixlAgentMetadata,
};

use crate::golden;

struct Captured {
    name: String,
    request: Vec<u8>,
    payload: Vec<u8>,
    clock: Vec<u8>,
    agent_metadata: Vec<u8>,
    nixl_blob: Vec<u8>,
}

/// Returns all captures: every `handshake/NAME.request.bin` with the files that belong to it.
fn captured() -> Vec<Captured> {
    let folder = golden::directory().join("handshake");
    let files =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let names = files.filter_map(|file| {
        file.ok()?.file_name().to_str()?.strip_suffix(".request.bin").map(str::to_owned)
    });
    let captured: Vec<_> = names
        .map(|name| {
            let read = |part: &str| golden::bytes(&format!("handshake/{name}.{part}.bin"));
            Captured {
                request: read("request"),
                payload: read("reply0"),
                clock: read("reply1"),
                agent_metadata: read("agent_metadata"),
                nixl_blob: read("nixl_agent_blob"),
                name,
            }
        })
        .collect();
    let names = captured.iter().map(|capture| capture.name.as_str());
    golden::require_captures("handshake", names, &["decode", "prefill"]);
    captured
}

#[test]
fn golden_requests_decode_and_encode_to_the_same_bytes() {
    for capture in captured() {
        let request = HandshakeRequest::decode(&capture.request).unwrap();
        assert!(request.pipeline_aware(), "{}", capture.name);
        assert_eq!(request.encode(), capture.request, "{}", capture.name);
        assert_eq!(
            HandshakeRequest::new(request.rank(), Version::V0_32).unwrap(),
            request,
            "{}",
            capture.name
        );
    }
}

#[test]
fn golden_replies_decode_and_encode_to_the_same_bytes() {
    for capture in captured() {
        let payload = HandshakePayload::decode(&capture.payload).unwrap();
        assert_eq!(payload.agent_metadata_bytes, capture.agent_metadata, "{}", capture.name);
        assert_eq!(payload.encode(), capture.payload, "{}", capture.name);
        assert_eq!(
            ClockReading::decode(&capture.clock).unwrap().encode()[..],
            capture.clock,
            "{}",
            capture.name
        );

        for version in [Version::V0_32, Version::V0_33] {
            let metadata = NixlAgentMetadata::decode(&capture.agent_metadata, version).unwrap();
            assert_eq!(metadata.agent_metadata, capture.nixl_blob, "{}", capture.name);
            assert_eq!(metadata.encode(), capture.agent_metadata, "{}", capture.name);
            assert_eq!(metadata.unknown().count(), 0, "{}", capture.name);
            metadata.check_regions().unwrap();
        }
    }
}

/// A new message with the captured values has the captured bytes: its key order and encodings are
/// vLLM's even without a message to copy them from.
#[test]
fn golden_metadata_written_from_values_equals_the_capture() {
    for capture in captured() {
        let read = NixlAgentMetadata::decode(&capture.agent_metadata, Version::V0_32).unwrap();
        let mut new = NixlAgentMetadata::new(read.engine_id.clone(), Version::V0_32);
        new.agent_metadata = read.agent_metadata;
        new.kv_caches_base_addr = read.kv_caches_base_addr;
        new.device_id = read.device_id;
        new.num_blocks = read.num_blocks;
        new.block_lens = read.block_lens;
        new.block_strides = read.block_strides;
        new.kv_cache_layout = read.kv_cache_layout;
        new.block_size = read.block_size;
        new.ssm_sizes = read.ssm_sizes;
        new.attn_backend_name = read.attn_backend_name;
        new.physical_blocks_per_logical_kv_block = read.physical_blocks_per_logical_kv_block;
        new.region_num_blocks = read.region_num_blocks;
        new.region_group_ids = read.region_group_ids;
        new.region_names = read.region_names;
        new.region_mem_types = read.region_mem_types;
        new.dcp_size = read.dcp_size;
        new.pcp_size = read.pcp_size;
        new.ple_block_len = read.ple_block_len;
        new.region_members = read.region_members;
        new.packed_member_layouts = read.packed_member_layouts;
        assert_eq!(new.encode(), capture.agent_metadata, "{}", capture.name);
    }
}

// vLLM 1: both ends of a kvx handshake exchange vLLM's captured bytes
#[test]
fn golden_exchange_between_our_two_ends() {
    for capture in captured() {
        let payload = HandshakePayload::decode(&capture.payload).unwrap();
        let metadata = NixlAgentMetadata::decode(&capture.agent_metadata, Version::V0_32).unwrap();
        let rank: WorkerRank = HandshakeRequest::decode(&capture.request).unwrap().rank();

        // kvx's listener, with the metadata of vLLM's worker, answers vLLM's request with vLLM's
        // bytes.
        let mut listener = Listener::new(payload.compatibility_hash.clone());
        listener.publish(rank, &metadata);
        let clock = Time::from_seconds(ClockReading::decode(&capture.clock).unwrap().0).unwrap();
        let received = [&b"identity"[..], b"", &capture.request];
        let answer = listener.answer(&received, clock).unwrap();
        let sent: Vec<&[u8]> = answer.frames().collect();
        assert_eq!(sent[..3], [received[0], b"", &capture.payload], "{}", capture.name);
        assert!(answer.refusal().is_none(), "{}", capture.name);

        // kvx's requester sends vLLM's request and accepts vLLM's answer.
        let expectation = Expectation::new(
            Version::V0_32,
            metadata.engine_id.clone(),
            payload.compatibility_hash,
        );
        let mut handshake =
            Handshake::new(expectation, [rank], (rank.pp + 1, rank.tp + 1)).unwrap();
        let at = |seconds| Time::from_origin(Duration::from_secs(seconds));
        assert_eq!(handshake.request(at(10)).unwrap(), capture.request, "{}", capture.name);
        handshake.received(&[&capture.payload, &capture.clock], at(12)).unwrap();
        let peer = handshake.finish().unwrap();
        assert_eq!(peer.workers[&rank], metadata, "{}", capture.name);
        let ahead = peer.clock.expect("the reply has a clock").seconds;
        assert!((ahead - (clock.seconds() - 11.0)).abs() < 1e-6, "{}: {ahead}", capture.name);
    }
}
