//! NixlPushConnector: a decode registers its blocks, and the prefill writes into them.

use std::time::Duration;

use kvx_connector::{Decode, Loaded, Prefill, Released};
use kvx_testkit::test;
use kvx_vllm::engine::{
    Allocation, Arrival, Ending, Kept, LoadFailure, Outcome, RequestId, Status,
};
use kvx_vllm::params::{TransferMode, TransferParams};

use super::rig::{BLOCK, Engine, LIMIT, SIZES, lists, moves_prompts};

fn push(backend: &str, sizes: (u32, u32)) {
    // A pushing prefill finds a registration by the name of its own request.
    let params = moves_prompts(Engine::pushing, "r", backend, sizes);
    assert_eq!(params.transfer_mode, Some(TransferMode::Push));
}

#[test]
fn a_prompt_is_written_to_the_decode() {
    push("SHM", (1, 1));
    push("TCP", (1, 1));
}

#[test]
fn heads_are_written_to_their_workers_whatever_the_numbers_of_them() {
    for sizes in SIZES {
        push("TCP", sizes);
    }
}

// vLLM 47: a registration longer than one notification is sent in parts
#[test]
fn a_registration_longer_than_a_notification_travels_in_parts() {
    let blocks = 30_000;
    let (prefill, decode) =
        (Engine::pushing_many("prefill", blocks), Engine::pushing_many("decode", blocks));
    let (here, there): (Vec<u32>, Vec<u32>) = ((0..blocks).collect(), (0..blocks).rev().collect());
    let tokens = blocks * BLOCK;
    let (last, ours) = ([here[blocks as usize - 1]], [there[blocks as usize - 1]]);
    prefill.compute(8, &last, BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&here), tokens).unwrap();
    let fetch = Decode::new(&decode.connector).fetch("r", &params, 0, lists(&there), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..tokens });
    assert_eq!(
        (decode.wrong(8, &ours, 0..BLOCK), lease.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
}

/// The existing connection leads to caches that the decode has given back.
#[test]
fn a_decode_that_registers_anew_is_written_to() {
    let (prefill, mut decode) =
        (Engine::pushing("prefill", "{}", 2), Engine::pushing("decode", "{}", 1));
    // The third load waits until the decode may be asked again.
    for round in 0..3 {
        let name = format!("r{round}");
        prefill.compute(round, &[3, 9], 2 * BLOCK);
        let (lease, params) =
            Prefill::new(&prefill.connector).publish(&*name, lists(&[3, 9]), 2 * BLOCK).unwrap();
        let fetch = Decode::new(&decode.connector).fetch(&*name, &params, 0, lists(&[7, 1]), LIMIT);
        assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..2 * BLOCK });
        assert_eq!(decode.wrong(round, &[7, 1], 0..2 * BLOCK), 0);
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
        decode.register_anew();
    }
}

fn arrive(engine: &Engine, request: &RequestId, tokens: u32, params: &TransferParams) {
    let arrival = Arrival { request, prompt_tokens: tokens, params: Some(params), deadline: None };
    engine.connector.on_new_request(arrival).unwrap();
}

