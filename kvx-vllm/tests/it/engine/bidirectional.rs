//! A conversation's second turn: the prefill side reads blocks that the decode side still has.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{
    BlockLists, ClockOffset, Ending, Finished, LoadFailure, Outcome, PeerPlan, Settings, Status,
    Then, WorkerRank,
};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::{CompatibilityHash, Expectation, Handshake, Listener, NixlAgentMetadata};

use super::rig::{
    Rig, at, beats, blocks, handshakes, loaded, notes, pairs, plan, prefilled, reads, remote,
    settings,
};

fn both(engine: &str) -> Settings {
    Settings { bidirectional: true, ..settings(engine) }
}

/// Returns a decode engine's answer of a turn: blocks 500 and on, kept until `expires` on its
/// clock.
fn decoded(request: &str, tokens: u32, expires: f64) -> TransferParams {
    let mut from = remote("d", request, blocks(500, tokens), tokens);
    from.expiry_time = Some(expires);
    TransferParams::decoded(from, Version::default())
}

/// Returns a plan for a peer whose clock is 1000 s ahead.
fn clocked() -> PeerPlan {
    PeerPlan { clock: ClockOffset::sampled(at(0.0), at(0.0), 1000.0), ..plan() }
}

fn ends(rig: &mut Rig, now: f64, id: &str, tokens: u32) -> Finished {
    let ending = Ending {
        status: Status::Stopped,
        blocks: BlockLists::single(blocks(100, tokens)),
        computed: tokens,
        cached: None,
        reference: None,
    };
    rig.scheduler.request_finished(at(now), &id.into(), ending)
}

