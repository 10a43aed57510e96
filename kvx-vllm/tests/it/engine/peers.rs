//! Engines that are replaced, restart, register again, or disappear.

use std::time::Duration;

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{
    Connection, FailureKind, HandshakeFailure, LoadFailure, Move, MoveFailure, Outcome, Settings,
    WorkerRank,
};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::{CompatibilityHash, Listener, NixlAgentMetadata};

use super::rig::{
    Rig, at, blocks, disconnects, handshakes, loaded, plan, prefilled, reads, remote, settings,
};

/// Returns parameters of an engine at the address of another one.
fn at_address_of(address: &str, engine: &str, request: &str) -> TransferParams {
    let mut from = remote(engine, request, blocks(500, 40), 40);
    from.host = format!("{address}.host");
    TransferParams::prefilled(from, Version::default())
}

fn registered(generation: u64) -> TransferParams {
    let mut from = remote("p", "p-r", blocks(500, 40), 40);
    from.registration_generation = generation;
    TransferParams::prefilled(from, Version::default())
}

/// Completes a load. Returns the connection, and the actions on the way.
fn load_whole(
    decode: &mut Rig,
    now: f64,
    id: &str,
    params: &TransferParams,
) -> (Connection, Vec<Connection>) {
    decode.load(now, id, 40, params);
    let mut actions = decode.step(now);
    if let [connection] = handshakes(&actions)[..] {
        actions.extend(decode.connected(now, connection, plan()));
    }
    let read = reads(&actions).remove(0);
    actions.extend(decode.read_done(now, &read));
    assert_eq!(decode.outcomes(now), [loaded(id, 40)]);
    (read.connection, disconnects(&actions))
}

fn gone(decode: &mut Rig, now: f64, what: &Move) {
    let failure = MoveFailure {
        kind: FailureKind::TransferFailed,
        settled: true,
        peer_is_gone: true,
        error: "the peer has restarted".into(),
    };
    decode.worker.move_resolved(at(now), what.id, Err(failure));
}

fn no_answer(rig: &mut Rig, now: f64, connection: Connection) {
    rig.worker.connected(
        at(now),
        connection,
        Err(HandshakeFailure { setup: false, error: "no answer".into() }),
    );
}

// vLLM 40: idle engines are forgotten when a new engine connects
#[test]
fn an_idle_engine_is_forgotten_when_a_new_one_comes() {
    let mut decode =
        Rig::new(Settings { engine_ttl: Some(Duration::from_secs(60)), ..settings("d") });
    let (first, _) = load_whole(&mut decode, 0.0, "a", &prefilled("p", "p-a", 40));
    decode.step(1000.0);
    assert_eq!(decode.worker.len(), 1, "an idle engine is kept until another one arrives");
    let (_, forgotten) = load_whole(&mut decode, 1000.0, "b", &prefilled("q", "q-b", 40));
    assert_eq!(forgotten, [first]);
}

// vLLM 40: an engine is kept if no TTL is set, while it is read from, and while heartbeats go to it
#[test]
fn an_engine_that_is_used_or_without_a_ttl_is_not_forgotten() {
    let mut forever = Rig::new(Settings { engine_ttl: None, ..settings("d") });
    load_whole(&mut forever, 0.0, "a", &prefilled("p", "p-a", 40));
    assert_eq!(load_whole(&mut forever, 1e6, "b", &prefilled("q", "q-b", 40)).1, []);

    let mut decode = Rig::new(Settings {
        engine_ttl: Some(Duration::from_secs(60)),
        load_timeout: Duration::from_secs(900),
        ..settings("d")
    });
    decode.load_to_read(0.0, "reading", 40, &prefilled("p", "p-a", 40));
    assert_eq!(
        load_whole(&mut decode, 100.0, "b", &prefilled("q", "q-b", 40)).1,
        [],
        "it is read from"
    );

    let mut decode =
        Rig::new(Settings { engine_ttl: Some(Duration::from_secs(60)), ..settings("d") });
    decode.arrive(0.0, "waiting", 40, &prefilled("p", "p-a", 40));
    let connection = decode.step_to_handshake(0.0);
    decode.connected(0.0, connection, plan());
    for beat in 1..20 {
        decode.step(f64::from(beat) * 5.0);
    }
    assert_eq!(
        load_whole(&mut decode, 100.0, "b", &prefilled("q", "q-b", 40)).1,
        [],
        "it has heartbeats"
    );
}

