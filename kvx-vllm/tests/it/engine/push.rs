//! Push: a decode engine registers its blocks, and a prefill engine writes into them.

use std::time::Duration;

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{
    Action, FailureKind, HandshakeFailure, Kept, LoadFailure, Move, MoveFailure, Outcome, PeerLane,
    Settings, Status, WorkerRank,
};
use kvx_vllm::mapping::MemoryType;
use kvx_vllm::params::{TransferMode, TransferParams};
use kvx_vllm::wire::{EngineNotification, PushGrant, PushRegistration};

use super::rig::{
    Rig, at, handshakes, loaded, note_of, notes, pairs, plan, push, remote, settings, transferred,
    writes,
};

/// Returns a router's parameters for a decode engine: no blocks, and the name that both engines
/// share.
fn told(request: &str, tokens: u32) -> TransferParams {
    let mut from = remote("p", request, Vec::new(), tokens);
    from.block_ids = Vec::new();
    from.mode = TransferMode::Push;
    TransferParams::prefilled(from, Version::default())
}

fn decode() -> Rig {
    Rig::new(push(settings("d")))
}

fn prefill() -> Rig {
    Rig::new(push(settings("p")))
}

fn registration(request: &str, blocks: Vec<u32>) -> Vec<u8> {
    EngineNotification::Registration(Box::new(push_registration(request, blocks))).encode()
}

fn push_registration(request: &str, blocks: Vec<u32>) -> PushRegistration {
    let mut registration = PushRegistration::new(request, vec![blocks]);
    registration.decode_engine_id = Some("d".into());
    registration.decode_host = Some("d.host".into());
    registration.decode_port = Some(5600);
    registration.decode_tp_size = Some(1);
    registration
}

/// Registers a decode engine's blocks with the prefill engine.
fn registered(rig: &mut Rig, id: &str) -> Vec<Action> {
    rig.load(0.0, id, 40, &told(id, 40));
    let connection = rig.step_to_handshake(0.0);
    rig.connected(0.0, connection, plan())
}

/// Returns the write of a prefill engine for a registered request.
fn writing(rig: &mut Rig, id: &str) -> Move {
    rig.prefill(0.0, id, 40);
    let connection = handshakes(&rig.notified(0.0, "d/0", &registration(id, vec![7, 8, 9])))[0];
    writes(&rig.connected(0.0, connection, plan())).remove(0)
}

fn failed() -> MoveFailure {
    MoveFailure {
        kind: FailureKind::TransferFailed,
        settled: true,
        peer_is_gone: false,
        error: "no luck".into(),
    }
}

// vLLM 47: a decode holds its registration until it is connected, and sends it to all prefill ranks
#[test]
fn a_decode_registers_with_all_ranks_once_it_is_connected() {
    let mut decode = decode();
    decode.load(0.0, "r", 40, &told("r", 40));
    let connection = decode.step_to_handshake(0.0);
    assert!(decode.step(1.0).is_empty(), "staged until the handshake is complete");
    let mut two = plan();
    two.lanes.push(PeerLane { rank: WorkerRank { pp: 0, tp: 1 }, ..two.lanes[0].clone() });
    let actions = decode.connected(2.0, connection, two);
    let sent = actions.iter().find_map(|action| match action {
        Action::Register { ranks, registration, .. } => Some((ranks, registration)),
        _ => None,
    });
    let (ranks, said) = sent.unwrap();
    assert_eq!(ranks.iter().map(|rank| rank.tp).collect::<Vec<_>>(), [0, 1]);
    assert_eq!((&*said.request_id, &said.local_block_ids), ("r", &vec![vec![100, 101, 102]]));
    assert_eq!(said.decode_engine_id.as_deref(), Some("d"));
    assert_eq!((said.decode_host.as_deref(), said.decode_port), (Some("d.host"), Some(5600)));
    assert_eq!((said.remote_engine_id.as_deref(), said.remote_tp_size), (Some("p"), Some(1)));
    assert!(decode.step(3.0).is_empty(), "once");
}

