//! MooncakeConnector: a decode finds a prefill through its bootstrap server and asks, and the
//! prefill writes.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kvx_connector::{Decode, LoadError, Loaded, Prefill, Released};
use kvx_core::ErrorKind;
use kvx_testkit::{free_port, test};
use kvx_vllm::engine::{
    Allocation, Arrival, Ending, Finished, Kept, NotLoaded, Outcome, RequestId, Status,
};
use kvx_vllm::params::{MooncakeLeg, MooncakeParams, MooncakeTransferId, TransferParams};
use serde_json::json;

use super::rig::{BLOCK, Engine, LIMIT, SIZES, lists, moves_prompts};

#[test]
fn a_prompt_is_written_to_the_decode_that_asks() {
    moves_prompts(Engine::mooncake, "d", "SHM", (1, 1));
    moves_prompts(Engine::mooncake, "d", "TCP", (1, 1));
}

#[test]
fn heads_are_written_to_their_workers_whatever_the_numbers_of_them() {
    for sizes in SIZES {
        moves_prompts(Engine::mooncake, "d", "TCP", sizes);
    }
}

#[test]
fn a_decode_with_a_cached_prefix_is_written_the_rest() {
    let (prefill, decode) =
        (Engine::mooncake("prefill", "{}", 1), Engine::mooncake("decode", "{}", 1));
    let tokens = 3 * BLOCK;
    prefill.compute(5, &[1, 2, 3], tokens);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1, 2, 3]), tokens).unwrap();
    decode.compute(5, &[8], BLOCK);
    let fetch = Decode::new(&decode.connector).fetch("r", &params, BLOCK, lists(&[20, 10]), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: BLOCK..tokens });
    assert_eq!(
        (decode.wrong(5, &[8, 20, 10], 0..tokens), lease.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
}

#[test]
fn a_load_that_is_given_up_frees_both_sides_at_once() {
    given_up(&Engine::mooncake("prefill", "{}", 1), &Engine::mooncake("decode", "{}", 1));
}

/// The prefill gives up before it is asked, then the decode does.
fn given_up(prefill: &Engine, decode: &Engine) {
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    drop(lease);
    let fetch = Decode::new(&decode.connector).fetch("r", &params, 0, lists(&[1]), LIMIT);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert!(error.to_string().contains("without the blocks of that transfer"), "{error}");
    assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Free);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("s", lists(&[1]), BLOCK).unwrap();
    let held = Decode::new(&decode.connector).fetch("s", &params, 0, lists(&[1]), LIMIT).cancel();
    assert_eq!(held.wait_blocking(LIMIT).unwrap(), Released::Free);
    assert_eq!(
        lease.wait_blocking(Duration::from_secs(5)).unwrap(),
        Released::Fetched,
        "the decode has let go"
    );
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

/// Loads a block that a prefill publishes.
fn load(prefill: &Engine, decode: &Engine, request: &str) -> Result<Loaded, LoadError> {
    let (lease, params) =
        Prefill::new(&prefill.connector).publish(request, lists(&[1]), BLOCK).unwrap();
    let loaded =
        Decode::new(&decode.connector).fetch(request, &params, 0, lists(&[2]), LIMIT).join();
    if loaded.is_ok() {
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    }
    loaded
}

// vLLM 56: workers register again with a bootstrap server that was down or restarted
#[test]
fn a_bootstrap_server_that_is_down_or_restarted_costs_what_asks_it_then_and_nothing_else() {
    let port = free_port(0).unwrap();
    let external = format!(r#"{{"bootstrap_server_address": "127.0.0.1:{port}"}}"#);
    let prefill = Engine::mooncake("prefill", &external, 1);
    let (decode, other) = (Engine::mooncake("decode", "{}", 1), Engine::mooncake("other", "{}", 1));
    assert_eq!(prefill.connector.address().port, port);
    let error = load(&prefill, &decode, "early").unwrap_err();
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}: nobody listens")), "{error}");
    assert!(error.held.is_empty());
    // An engine without caches serves as a bootstrap server only.
    let server =
        || Engine::mooncake_at("server", "kv_producer", "{}", port).build_blocking().unwrap();
    let loads_in_time = |decode: &Engine, request: &str| {
        let until = Instant::now() + LIMIT;
        (0..).map(|round| load(&prefill, decode, &format!("{request}-{round}"))).find_map(
            |loaded| match loaded {
                Ok(loaded) => Some(loaded),
                Err(error) => {
                    assert!(Instant::now() < until, "{error}");
                    std::thread::sleep(Duration::from_millis(50));
                    None
                }
            },
        )
    };
    let first = server();
    assert_eq!(loads_in_time(&decode, "up"), Some(Loaded { tokens: 0..BLOCK }));
    first.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    // A decode that has asked before does not need the server any more.
    assert_eq!(load(&prefill, &decode, "known").unwrap(), Loaded { tokens: 0..BLOCK });
    load(&prefill, &other, "unknown").unwrap_err();
    let again = server();
    assert_eq!(
        loads_in_time(&other, "again"),
        Some(Loaded { tokens: 0..BLOCK }),
        "the workers have registered anew"
    );
    again.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

// vLLM 56, 58: a bootstrap port that is in use, and a leg that contradicts `kv_role`, are rejected
#[test]
fn a_port_that_is_taken_and_legs_of_the_other_role_are_refused_in_words() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Engine::mooncake_at("p", "kv_producer", "{}", port).build_blocking().unwrap_err();
    assert!(
        error.kind() == ErrorKind::Exhausted
            && error.to_string().contains("VLLM_MOONCAKE_BOOTSTRAP_PORT"),
        "{error}"
    );
    let builder = |role| Engine::mooncake_at(role, role, "{}", port);
    // A consumer listens nowhere.
    let consumer = Engine::of(builder("kv_consumer"), 1);
    let producer = Engine::of(builder("kv_producer").any_port(), 1);
    let (lease, params) =
        Prefill::new(&producer.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    let error = Decode::new(&producer.connector)
        .fetch("own", &params, 0, lists(&[2]), LIMIT)
        .join()
        .unwrap_err();
    assert!(error.to_string().contains("kv_role is kv_producer"), "{error}");
    let error = Prefill::new(&consumer.connector).publish("r", lists(&[1]), BLOCK).unwrap_err();
    assert!(error.to_string().contains("kv_role is kv_consumer"), "{error}");
    let error = Decode::new(&consumer.connector).fetch(
        "r",
        &TransferParams::ask_prefill(),
        0,
        lists(&[2]),
        LIMIT,
    );
    assert!(error.join().is_err());
    let fetch = Decode::new(&consumer.connector).fetch("r", &params, 0, lists(&[2]), LIMIT);
    assert_eq!(fetch.join().unwrap(), Loaded { tokens: 0..BLOCK });
    lease.wait_blocking(LIMIT).unwrap();
}

// vLLM 57, 60: a step loop completes a transfer whichever leg is first
#[test]
fn parameters_are_those_that_routers_write_and_a_step_loop_takes_them_in_either_order() {
    let (prefill, decode) =
        (Engine::mooncake("prefill", "{}", 2), Engine::mooncake("decode", "{}", 2));
    let tokens = 2 * BLOCK;
    for decode_first in [true, false] {
        let transfer = format!("xfer-{decode_first}");
        let (asked, given): (RequestId, RequestId) = ("p-1".into(), "d-1".into());
        let arrive = |engine: &Engine, request: &RequestId, leg| {
            let params = MooncakeParams::new(MooncakeTransferId::new(&*transfer).unwrap(), leg)
                .to_value()
                .unwrap();
            let params = TransferParams::from_value(&params).unwrap();
            let arrival =
                Arrival { request, prompt_tokens: tokens, params: Some(&params), deadline: None };
            engine.connector.on_new_request(arrival).unwrap();
        };
        let publish = || {
            arrive(&prefill, &asked, MooncakeLeg::Prefill);
            prefill.step();
            prefill.compute(3, &[1, 2], tokens);
            let (status, blocks) = (Status::LengthCapped, lists(&[1, 2]));
            let ending = Ending { status, blocks, computed: tokens, cached: None, reference: None };
            let Finished { delay_free, params, .. } =
                prefill.connector.request_finished(&asked, ending);
            assert!(
                delay_free && params.is_none(),
                "the router already knows the parameters of a decode"
            );
            prefill.step();
        };
        let ask = || {
            let address = prefill.connector.address();
            let leg = MooncakeLeg::Decode {
                remote_engine_id: prefill.connector.engine_id().as_str().into(),
                remote_bootstrap_addr: format!("http://{}:{}", address.host, address.port),
            };
            arrive(&decode, &given, leg);
            let external = decode.connector.get_num_new_matched_tokens(&given, 0).tokens;
            assert_eq!(external, tokens);
            let allocation = Allocation { fill: lists(&[6, 5]), computed: 0, external };
            decode.connector.update_state_after_alloc(&given, allocation).unwrap();
            decode.step();
        };
        if decode_first {
            ask();
            assert!(
                !decode.connector.outcomes_ready_blocking(Duration::from_millis(100)),
                "it waits, and delays no other request"
            );
            publish();
        } else {
            publish();
            ask();
        }
        assert!(decode.connector.outcomes_ready_blocking(LIMIT));
        let loaded = Outcome::Loaded { request: given.clone(), computed: tokens };
        assert_eq!(decode.connector.outcomes(), [loaded]);
        assert_eq!(decode.wrong(3, &[6, 5], 0..tokens), 0);
        decode.compute(9, &[6, 5], tokens);
        decode.connector.request_finished(&given, Ending::aborted());
        assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
        let free = Outcome::Free { request: asked.clone(), kept: Kept::Request };
        assert_eq!(prefill.connector.outcomes(), [free]);
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
    // Parameters of a NixlConnector name no transfer.
    let request = "n".into();
    let params = TransferParams::from_value(&json!({"do_remote_decode": true})).unwrap();
    let arrival =
        Arrival { request: &request, prompt_tokens: 1, params: Some(&params), deadline: None };
    let refused = prefill.connector.on_new_request(arrival).unwrap_err();
    assert!(
        matches!(&refused, NotLoaded::Params(_)) && refused.to_string().contains("transfer_id"),
        "{refused}"
    );
}

#[test]
fn caches_that_are_given_back_and_registered_anew_are_asked_for_anew() {
    let (mut prefill, mut decode) =
        (Engine::mooncake("prefill", "{}", 1), Engine::mooncake("decode", "{}", 1));
    for round in 0..3 {
        let request = format!("r{round}");
        prefill.compute(round, &[1], BLOCK);
        assert_eq!(load(&prefill, &decode, &request).unwrap(), Loaded { tokens: 0..BLOCK });
        assert_eq!(decode.wrong(round, &[2], 0..BLOCK), 0);
        match round {
            0 => prefill.register_anew(),
            _ => decode.register_anew(),
        }
    }
    decode.end();
    prefill.end();
}

/// Starts an engine with the protocol before vLLM 0.16.
fn older(engine: &str, extra: &str, tp: u32) -> Engine {
    let mut extra: serde_json::Value = serde_json::from_str(extra).unwrap();
    extra["kv_compat"] = "0.11".into();
    Engine::mooncake(engine, &extra.to_string(), tp)
}

// vLLM 58: before 0.16: kvx engines with several ranks transfer prompts over sockets
#[test]
fn before_0_16_a_prompt_is_written_to_the_decode_that_asks_without_a_bootstrap_server() {
    for (backend, sizes) in [("SHM", (1, 1)), ("TCP", (1, 1)), ("TCP", (2, 2))] {
        let params = moves_prompts(older, "d", backend, sizes);
        let told = params.to_value(Default::default()).unwrap();
        assert!(told["remote_host"].is_string() && told["remote_port"].is_number(), "{told}");
        assert!(told.get("remote_bootstrap_addr").is_none() && told.get("transfer_id").is_none());
    }
}

#[test]
fn before_0_16_other_sizes_are_refused_and_both_sides_are_free() {
    for (from, to) in [(2, 1), (1, 2)] {
        let (prefill, decode) = (older("prefill", "{}", from), older("decode", "{}", to));
        let (lease, params) =
            Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
        let fetch = Decode::new(&decode.connector).fetch("r", &params, 0, lists(&[2]), LIMIT);
        let error = fetch.join().unwrap_err();
        let words = error.to_string();
        assert!(
            words.contains("tensor-parallel size") || words.contains("nobody listens"),
            "{words}"
        );
        assert!(error.held.is_empty() || error.held.wait_blocking(LIMIT).is_ok());
        drop(lease);
        decode.end();
        prefill.end();
    }
}

#[test]
fn before_0_16_a_load_that_is_given_up_frees_both_sides_at_once() {
    given_up(&older("prefill", "{}", 1), &older("decode", "{}", 1));
}