// vLLM 41: an engine is replaced by a new one at its address after a confirmed handshake; engines
//     at other addresses are kept
#[test]
fn an_engine_at_the_address_of_another_takes_its_place_once_it_is_confirmed() {
    let mut decode = Rig::new(settings("d"));
    let (old, _) = load_whole(&mut decode, 0.0, "a", &at_address_of("h", "old", "a"));
    let (other, _) = load_whole(&mut decode, 0.0, "b", &at_address_of("elsewhere", "other", "b"));
    decode.load(1.0, "c", 40, &at_address_of("h", "new", "c"));
    let connection = decode.step_to_handshake(1.0);
    assert_eq!(decode.worker.len(), 3, "both are kept until the handshake has succeeded");
    assert_eq!(disconnects(&decode.connected(1.0, connection, plan())), [old]);
    assert_ne!(old, other);
}

// vLLM 41: an engine is kept when the handshake with a new one at its address fails
#[test]
fn the_old_engine_stays_when_the_handshake_with_the_new_one_fails() {
    let mut decode = Rig::new(settings("d"));
    let (old, _) = load_whole(&mut decode, 0.0, "a", &at_address_of("h", "old", "a"));
    decode.load(1.0, "b", 40, &at_address_of("h", "new", "b"));
    let connection = decode.step_to_handshake(1.0);
    no_answer(&mut decode, 6.0, connection);
    assert!(disconnects(&decode.actions()).is_empty());
    decode.outcomes(6.0);
    assert_eq!(load_whole(&mut decode, 7.0, "c", &at_address_of("h", "old", "c")).0, old);
}

// vLLM 41: a replaced engine is disconnected after its last read
#[test]
fn a_replaced_engine_goes_with_its_last_read() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "a", 40, &at_address_of("h", "old", "a"));
    let (_, gone) = load_whole(&mut decode, 1.0, "b", &at_address_of("h", "new", "b"));
    assert_eq!(gone, [], "it is read from");
    assert_eq!(disconnects(&decode.read_done(2.0, &read)), [read.connection]);
    assert_eq!(decode.outcomes(2.0), [loaded("a", 40)]);
}

// vLLM 41: a failed connection is not cached: the next request to the engine tries again
#[test]
fn an_engine_that_could_not_be_reached_is_asked_again_by_the_next_request() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "a", 40, &prefilled("p", "p-a", 40));
    let connection = decode.step_to_handshake(0.0);
    no_answer(&mut decode, 5.0, connection);
    assert_eq!(decode.outcomes(5.0).len(), 1);
    decode.load(5.0, "b", 40, &prefilled("p", "p-b", 40));
    let again = decode.step_to_handshake(5.0);
    assert_ne!(again, connection);
}

