//! The messages and hashes of each version of vLLM, from the definitions of its release: computed,
//! not captured.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::config::BlockRelease;
use kvx_vllm::engine::{ConsumerRule, Time, WorkerRank, release_of};
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};
use kvx_vllm::wire::{
    CompatibilityFactors, CompatibilityHash, EngineNotification, HandshakeRequest, Listener,
    NixlAgentMetadata,
};
use serde_json::Value;

use crate::golden;

fn each(mut check: impl FnMut(Version, &Value)) {
    let file = golden::json("dialects.json");
    for version in Version::SPOKEN {
        let entries = file["dialects"].as_array().unwrap();
        let entry = entries.iter().find(|entry| entry["dialect"] == version.vllm_version());
        check(version, entry.unwrap_or_else(|| panic!("{version} is not in the vectors")));
    }
}

fn number(value: &Value) -> u32 {
    value.as_u64().and_then(|number| number.try_into().ok()).unwrap()
}

#[test]
fn golden_connector_versions() {
    each(|version, entry| {
        assert_eq!(version.connector_version(), number(&entry["connector_version"]))
    });
}

// vLLM 9: handshake requests and answer frames equal those of each version
#[test]
fn golden_requests_and_the_frames_that_answer_them() {
    each(|version, entry| {
        let rank = WorkerRank { pp: 0, tp: 1 };
        let bytes = golden::hex(entry["request"].as_str().unwrap());
        assert_eq!(HandshakeRequest::new(rank, version).unwrap().encode(), bytes, "{version}");
        let mut listener = Listener::new(CompatibilityHash::foreign("h"));
        listener.publish(rank, &NixlAgentMetadata::new("e1", version));
        let message = [&b"d"[..], b"", &bytes];
        let answer = listener.answer(&message, Time::default()).unwrap();
        assert!(answer.refusal().is_none());
        assert_eq!(
            answer.frames().count(),
            2 + number(&entry["reply_frames"]) as usize,
            "{version}"
        );
    });
}

// vLLM 21: agent metadata has the keys of each version
#[test]
fn golden_metadata() {
    each(|version, entry| {
        let bytes = golden::hex(entry["metadata"]["hex"].as_str().unwrap());
        let read = NixlAgentMetadata::decode(&bytes, version).unwrap();
        assert_eq!(read.encode(), bytes, "{version}");
        let mut new = NixlAgentMetadata::new("e1", version);
        new.agent_metadata = vec![1, 2];
        new.kv_caches_base_addr = vec![0x7f00_0000_0000, 0x7f00_0010_0000];
        (new.device_id, new.num_blocks, new.block_size) = (1, 4, 16);
        (new.block_lens, new.block_strides) = (vec![4096; 2], vec![4096; 2]);
        new.kv_cache_layout = if version < Version::V0_29 { "HND" } else { "LBHNC" }.to_owned();
        if version >= Version::V0_20 {
            new.attn_backend_name = "FLASH_ATTN".to_owned();
        }
        if version >= Version::V0_30 {
            let names = |names: [&str; 2]| Some(names.map(str::to_owned).to_vec());
            (new.region_num_blocks, new.region_group_ids) = (Some(vec![4; 2]), Some(vec![0; 2]));
            new.region_names = names(["layers.0", "layers.1"]);
            new.region_mem_types = names(["VRAM", "VRAM"]);
        }
        assert_eq!(new.encode(), bytes, "{version}");
        assert_eq!(new, read, "{version}");
        // Metadata of an older version lacks a key that a later version always writes.
        let later = Version::SPOKEN.into_iter().filter(|later| *later > version);
        for later in later.filter(|later| {
            let keys = [Version::V0_20, Version::V0_21, Version::V0_29];
            keys.into_iter().any(|first| version < first && *later >= first)
        }) {
            let error = NixlAgentMetadata::decode(&bytes, later).unwrap_err();
            assert!(error.to_string().contains("absent"), "{version} read as {later}: {error}");
        }
    });
}

// vLLM 2: the compatibility hash has the factors of each version since 0.16
#[test]
fn golden_hashes() {
    each(|version, entry| {
        let mut factors = CompatibilityFactors::new(version, "Qwen/Qwen3-0.6B");
        (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) = (8, 128, 28);
        assert_eq!(factors.json().unwrap(), entry["hash"]["input"].as_str().unwrap(), "{version}");
        assert_eq!(
            factors.hash().unwrap().as_str(),
            entry["hash"]["sha256"].as_str().unwrap(),
            "{version}"
        );
    });
}

// vLLM 13: a prefill's answer has the keys of each version
#[test]
fn golden_params() {
    each(|version, entry| {
        for (key, mode) in [("pull", TransferMode::Pull), ("push", TransferMode::Push)] {
            let expected = &entry["params"][key];
            if expected.is_null() {
                continue;
            }
            let mut remote =
                RemoteBlocks::new("e1", "cmpl-u-0-bbb18847", "10.0.0.1", 5600, vec![vec![28, 29]]);
            (remote.tp_size, remote.num_tokens, remote.mode) = (2, Some(20), mode);
            remote.registration_generation = 3;
            let params = TransferParams::prefilled(remote, version);
            assert_eq!(params.to_value(version).unwrap(), *expected, "{version} {key}");
            let read = TransferParams::from_value(expected).unwrap();
            assert_eq!(read.to_value(version).unwrap(), *expected, "{version} {key}");
        }
    });
}

// vLLM 43: a completion carries the number that each version expects
#[test]
fn golden_notifications_of_each_version() {
    each(|version, entry| {
        // Two of four decode ranks read from each of two prefill ranks.
        let count = ConsumerRule::of(version).written(2, 4);
        let done = EngineNotification::done("cmpl-u-0-bbb18847", count).unwrap().encode();
        assert_eq!(done, entry["completion"].as_str().unwrap().as_bytes(), "{version}");
        assert_eq!(ConsumerRule::of(version).expected(count, 2), 2, "{version}");
        let leased = matches!(release_of(version), BlockRelease::Lease(_));
        assert_eq!(leased, entry["heartbeat"].is_string(), "{version}");
        assert_eq!(version.leases(), leased);
    });
}
