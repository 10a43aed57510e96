//! Loads and leases that end in other ways: dropped, cancelled, too late, without a peer.

use std::time::{Duration, Instant};

use kvx_connector::{Connector, Decode, Prefill, Released};
use kvx_testkit::test;
use kvx_vllm::engine::{Kept, LoadFailure, Outcome, Then};

use super::rig::{BLOCK, Engine, LIMIT, lists};

/// Waits for the outcome of blocks.
fn outcome(connector: &Connector) -> Outcome {
    assert!(connector.outcomes_ready_blocking(LIMIT), "no outcome in time");
    let mut outcomes = connector.outcomes();
    assert_eq!(outcomes.len(), 1, "{outcomes:?}");
    outcomes.remove(0)
}

fn is_idle_soon(connector: &Connector) -> bool {
    let until = Instant::now() + LIMIT;
    while !connector.is_idle() && Instant::now() < until {
        std::thread::yield_now();
    }
    connector.is_idle()
}

#[test]
fn a_decode_that_comes_after_a_lease_was_dropped_is_refused() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    // Another request has the same block, from the prefix cache, so it stays unchanged.
    let (shared, theirs) =
        Prefill::new(&prefill.connector).publish("s", lists(&[5]), BLOCK).unwrap();
    drop(lease);
    let fetch = Decode::new(&decode.connector).fetch("d1", &theirs, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(shared.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    let fetch = Decode::new(&decode.connector).fetch("d2", &params, 0, lists(&[2]), LIMIT);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert_eq!(
        (error.failure, error.then, error.invalid),
        (LoadFailure::Stale, Then::Fail, vec![2])
    );
    assert!(error.held.is_empty());
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

#[test]
fn a_dropped_fetch_releases_both_sides() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    drop(Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT));
    assert_eq!(outcome(&decode.connector), Outcome::Free { request: "d".into(), kept: Kept::Load });
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r2", lists(&[5]), BLOCK).unwrap();
    let held = Decode::new(&decode.connector).fetch("d2", &params, 0, lists(&[1]), LIMIT).cancel();
    assert_eq!(held.wait_blocking(LIMIT).unwrap(), Released::Free);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    assert!(is_idle_soon(&prefill.connector) && is_idle_soon(&decode.connector));
    assert_eq!(decode.connector.outcomes(), []);
}

