//! Engines without a step loop: publish here, fetch there.

use std::time::Instant;

use kvx_connector::params::TransferParams;
use kvx_connector::runtime::{Decode, Loaded, Prefill, Released};
use kvx_testkit::test;

use super::rig::{BLOCK, Engine, LIMIT, SIZES, lists, moves_prompts};

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
            .fetch(name, params, lists(&[7, 1, 30]), LIMIT)
            .wait_blocking()
            .unwrap()
    };
    let (first, params) = publish();
    fetch("d", &params);
    let until = Instant::now() + LIMIT;
    while !prefill.connector.is_idle() {
        assert!(Instant::now() < until, "the first lease does not end");
        std::thread::yield_now();
    }
    // Nobody has asked the first one yet.
    let (second, params) = publish();
    drop(first);
    assert_eq!(fetch("e", &params), Loaded { tokens });
    assert_eq!(decode.wrong(1, &[7, 1, 30], 0..tokens), 0);
    assert_eq!(second.wait(LIMIT).unwrap(), Released::Free);
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
        let loaded =
            Decode::new(&decode.connector).fetch(format!("d{at}"), &params, lists(there), LIMIT);
        assert_eq!(loaded.wait(LIMIT).unwrap().unwrap(), Loaded { tokens });
        let cached = 3 - there.len() as u32;
        let blocks: Vec<u32> = (0..cached).map(|_| 63).chain(there.iter().copied()).collect();
        assert_eq!(decode.wrong(1, &blocks, (cached * BLOCK).min(tokens)..tokens), 0, "{there:?}");
        assert_eq!(lease.wait(LIMIT).unwrap(), Released::Free, "{there:?}");
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}

#[test]
fn what_cannot_be_fetched_or_published_is_said_in_the_words_of_the_caller() {
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let mut nobody = TransferParams::default();
    nobody.do_remote_prefill = true;
    let why =
        Decode::new(&decode.connector).fetch("d", &nobody, lists(&[1]), LIMIT).wait(LIMIT).unwrap();
    let why = why.unwrap_err().to_string();
    assert!(why.contains("remote_") && !why.contains("blocks to fill"), "{why}");
    prefill.connector.shutdown(LIMIT).wait(LIMIT).unwrap();
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
        Decode::new(&decode.connector).fetch(format!("d{at}"), params, lists(&[at as u32]), LIMIT)
    };
    let fetched: Vec<_> = published.iter().enumerate().map(fetch).collect();
    for (at, fetch) in fetched.into_iter().enumerate() {
        fetch.wait(LIMIT).unwrap().unwrap();
        assert_eq!(decode.wrong(at as u16, &[at as u32], 0..BLOCK), 0);
    }
    for (lease, _) in published {
        assert_eq!(lease.wait(LIMIT).unwrap(), Released::Free);
    }
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
}