// vLLM 41: an engine with invalid descriptors is asked for fresh ones under its old id at once,
//     then with a backoff from 1 to 60 s
#[test]
fn an_engine_whose_data_is_wrong_is_asked_anew_at_once_and_then_after_longer_and_longer_waits() {
    let mut decode = Rig::new(settings("d"));
    let mut now = 0.0;
    for (round, wait) in [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0].into_iter().enumerate() {
        let id = format!("r{round}");
        decode.load(now, &id, 40, &prefilled("p", &id, 40));
        let connection = decode.step_to_handshake(now);
        let read = reads(&decode.connected(now, connection, plan())).remove(0);
        gone(&mut decode, now, &read);
        assert_eq!(disconnects(&decode.actions()), [connection], "fresh descriptors each time");
        assert_eq!(decode.outcomes(now).len(), 1);
        if wait == 0.0 {
            continue;
        }
        // During the wait, a request fails at once without a handshake.
        decode.load(now + wait - 0.1, &format!("early{round}"), 40, &prefilled("p", "x", 40));
        assert!(decode.step(now + wait - 0.1).is_empty());
        let outcomes = decode.outcomes(now + wait - 0.1);
        assert!(
            matches!(&outcomes[..], [Outcome::Failed { failure: LoadFailure::Handshake(_), .. }]),
            "{outcomes:?}"
        );
        now += wait;
    }
    // A successful read resets the wait.
    load_whole(&mut decode, now, "good", &prefilled("p", "good", 40));
    decode.load(now, "bad", 40, &prefilled("p", "bad", 40));
    let read = reads(&decode.step(now)).remove(0);
    gone(&mut decode, now, &read);
    decode.actions();
    decode.outcomes(now);
    decode.load(now + 1.0, "next", 40, &prefilled("p", "next", 40));
    decode.step_to_handshake(now + 1.0);
}

#[test]
fn an_engine_that_restarts_is_reached_as_soon_as_it_listens() {
    let mut decode = Rig::new(settings("d"));
    let (_, _) = load_whole(&mut decode, 0.0, "first", &prefilled("p", "first", 40));
    // It disappears, and is contacted while it is down: once after an earlier failed attempt, and
    // once without.
    for round in 0..2 {
        let now = 10.0 * f64::from(round) + 1.0;
        let id = format!("lost{round}");
        decode.load(now, &id, 40, &prefilled("p", &id, 40));
        let read = reads(&decode.step(now)).remove(0);
        gone(&mut decode, now, &read);
        decode.actions();
        decode.outcomes(now);
        for attempt in 0..3 {
            let (now, id) =
                (now + 2.0 + 0.1 * f64::from(attempt), format!("early{round}{attempt}"));
            decode.load(now, &id, 40, &prefilled("p", &id, 40));
            let connection = decode.step_to_handshake(now);
            no_answer(&mut decode, now, connection);
            assert_eq!(decode.outcomes(now).len(), 1);
        }
        let id = format!("back{round}");
        load_whole(&mut decode, now + 2.3, &id, &prefilled("p", &id, 40));
    }
}

// vLLM 41: neither a success nor an expiry probes a peer
#[test]
fn success_and_expiry_ask_nobody() {
    let mut decode = Rig::new(settings("d"));
    load_whole(&mut decode, 0.0, "a", &prefilled("p", "p-a", 40));
    decode.outcomes(100.0);
    assert!(decode.step(100.0).is_empty());
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    assert_eq!(prefill.outcomes(30.0).len(), 1);
    assert!(prefill.step(31.0).is_empty());
}

// vLLM 41: a higher registration generation starts a new handshake
#[test]
fn a_higher_registration_asks_for_a_new_handshake() {
    let mut decode = Rig::new(settings("d"));
    let (old, _) = load_whole(&mut decode, 0.0, "a", &registered(0));
    decode.load(1.0, "b", 40, &registered(1));
    let actions = decode.step(1.0);
    assert_eq!(disconnects(&actions), [old]);
    let connection = handshakes(&actions)[0];
    assert_eq!(reads(&decode.connected(1.0, connection, plan())).len(), 1);
}

// vLLM 41: a lower registration generation starts a new handshake, as the engine restarted under
//     its name (vLLM keeps its old metadata)
#[test]
fn a_lower_registration_is_of_an_engine_that_began_anew_under_its_name() {
    let mut decode = Rig::new(settings("d"));
    let (old, _) = load_whole(&mut decode, 0.0, "a", &registered(2));
    // A restarted engine is contacted at once.
    let (new, gone) = load_whole(&mut decode, 0.5, "b", &registered(0));
    assert_ne!(old, new);
    assert_eq!(gone, [old]);
    let (same, _) = load_whole(&mut decode, 0.6, "c", &registered(0));
    assert_eq!(same, new);
    // Alternating registrations: a second apart, and longer if no load succeeds in between.
    decode.load(0.7, "d", 40, &registered(2));
    assert!(decode.step(0.7).is_empty());
    let outcomes = decode.outcomes(0.7);
    assert!(
        matches!(&outcomes[..], [Outcome::Failed { failure: LoadFailure::Handshake(_), .. }]),
        "{outcomes:?}"
    );
    load_whole(&mut decode, 1.5, "e", &registered(2));
}

