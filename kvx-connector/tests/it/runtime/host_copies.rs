//! Device caches whose peers see copies on the host (`kv_buffer_device: cpu`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_connector::{Decode, Loaded, Prefill, Released};
use kvx_core::{ErrorKind, MemoryKind};
use kvx_testkit::device::CopyOutcome;
use kvx_testkit::{TestDevice, test};
use kvx_vllm::engine::{Arrival, Ending, Kept, LoadFailure, Outcome, RequestId, Status};
use kvx_vllm::params::TransferParams;

use super::rig::{BLOCK, Engine, LIMIT, SIZES, lists, moves_prompts};

/// SHM cannot reach the memory of a test device. TCP is left out, because it would need no copies.
const SHM: &str = r#"{"backends": ["SHM"]}"#;

fn device() -> Arc<TestDevice> {
    TestDevice::new(MemoryKind::Cuda)
}

fn pulling(engine: &str, extra: &str, tp: u32) -> Engine {
    Engine::on_device(&device(), "NixlConnector", engine, extra, tp)
}

fn pushing(engine: &str, extra: &str, tp: u32) -> Engine {
    Engine::on_device(&device(), "NixlPushConnector", engine, extra, tp)
}

fn mooncake(engine: &str, extra: &str, tp: u32) -> Engine {
    Engine::on_device(&device(), "MooncakeConnector", engine, extra, tp)
}

/// A prefill and a decode, each on a device of its own.
fn pair() -> ([Arc<TestDevice>; 2], Engine, Engine) {
    let devices = [device(), device()];
    let engine = |at: usize, name| Engine::on_device(&devices[at], "NixlConnector", name, SHM, 1);
    let (prefill, decode) = (engine(0, "prefill"), engine(1, "decode"));
    (devices, prefill, decode)
}

fn arrived(engine: &Engine, request: &RequestId, tokens: u32) {
    let asked = TransferParams::ask_prefill();
    let arrival = Arrival { request, prompt_tokens: tokens, params: Some(&asked), deadline: None };
    engine.connector.on_new_request(arrival).unwrap();
}

/// Ends a prefilled request. Returns the parameters for its decode.
fn finish(engine: &Engine, request: &RequestId, blocks: &[u32], tokens: u32) -> TransferParams {
    let blocks = lists(blocks);
    let status = Status::LengthCapped;
    let ending = Ending { status, blocks, computed: tokens, cached: None, reference: None };
    let finished = engine.connector.request_finished(request, ending);
    assert_eq!(finished.withheld, None);
    finished.params.unwrap()
}

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn fetched(decode: &Engine, name: &str, params: &TransferParams, blocks: &[u32], tokens: u32) {
    let fetch = Decode::new(&decode.connector).fetch(name, params, 0, lists(blocks), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..tokens });
}

#[test]
fn prompts_go_from_device_to_device_by_way_of_the_host() {
    for sizes in SIZES {
        moves_prompts(pulling, "d", "SHM", sizes);
    }
    moves_prompts(pushing, "r", "SHM", (2, 1));
    moves_prompts(pushing, "r", "SHM", (1, 2));
    moves_prompts(mooncake, "d", "SHM", (2, 1));
}