// vLLM 46: a decode's answer carries an expiry time on the decode's clock, at which its blocks are
//     freed
#[test]
fn a_decode_keeps_its_blocks_and_says_until_when() {
    let mut decode = Rig::new(both("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(1.0, &read);
    decode.outcomes(1.0);
    let finished = ends(&mut decode, 2.0, "r", 50);
    assert!(finished.delay_free);
    let params = finished.params.unwrap();
    assert!(params.do_remote_decode && !params.do_remote_prefill);
    assert_eq!(params.remote_blocks_expiry_time, Some(482.0));
    assert_eq!(
        (params.remote_num_tokens, params.remote_block_ids),
        (Some(50), Some(vec![blocks(100, 50)]))
    );
    decode.step(2.0);
    assert_eq!(decode.outcomes(481.0), []);
    assert_eq!(decode.outcomes(482.0).len(), 1, "whether or not a peer has read them");
}

// vLLM 46: a completion may arrive before the decode's worker learns that the decode keeps the
//     blocks
#[test]
fn a_completion_may_overtake_the_word_that_a_decode_keeps_its_blocks() {
    let mut decode = Rig::new(both("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(1.0, &read);
    decode.outcomes(1.0);
    assert!(ends(&mut decode, 2.0, "r", 50).delay_free);
    // The next prefill has the answer before this engine's next step.
    decode.notified(2.0, "p/0", b"r:1");
    assert_eq!(decode.outcomes(2.0), []);
    decode.step(2.5);
    assert_eq!(decode.outcomes(2.5).len(), 1, "the blocks are free at once");
    assert_eq!(decode.metric("vllm:nixl_num_notifications_after_expiry"), 0.0);
}

// vLLM 46: two turns load in both directions, and a rescheduled request is not read again
#[test]
fn two_turns_load_forth_and_back() {
    let mut prefill = Rig::new(both("p"));
    prefill.arrive(0.0, "turn2", 200, &decoded("d-r", 150, 1480.0));
    assert_eq!(prefill.matched(0.0, "turn2", 0), 150);
    prefill.allocate(0.0, "turn2", 100, 0);
    let connection = prefill.step_to_handshake(0.0);
    let actions = prefill.connected(0.0, connection, clocked());
    assert!(beats(&actions).is_empty(), "the decode side gets no heartbeat");
    let read = reads(&actions).remove(0);
    prefill.read_done(1.0, &read);
    assert_eq!(prefill.outcomes(1.0), [loaded("turn2", 150)]);
    // It is not read again when the request is rescheduled, and it is published at its end.
    assert_eq!(prefill.matched(2.0, "turn2", 0), 0);
    let finished = ends(&mut prefill, 3.0, "turn2", 200);
    assert!(finished.params.unwrap().do_remote_prefill);
    // On the decode side, one completion frees the blocks.
    let mut decode = Rig::new(both("d"));
    let first = decode.load_to_read(0.0, "d-r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(0.0, &first);
    decode.outcomes(0.0);
    ends(&mut decode, 0.0, "d-r", 150);
    decode.step(0.0);
    decode.notified(1.0, "p/0", b"d-r:1");
    assert_eq!(decode.outcomes(1.0).len(), 1);
}

// vLLM 46: a prefill's load is capped to the prompt, with a partial last block
#[test]
fn no_more_than_the_prompt_is_fetched_and_the_last_block_may_be_partial() {
    let mut prefill = Rig::new(both("p"));
    prefill.arrive(0.0, "r", 100, &decoded("d-r", 150, 1480.0));
    assert_eq!(prefill.matched(0.0, "r", 16), 84);
    prefill.allocate(0.0, "r", 100, 16);
    let connection = prefill.step_to_handshake(0.0);
    let read = reads(&prefill.connected(0.0, connection, clocked())).remove(0);
    let expected: Vec<_> = (0..6).map(|place| (100 + place, 501 + place)).collect();
    assert_eq!(
        pairs(&read),
        expected,
        "blocks 1 to 6 of the prompt, not the last six of the decode's"
    );
}

// vLLM 46: fewer than 64 remaining tokens are computed instead of loaded
#[test]
fn few_tokens_are_computed_and_the_decode_is_told() {
    let mut prefill = Rig::new(both("p"));
    prefill.arrive(0.0, "few", 100, &decoded("d-few", 79, 1480.0));
    assert_eq!(prefill.matched(0.0, "few", 16), 0, "63 of 64");
    assert_eq!(prefill.matched(0.0, "few", 0), 79);
    prefill.allocate(0.0, "few", 100, 16);
    let connection = prefill.step_to_handshake(0.0);
    assert_eq!(notes(&prefill.connected(0.0, connection, clocked())), [(0, "d-few:1".to_owned())]);
    assert_eq!(prefill.outcomes(0.0), []);
}

// vLLM 46: blocks within 5 s of their expiry are not loaded, and count as expired
#[test]
fn blocks_about_to_expire_are_declined_and_computed() {
    let mut prefill = Rig::new(both("p"));
    prefill.arrive(0.0, "r", 200, &decoded("d-r", 150, 1004.9));
    prefill.allocate(0.0, "r", 100, 0);
    let connection = prefill.step_to_handshake(0.0);
    assert!(reads(&prefill.connected(0.0, connection, clocked())).is_empty());
    let outcomes = prefill.outcomes(0.0);
    let [Outcome::Failed { failure, then, .. }] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(
        (failure, *then),
        (&LoadFailure::Expiring, Then::Recompute { computed: 0 }),
        "under either policy"
    );
    assert_eq!(prefill.metric("vllm:nixl_num_kv_expired_reqs"), 1.0, "a declined offer is counted");
    assert_eq!(prefill.metric("vllm:nixl_num_failed_transfers"), 0.0);
    // Once the peer's clock is known, such an offer is declined at once.
    prefill.arrive(1.0, "s", 200, &decoded("d-s", 150, 1005.9));
    assert_eq!(prefill.matched(1.0, "s", 0), 0);
    prefill.arrive(1.0, "t", 200, &decoded("d-t", 150, 1007.0));
    assert_eq!(prefill.matched(1.0, "t", 0), 150);
}

// vLLM 46: an expiry time refers to the clock that the listener sends, whatever clocks the workers
//     have
#[test]
fn an_expiry_is_on_the_clock_that_the_listener_shows() {
    // The decode's scheduler counts from 5000 s, the prefill's worker from 40 s, and its scheduler
    // from 7 s.
    let mut decode = Rig::new(both("d"));
    let read = decode.load_to_read(5000.0, "d-r", 150, &prefilled("p", "p-r", 150));
    decode.read_done(5000.0, &read);
    decode.outcomes(5000.0);
    let mut params = ends(&mut decode, 5000.0, "d-r", 150).params.unwrap();
    params.remote_host = Some("d.host".into());
    assert_eq!(params.remote_blocks_expiry_time, Some(5480.0));
    let hash = CompatibilityHash::foreign("h");
    let (mut listener, rank) = (Listener::new(hash.clone()), WorkerRank::default());
    let mut metadata = NixlAgentMetadata::new("d", Version::default());
    metadata.block_size = 16;
    listener.publish(rank, &metadata);
    // The prefill's handshake is 470 s later: 10 s remain, and 4 s when it checks.
    let expectation = Expectation::new(Version::default(), "d", hash);
    let mut handshake = Handshake::new(expectation, [rank], (1, 1)).unwrap();
    let request = handshake.request(at(40.0)).unwrap();
    let message = [&b"p"[..], b"", &request];
    let frames: Vec<Vec<u8>> = listener
        .answer(&message, at(5470.0))
        .unwrap()
        .frames()
        .skip(2)
        .map(<[u8]>::to_vec)
        .collect();
    handshake.received(&frames, at(40.0)).unwrap();
    let clock = handshake.finish().unwrap().clock;
    for (worker_now, declined) in [(40.0, false), (46.0, true)] {
        let mut prefill = Rig::new(both("p"));
        prefill.arrive(7.0, "turn2", 200, &params);
        prefill.allocate(7.0, "turn2", 100, 0);
        let meta = prefill.scheduler.build_connector_meta(at(7.0));
        prefill.worker.start_load_kv(at(worker_now), meta);
        let connection = handshakes(&prefill.actions())[0];
        let plan = PeerPlan { clock, ..plan() };
        let actions = prefill.connected(worker_now, connection, plan);
        assert_eq!(reads(&actions).is_empty(), declined, "at {worker_now} s of the worker");
    }
}

// vLLM 46: a full prefix hit skips the checks of the token threshold and the expiry
#[test]
fn a_whole_prompt_in_the_cache_asks_neither_threshold_nor_expiry() {
    let mut prefill = Rig::new(both("p"));
    prefill.arrive(0.0, "r", 160, &decoded("d-r", 150, 1.0));
    prefill.allocate(0.0, "r", 100, 160);
    let connection = prefill.step_to_handshake(0.0);
    assert_eq!(notes(&prefill.connected(0.0, connection, clocked())), [(0, "d-r:1".to_owned())]);
    assert_eq!(prefill.log, [""; 0]);
}

#[test]
fn a_decode_without_a_token_count_is_not_read_from() {
    let mut prefill = Rig::new(both("p"));
    let mut from = remote("d", "d-r", blocks(500, 150), 150);
    from.num_tokens = None;
    prefill.arrive(0.0, "r", 200, &TransferParams::decoded(from, Version::V0_20));
    assert_eq!(prefill.matched(0.0, "r", 0), 0);
}

// vLLM 46: a decode's blocks are not loaded where bidirectional transfer is disabled
#[test]
fn an_offer_of_a_decode_is_ignored_where_it_is_not_switched_on() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "r", 200, &decoded("d-r", 150, 1480.0));
    assert_eq!(prefill.matched(0.0, "r", 0), 0);
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(0.0, &read);
    decode.outcomes(0.0);
    assert!(!ends(&mut decode, 1.0, "r", 50).delay_free);
}
