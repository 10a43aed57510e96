//! Impossible settings, and errors that name the setting to change.

use kvx_connector::nixl::NixlPeer;
use kvx_connector::{Connector, Decode, Group, Prefill, probe};
use kvx_core::{Agent, Error, ErrorKind, Memory, Op};
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{Allocation, Arrival, LoadFailure, NotLoaded, RequestId, WorkerRank};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::CompatibilityFactors;

use super::rig::{BLOCK, BLOCKS, Engine, LIMIT, builder, caches, lists, pool, registry};

fn factors(config: &kvx_vllm::config::KvTransferConfig) -> CompatibilityFactors {
    CompatibilityFactors::from_config(config, "a model")
}

fn says(error: &Error, kind: ErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
}

#[test]
fn caches_that_do_not_fit_are_refused_with_the_call_to_change() {
    let connector = builder("engine", "{}").block_size(2 * BLOCK).build_blocking().unwrap();
    let (pool, rank) = (pool(1), WorkerRank { pp: 0, tp: 0 });
    let register = |connector: &Connector| {
        connector.rank(rank).unwrap().register(caches(&pool, 1), [pool.clone()])
    };
    says(
        &register(&connector).unwrap_err(),
        ErrorKind::Invalid,
        &["ConnectorBuilder::block_size(16)"],
    );
    let connector = builder("engine", "{}").build_blocking().unwrap();
    let elsewhere = super::rig::pool(1);
    let error = connector.rank(rank).unwrap().register(caches(&pool, 1), [elsewhere]).unwrap_err();
    says(&error, ErrorKind::Invalid, &["Rank::register", "layers.0.attn"]);
    register(&connector).expect("a refusal changes nothing");
    says(&register(&connector).unwrap_err(), ErrorKind::Invalid, &["Rank::give_back"]);
    let error = connector.rank(WorkerRank { pp: 0, tp: 1 }).unwrap_err();
    says(&error, ErrorKind::Invalid, &["ConnectorBuilder::workers"]);
}

#[test]
fn blocks_outside_the_caches_are_refused_and_nothing_is_ordered() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let publish =
        |blocks: &[u32]| Prefill::new(&prefill.connector).publish("r", lists(blocks), BLOCK);
    says(&publish(&[BLOCKS]).unwrap_err(), ErrorKind::Invalid, &["beyond"]);
    says(&publish(&[]).unwrap_err(), ErrorKind::Invalid, &["fewer blocks"]);
    let (lease, params) = publish(&[1]).unwrap();
    let id: RequestId = "d".into();
    let arrival =
        Arrival { request: &id, prompt_tokens: BLOCK, params: Some(&params), deadline: None };
    decode.connector.on_new_request(arrival).unwrap();
    let allocate = |fill| {
        let allocation = Allocation { fill, computed: 0, external: BLOCK };
        decode.connector.update_state_after_alloc(&id, allocation).unwrap_err()
    };
    says(&allocate(lists(&[BLOCKS])), ErrorKind::OutOfBounds, &["block 64", "64 blocks"]);
    let two = kvx_vllm::engine::BlockLists::new([vec![1], vec![2]]);
    says(&allocate(two), ErrorKind::Invalid, &["ConnectorBuilder::groups"]);
    drop(lease);
    let (_other, params) =
        Prefill::new(&prefill.connector).publish("s", lists(&[1]), BLOCK).unwrap();
    let fetch = |blocks: &[u32]| {
        let fetch = Decode::new(&decode.connector).fetch("other", &params, 0, lists(blocks), LIMIT);
        fetch.wait_blocking(LIMIT).unwrap()
    };
    for blocks in [&[1, 2][..], &[BLOCKS]] {
        let error = fetch(blocks).unwrap_err();
        assert!(matches!(error.failure, LoadFailure::Refused(_)), "{error}");
    }
    let (_next, params) = publish(&[2]).unwrap();
    let fetch = Decode::new(&decode.connector).fetch("next", &params, 0, lists(&[3]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().expect("all else goes on");
}

#[test]
fn invalid_parameters_of_peers_are_refused() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let names = std::cell::Cell::new(0);
    // A failed load notifies the prefill, so each load has its own request.
    let fetch_with = |change: &dyn Fn(&mut TransferParams)| {
        let name = format!("r{}", names.replace(names.get() + 1));
        let published = Prefill::new(&prefill.connector).publish(&*name, lists(&[1]), BLOCK);
        let (_lease, mut params) = published.unwrap();
        change(&mut params);
        Decode::new(&decode.connector)
            .fetch(&*name, &params, 0, lists(&[3]), LIMIT)
            .wait_blocking(LIMIT)
            .unwrap()
    };
    let with = |change: &dyn Fn(&mut TransferParams)| fetch_with(change).unwrap_err().failure;
    let beyond = with(&|params| params.remote_block_ids = Some(vec![vec![BLOCKS]]));
    assert!(matches!(&beyond, LoadFailure::Refused(why) if why.contains("block 64")), "{beyond:?}");
    let engine = with(&|params| params.remote_engine_id = Some("another".into()));
    assert!(
        matches!(&engine, LoadFailure::Handshake(why) if why.contains("engine id mismatch")),
        "{engine:?}"
    );
    let stripped = with(&|params| params.kvx_block_reference = None);
    assert!(
        matches!(&stripped, LoadFailure::Refused(why) if why.contains("unchanged")),
        "{stripped:?}"
    );
    let nobody = with(&|params| params.do_remote_prefill = false);
    assert!(matches!(nobody, LoadFailure::Refused(_)), "{nobody:?}");
    fetch_with(&|_| ()).expect("all else goes on");
}

