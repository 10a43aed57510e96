//! Ranks that give their caches back, and register others.

use std::time::{Duration, Instant};

use kvx_connector::Released;
use kvx_testkit::Child;
use kvx_vllm::engine::LoadFailure;

use super::fleet::{Fleet, extra, heard, path, rank, rank_of};
use super::rank::VARIABLE;
use crate::runtime::rig::{BLOCK, BLOCKS, Engine, LIMIT, builder};

/// Tests that run over each backend.
pub(crate) const WITH_LOADS: &[(&str, fn(&str))] = &[
    ("all_ranks_register_other_blocks_anew", all_ranks_register_other_blocks_anew),
    ("a_rank_alone_registers_anew_under_a_lease", a_rank_alone_registers_anew_under_a_lease),
    ("a_decode_rank_registers_anew", a_decode_rank_registers_anew),
    (
        "nothing_is_pushed_of_caches_that_were_given_back",
        nothing_is_pushed_of_caches_that_were_given_back,
    ),
    ("caches_that_are_read_are_given_back_later", caches_that_are_read_are_given_back_later),
];

pub(crate) const CASES: &[(&str, fn(&str))] = &[
    ("a_rank_that_has_no_caches_gives_none_back", a_rank_that_has_no_caches_gives_none_back),
    (
        "a_rank_that_is_killed_as_it_gives_back_is_lost",
        a_rank_that_is_killed_as_it_gives_back_is_lost,
    ),
    (
        "a_rank_that_is_stopped_as_it_gives_back_is_lost",
        a_rank_that_is_stopped_as_it_gives_back_is_lost,
    ),
    (
        "an_engine_that_stands_still_is_waited_for_in_vain",
        an_engine_that_stands_still_is_waited_for_in_vain,
    ),
    (
        "the_deadline_of_the_group_is_not_of_later_caches",
        the_deadline_of_the_group_is_not_of_later_caches,
    ),
    ("one_rank_cannot_register_other_blocks", one_rank_cannot_register_other_blocks),
];

const GIVE_BACK: &str = "give_back 10000";
const GIVEN_BACK: &str = "given back";

fn register(fleet: &mut Fleet, rank: usize, blocks: u32) {
    assert_eq!(fleet.ask_one(rank, &format!("register {blocks}")), "ready");
}

fn give_back(fleet: &mut Fleet, rank: usize) {
    assert_eq!(fleet.ask_one(rank, GIVE_BACK), GIVEN_BACK);
}