#[test]
fn a_backend_with_small_buffers_needs_no_copies() {
    let device = device();
    for (backend, allocations) in [("TCP", 1), ("SHM", 1)] {
        let extra = format!(r#"{{"backends": ["{backend}"]}}"#);
        let engine = Engine::on_device(&device, "NixlConnector", "e", &extra, 1);
        engine.compute(1, &[1], BLOCK);
        let before = device.counters().copies;
        let (_lease, _) = Prefill::new(&engine.connector).publish("r", lists(&[1]), BLOCK).unwrap();
        let copied = device.counters().copies - before;
        assert_eq!(copied, u64::from(backend == "SHM"), "{backend}");
        assert_eq!(device.allocations(), allocations);
        engine.end();
    }
}

// vLLM 45: with host buffers, blocks are copied to the host in chunks before they are advertised
#[test]
fn what_is_computed_is_copied_once() {
    let ([here, _], prefill, decode) = pair();
    let (request, blocks) = (RequestId::from("r"), [3, 9, 4, 11, 20]);
    arrived(&prefill, &request, 5 * BLOCK - 3);
    let before = {
        prefill.compute(1, &blocks, 5 * BLOCK - 3);
        here.counters().copies
    };
    for chunk in 1..=4 {
        prefill.connector.computed(&request, &lists(&blocks[..chunk]), chunk as u32 * BLOCK + 5);
        wait_until("a chunk is not copied", || here.counters().copies == before + chunk as u64);
    }
    // Only the block that was not whole is copied. A prefix that peers may read already is not
    // copied for the next request.
    let params = finish(&prefill, &request, &blocks, 5 * BLOCK - 3);
    assert_eq!(here.counters().copies, before + 5);
    let next = RequestId::from("s");
    arrived(&prefill, &next, 2 * BLOCK);
    finish(&prefill, &next, &blocks[..2], 2 * BLOCK);
    assert_eq!(here.counters().copies, before + 5);
    fetched(&decode, "d", &params, &[1, 2, 3, 4, 5], 5 * BLOCK - 3);
    assert_eq!(decode.wrong(1, &[1, 2, 3, 4, 5], 0..5 * BLOCK - 3), 0);
    // Requests that keep no blocks for a peer cause no copies.
    let nobody = RequestId::from("t");
    let arrival = Arrival { request: &nobody, prompt_tokens: BLOCK, params: None, deadline: None };
    prefill.connector.on_new_request(arrival).unwrap();
    prefill.connector.computed(&nobody, &lists(&[40]), BLOCK);
    prefill.connector.request_finished(&nobody, Ending::aborted());
    // Wait as long as a copy would take.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(here.counters().copies, before + 5);
}

/// One request has the block twice, another request in between.
// vLLM 45: a block that another request used in the meantime is copied to the host again
#[test]
fn a_block_that_changes_hands_is_copied_anew() {
    let ([here, _], prefill, decode) = pair();
    let [first, second] = ["first", "second"].map(RequestId::from);
    arrived(&prefill, &first, 2 * BLOCK);
    arrived(&prefill, &second, BLOCK);
    prefill.compute(1, &[3, 9], 2 * BLOCK);
    prefill.connector.computed(&first, &lists(&[3, 9]), 2 * BLOCK);
    // It is preempted. Block 9 goes to the other request, which never reports progress and is
    // copied at its end.
    prefill.compute(2, &[9], BLOCK);
    let params = finish(&prefill, &second, &[9], BLOCK);
    fetched(&decode, "d2", &params, &[1], BLOCK);
    assert_eq!(decode.wrong(2, &[1], 0..BLOCK), 0);
    wait_until("it is not released", || !prefill.connector.outcomes().is_empty());
    // The first request continues with the same blocks, and then with its blocks in the other
    // order.
    prefill.compute(1, &[3, 9], 2 * BLOCK);
    let params = finish(&prefill, &first, &[3, 9], 2 * BLOCK);
    fetched(&decode, "d1", &params, &[1, 2], 2 * BLOCK);
    assert_eq!(decode.wrong(1, &[1, 2], 0..2 * BLOCK), 0);
    wait_until("it is not released", || !prefill.connector.outcomes().is_empty());
    let third = RequestId::from("third");
    arrived(&prefill, &third, 2 * BLOCK);
    let before = here.counters().copies;
    prefill.connector.computed(&third, &lists(&[3, 9]), 2 * BLOCK);
    wait_until("it is not copied", || here.counters().copies > before);
    prefill.compute(3, &[9, 3], 2 * BLOCK);
    let params = finish(&prefill, &third, &[9, 3], 2 * BLOCK);
    fetched(&decode, "d3", &params, &[1, 2], 2 * BLOCK);
    assert_eq!(decode.wrong(3, &[1, 2], 0..2 * BLOCK), 0);
}

/// The request in between keeps nothing for a peer, and the device is slow: the first copy would
/// contain its tokens.
// vLLM 45: host copies made for a preempted request no longer count
#[test]
fn what_was_copied_of_a_preempted_request_counts_no_more() {
    let ([here, _], prefill, decode) = pair();
    let request = RequestId::from("r");
    arrived(&prefill, &request, 2 * BLOCK);
    prefill.compute(2, &[3, 9], 2 * BLOCK);
    let before = here.counters().copies;
    prefill.connector.computed(&request, &lists(&[3, 9]), 2 * BLOCK);
    wait_until("it is not copied", || here.counters().copies > before);
    prefill.connector.preempted(&request);
    prefill.compute(1, &[3, 9], 2 * BLOCK);
    prefill.connector.computed(&request, &lists(&[3]), BLOCK);
    let params = finish(&prefill, &request, &[3, 9], 2 * BLOCK);
    fetched(&decode, "d", &params, &[1, 2], 2 * BLOCK);
    assert_eq!(decode.wrong(1, &[1, 2], 0..2 * BLOCK), 0);
}

#[test]
fn a_block_that_grows_while_peers_may_read_it_is_copied_anew() {
    let (_devices, prefill, decode) = pair();
    let all = [BLOCK + 4, 2 * BLOCK - 6, 2 * BLOCK];
    let published = all.map(|tokens| {
        prefill.compute(1, &[3, 9], tokens);
        Prefill::new(&prefill.connector)
            .publish(format!("r{tokens}"), lists(&[3, 9]), tokens)
            .unwrap()
    });
    for (tokens, (_, params)) in all.into_iter().zip(&published) {
        fetched(&decode, &format!("d{tokens}"), params, &[1, 2], tokens);
        assert_eq!(decode.wrong(1, &[1, 2], 0..tokens), 0, "{tokens}");
    }
}

/// Two copies to the host are ordered for blocks that a load then gets: one is in progress, one has
/// not started.
#[test]
fn no_older_copy_gets_into_loaded_blocks() {
    let ([_, there], prefill, decode) = pair();
    prefill.compute(1, &[5, 6], 2 * BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5, 6]), 2 * BLOCK).unwrap();
    let given_up = RequestId::from("given up");
    arrived(&decode, &given_up, 2 * BLOCK);
    decode.compute(9, &[1, 2], 2 * BLOCK);
    there.hold();
    decode.connector.computed(&given_up, &lists(&[1, 2]), BLOCK);
    wait_until("nothing is copied", || there.waiting() == 1);
    decode.connector.computed(&given_up, &lists(&[1, 2]), 2 * BLOCK);
    decode.connector.request_finished(&given_up, Ending::aborted());
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1, 2]), LIMIT);
    // Long enough for a read that does not wait.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(there.waiting(), 1);
    there.release();
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..2 * BLOCK });
    assert_eq!(decode.wrong(1, &[1, 2], 0..2 * BLOCK), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
}