#[test]
fn heartbeats_carry_the_latest_registration() {
    let mut decode = Rig::new(settings("d"));
    for (id, generation) in [("a", 2), ("b", 0)] {
        decode.arrive(0.0, id, 40, &registered(generation));
    }
    let beats = decode.scheduler.build_connector_meta(at(0.0)).heartbeats;
    assert_eq!(beats.iter().map(|beat| beat.peer.registration).collect::<Vec<_>>(), [0]);
}

// vLLM 41: if the registration generation rises during a handshake, requests that wait for the
//     older one fail
#[test]
fn a_registration_that_rises_during_the_handshake_starts_another() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "a", 40, &registered(0));
    let first = decode.step_to_handshake(0.0);
    decode.load(1.0, "b", 40, &registered(1));
    let second = decode.step_to_handshake(1.0);
    assert_eq!(
        disconnects(&decode.connected(2.0, first, plan())),
        [first],
        "no request waits for it any more"
    );
    let actions = decode.connected(3.0, second, plan());
    assert_eq!(reads(&actions).len(), 1, "the blocks of the older registration are rejected");
    assert_eq!(decode.outcomes(3.0).len(), 1);
}

// vLLM 42: sleep and wake raise one generation counter, which the parameters carry
#[test]
fn an_engine_that_registers_anew_says_so() {
    let mut prefill = Rig::new(settings("p"));
    assert_eq!(prefill.prefill(0.0, "a", 40).remote_registration_generation, Some(0));
    let (mut listener, rank) =
        (Listener::new(CompatibilityHash::foreign("h")), WorkerRank::default());
    let mut metadata = NixlAgentMetadata::new("p", Version::default());
    listener.publish(rank, &metadata);
    listener.publish(WorkerRank { tp: 1, ..rank }, &metadata);
    assert_eq!(listener.registration_generation(), 0, "the registration is unchanged");
    metadata.kv_caches_base_addr = vec![4096];
    listener.publish(rank, &metadata);
    prefill.scheduler.registered(listener.registration_generation());
    assert_eq!(prefill.prefill(1.0, "b", 40).remote_registration_generation, Some(1));
}

#[test]
fn the_loss_of_a_peer_releases_its_mappings() {
    let mut decode = Rig::new(settings("d"));
    let (connection, _) = load_whole(&mut decode, 0.0, "a", &prefilled("p", "p-a", 40));
    decode.worker.connection_lost(at(1.0), connection);
    assert_eq!(disconnects(&decode.actions()), [connection]);
    let (other, _) = load_whole(&mut decode, 2.0, "b", &prefilled("p", "p-b", 40));
    assert_ne!(connection, other);
}

// vLLM 42: shutdown releases everything, and can be repeated
#[test]
fn shutdown_releases_every_connection_once() {
    let mut decode = Rig::new(settings("d"));
    let (idle, _) = load_whole(&mut decode, 0.0, "a", &prefilled("p", "p-a", 40));
    let read = decode.load_to_read(1.0, "b", 40, &prefilled("q", "q-b", 40));
    decode.worker.shutdown();
    assert_eq!(disconnects(&decode.actions()), [idle]);
    assert_eq!(disconnects(&decode.read_done(2.0, &read)), [read.connection]);
    decode.worker.shutdown();
    assert!(decode.actions().is_empty());
    decode.outcomes(2.0);
    assert!(decode.worker.is_empty());
    assert!(decode.step(3.0).is_empty());
}
