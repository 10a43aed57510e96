//! Loads between engines of any number of ranks.

use std::sync::Arc;

use kvx_connector::nixl::NixlPeer;
use kvx_connector::{Connector, ConnectorBuilder, Decode, Released, Version, probe};
use kvx_core::{Agent, Memory, Op, Place as _, Plan, Region, Span};
use kvx_vllm::engine::{Allocation, Arrival, LoadFailure, Outcome, RequestId, WorkerRank};
use kvx_vllm::wire::nixl::{BUCKET_LEN, GENERATIONS_REGION, LeaseKey};

use super::fleet::{Fleet, extra, group, heard, path, rank};
use crate::runtime::rig::{self, BLOCK, BLOCKS, LIMIT, Part, block_on, lists};

pub(crate) const CASES: &[(&str, fn(&str))] = &[
    ("two_ranks_are_read_by_one", two_ranks_are_read_by_one),
    ("one_rank_is_read_by_two", one_rank_is_read_by_two),
    ("two_ranks_are_read_by_two", two_ranks_are_read_by_two),
    ("a_rank_may_be_in_the_engines_process", a_rank_may_be_in_the_engines_process),
    ("a_step_loop_orders_loads_of_joined_ranks", a_step_loop_orders_loads_of_joined_ranks),
];

/// Tests in which the engine shares generation counters with its ranks.
pub(crate) const OF_ONE_HOST: &[(&str, fn(&str))] = &[
    ("blocks_that_were_taken_back_are_noticed", blocks_that_were_taken_back_are_noticed),
    ("nixl_agents_find_the_leases_at_each_rank", nixl_agents_find_the_leases_at_each_rank),
];

/// Sends prompts of up to twenty blocks from one fleet to the other. Both are idle afterwards.
pub(crate) fn prompts_arrive(mut prefill: Fleet, mut decode: Fleet) {
    for (number, tokens) in [(1, 1), (2, BLOCK), (3, 3 * BLOCK + 5), (4, 20 * BLOCK)] {
        let needed = tokens.div_ceil(BLOCK);
        let here: Vec<u32> = (0..needed).map(|at| (at * 7 + u32::from(number)) % BLOCKS).collect();
        let there: Vec<u32> = (0..needed).map(|at| (at * 5 + 3) % BLOCKS).collect();
        prefill.compute(number, &here, tokens);
        // A push finds its load by the request's name.
        let request = format!("r{number}");
        let (lease, params) = prefill.publish(&request, &here, tokens).unwrap();
        let loaded = decode.fetch(&request, &params, &there, LIMIT).join().unwrap();
        assert_eq!(loaded.tokens, 0..tokens);
        let wrong = decode.wrong(number, &there, 0..tokens);
        assert_eq!(wrong, 0, "{} to {}, {tokens} tokens", prefill.tp, decode.tp);
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
    prefill.end();
    decode.end();
}

fn read_by(backend: &str, prefill: u32, decode: u32) {
    prompts_arrive(Fleet::new("prefill", backend, prefill), Fleet::new("decode", backend, decode));
}

// vLLM 8, 15: one decode rank reads from two prefill ranks, each rank in a separate process
fn two_ranks_are_read_by_one(backend: &str) {
    read_by(backend, 2, 1);
}

// vLLM 8, 15: two decode ranks read from one prefill rank, each rank in a separate process
fn one_rank_is_read_by_two(backend: &str) {
    read_by(backend, 1, 2);
}

// vLLM 8, 15: two decode ranks read from two prefill ranks, each rank in a separate process
fn two_ranks_are_read_by_two(backend: &str) {
    read_by(backend, 2, 2);
}

fn a_rank_may_be_in_the_engines_process(backend: &str) {
    let decode = rig::builder("decode", &extra(backend));
    a_prompt_arrives_beside_the_engine(Fleet::new("prefill", backend, 2), decode);
}

/// Sends a prompt from a fleet to a decode of two ranks, of which one runs in the engine's process.
pub(crate) fn a_prompt_arrives_beside_the_engine(mut prefill: Fleet, decode: ConnectorBuilder) {
    let connector = decode.workers(2, 1).build_blocking().unwrap();
    let own = rig::pool(2);
    let first = connector.rank(WorkerRank::default()).unwrap();
    first.register(rig::caches(&own, 2), [Arc::clone(&own)]).unwrap();
    let path = path("decode");
    let whole = group(&connector, &path, LIMIT);
    let mut other = rank(&path, 1, 2);
    whole.wait_blocking(LIMIT).unwrap();
    assert_eq!(heard(&other), "ready");

    let (tokens, here, there) = (3 * BLOCK, [1, 2, 3], [6, 5, 4]);
    prefill.compute(9, &here, tokens);
    let (_lease, params) = prefill.publish("r", &here, tokens).unwrap();
    Decode::new(&connector).fetch("r", &params, 0, lists(&there), LIMIT).join().unwrap();
    let part = Part { pool: &own, tp: 2, rank: 0, blocks: BLOCKS };
    assert_eq!(part.wrong(9, &there, 0..tokens), 0);
    other.say(&format!("wrong 9 6,5,4 0 {tokens}")).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(heard(&other), "0");
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    prefill.end();
}

// vLLM 10, 39: a step's message goes to all joined ranks, and the load needs all of them
fn a_step_loop_orders_loads_of_joined_ranks(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 2));
    let (tokens, here, there) = (3 * BLOCK, [1, 2, 3], [6, 5]);
    prefill.compute(9, &here, tokens);
    let (_lease, params) = prefill.publish("asked", &here, tokens).unwrap();
    let given: RequestId = "given".into();
    let arrival =
        Arrival { request: &given, prompt_tokens: tokens, params: Some(&params), deadline: None };
    decode.connector.on_new_request(arrival).unwrap();
    let matched = decode.connector.get_num_new_matched_tokens(&given, BLOCK);
    let allocation = Allocation { fill: lists(&there), computed: BLOCK, external: matched.tokens };
    decode.connector.update_state_after_alloc(&given, allocation).unwrap();
    decode.connector.step();
    for tp in 0..decode.tp {
        assert_eq!(decode.connector.outcomes(), [], "a load has ended before all ranks started it");
        decode.connector.rank(WorkerRank { pp: 0, tp }).unwrap().start_load_kv();
    }
    block_on(decode.connector.outcomes_ready());
    assert_eq!(decode.connector.outcomes(), [Outcome::Loaded { request: given, computed: tokens }]);
    assert_eq!(decode.wrong(9, &[63, 6, 5], BLOCK..tokens), 0);
    prefill.end();
    decode.end();
}