#[test]
fn blocks_that_were_not_copied_to_the_host_are_not_published() {
    let ([here, _], prefill, decode) = pair();
    prefill.compute(1, &[5], BLOCK);
    here.next([CopyOutcome::Fail]);
    let why =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap_err().to_string();
    assert!(why.contains("could not be copied to the host"), "{why}");
    assert!(prefill.connector.is_idle());
    let (_lease, params) =
        Prefill::new(&prefill.connector).publish("s", lists(&[5]), BLOCK).unwrap();
    fetched(&decode, "d", &params, &[1], BLOCK);
    assert_eq!(decode.wrong(1, &[1], 0..BLOCK), 0);
}

#[test]
fn a_load_that_does_not_get_to_the_device_has_failed() {
    let ([_, there], prefill, decode) = pair();
    prefill.compute(1, &[5], BLOCK);
    let fetch = |name: &str, act| {
        let (_lease, params) =
            Prefill::new(&prefill.connector).publish(name, lists(&[5]), BLOCK).unwrap();
        there.next([act]);
        let fetch = Decode::new(&decode.connector).fetch(name, &params, 0, lists(&[1]), LIMIT);
        fetch.wait_blocking(LIMIT).unwrap().unwrap_err()
    };
    let failed = fetch("r", CopyOutcome::Fail);
    assert!(matches!(failed.failure, LoadFailure::Transfer(_)), "{failed}");
    assert_eq!(
        (&failed.invalid[..], failed.held.wait_blocking(LIMIT).unwrap()),
        (&[1][..], Released::Free)
    );
    // The device may still write to the block.
    let lost = fetch("s", CopyOutcome::Forget);
    assert_eq!(
        (&lost.invalid[..], lost.held.wait_blocking(LIMIT).unwrap()),
        (&[1][..], Released::Lost)
    );
    // So copies stop for good, and those that have not started fail.
    let none = fetch("t", CopyOutcome::Copy);
    assert!(
        none.to_string().contains("copies between host and device have stopped for good"),
        "{none}"
    );
    assert_eq!(none.held.wait_blocking(LIMIT).unwrap(), Released::Free);
    assert!(decode.connector.is_idle());
    let kept = decode.ranks[0].give_back(LIMIT).wait_blocking(LIMIT).unwrap_err();
    assert_eq!(kept.kind(), ErrorKind::StillShared, "{kept}");
}