// vLLM 47: prefill and registration are matched in either order, and the request ends with the
//     write
#[test]
fn a_prefill_writes_when_it_has_both_in_either_order() {
    for registration_first in [true, false] {
        let mut prefill = prefill();
        let mut actions = Vec::new();
        if registration_first {
            actions.extend(prefill.notified(0.0, "d/0", &registration("r", vec![7, 8, 9])));
            assert!(actions.is_empty());
            prefill.arrive(0.0, "r", 40, &TransferParams::ask_prefill());
            prefill.allocate(0.0, "r", 100, 0);
            prefill.ends(1.0, "r", Status::LengthCapped, 40);
            assert!(prefill.scheduler.has_pending_push_work());
            actions.extend(prefill.step(1.0));
        } else {
            prefill.prefill(0.0, "r", 40);
            actions.extend(prefill.notified(1.0, "d/0", &registration("r", vec![7, 8, 9])));
        }
        let connection = handshakes(&actions)[0];
        assert!(writes(&actions).is_empty(), "deferred until the handshake");
        let write = writes(&prefill.connected(2.0, connection, plan())).remove(0);
        assert_eq!(pairs(&write), [(100, 7), (101, 8), (102, 9)]);
        assert_eq!(note_of(&write).unwrap(), "r:1");
        assert_eq!(prefill.outcomes(2.0), [], "it is complete when the write is");
        prefill.worker.move_resolved(at(3.0), write.id, Ok(transferred()));
        assert!(matches!(&prefill.outcomes(3.0)[..], [Outcome::Free { .. }]));
        assert!(prefill.scheduler.is_empty() && !prefill.scheduler.has_pending_push_work());
    }
}

// vLLM 47: requests are matched by name without the engine's suffix
#[test]
fn names_match_without_the_engines_own_suffix() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "cmpl-u-0-00000001", 40);
    prefill.prefill(0.0, "cmpl-v-0-00000002", 40);
    let actions = prefill.notified(1.0, "d/0", &registration("cmpl-u-0-0000abcd", vec![7, 8, 9]));
    let write = writes(&prefill.connected(1.0, handshakes(&actions)[0], plan())).remove(0);
    assert_eq!(note_of(&write).unwrap(), "cmpl-u-0-0000abcd:1", "the decode engine's name");
}

// vLLM 47: a registration whose name fits two requests is not assigned to either
#[test]
fn two_requests_of_one_shared_name_are_not_guessed_apart() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "cmpl-u-0-00000001", 40);
    prefill.prefill(0.0, "cmpl-u-0-00000002", 40);
    assert!(
        prefill.notified(1.0, "d/0", &registration("cmpl-u-0-0000abcd", vec![7, 8, 9])).is_empty()
    );
    assert_eq!(
        handshakes(&prefill.notified(
            1.0,
            "d/0",
            &registration("cmpl-u-0-00000002", vec![4, 5, 6])
        ))
        .len(),
        1
    );
}

// vLLM 47: incomplete registrations are dropped
#[test]
fn a_registration_that_lacks_something_is_dropped() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "r", 40);
    let bare =
        EngineNotification::Registration(Box::new(PushRegistration::new("r", vec![vec![1, 2, 3]])))
            .encode();
    assert!(prefill.try_notified(0.0, "d/0", &bare).is_err());
    assert!(prefill.try_notified(0.0, "d/0", b"PUSH_REG:\xc1").is_err());
    assert!(prefill.actions().is_empty());
    assert!(matches!(&prefill.outcomes(30.0)[..], [Outcome::Free { .. }]), "its lease ends");
}

#[test]
fn a_registration_for_another_engine_is_not_served() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "r", 40);
    let mut other = PushRegistration::new("r", vec![vec![1, 2, 3]]);
    other.decode_engine_id = Some("d".into());
    other.decode_host = Some("d.host".into());
    (other.decode_port, other.decode_tp_size) = (Some(1), Some(1));
    other.remote_engine_id = Some("an-earlier-life".into());
    assert!(
        prefill
            .notified(0.0, "d/0", &EngineNotification::Registration(Box::new(other)).encode())
            .is_empty()
    );
}

#[test]
fn a_repeated_registration_is_served_once() {
    let mut prefill = prefill();
    let write = writing(&mut prefill, "cmpl-u-0-00000001");
    prefill.worker.move_resolved(at(1.0), write.id, Ok(transferred()));
    prefill.outcomes(1.0);
    // The next request with that name, and the old registration again, whose blocks belong to
    // another request by now.
    prefill.prefill(2.0, "cmpl-u-0-00000002", 40);
    let again = prefill.notified(2.0, "d/0", &registration("cmpl-u-0-00000001", vec![7, 8, 9]));
    assert!(again.is_empty(), "{again:?}");
}

