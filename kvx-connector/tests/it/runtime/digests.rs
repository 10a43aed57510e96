//! Blocks with digests: loads that succeed, loads that are refused, and with which peers.

use std::sync::atomic::{AtomicU32, Ordering};

use kvx_connector::{Decode, LoadError, Prefill};
use kvx_core::MemoryKind;
use kvx_testkit::{TestDevice, test};
use kvx_vllm::config::{KvTransferConfig, Surroundings};
use kvx_vllm::engine::{LoadFailure, Then, WorkerRank};

use super::rig::{BLOCK, Engine, LAYERS, LIMIT, builder, built, caches, lists};

const DIGEST: &str = r#"{"kvx_digest": true}"#;

fn digesting(engine: &str, tp: u32) -> Engine {
    Engine::new(engine, DIGEST, tp)
}

/// Publishes three blocks, lets `spoil` change the prefill's, and loads them into blocks 1 to 3.
fn loaded_after(
    prefill: &Engine,
    decode: &Engine,
    spoil: impl FnOnce(&Engine),
) -> Result<(), LoadError> {
    // Each request has its own name, because the decode's last notification about the one before
    // may be in flight.
    static REQUESTS: AtomicU32 = AtomicU32::new(0);
    let request = format!("r{}", REQUESTS.fetch_add(1, Ordering::Relaxed));
    prefill.compute(7, &[5, 6, 8], 3 * BLOCK);
    let publish = Prefill::new(&prefill.connector).publish(request, lists(&[5, 6, 8]), 3 * BLOCK);
    let (_lease, params) = publish.unwrap();
    spoil(prefill);
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1, 2, 3]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().map(drop)
}

#[test]
fn blocks_are_loaded_whose_digests_are_those_that_were_published() {
    for (from, to) in [(1, 1), (2, 2), (2, 1), (4, 2)] {
        let (prefill, decode) = (digesting("prefill", from), digesting("decode", to));
        // The second time the blocks have other contents.
        for _ in 0..2 {
            loaded_after(&prefill, &decode, |_| ()).unwrap();
            assert_eq!(decode.wrong(7, &[1, 2, 3], 0..3 * BLOCK), 0, "{from} to {to}");
            prefill.compute(9, &[5, 6, 8], 3 * BLOCK);
        }
    }
}

#[test]
fn a_block_that_was_spoilt_after_it_was_published_is_refused_alone() {
    for (policy, then) in [("fail", Then::Fail), ("recompute", Then::Recompute { computed: BLOCK })]
    {
        for tp in [1, 2] {
            let (prefill, decode) =
                (digesting("prefill", 2), Engine::with_policy("decode", DIGEST, policy, tp));
            let error =
                loaded_after(&prefill, &decode, |prefill| prefill.compute(8, &[6], 1)).unwrap_err();
            assert_eq!(
                (error.failure, error.then, error.invalid),
                (LoadFailure::Corrupt, then, vec![2])
            );
            loaded_after(&prefill, &decode, |_| ()).unwrap();
        }
    }
}

#[test]
fn a_block_that_was_spoilt_is_not_made_right_by_publishing_it_again() {
    let (prefill, decode) = (digesting("prefill", 1), digesting("decode", 1));
    let spoil = |prefill: &Engine| {
        prefill.compute(8, &[6], 1);
        let again = Prefill::new(&prefill.connector).publish("s", lists(&[5, 6]), 2 * BLOCK);
        let (_lease, params) = again.unwrap();
        let fetch = Decode::new(&decode.connector).fetch("e", &params, 0, lists(&[11, 12]), LIMIT);
        assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap_err().invalid, [12]);
    };
    let error = loaded_after(&prefill, &decode, spoil).unwrap_err();
    assert_eq!((error.failure, error.invalid), (LoadFailure::Corrupt, vec![2]));
}

#[test]
fn a_prefill_without_digests_is_refused_and_a_decode_without_them_does_not_check() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), digesting("decode", 1));
    let error = loaded_after(&prefill, &decode, |_| ()).unwrap_err();
    let LoadFailure::Handshake(why) = error.failure else { panic!("{error}") };
    assert!(why.contains("set kvx_digest in its kv_connector_extra_config"), "{why}");
    assert_eq!(error.invalid, [1, 2, 3]);
    let (prefill, decode) = (digesting("prefill", 1), Engine::new("decode", "{}", 1));
    loaded_after(&prefill, &decode, |prefill| prefill.compute(8, &[6], 1)).unwrap();
}

#[test]
fn digests_of_parts_of_blocks_are_refused() {
    let (prefill, decode) = (digesting("prefill", 1), digesting("decode", 2));
    let error = loaded_after(&prefill, &decode, |_| ()).unwrap_err();
    let LoadFailure::Handshake(why) = error.failure else { panic!("{error}") };
    assert!(why.contains("tensor-parallel size has to be that of the peer or a divisor"), "{why}");
}

#[test]
fn pushes_with_digests_are_refused() {
    let error = Engine::push_builder("prefill", DIGEST).build_blocking().unwrap_err();
    assert!(error.to_string().contains("kvx_digest is for NixlConnector"), "{error}");
    drop(builder("prefill", DIGEST).build_blocking().unwrap());
}

#[test]
fn digests_of_caches_on_a_device_are_refused() {
    let json = format!(
        r#"{{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {DIGEST}}}"#
    );
    let surroundings =
        Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1").gpu(true);
    let config = KvTransferConfig::from_json(&json, &surroundings).unwrap();
    let connector = built(&config).build_blocking().unwrap();
    let memory = TestDevice::new(MemoryKind::Cuda).allocate((LAYERS as usize) << 16);
    let caches = caches(&memory, 1);
    let error = connector
        .rank(WorkerRank { pp: 0, tp: 0 })
        .unwrap()
        .register(caches, [memory])
        .unwrap_err();
    assert!(error.to_string().contains("kvx_digest needs caches in host memory"), "{error}");
}
