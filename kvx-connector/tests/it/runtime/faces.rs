//! Engines without a step loop: one publishes, the other fetches.

use std::time::Instant;

use kvx_connector::{Decode, Loaded, Prefill, Released};
use kvx_testkit::test;
use kvx_vllm::engine::{LoadFailure, Then};
use kvx_vllm::params::TransferParams;

use super::rig::{BLOCK, Engine, LIMIT, SIZES, lists, moves_prompts};

// vLLM 21: pools in host memory are registered and read
#[test]
fn a_prompt_is_published_here_and_fetched_there() {
    moves_prompts(Engine::new, "d", "SHM", (1, 1));
    moves_prompts(Engine::new, "d", "TCP", (1, 1));
}

#[test]
fn heads_find_their_workers_whatever_the_numbers_of_them() {
    for sizes in SIZES {
        moves_prompts(Engine::new, "d", "SHM", sizes);
    }
}

#[test]
fn a_lease_that_has_ended_takes_nothing_back_from_the_next_of_its_name() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (here, tokens) = ([3, 9, 4], 2 * BLOCK + 5);
    prefill.compute(1, &here, tokens);
    let publish = || Prefill::new(&prefill.connector).publish("r", lists(&here), tokens).unwrap();
    let fetch = |name: &str, params: &TransferParams| {
        Decode::new(&decode.connector)
            .fetch(name, params, 0, lists(&[7, 1, 30]), LIMIT)
            .join()
            .unwrap()
    };
    let (first, params) = publish();
    fetch("d", &params);
    let until = Instant::now() + LIMIT;
    while !prefill.connector.is_idle() {
        assert!(Instant::now() < until, "the first lease does not end");
        std::thread::yield_now();
    }
    // No decode has asked for the first one yet.
    let (second, params) = publish();
    drop(first);
    assert_eq!(fetch("e", &params), Loaded { tokens: 0..tokens });
    assert_eq!(decode.wrong(1, &[7, 1, 30], 0..tokens), 0);
    assert_eq!(second.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    decode.end();
    prefill.end();
}

#[test]
fn what_the_engine_has_already_is_not_loaded() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let here = [3, 9, 4];
    let tokens = 2 * BLOCK + 5;
    prefill.compute(1, &here, tokens);
    for (at, there) in [&[7, 1, 30][..], &[8, 2], &[5], &[]].into_iter().enumerate() {
        let (lease, params) = Prefill::new(&prefill.connector)
            .publish(format!("r{at}"), lists(&here), tokens)
            .unwrap();
        let cached = 3 - there.len() as u32;
        let computed = (cached * BLOCK).min(tokens);
        let fetch = Decode::new(&decode.connector).fetch(
            format!("d{at}"),
            &params,
            computed,
            lists(there),
            LIMIT,
        );
        assert_eq!(
            fetch.wait_blocking(LIMIT).unwrap().unwrap(),
            Loaded { tokens: computed..tokens }
        );
        let blocks: Vec<u32> = (0..cached).map(|_| 63).chain(there.iter().copied()).collect();
        assert_eq!(decode.wrong(1, &blocks, computed..tokens), 0, "{there:?}");
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched, "{there:?}");
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

/// One block too few would shift the contents by a block. One too many would leave the last one
/// unchanged.
#[test]
fn blocks_that_do_not_match_the_tokens_at_hand_are_refused() {
    for start in [Engine::new, Engine::pushing, Engine::mooncake] {
        let (prefill, decode) = (start("prefill", "{}", 1), start("decode", "{}", 1));
        let (here, tokens) = ([3, 9, 4], 2 * BLOCK + 5);
        prefill.compute(1, &here, tokens);
        let (lease, params) =
            Prefill::new(&prefill.connector).publish("r", lists(&here), tokens).unwrap();
        let fetch = |computed, there: &[u32]| {
            Decode::new(&decode.connector).fetch("r", &params, computed, lists(there), LIMIT).join()
        };
        for (computed, there, word) in [
            (0, &[7, 1][..], "need 3"),
            (0, &[7, 1, 30, 2], "need 3"),
            (BLOCK, &[7, 1, 30], "need 2"),
            (BLOCK, &[30], "need 2"),
            (0, &[], "need 3"),
            (tokens, &[30], "need 0"),
            (BLOCK - 1, &[7, 1, 30], "multiple of the block size"),
            (tokens + 1, &[], "has 37"),
        ] {
            let error = fetch(computed, there).unwrap_err();
            let refused = matches!(&error.failure, LoadFailure::Refused(why) if why.contains(word));
            assert!(refused && error.held.is_empty(), "{computed} {there:?}: {error}");
            assert_eq!(error.then, Then::Recompute { computed }, "the engine keeps what it had");
        }
        // The prefill's lease still holds all its blocks.
        assert_eq!(fetch(0, &[7, 1, 30]).unwrap(), Loaded { tokens: 0..tokens });
        assert_eq!(decode.wrong(1, &[7, 1, 30], 0..tokens), 0);
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    }
}

#[test]
fn errors_of_fetch_and_publish_name_what_the_caller_gave() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let mut nobody = TransferParams::default();
    nobody.do_remote_prefill = true;
    let why = Decode::new(&decode.connector)
        .fetch("d", &nobody, 0, lists(&[1]), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap();
    let why = why.unwrap_err().to_string();
    assert!(why.contains("remote_") && !why.contains("does not fit tokens"), "{why}");
    prefill.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    let why =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap_err().to_string();
    assert!(why.contains("was shut down") && !why.contains("computed here"), "{why}");
}

#[test]
fn sixty_prompts_at_once_are_each_their_own() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let publish = |at: u32| {
        let block = [at % 60];
        prefill.compute(at as u16 % 60, &block, BLOCK);
        let published =
            Prefill::new(&prefill.connector).publish(format!("r{at}"), lists(&block), BLOCK);
        published.unwrap()
    };
    let published: Vec<_> = (0..60).map(publish).collect();
    let fetch = |(at, (_, params)): (usize, &(_, _))| {
        Decode::new(&decode.connector).fetch(
            format!("d{at}"),
            params,
            0,
            lists(&[at as u32]),
            LIMIT,
        )
    };
    let fetched: Vec<_> = published.iter().enumerate().map(fetch).collect();
    for (at, fetch) in fetched.into_iter().enumerate() {
        fetch.wait_blocking(LIMIT).unwrap().unwrap();
        assert_eq!(decode.wrong(at as u16, &[at as u32], 0..BLOCK), 0);
    }
    for (lease, _) in published {
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}