// vLLM 47: a push works whichever side is first, with request names that differ in the engines'
//     suffixes
#[test]
fn a_step_loop_pushes_whichever_side_is_first_and_no_worker_is_written_to_before_it_is_told() {
    let (prefill, decode) =
        (Engine::pushing("prefill", "{}", 2), Engine::pushing("decode", "{}", 2));
    let tokens = 2 * BLOCK;
    for decode_first in [true, false] {
        // Each engine adds its own suffix to the name.
        let asked: RequestId = format!("cmpl-{decode_first}-0-0000000a").into();
        let given: RequestId = format!("cmpl-{decode_first}-0-0000000b").into();
        let here = [1, 2];
        let publish = || {
            arrive(&prefill, &asked, tokens, &TransferParams::ask_prefill());
            let nothing = Allocation { fill: lists(&[]), computed: 0, external: 0 };
            prefill.connector.update_state_after_alloc(&asked, nothing).unwrap();
            prefill.step();
            prefill.compute(3, &here, tokens);
            let status = Status::LengthCapped;
            let ending = Ending {
                status,
                blocks: lists(&here),
                computed: tokens,
                cached: None,
                reference: None,
            };
            prefill.connector.request_finished(&asked, ending).params.unwrap()
        };
        let load = || {
            // The parameters as a router knows them right after it has asked a prefill.
            let address = prefill.connector.address();
            let mut params = TransferParams::default();
            params.do_remote_prefill = true;
            params.remote_engine_id = Some(prefill.connector.engine_id().as_str().to_owned());
            params.remote_request_id = Some("cmpl-x".to_owned());
            (params.remote_host, params.remote_port) =
                (Some(address.host.to_string()), Some(address.port));
            (params.tp_size, params.transfer_mode) = (Some(2), Some(TransferMode::Push));
            arrive(&decode, &given, tokens, &params);
            let external = decode.connector.get_num_new_matched_tokens(&given, 0).tokens;
            assert_eq!(external, tokens);
            let allocation = Allocation { fill: lists(&[6, 5]), computed: 0, external };
            decode.connector.update_state_after_alloc(&given, allocation).unwrap();
            decode.connector.step();
            decode.ranks[0].start_load_kv();
        };
        if decode_first {
            load();
            publish();
        } else {
            publish();
            load();
        }
        assert!(
            !decode.connector.outcomes_ready_blocking(Duration::from_millis(300)),
            "one worker has not started the load"
        );
        assert!(decode.wrong(3, &[6, 5], 0..tokens) > 0);
        decode.ranks[1].start_load_kv();
        assert!(decode.connector.outcomes_ready_blocking(LIMIT));
        let loaded = Outcome::Loaded { request: given.clone(), computed: tokens };
        assert_eq!(decode.connector.outcomes(), [loaded]);
        assert_eq!(decode.wrong(3, &[6, 5], 0..tokens), 0);
        decode.compute(9, &[6, 5], tokens);
        let ending = Ending { status: Status::Aborted, ..Ending::aborted() };
        decode.connector.request_finished(&given, ending);
        assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
        let free = Outcome::Free { request: asked.clone(), kept: Kept::Request };
        assert_eq!(prefill.connector.outcomes(), [free]);
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

// vLLM 47: the watchdog fails a load of a decode that no prefill writes to
#[test]
fn a_load_that_nobody_pushes_fails_in_time_and_the_next_one_works() {
    let (prefill, decode) =
        (Engine::pushing("prefill", "{}", 1), Engine::pushing("decode", "{}", 1));
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("other", lists(&[5]), BLOCK).unwrap();
    // The prefill has no request of that name.
    let fetch = Decode::new(&decode.connector).fetch(
        "r",
        &params,
        0,
        lists(&[1]),
        Duration::from_millis(300),
    );
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert!(matches!(error.failure, LoadFailure::NotPushed | LoadFailure::Deadline), "{error}");
    assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Free);
    let held = Decode::new(&decode.connector).fetch("s", &params, 0, lists(&[1]), LIMIT).cancel();
    assert_eq!(held.wait_blocking(LIMIT).unwrap(), Released::Free);
    prefill.compute(2, &[5], BLOCK);
    let fetch = Decode::new(&decode.connector).fetch("other", &params, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(
        (decode.wrong(2, &[1], 0..BLOCK), lease.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

#[test]
fn blocks_of_a_dropped_lease_come_back_by_an_outcome() {
    let prefill = Engine::pushing("prefill", "{}", 1);
    let (lease, _) = Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    drop(lease);
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    let free = Outcome::Free { request: "r".into(), kept: Kept::Request };
    assert_eq!(prefill.connector.outcomes(), [free]);
    assert!(prefill.connector.is_idle());
}