/// The engine has the generations of all blocks, wherever the ranks run.
fn blocks_that_were_taken_back_are_noticed(backend: &str) {
    taken_back_blocks_are_noticed(backend, |_| ());
}

/// Checks the same where the engine waits until it may reuse the blocks.
pub(crate) fn taken_back_blocks_are_noticed(backend: &str, wait: fn(&Connector)) {
    let (mut prefill, decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5, 6], 2 * BLOCK);
    let (lease, params) = prefill.publish("p", &[5, 6], 2 * BLOCK).unwrap();
    // Another request has the first block, so it stays unchanged.
    let (_shared, theirs) = prefill.publish("q", &[5], BLOCK).unwrap();
    drop(lease);
    wait(&prefill.connector);
    decode.fetch("d1", &theirs, &[1], LIMIT).join().unwrap();
    let error = decode.fetch("d2", &params, &[1, 2], LIMIT).join().unwrap_err();
    // The completion of `d1` may have released the other block by now, or not.
    assert_eq!(error.failure, LoadFailure::Stale);
    assert!(error.invalid.contains(&2), "{:?}", error.invalid);
    prefill.end();
    decode.end();
}

/// Returns whether an agent finds the lease of a request at a NIXL peer.
fn finds(request: &str, peer: &NixlPeer, buckets: &Region) -> bool {
    let leases = peer.peer().region(GENERATIONS_REGION).unwrap();
    let key = LeaseKey::of(request);
    let places = key.offsets(leases.len()).unwrap();
    let span = |(at, remote): (u64, u64)| Span { local: at * BUCKET_LEN, remote, len: BUCKET_LEN };
    let spans: Vec<Span> = (0..).zip(places).map(span).collect();
    let plan = Plan::of_spans(Op::Read, [(buckets.clone(), leases, spans)]).unwrap();
    peer.peer().post(&plan).unwrap().wait_blocking(LIMIT).unwrap();
    let mut read = [0; 2 * BUCKET_LEN as usize];
    buckets.copy_out(0, &mut read).unwrap();
    key.is_in(&read)
}

fn nixl_agents_find_the_leases_at_each_rank(backend: &str) {
    let extra = format!(r#"{{"backends": ["KVX", "{backend}"]}}"#);
    let mut prefill = Fleet::of(rig::builder("prefill", &extra), "prefill", 2);
    let agent = Agent::builder("reader").registry(rig::registry()).build().unwrap();
    let buckets = agent.register("b", Memory::pool(4096).build().unwrap()).unwrap();
    let peers = [0, 1].map(|tp| {
        let rank = WorkerRank { pp: 0, tp };
        let address = prefill.connector.address();
        let told = probe(address, rank, Version::default(), None, LIMIT).unwrap();
        NixlPeer::connect(&agent, &told.metadata.unwrap().agent_metadata).unwrap()
    });
    let found = |request: &str| {
        let [first, second] = [0, 1].map(|at| finds(request, &peers[at], &buckets));
        assert_eq!(first, second, "{request}");
        first
    };
    prefill.compute(1, &[1, 2], 2 * BLOCK);
    let (one, _) = prefill.publish("one", &[1, 2], 2 * BLOCK).unwrap();
    let (other, _) = prefill.publish("other", &[1], BLOCK).unwrap();
    assert!(found("one") && found("other") && !found("third"));
    drop(one);
    assert!(!found("one") && found("other"), "it ends with its lease, not with its blocks");
    drop(other);
    assert!(!found("other"));
    prefill.end();
}
