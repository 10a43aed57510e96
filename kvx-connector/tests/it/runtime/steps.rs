//! Engines with a step loop, which call the methods of `KVConnectorBase_V1`.

use kvx_testkit::test;
use kvx_vllm::engine::{Allocation, Arrival, Ending, Kept, Matched, Outcome, RequestId, Status};
use kvx_vllm::params::TransferParams;

use super::rig::{BLOCK, Engine, LIMIT, block_on, lists};

fn arrive(engine: &Engine, request: &RequestId, tokens: u32, params: &TransferParams) {
    let arrival = Arrival { request, prompt_tokens: tokens, params: Some(params), deadline: None };
    engine.connector.on_new_request(arrival).unwrap();
}

fn ending(blocks: &[u32], tokens: u32) -> Ending {
    let status = Status::LengthCapped;
    Ending { status, blocks: lists(blocks), computed: tokens, cached: None, reference: None }
}

#[test]
fn a_step_loop_prefills_and_loads() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 2), Engine::new("decode", "{}", 2));
    let (tokens, here, there) = (3 * BLOCK, [1, 2, 3], [6, 5]);
    let (asked, given): (RequestId, RequestId) = ("asked".into(), "given".into());

    arrive(&prefill, &asked, tokens, &TransferParams::ask_prefill());
    assert_eq!(prefill.connector.get_num_new_matched_tokens(&asked, 0), Matched::default());
    let nothing = Allocation { fill: lists(&[]), computed: 0, external: 0 };
    prefill.connector.update_state_after_alloc(&asked, nothing).unwrap();
    prefill.step();
    prefill.compute(9, &here, tokens);
    let finished = prefill.connector.request_finished(&asked, ending(&here, tokens));
    assert!(finished.delay_free, "{finished:?}");
    let params = finished.params.unwrap();

    arrive(&decode, &given, tokens, &params);
    let matched = decode.connector.get_num_new_matched_tokens(&given, BLOCK);
    assert_eq!(matched, Matched { tokens: 2 * BLOCK, asynchronous: true });
    let allocation = Allocation { fill: lists(&there), computed: BLOCK, external: matched.tokens };
    decode.connector.update_state_after_alloc(&given, allocation).unwrap();
    decode.connector.step();
    assert_eq!(decode.connector.outcomes(), [], "nothing is loaded before the workers start");
    decode.ranks.iter().for_each(|rank| rank.start_load_kv());

    block_on(decode.connector.outcomes_ready());
    assert_eq!(
        decode.connector.outcomes(),
        [Outcome::Loaded { request: given.clone(), computed: tokens }]
    );
    assert_eq!(decode.wrong(9, &[63, 6, 5], BLOCK..tokens), 0);
    decode.connector.request_finished(&given, ending(&[63, 6, 5], tokens));
    // The engine of the prefill sleeps: the release needs no step.
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(
        prefill.connector.outcomes(),
        [Outcome::Free { request: asked, kept: Kept::Request }]
    );
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

#[test]
fn a_request_without_anything_to_load_is_not_remembered() {
    let engine = Engine::new("engine", "{}", 1);
    let request: RequestId = "r".into();
    let arrival = Arrival { request: &request, prompt_tokens: 5, params: None, deadline: None };
    engine.connector.on_new_request(arrival).unwrap();
    assert_eq!(engine.connector.get_num_new_matched_tokens(&request, 0), Matched::default());
    engine.step();
    let finished = engine.connector.request_finished(&request, ending(&[1], 5));
    assert!(!finished.delay_free && finished.params.is_none());
    assert!(engine.connector.is_idle());
}
