//! Attacks on the memory of a decoder: messages whose values take many times their bytes.

use kvx_testkit::{most_allocated, test};
use kvx_vllm::Version;
use kvx_vllm::wire::NixlAgentMetadata;
use kvx_vllm::wire::mooncake::{PullRequest, PulledRequest};

/// The most memory that a message's values may take while it is decoded.
const LIMIT: usize = 64 << 20;

/// Returns metadata of this number of regions, as an engine would write it.
fn metadata(regions: usize) -> NixlAgentMetadata {
    let mut metadata = NixlAgentMetadata::new("engine", Version::V0_33);
    metadata.kv_caches_base_addr = vec![0x7f00_0000_0000; regions];
    metadata.block_lens = vec![4096; regions];
    metadata.block_strides = vec![4096; regions];
    metadata.region_names = Some(vec!["model.layers.0.self_attn.attn".into(); regions]);
    metadata.block_size = 16;
    metadata
}

#[test]
fn metadata_takes_bounded_memory_however_few_bytes_encode_it() {
    let decode = |metadata: &NixlAgentMetadata| {
        let bytes = metadata.encode();
        assert!(bytes.len() <= NixlAgentMetadata::MAX_LEN, "{} bytes", bytes.len());
        most_allocated(|| NixlAgentMetadata::decode(&bytes, Version::V0_33))
    };
    let (read, took) = decode(&metadata(NixlAgentMetadata::MAX_REGIONS));
    assert_eq!(read.unwrap().regions(), NixlAgentMetadata::MAX_REGIONS);
    assert!(took <= LIMIT, "{took} bytes");
    let mut empty_names = metadata(1);
    empty_names.region_members = vec![vec![String::new(); 64_000]; 64];
    let mut short_names = metadata(1);
    short_names.region_members = vec![vec!["a".into(); 64_000]; 32];
    for hostile in [empty_names, short_names] {
        let (refused, took) = decode(&hostile);
        let why = refused.err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("more memory than is allowed"), "{why} {took} bytes");
        assert!(took <= LIMIT + (1 << 20), "{took} bytes");
    }
}

/// Returns a request for this number of requests, each with this number of groups and blocks.
fn pull(requests: usize, groups: usize, blocks: u32) -> PullRequest {
    let mut pull = PullRequest::new("decode", 1, 1, 0);
    let pulled = |number: usize| PulledRequest {
        request_id: format!("cmpl-{number}"),
        transfer_id: format!("xfer-{number}"),
        block_ids: vec![(1000..1000 + blocks).collect(); groups],
    };
    pull.req_blocks = (0..requests).map(pulled).collect();
    pull
}

#[test]
fn a_pull_request_takes_bounded_memory_however_few_bytes_encode_it() {
    let decode = |pull: &PullRequest| {
        let bytes = pull.encode();
        assert!(bytes.len() <= PullRequest::MAX_LEN, "{} bytes", bytes.len());
        most_allocated(|| PullRequest::decode(&bytes))
    };
    let (read, took) = decode(&pull(100, 2, 2500));
    assert_eq!(read.unwrap().req_blocks.len(), 100);
    assert!(took <= LIMIT, "{took} bytes");
    let empty_groups = pull(47, 60_000, 0);
    let mut empty_grants = pull(1, 1, 1);
    let grants = |number: usize| (number.to_string(), vec![Vec::new(); 1000]);
    empty_grants.kvx_grants = (0..3000).map(grants).collect();
    for hostile in [empty_groups, empty_grants] {
        let (refused, took) = decode(&hostile);
        let why = refused.err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("more memory than is allowed"), "{why} {took} bytes");
        assert!(took <= LIMIT + (1 << 20), "{took} bytes");
    }
}