#[test]
fn nothing_is_loaded_from_parameters_without_blocks() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (_lease, mut params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    (params.remote_block_ids, params.remote_num_tokens) = (Some(vec![vec![]]), Some(100));
    let fetch =
        Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1, 2, 3, 4, 5, 6, 7]), LIMIT);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert!(
        matches!(&error.failure, LoadFailure::Refused(why) if why.contains("no blocks")),
        "{error}"
    );
}

#[test]
fn a_load_into_windows_alone_reads_them() {
    let windows = |engine| {
        let builder = builder(engine, "{}").groups([Group::Window { tokens: BLOCK }]);
        Engine::of(builder, 1)
    };
    let (prefill, decode) = (windows("prefill"), windows("decode"));
    prefill.compute(7, &[5], BLOCK);
    let (_lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(decode.wrong(7, &[1], 0..BLOCK), 0);
}

#[test]
fn only_hosts_that_are_allowed_are_asked() {
    let prefill = Engine::new("prefill", "{}", 1);
    let (_lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    let decode = Engine::new("decode", r#"{"allowed_hosts": ["10.1.2.3"]}"#, 1);
    let request: RequestId = "d".into();
    let arrival =
        Arrival { request: &request, prompt_tokens: BLOCK, params: Some(&params), deadline: None };
    let refused = decode.connector.on_new_request(arrival).unwrap_err();
    assert_eq!(refused, NotLoaded::HostNotAllowed("127.0.0.1".into()));
    assert!(refused.to_string().contains("allowed_hosts"), "{refused}");
    let decode = Engine::new("decode", r#"{"allowed_hosts": ["10.1.2.3", "127.0.0.1"]}"#, 1);
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[3]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
}

#[test]
fn with_kvx_named_any_peer_gets_what_a_nixl_with_that_backend_loads() {
    let prefill = Engine::new("prefill", r#"{"backends": ["KVX"]}"#, 1);
    prefill.compute(7, &[5], BLOCK);
    let told = |engine: &Engine| {
        let rank = WorkerRank { pp: 0, tp: 0 };
        probe(engine.connector.address(), rank, Version::default(), None, LIMIT).unwrap()
    };
    let metadata = told(&prefill).metadata.unwrap();
    let agent = Agent::builder("reader").registry(registry()).build().unwrap();
    let peer = NixlPeer::connect(&agent, &metadata.agent_metadata).unwrap();
    let (len, stride) = (metadata.block_lens[1], metadata.block_strides[1]);
    let cache = agent.register("kv", Memory::pool(len as usize).build().unwrap()).unwrap();
    let block = metadata.kv_caches_base_addr[1] + 5 * stride;
    let plan = peer.plan(Op::Read, &cache, [(0, block, len)]).unwrap();
    peer.peer().post(&plan).unwrap().wait_blocking(LIMIT).unwrap();
    let mut got = [0; 4];
    cache.copy_out(0, &mut got).unwrap();
    assert_eq!(got, [7, 0, 1, 0], "request, layer, head");
    // Without KVX only kvx peers get metadata, in answers to their own questions.
    assert!(told(&Engine::new("other", "{}", 1)).metadata.unwrap().agent_metadata.is_empty());
}

#[test]
fn a_port_that_is_taken_is_an_error_with_the_variable_and_a_free_one() {
    let taken = Engine::new("first", "{}", 1);
    let port = taken.connector.address().port.to_string();
    let surroundings = kvx_vllm::config::Surroundings::default()
        .variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        .variable("VLLM_NIXL_SIDE_CHANNEL_PORT", &*port);
    let json = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#;
    let second = kvx_vllm::config::KvTransferConfig::from_json(json, &surroundings).unwrap();
    let error =
        Connector::builder(&second, registry(), factors(&second)).build_blocking().unwrap_err();
    says(&error, ErrorKind::Exhausted, &["VLLM_NIXL_SIDE_CHANNEL_PORT", &port]);
}

#[test]
fn unsupported_connectors_are_refused_when_they_are_built() {
    for (connector, extra, words) in [
        (
            "MultiConnector",
            r#"{"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}"#,
            ["one connector", "NixlConnector"],
        ),
        ("MooncakeConnector", r#"{"kvx_digest": true}"#, ["kvx_digest", "NixlConnector"]),
    ] {
        let json = format!(
            r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "kv_connector_extra_config": {extra}}}"#
        );
        let surroundings = kvx_vllm::config::Surroundings::default();
        let other = kvx_vllm::config::KvTransferConfig::from_json(&json, &surroundings).unwrap();
        let error = Connector::builder(&other, registry(), factors(&other))
            .any_port()
            .build_blocking()
            .unwrap_err();
        says(&error, ErrorKind::Unsupported, &words);
    }
    let stages = Engine::mooncake_builder("engine", r#"{"kv_compat": "0.11"}"#).workers(1, 2);
    says(
        &stages.build_blocking().unwrap_err(),
        ErrorKind::Unsupported,
        &["pipeline stages", "kv_compat"],
    );
    let nothing: [Group; 0] = [];
    let error = builder("engine", "{}").groups(nothing).build_blocking().unwrap_err();
    says(&error, ErrorKind::Invalid, &["KV cache group"]);
    let error = builder("engine", "{}").workers(0, 1).build_blocking().unwrap_err();
    says(&error, ErrorKind::Invalid, &["ConnectorBuilder::workers"]);
    assert!(builder("engine", "{}").build_blocking().is_ok());
}