#[test]
fn the_oldest_of_very_many_served_registrations_is_forgotten() {
    let mut prefill = prefill();
    // Withdrawn registrations are remembered as served.
    for number in 0..=65_536 {
        let id = format!("r{number}");
        let now = f64::from(number) / 1000.0;
        prefill.notified(now, "d/0", &registration(&id, vec![7, 8, 9]));
        prefill.notified(now, "d/0", format!("{id}:1").as_bytes());
    }
    prefill.prefill(70.0, "next", 40);
    let actions = prefill.notified(70.0, "d/0", &registration("next", vec![7, 8, 9]));
    assert_eq!(handshakes(&actions).len(), 1);
    prefill.connected(70.0, handshakes(&actions)[0], plan());
    // The newest registration is still known, the oldest is not.
    for (id, served) in [("r65536", true), ("r0", false)] {
        prefill.prefill(71.0, id, 40);
        let actions = prefill.notified(71.0, "d/0", &registration(id, vec![7, 8, 9]));
        assert_eq!(writes(&actions).is_empty(), served, "{id}");
    }
}

#[test]
fn blocks_of_a_forgotten_write_are_lost() {
    let mut prefill = prefill();
    let write = writing(&mut prefill, "r");
    prefill.worker.move_resolved(
        at(1.0),
        write.id,
        Err(MoveFailure { settled: false, ..failed() }),
    );
    prefill.worker.move_forgotten(at(2.0), write.id);
    assert_eq!(prefill.outcomes(2.0), [], "they are kept until their lease ends");
    let outcomes = prefill.outcomes(30.0);
    assert!(matches!(&outcomes[..], [Outcome::Lost { .. }]), "{outcomes:?}");
}

#[test]
fn a_decode_is_notified_after_all_writes_into_its_memory_types() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "r", 40);
    let connection =
        handshakes(&prefill.notified(0.0, "d/0", &registration("r", vec![7, 8, 9])))[0];
    let mut mixed = plan();
    mixed.lanes[0].memory =
        vec![(MemoryType::Vram, MemoryType::Vram), (MemoryType::Dram, MemoryType::Dram)];
    let moves = writes(&prefill.connected(0.0, connection, mixed));
    assert_eq!(moves.iter().map(note_of).collect::<Vec<_>>(), [None, None]);
    prefill.worker.move_resolved(at(1.0), moves[1].id, Ok(transferred()));
    assert!(notes(&prefill.actions()).is_empty(), "the other write is in flight");
    prefill.worker.move_resolved(at(2.0), moves[0].id, Ok(transferred()));
    assert_eq!(notes(&prefill.actions()), [(0, "r:1".to_owned())]);
}

// vLLM 47: the prefill's watchdog forgets a registration for which no prefill arrives
#[test]
fn a_registration_nobody_prefills_for_is_forgotten() {
    let mut prefill = Rig::new(Settings {
        push_timeout: std::time::Duration::from_secs(10),
        ..push(settings("p"))
    });
    prefill.notified(0.0, "d/0", &registration("r", vec![7, 8, 9]));
    assert_eq!(prefill.worker.next_deadline(), Some(at(10.0)));
    prefill.outcomes(10.0);
    assert!(prefill.worker.is_empty());
}

// vLLM 47: a failed write keeps the blocks until the lease ends
#[test]
fn a_failed_write_leaves_the_blocks_until_the_lease_ends_and_reports_them_once() {
    let mut prefill = prefill();
    let write = writing(&mut prefill, "r");
    prefill.worker.move_resolved(at(1.0), write.id, Err(failed()));
    assert_eq!(prefill.outcomes(29.0), []);
    assert!(matches!(&prefill.outcomes(30.0)[..], [Outcome::Free { .. }]));
    let is_said = prefill.log.iter().any(|line| line.contains("kv_lease_duration"));
    assert!(is_said, "{:?}", prefill.log);
    assert_eq!(prefill.outcomes(60.0), []);
}

// vLLM 47: a lease that expires during a write is reported once, after the write
#[test]
fn a_lease_that_ends_during_a_write_waits_for_it() {
    let mut prefill = prefill();
    let write = writing(&mut prefill, "r");
    assert_eq!(prefill.outcomes(31.0), [], "the write reads the blocks");
    prefill.worker.move_resolved(at(32.0), write.id, Ok(transferred()));
    assert!(matches!(&prefill.outcomes(32.0)[..], [Outcome::Free { .. }]));
    assert_eq!(prefill.outcomes(33.0), []);
    assert_eq!(prefill.metric("vllm:nixl_num_kv_expired_reqs"), 1.0);
    assert!(prefill.log.is_empty(), "the decode has the blocks: {:?}", prefill.log);
}

