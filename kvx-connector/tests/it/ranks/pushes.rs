//! NixlPushConnector: the ranks of a prefill write into those of a decode, all of them in processes
//! of their own.

use std::time::{Duration, Instant};

use kvx_connector::Released;
use kvx_vllm::engine::{Allocation, Arrival, Kept, LoadFailure, Outcome, RequestId, WorkerRank};

use super::fleet::{Fleet, extra};
use super::loads::{a_prompt_arrives_beside_the_engine, prompts_arrive};
use crate::runtime::rig::{BLOCK, Engine, LIMIT, lists};

pub(crate) const CASES: &[(&str, fn(&str))] = &[
    (
        "prompts_are_written_whatever_the_numbers_of_ranks",
        prompts_are_written_whatever_the_numbers_of_ranks,
    ),
    (
        "a_rank_may_be_written_to_in_the_engines_process",
        a_rank_may_be_written_to_in_the_engines_process,
    ),
    (
        "no_rank_is_written_to_before_all_have_started",
        no_rank_is_written_to_before_all_have_started,
    ),
    (
        "a_stopped_writer_costs_the_deadline_and_no_block",
        a_stopped_writer_costs_the_deadline_and_no_block,
    ),
    (
        "a_killed_writer_costs_the_deadline_and_no_block",
        a_killed_writer_costs_the_deadline_and_no_block,
    ),
    ("a_dropped_lease_comes_back_by_an_outcome", a_dropped_lease_comes_back_by_an_outcome),
];

fn pushing(engine: &str, backend: &str, tp: u32) -> Fleet {
    Fleet::of(Engine::push_builder(engine, &extra(backend)), engine, tp)
}

fn prompts_are_written_whatever_the_numbers_of_ranks(backend: &str) {
    for (from, to) in [(2, 2), (2, 1), (1, 2)] {
        prompts_arrive(pushing("prefill", backend, from), pushing("decode", backend, to));
    }
}

fn a_rank_may_be_written_to_in_the_engines_process(backend: &str) {
    let decode = Engine::push_builder("decode", &extra(backend));
    a_prompt_arrives_beside_the_engine(pushing("prefill", backend, 2), decode);
}

fn no_rank_is_written_to_before_all_have_started(backend: &str) {
    let (mut prefill, mut decode) = (pushing("prefill", backend, 2), pushing("decode", backend, 2));
    let (tokens, here, there) = (2 * BLOCK, [1, 2], [6, 5]);
    prefill.compute(3, &here, tokens);
    let (lease, params) = prefill.publish("r", &here, tokens).unwrap();
    let request: RequestId = "r".into();
    let arrival =
        Arrival { request: &request, prompt_tokens: tokens, params: Some(&params), deadline: None };
    decode.connector.on_new_request(arrival).unwrap();
    let external = decode.connector.get_num_new_matched_tokens(&request, 0).tokens;
    let allocation = Allocation { fill: lists(&there), computed: 0, external };
    decode.connector.update_state_after_alloc(&request, allocation).unwrap();
    decode.connector.step();
    decode.connector.rank(WorkerRank { pp: 0, tp: 0 }).unwrap().start_load_kv();
    assert!(
        !decode.connector.outcomes_ready_blocking(Duration::from_millis(300)),
        "one rank has not started the load"
    );
    // Each rank has half of four heads, in three layers, of these tokens.
    let untouched = decode.wrong(3, &there, 0..tokens);
    assert_eq!(untouched, 3 * 4 * tokens as usize, "something was written early");
    decode.connector.rank(WorkerRank { pp: 0, tp: 1 }).unwrap().start_load_kv();
    assert!(decode.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(decode.connector.outcomes(), [Outcome::Loaded { request, computed: tokens }]);
    assert_eq!(decode.wrong(3, &there, 0..tokens), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    prefill.end();
    decode.end();
}

/// Loads from a prefill whose second rank is stopped. The blocks are released, get other contents,
/// and keep them.
fn after_a_stopped_writer(backend: &str, then: fn(&mut Fleet)) {
    let (mut prefill, mut decode) = (pushing("prefill", backend, 2), pushing("decode", backend, 2));
    prefill.compute(1, &[5, 7], 2 * BLOCK);
    let (_lease, params) = prefill.publish("r", &[5, 7], 2 * BLOCK).unwrap();
    // The connection exists.
    prefill.compute(4, &[8], BLOCK);
    let (_first, first) = prefill.publish("first", &[8], BLOCK).unwrap();
    decode.fetch("first", &first, &[9], LIMIT).join().unwrap();
    prefill.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    let began = Instant::now();
    let error = decode.fetch("r", &params, &[1, 2], Duration::from_secs(1)).join().unwrap_err();
    assert!(began.elapsed() < LIMIT / 2, "{:?}: {error}", began.elapsed());
    assert!(matches!(error.failure, LoadFailure::NotPushed | LoadFailure::Deadline), "{error}");
    assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Free);
    decode.compute(6, &[1, 2], 2 * BLOCK);
    then(&mut prefill);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(
        decode.wrong(6, &[1, 2], 0..2 * BLOCK),
        0,
        "a prefill has written into blocks that were reused"
    );
    decode.end();
}

fn a_stopped_writer_costs_the_deadline_and_no_block(backend: &str) {
    after_a_stopped_writer(backend, |prefill| {
        prefill.ranks[1].go_on().unwrap_or_else(|why| panic!("{why}"))
    });
}

fn a_killed_writer_costs_the_deadline_and_no_block(backend: &str) {
    after_a_stopped_writer(backend, |prefill| {
        prefill.ranks[1].kill().unwrap_or_else(|why| panic!("{why}"))
    });
}

fn a_dropped_lease_comes_back_by_an_outcome(backend: &str) {
    let mut prefill = pushing("prefill", backend, 2);
    prefill.compute(1, &[5], BLOCK);
    let (lease, _) = prefill.publish("r", &[5], BLOCK).unwrap();
    drop(lease);
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(
        prefill.connector.outcomes(),
        [Outcome::Free { request: "r".into(), kept: Kept::Request }]
    );
    assert!(prefill.connector.is_idle());
    prefill.end();
}