/// Loads a block of a request from one fleet to the other. If a prefill registers again and again,
/// a decode asks it again only after a while.
fn arrives(prefill: &mut Fleet, decode: &mut Fleet, request: u16, block: u32) {
    prefill.compute(request, &[block], BLOCK);
    let (lease, params) = prefill.publish(&format!("p{request}"), &[block], BLOCK).unwrap();
    let until = Instant::now() + Duration::from_secs(4);
    let fetch = |at: u32| decode.fetch(&format!("d{request}-{at}"), &params, &[1], LIMIT).join();
    for at in 0.. {
        match fetch(at) {
            Ok(_) => break,
            Err(error) => {
                let early = matches!(&error.failure, LoadFailure::Handshake(why) if why.contains("kvx asks it again"));
                assert!(early && Instant::now() < until, "{error}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    assert_eq!(decode.wrong(request, &[1], 0..BLOCK), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
}

/// Checks that nothing can be published.
fn refused(prefill: &Fleet) {
    let error = prefill.publish("refused", &[5], BLOCK).map(drop).unwrap_err();
    assert!(error.to_string().contains("has given its caches back"), "{error}");
}

// vLLM 10, 39: all ranks of an engine release their caches and register new ones with another
//     number of blocks
fn all_ranks_register_other_blocks_anew(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 2));
    arrives(&mut prefill, &mut decode, 1, 5);
    for round in 1..=2 {
        let blocks = BLOCKS << round;
        for rank in [1, 0] {
            give_back(&mut prefill, rank);
            refused(&prefill);
            give_back(&mut prefill, rank);
        }
        register(&mut prefill, 0, blocks);
        refused(&prefill);
        register(&mut prefill, 1, blocks);
        arrives(&mut prefill, &mut decode, 1 + round, blocks - 1);
        let error = prefill.publish("beyond", &[blocks], BLOCK).map(drop).unwrap_err();
        assert!(error.to_string().contains("beyond the registered caches"), "{error}");
    }
    prefill.end();
    decode.end();
}

fn a_rank_alone_registers_anew_under_a_lease(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    arrives(&mut prefill, &mut decode, 1, 4);
    prefill.compute(2, &[5], BLOCK);
    let (lease, params) = prefill.publish("kept", &[5], BLOCK).unwrap();
    give_back(&mut prefill, 0);
    let error = decode.fetch("early", &params, &[1], Duration::from_secs(3)).join().unwrap_err();
    assert_eq!(error.invalid, [1], "{error}");
    register(&mut prefill, 0, BLOCKS);
    // The published block has other contents on that rank now.
    decode.fetch("late", &params, &[1], Duration::from_secs(3)).join().unwrap_err();
    arrives(&mut prefill, &mut decode, 3, 6);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Expired);
    // Both ranks still share the generations, so readers notice blocks that were taken back.
    prefill.compute(4, &[7], BLOCK);
    let (lease, params) = prefill.publish("taken back", &[7], BLOCK).unwrap();
    drop(lease);
    decode.fetch("stale", &params, &[1], LIMIT).join().unwrap_err();
    prefill.end();
    decode.end();
}

fn a_decode_rank_registers_anew(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    arrives(&mut prefill, &mut decode, 1, 4);
    prefill.compute(2, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    give_back(&mut decode, 1);
    let error = decode.fetch("refused", &params, &[1], LIMIT).join().unwrap_err();
    for words in ["rank pp 0 tp 1 (", ") has given its caches back"] {
        assert!(error.to_string().contains(words), "{error}");
    }
    register(&mut decode, 1, BLOCKS);
    arrives(&mut prefill, &mut decode, 3, 6);
    prefill.end();
    decode.end();
}

fn nothing_is_pushed_of_caches_that_were_given_back(backend: &str) {
    let pushing = |engine, tp| Fleet::of(Engine::push_builder(engine, &extra(backend)), engine, tp);
    let (mut prefill, mut decode) = (pushing("prefill", 2), pushing("decode", 1));
    let publish = |prefill: &mut Fleet, request: &str, number: u16| {
        prefill.compute(number, &[5], BLOCK);
        prefill.publish(request, &[5], BLOCK).unwrap()
    };
    let (lease, params) = publish(&mut prefill, "early", 1);
    give_back(&mut prefill, 0);
    register(&mut prefill, 0, BLOCKS);
    decode.fetch("early", &params, &[1], Duration::from_secs(2)).join().unwrap_err();
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    let (lease, params) = publish(&mut prefill, "late", 2);
    decode.fetch("late", &params, &[1], LIMIT).join().unwrap();
    assert_eq!(decode.wrong(2, &[1], 0..BLOCK), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    prefill.end();
    decode.end();
}

/// A reader is stopped in the middle of a load.
fn caches_that_are_read_are_given_back_later(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    arrives(&mut prefill, &mut decode, 1, 4);
    prefill.compute(2, &[5], BLOCK);
    let (lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    decode.ranks[0].stop().unwrap_or_else(|why| panic!("{why}"));
    let fetch = decode.fetch("d", &params, &[1], LIMIT);
    let fetch = fetch.wait_blocking(Duration::from_millis(200)).expect_err("its rank stands still");
    let began = Instant::now();
    let said = prefill.ask_one(0, "give_back 500");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    // Over TCP only the rank itself touches its memory.
    match backend {
        "SHM" => assert!(said.starts_with("StillShared: "), "{said}"),
        _ => assert_eq!(said, GIVEN_BACK),
    }
    refused(&prefill);
    decode.ranks[0].go_on().unwrap_or_else(|why| panic!("{why}"));
    give_back(&mut prefill, 0);
    // The block has arrived whole, or its load has failed.
    if fetch.join().is_ok() {
        assert_eq!(decode.wrong(2, &[1], 0..BLOCK), 0);
    }
    assert!(lease.wait_blocking(LIMIT).unwrap().is_free());
    register(&mut prefill, 0, BLOCKS);
    arrives(&mut prefill, &mut decode, 3, 6);
    prefill.end();
    decode.end();
}

fn a_rank_that_has_no_caches_gives_none_back(backend: &str) {
    let (mut prefill, whole) = Fleet::awaiting("prefill", backend, 1, LIMIT);
    prefill.ranks.push(rank_of(&prefill.path, 0, 1, 0));
    assert_eq!(heard(&prefill.ranks[0]), "joined");
    give_back(&mut prefill, 0);
    register(&mut prefill, 0, BLOCKS);
    whole.wait_blocking(LIMIT).unwrap();
    let mut decode = Fleet::new("decode", backend, 1);
    arrives(&mut prefill, &mut decode, 1, 5);
    let said = prefill.ask_one(0, "register 64");
    assert!(said.contains("give them back first"), "{said}");
    prefill.end();
    decode.end();
}

/// Starts a prefill whose first rank, to give its caches back, waits for a stopped decode.
fn as_it_gives_back(backend: &str) -> (Fleet, Fleet) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    arrives(&mut prefill, &mut decode, 1, 4);
    decode.ranks[0].stop().unwrap_or_else(|why| panic!("{why}"));
    prefill.ranks[0].say(GIVE_BACK).unwrap_or_else(|why| panic!("{why}"));
    let until = Instant::now() + LIMIT;
    while prefill.publish("look", &[5], BLOCK).is_ok() {
        assert!(Instant::now() < until, "the engine does not learn of it");
        std::thread::sleep(Duration::from_millis(10));
    }
    refused(&prefill);
    (prefill, decode)
}

fn not_there(prefill: &Fleet, within: Duration) {
    let until = Instant::now() + within;
    loop {
        let error = prefill.publish("look", &[5], BLOCK).map(drop).unwrap_err();
        if error.to_string().contains("a rank of this engine is missing") {
            return;
        }
        assert!(Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn a_rank_that_is_killed_as_it_gives_back_is_lost(backend: &str) {
    let (mut prefill, decode) = as_it_gives_back(backend);
    prefill.ranks[0].kill().unwrap_or_else(|why| panic!("{why}"));
    not_there(&prefill, LIMIT);
    decode.ranks[0].go_on().unwrap_or_else(|why| panic!("{why}"));
    prefill.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    decode.end();
}

fn a_rank_that_is_stopped_as_it_gives_back_is_lost(backend: &str) {
    let (mut prefill, decode) = as_it_gives_back(backend);
    prefill.ranks[0].stop().unwrap_or_else(|why| panic!("{why}"));
    // The other rank is not delayed.
    decode.ranks[0].go_on().unwrap_or_else(|why| panic!("{why}"));
    give_back(&mut prefill, 1);
    register(&mut prefill, 1, BLOCKS * 2);
    not_there(&prefill, Duration::from_secs(15));
    let began = Instant::now();
    let error =
        prefill.connector.shutdown(Duration::from_secs(1)).wait_blocking(LIMIT).unwrap_err();
    assert_eq!(error.kind(), kvx_core::ErrorKind::StillShared, "{error}");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    decode.end();
}

fn an_engine_that_stands_still_is_waited_for_in_vain(_: &str) {
    let path = path("still");
    let mut engine = Child::start_self(VARIABLE, &path.display().to_string()).unwrap();
    let mut rank = rank(&path, 0, 1);
    assert_eq!([heard(&engine), heard(&rank)], ["whole", "ready"]);
    engine.stop().unwrap_or_else(|why| panic!("{why}"));
    let mut ask = |line: &str| {
        rank.say(line).unwrap_or_else(|why| panic!("{why}"));
        heard(&rank)
    };
    let said = ask("give_back 500");
    assert!(
        said.starts_with("TimedOut: ") && said.contains("the engine did not confirm it"),
        "{said}"
    );
    let said = ask("give_back 100");
    assert!(said.starts_with("TimedOut: "), "{said}");
    engine.go_on().unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(
        [ask(GIVE_BACK), ask(GIVE_BACK), ask("register 128")],
        [GIVEN_BACK, GIVEN_BACK, "ready"]
    );
    engine.kill().unwrap_or_else(|why| panic!("{why}"));
    std::fs::remove_file(path).unwrap();
}

fn the_deadline_of_the_group_is_not_of_later_caches(backend: &str) {
    let deadline = Instant::now() + Duration::from_secs(3);
    let built = builder("prefill", &extra(backend));
    let (mut prefill, whole) = Fleet::awaited(built, "prefill", 1, Duration::from_secs(3));
    prefill.ranks.push(rank(&prefill.path, 0, 1));
    whole.wait_blocking(LIMIT).unwrap();
    assert_eq!(heard(&prefill.ranks[0]), "ready");
    give_back(&mut prefill, 0);
    std::thread::sleep(
        deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(300),
    );
    refused(&prefill);
    register(&mut prefill, 0, BLOCKS);
    let mut decode = Fleet::new("decode", backend, 1);
    arrives(&mut prefill, &mut decode, 1, 5);
    prefill.end();
    decode.end();
}

fn one_rank_cannot_register_other_blocks(backend: &str) {
    let mut prefill = Fleet::new("prefill", backend, 2);
    give_back(&mut prefill, 0);
    let said = prefill.ask_one(0, "register 32");
    assert!(
        said.contains("rank pp 0 tp 0 has 32 logical blocks, another rank of this engine 64"),
        "{said}"
    );
    not_there(&prefill, LIMIT);
}