// vLLM 47: a kvx decode that no longer renews its lease is no longer written to
#[test]
fn a_decode_that_renews_no_lease_is_not_written_to_any_longer() {
    let granted = |id: &str| {
        let mut registration = push_registration(id, vec![7, 8, 9]);
        registration.kvx_grants = vec![PushGrant { pp: 0, tp: 0, regions: vec![vec![1]] }];
        EngineNotification::Registration(Box::new(registration)).encode()
    };
    let mut prefill = prefill();
    prefill.prefill(0.0, "r", 40);
    let connection = handshakes(&prefill.notified(0.0, "d/0", &granted("r")))[0];
    let write = writes(&prefill.connected(0.0, connection, plan())).remove(0);
    // The decode engine renews the lease as long as it waits.
    prefill.notified(20.0, "d/0", b"HB:r");
    assert_eq!((prefill.outcomes(39.0), prefill.actions().len()), (vec![], 0));
    assert_eq!(prefill.outcomes(40.0), [], "the write reads the blocks");
    let actions = prefill.actions();
    assert!(matches!(&actions[..], [Action::Cancel { id }] if *id == write.id), "{actions:?}");
    prefill.worker.move_resolved(at(40.0), write.id, Err(failed()));
    assert!(matches!(&prefill.outcomes(40.0)[..], [Outcome::Free { .. }]));
    assert_eq!(prefill.outcomes(60.0), []);
}

// vLLM 47: heartbeats renew the leases of pushed requests
#[test]
fn heartbeats_renew_by_the_shared_name() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "cmpl-u-0-00000001", 40);
    prefill.notified(20.0, "d/0", b"HB:cmpl-u-0");
    assert_eq!(prefill.outcomes(39.0), []);
    assert_eq!(prefill.outcomes(40.0).len(), 1);
}

// vLLM 47: a decode waits for the completions of all ranks and stages that write to it
#[test]
fn a_decode_waits_for_all_ranks_that_write() {
    let mut decode = decode();
    decode.load(0.0, "r", 40, &told("r", 40));
    let connection = decode.step_to_handshake(0.0);
    let mut four = plan();
    four.completions = 2 * 2; // two pipeline ranks, two tensor ranks for each local rank
    decode.connected(0.0, connection, four);
    for from in ["p/0", "p/1", "p/1", "p/2"] {
        decode.notified(1.0, from, b"r:2");
        assert_eq!(decode.outcomes(1.0), []);
    }
    decode.notified(1.0, "p/3", b"r:2");
    assert_eq!(decode.outcomes(1.0), [loaded("r", 40)]);
}

// vLLM 47: MLA: every decode rank is written to
#[test]
fn a_latent_cache_is_written_to_every_decode_rank() {
    let mut prefill = prefill();
    prefill.prefill(0.0, "r", 40);
    let connection =
        handshakes(&prefill.notified(0.0, "d/0", &registration("r", vec![7, 8, 9])))[0];
    let mut all = plan();
    all.lanes = (0..4)
        .map(|tp| PeerLane { rank: WorkerRank { pp: 0, tp }, ..all.lanes[0].clone() })
        .collect();
    let moves = writes(&prefill.connected(0.0, connection, all));
    assert_eq!(moves.iter().map(|what| what.part.rank.tp).collect::<Vec<_>>(), [0, 1, 2, 3]);
    for what in &moves {
        assert_eq!(note_of(what).unwrap(), "r:1", "each of them is notified");
        assert_eq!(prefill.outcomes(1.0), []);
        prefill.worker.move_resolved(at(1.0), what.id, Ok(transferred()));
    }
    assert_eq!(prefill.outcomes(1.0).len(), 1);
}