/// Caches that a device still copies must not be reused.
fn are_given_back_when_released(engine: &Engine, device: &TestDevice) {
    let early =
        engine.ranks[0].give_back(Duration::from_millis(100)).wait_blocking(LIMIT).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::StillShared, "{early}");
    device.release();
    engine.ranks[0].give_back(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn caches_are_given_back_when_nothing_copies_them() {
    let ([here, _], prefill, _decode) = pair();
    let request = RequestId::from("r");
    arrived(&prefill, &request, BLOCK);
    prefill.compute(1, &[5], BLOCK);
    here.hold();
    prefill.connector.computed(&request, &lists(&[5]), BLOCK);
    wait_until("nothing is copied", || here.waiting() == 1);
    are_given_back_when_released(&prefill, &here);
}

#[test]
fn caches_are_given_back_after_a_load_that_is_being_copied() {
    let ([_, there], prefill, decode) = pair();
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    there.hold();
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    wait_until("nothing is copied to the device", || there.waiting() == 1);
    are_given_back_when_released(&decode, &there);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..BLOCK });
    assert_eq!(decode.wrong(1, &[1], 0..BLOCK), 0);
}

#[test]
fn digests_are_of_the_copies() {
    let extra = r#"{"backends": ["SHM"], "kvx_digest": true}"#;
    let (prefill, decode) = (pulling("prefill", extra, 2), pulling("decode", extra, 1));
    prefill.compute(1, &[5, 6], 2 * BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5, 6]), 2 * BLOCK).unwrap();
    fetched(&decode, "d", &params, &[1, 2], 2 * BLOCK);
    assert_eq!(decode.wrong(1, &[1, 2], 0..2 * BLOCK), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
}

/// An engine with a step loop learns of a load when its blocks are on the device, and not before.
// vLLM 45: with host buffers, blocks are copied to the device before they count as loaded
#[test]
fn a_step_loop_hears_of_blocks_on_the_device() {
    let ([_, there], prefill, decode) = pair();
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    let request = RequestId::from("d");
    let arrival =
        Arrival { request: &request, prompt_tokens: BLOCK, params: Some(&params), deadline: None };
    decode.connector.on_new_request(arrival).unwrap();
    let external = decode.connector.get_num_new_matched_tokens(&request, 0).tokens;
    let allocation = kvx_vllm::engine::Allocation { fill: lists(&[1]), computed: 0, external };
    decode.connector.update_state_after_alloc(&request, allocation).unwrap();
    there.hold();
    decode.step();
    wait_until("nothing is copied to the device", || there.waiting() == 1);
    assert_eq!(decode.connector.outcomes(), []);
    assert!(!decode.connector.is_idle());
    // The load is abandoned while it is copied. The engine may reuse the block once nothing writes
    // to it.
    let finished = decode.connector.request_finished(&request, Ending::aborted());
    assert!(finished.delay_free);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(decode.connector.outcomes(), []);
    there.release();
    assert!(decode.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(decode.connector.outcomes(), [Outcome::Free { request, kept: Kept::Load }]);
}