#[test]
fn a_fetch_under_a_name_in_use_does_not_affect_the_first_one() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    let error = Prefill::new(&prefill.connector).publish("r", lists(&[6]), BLOCK).unwrap_err();
    assert!(error.to_string().contains("has not ended yet"), "{error}");
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    drop(Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[2]), LIMIT));
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(
        (decode.wrong(1, &[1], 0..BLOCK), lease.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
    assert_eq!(decode.connector.outcomes(), [], "the blocks of the one with the name are not free");
    let (again, _) = Prefill::new(&prefill.connector).publish("r", lists(&[6]), BLOCK).unwrap();
    drop(again);
    assert!(is_idle_soon(&prefill.connector) && is_idle_soon(&decode.connector));
}

#[test]
fn a_fetch_that_never_began_frees_its_blocks_once() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (_lease, mut params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    params.do_remote_prefill = false;
    let held =
        Decode::new(&decode.connector).fetch("cancelled", &params, 0, lists(&[1]), LIMIT).cancel();
    assert!(held.is_empty());
    assert_eq!(decode.connector.outcomes(), [], "the call has said so");
    drop(Decode::new(&decode.connector).fetch("dropped", &params, 0, lists(&[1]), LIMIT));
    assert_eq!(
        outcome(&decode.connector),
        Outcome::Free { request: "dropped".into(), kept: Kept::Load }
    );
}

#[test]
fn blocks_are_free_when_no_decode_comes_and_stay_while_one_waits() {
    let extra = r#"{"kv_lease_duration": 1}"#;
    let (prefill, decode) = (Engine::new("prefill", extra, 1), Engine::new("decode", extra, 1));
    let begun = Instant::now();
    let (lost, _) = Prefill::new(&prefill.connector).publish("nobody", lists(&[1]), BLOCK).unwrap();
    prefill.compute(2, &[2], BLOCK);
    let (wanted, params) =
        Prefill::new(&prefill.connector).publish("wanted", lists(&[2]), BLOCK).unwrap();
    // The request is queued at the decode, whose engine makes no step meanwhile.
    let (queued, id) = (&params, "queued".into());
    let arrival = kvx_vllm::engine::Arrival {
        request: &id,
        prompt_tokens: BLOCK,
        params: Some(queued),
        deadline: None,
    };
    decode.connector.on_new_request(arrival).unwrap();
    assert_eq!(lost.wait_blocking(LIMIT).unwrap(), Released::Expired);
    assert!((1..4).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    let wanted = wanted.wait_blocking(Duration::from_secs(3)).expect_err("its lease is renewed");
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[3]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(
        (decode.wrong(2, &[3], 0..BLOCK), wanted.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
}

#[test]
fn a_load_without_a_peer_fails_in_time_and_the_next_one_works() {
    let extra = r#"{"backends": ["TCP"]}"#;
    let (prefill, decode) = (Engine::new("prefill", extra, 1), Engine::new("decode", extra, 1));
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    prefill.end();
    assert_eq!(
        lease.wait_blocking(LIMIT).unwrap(),
        Released::Free,
        "a shutdown that was proven frees all"
    );
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert!(
        matches!(&error.failure, LoadFailure::Handshake(why) if why.contains("VLLM_NIXL_SIDE_CHANNEL")),
        "{error}"
    );
    assert_eq!(error.then, Then::Fail);
    let again = Engine::new("prefill", extra, 1);
    again.compute(3, &[5], BLOCK);
    let (_lease, params) = Prefill::new(&again.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(decode.wrong(3, &[1], 0..BLOCK), 0);
}

#[test]
fn an_engine_that_comes_back_under_its_name_is_asked_anew() {
    let extra = r#"{"backends": ["TCP"]}"#;
    let decode = Engine::new("decode", extra, 1);
    for life in 0..3 {
        let prefill = Engine::new("prefill", extra, 1);
        prefill.compute(life, &[5], BLOCK);
        let until = Instant::now() + LIMIT;
        // The first loads of each life may use the connection of the life before. A decode asks
        // again under one name after a second at the earliest.
        for attempt in 0.. {
            let name = format!("{life}-{attempt}");
            let (lease, params) =
                Prefill::new(&prefill.connector).publish(&*name, lists(&[5]), BLOCK).unwrap();
            match Decode::new(&decode.connector)
                .fetch(&*name, &params, 0, lists(&[1]), LIMIT)
                .wait_blocking(LIMIT)
                .unwrap()
            {
                Ok(_) => {
                    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
                    break;
                }
                Err(error) => assert!(Instant::now() < until, "life {life}: {error}"),
            }
        }
        assert_eq!(decode.wrong(life, &[1], 0..BLOCK), 0);
        prefill.end();
    }
}

#[test]
fn caches_are_given_back_and_registered_anew() {
    let (mut prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (lease, before) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    let fetch = Decode::new(&decode.connector).fetch("d", &before, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    prefill.register_anew();
    prefill.compute(4, &[5], BLOCK);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
    assert!(params.remote_registration_generation > before.remote_registration_generation);
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap();
    assert_eq!(
        (decode.wrong(4, &[1], 0..BLOCK), lease.wait_blocking(LIMIT).unwrap()),
        (0, Released::Fetched)
    );
}

#[test]
fn the_policy_says_what_becomes_of_a_request_whose_load_failed() {
    let decode = Engine::with_policy("decode", "{}", "recompute", 1);
    let prefill = Engine::new("prefill", "{}", 1);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[5, 6]), 2 * BLOCK).unwrap();
    drop(lease);
    let fetch = Decode::new(&decode.connector).fetch("d", &params, 0, lists(&[1, 2]), LIMIT);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    assert_eq!((error.failure, error.then), (LoadFailure::Stale, Then::Recompute { computed: 0 }));
}

#[test]
fn what_was_published_before_caches_were_given_back_is_not_loaded() {
    for start in [Engine::new, Engine::pushing] {
        let (mut prefill, decode) = (start("prefill", "{}", 2), start("decode", "{}", 1));
        prefill.compute(1, &[5], BLOCK);
        let (_lease, params) =
            Prefill::new(&prefill.connector).publish("r", lists(&[5]), BLOCK).unwrap();
        // The other worker keeps its caches, and so the generations of all blocks.
        prefill.register_one_anew(0);
        let fetch = Decode::new(&decode.connector).fetch(
            "r",
            &params,
            0,
            lists(&[1]),
            Duration::from_secs(3),
        );
        fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    }
}