// vLLM 47: the decode's watchdog fails a load that is not written in time
#[test]
fn a_decode_that_is_not_written_to_in_time_fails_when_it_cannot_be_written_to_any_more() {
    let patient = Settings { push_timeout: Duration::from_secs(200), ..push(settings("d")) };
    let mut decode = Rig::new(patient);
    assert_eq!(notes(&registered(&mut decode, "r")).len(), 1);
    assert_eq!(decode.worker.next_deadline(), Some(at(200.0)), "a push has more time than a read");
    decode.worker.get_finished(at(200.0));
    let actions = decode.actions();
    assert!(
        matches!(&actions[0], Action::Fence { request } if request.as_str() == "r"),
        "{actions:?}"
    );
    assert_eq!(notes(&actions), [(0, "r:1".to_owned())], "a kvx prefill forgets the registration");
    assert!(decode.worker.get_finished(at(201.0)).is_empty());
    decode.worker.fenced(at(202.0), &"r".into());
    let output = decode.worker.get_finished(at(202.0));
    assert_eq!(output.finished_recving, ["r".into()]);
    assert_eq!(output.failed_recving[0].failure, LoadFailure::NotPushed);
}

#[test]
fn an_abort_of_a_registered_request_is_fenced_before_its_blocks_are_free() {
    let mut decode = decode();
    registered(&mut decode, "r");
    assert!(decode.ends(1.0, "r", Status::Aborted, 0).delay_free);
    let actions = decode.step(1.0);
    assert!(matches!(&actions[0], Action::Fence { .. }), "{actions:?}");
    assert_eq!(decode.outcomes(1.0), []);
    decode.worker.fenced(at(2.0), &"r".into());
    assert!(matches!(&decode.outcomes(2.0)[..], [Outcome::Free { .. }]));
}

#[test]
fn a_load_that_is_cancelled_before_it_begins_registers_nothing_and_is_fenced() {
    let mut decode = decode();
    decode.load(0.0, "r", 40, &told("r", 40));
    let mut meta = decode.scheduler.build_connector_meta(at(0.0));
    assert!(decode.ends(0.0, "r", Status::Aborted, 0).delay_free);
    meta.cancel = decode.scheduler.build_connector_meta(at(0.0)).cancel;
    decode.worker.start_load_kv(at(0.0), meta);
    let actions = decode.actions();
    assert!(
        matches!(&actions[0], Action::Fence { .. }) && notes(&actions).is_empty(),
        "{actions:?}"
    );
    decode.worker.fenced(at(1.0), &"r".into());
    assert!(matches!(&decode.outcomes(1.0)[..], [Outcome::Free { .. }]));
}

#[test]
fn a_worker_that_never_registered_is_fenced_too() {
    // Its sibling may have registered the blocks of all ranks.
    let mut decode = decode();
    decode.load(0.0, "r", 40, &told("r", 40));
    let connection = decode.step_to_handshake(0.0);
    let failure = HandshakeFailure { setup: false, error: "no answer".into() };
    decode.worker.connected(at(5.0), connection, Err(failure));
    let actions = decode.actions();
    assert!(matches!(&actions[..], [Action::Fence { .. }]), "{actions:?}");
    assert_eq!(decode.outcomes(5.0), []);
    assert!(decode.log[0].contains("push_reg_handshake_failed"), "{:?}", decode.log);
    decode.worker.fenced(at(6.0), &"r".into());
    assert!(matches!(&decode.outcomes(6.0)[..], [Outcome::Failed { .. }]));
}

#[test]
fn a_withdrawn_registration_is_not_written_to() {
    let mut waiting = prefill();
    waiting.notified(0.0, "d/0", &registration("r", vec![7, 8, 9]));
    waiting.notified(1.0, "d/0", b"r:1");
    assert!(waiting.worker.next_deadline().is_some(), "it is remembered as served");
    waiting.arrive(2.0, "r", 40, &TransferParams::ask_prefill());
    waiting.allocate(2.0, "r", 100, 0);
    waiting.ends(2.0, "r", Status::LengthCapped, 40);
    assert!(waiting.step(2.0).is_empty());

    let mut running = prefill();
    let write = writing(&mut running, "cmpl-u-0-00000001");
    let registered_as = note_of(&write).unwrap();
    assert_eq!(registered_as, "cmpl-u-0-00000001:1");
    let mut other = prefill();
    other.prefill(0.0, "cmpl-u-0-00000001", 40);
    let actions = other.notified(0.0, "d/0", &registration("cmpl-u-0-0000abcd", vec![7, 8, 9]));
    let write = writes(&other.connected(0.0, handshakes(&actions)[0], plan())).remove(0);
    let cancelled = other.notified(1.0, "d/0", b"cmpl-u-0-0000abcd:1");
    assert!(matches!(&cancelled[..], [Action::Cancel { id }] if *id == write.id), "{cancelled:?}");
    other.worker.move_resolved(at(2.0), write.id, Err(failed()));
    assert!(
        matches!(&other.outcomes(2.0)[..], [Outcome::Free { .. }]),
        "the blocks are not needed any more"
    );
}

#[test]
fn a_registration_that_cannot_be_sent_fails_the_load() {
    let mut decode = decode();
    registered(&mut decode, "r");
    decode.worker.notification_failed(
        at(1.0),
        Some(&"r".into()),
        WorkerRank::default(),
        "no route",
    );
    assert!(matches!(&decode.actions()[0], Action::Fence { .. }));
    decode.outcomes(1.0);
    assert!(decode.log[0].contains("push_reg_notif_failed"), "{:?}", decode.log);
    assert_eq!(decode.metric("vllm:nixl_num_failed_notifications"), 1.0);
}

#[test]
fn the_loss_of_the_prefill_ends_the_wait() {
    let mut decode = decode();
    decode.load(0.0, "r", 40, &told("r", 40));
    let connection = decode.step_to_handshake(0.0);
    decode.connected(0.0, connection, plan());
    decode.worker.connection_lost(at(1.0), connection);
    assert!(matches!(&decode.actions()[0], Action::Fence { .. }));
}

#[test]
fn a_push_names_its_mode_and_omits_keys_of_pull() {
    let value = prefill().prefill(0.0, "r", 40).to_value(Version::default()).unwrap();
    assert_eq!(value["transfer_mode"], "push");
    assert!(value.get("remote_blocks_expiry_time").is_none());
    assert!(value.get("remote_registration_generation").is_none());
}

#[test]
fn registrations_are_bounded_and_a_pull_engine_keeps_none() {
    let mut pulled = Rig::new(settings("p"));
    let error = pulled.try_notified(0.0, "d/0", &registration("r", vec![7])).unwrap_err();
    assert_eq!(error.kind(), kvx_core::ErrorKind::Unsupported, "{error}");
    assert_eq!(pulled.worker.next_deadline(), None, "there is nothing to expire later");

    let mut prefill = prefill();
    let many: Vec<u32> = (0..1 << 20).collect();
    let told = |at_: usize| registration(&format!("r{at_}"), many.clone());
    let refused = (0..20).find_map(|index| prefill.try_notified(0.0, "d/0", &told(index)).err());
    assert_eq!(refused.unwrap().kind(), kvx_core::ErrorKind::Busy);
}

#[test]
fn withdrawn_blocks_are_free_once_reads_end() {
    let freed =
        |outcomes: &[Outcome]| matches!(outcomes, [Outcome::Free { kept: Kept::Request, .. }]);
    // Without a registration the blocks are free at once.
    let mut waiting = prefill();
    waiting.prefill(0.0, "r", 40);
    assert!(!waiting.scheduler.withdraw(&"r".into()));
    assert!(waiting.step(1.0).is_empty());
    assert!(freed(&waiting.outcomes(1.0)));
    assert!(waiting.notified(2.0, "d/0", &registration("r", vec![7, 8, 9])).is_empty());
    // With a write in flight they are free once it has settled, and the decode engine is not
    // notified.
    let mut running = prefill();
    let write = writing(&mut running, "r");
    assert!(!running.scheduler.withdraw(&"r".into()));
    let actions = running.step(1.0);
    assert!(matches!(&actions[..], [Action::Cancel { id }] if *id == write.id), "{actions:?}");
    assert_eq!(running.outcomes(1.0), []);
    running.worker.move_resolved(at(2.0), write.id, Err(failed()));
    assert!(freed(&running.outcomes(2.0)));
    assert!(running.scheduler.is_empty() && notes(&running.actions()).is_empty());
}

#[test]
fn registrations_from_disallowed_hosts_are_rejected() {
    for (allowed, refused) in [("elsewhere", true), ("d.host", false)] {
        let hosts = Some(vec![allowed.to_owned()]);
        let mut prefill = Rig::new(Settings { allowed_hosts: hosts, ..push(settings("p")) });
        prefill.prefill(0.0, "r", 40);
        let answer = prefill.try_notified(1.0, "d/0", &registration("r", vec![7, 8, 9]));
        assert_eq!(answer.is_err(), refused, "{allowed}");
        assert_eq!(handshakes(&prefill.actions()).is_empty(), refused, "{allowed}");
    }
}
