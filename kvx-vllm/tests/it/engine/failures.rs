//! Failed loads: notifications, invalid blocks, and the engine's reaction.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::config::LoadFailurePolicy;
use kvx_vllm::engine::{
    Action, Arrival, FailureKind, HandshakeFailure, Kept, LoadFailure, Move, MoveFailure,
    NotLoaded, Outcome, PeerLane, Settings, Status, Then, WorkerRank,
};
use kvx_vllm::params::TransferParams;

use super::rig::{
    BLOCK, Rig, at, blocks, loaded, notes, plan, prefilled, reads, remote, settings, transferred,
};

fn recomputing() -> Settings {
    Settings { policy: LoadFailurePolicy::Recompute, ..settings("d") }
}

fn failure(kind: FailureKind, settled: bool) -> MoveFailure {
    MoveFailure { kind, settled, peer_is_gone: false, error: "no luck".into() }
}

fn fails(rig: &mut Rig, now: f64, what: &Move, kind: FailureKind, settled: bool) {
    rig.worker.move_resolved(at(now), what.id, Err(failure(kind, settled)));
}

fn no_answer() -> HandshakeFailure {
    HandshakeFailure { setup: false, error: "no answer in 5 s".into() }
}

fn failed(outcomes: &[Outcome]) -> (&LoadFailure, Then, &[u32]) {
    let [Outcome::Failed { failure, then, invalid, .. }] = outcomes else { panic!("{outcomes:?}") };
    (failure, *then, invalid)
}

/// Starts a load from two ranks and returns its reads.
fn two_reads(decode: &mut Rig, id: &str) -> Vec<Move> {
    let mut from = remote("p", "p-r", blocks(500, 40), 40);
    from.tp_size = 2;
    decode.load(0.0, id, 40, &TransferParams::prefilled(from, Version::default()));
    let connection = decode.step_to_handshake(0.0);
    let mut two = plan();
    two.lanes.push(PeerLane { rank: WorkerRank { pp: 0, tp: 1 }, ..two.lanes[0].clone() });
    reads(&decode.connected(0.0, connection, two))
}

// vLLM 23: a failed handshake fails the requests that wait for it, and only awaited loads are
//     reported
#[test]
fn a_failed_handshake_fails_who_waited_for_it_and_only_the_awaited_are_reported() {
    let mut decode = Rig::new(settings("d"));
    for request in ["a", "b"] {
        decode.arrive(0.0, request, 40, &prefilled("p", request, 40));
        decode.allocate(0.0, request, 100, 0);
    }
    decode.arrive(0.0, "hit", 32, &prefilled("p", "hit", 32));
    decode.allocate(0.0, "hit", 200, 32);
    let connection = decode.step_to_handshake(0.0);
    decode.worker.connected(at(5.0), connection, Err(no_answer()));
    let outcomes = decode.outcomes(5.0);
    assert_eq!(outcomes.len(), 2);
    for outcome in outcomes {
        let outcome = [outcome];
        let (failure, then, invalid) = failed(&outcome);
        assert_eq!(failure, &LoadFailure::Handshake("no answer in 5 s".into()));
        assert_eq!((then, invalid), (Then::Fail, &[100, 101, 102][..]));
    }
    assert_eq!(
        decode.metric("vllm:nixl_num_failed_transfers"),
        1.0,
        "one report for the handshake, not one for each request"
    );
}

// vLLM 24: a transfer that cannot be set up fails with all its local blocks invalid
#[test]
fn a_transfer_that_cannot_be_described_fails_with_all_its_blocks() {
    let mut decode = Rig::new(recomputing());
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    let mut small = plan();
    small.remote_blocks = 501.into();
    let actions = decode.connected(0.0, connection, small);
    assert!(reads(&actions).is_empty(), "no read goes beyond the peer's pool");
    assert_eq!(
        notes(&actions),
        [(0, "p-r:1".to_owned())],
        "its blocks are released before their lease ends"
    );
    let outcomes = decode.outcomes(0.0);
    let (failure, then, invalid) = failed(&outcomes);
    assert!(matches!(failure, LoadFailure::Refused(why) if why.contains("501")), "{failure}");
    assert_eq!((then, invalid), (Then::Recompute { computed: 0 }, &[100, 101, 102][..]));
    assert_eq!(decode.last.invalid_block_ids(), [100, 101, 102]);
    assert!(decode.log[0].contains("transfer_setup_failed"), "{:?}", decode.log);
}

// vLLM 25: a failed read is reported after its sibling reads have ended
#[test]
fn a_failed_read_is_reported_after_the_last_of_its_siblings() {
    let mut decode = Rig::new(settings("d"));
    let moves = two_reads(&mut decode, "r");
    fails(&mut decode, 1.0, &moves[0], FailureKind::TransferFailed, true);
    assert_eq!(decode.outcomes(1.0), [], "the other read still writes into the blocks");
    let actions = decode.read_done(2.0, &moves[1]);
    assert!(notes(&actions).is_empty(), "a failed load sends no notification");
    let outcomes = decode.outcomes(2.0);
    assert_eq!(failed(&outcomes).1, Then::Fail);
    assert!(decode.worker.next_deadline().is_none());
}

// vLLM 25: a read that cannot be cancelled keeps its blocks until it settles, and counts as one
//     failure
#[test]
fn a_read_that_cannot_be_ended_keeps_its_blocks_until_it_settles() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    fails(&mut decode, 1.0, &read, FailureKind::TransferFailed, false);
    assert_eq!(decode.outcomes(1.0), []);
    decode.worker.move_resolved(at(2.0), read.id, Ok(transferred()));
    assert_eq!(decode.outcomes(2.0), [], "it already has an outcome");
    decode.worker.move_settled(at(3.0), read.id);
    assert_eq!(decode.outcomes(3.0).len(), 1);
    assert!(
        decode.log.iter().any(|line| line.contains("transfer_release_failed")),
        "{:?}",
        decode.log
    );
    assert_eq!(decode.metric("vllm:nixl_num_failed_transfers"), 1.0, "one failure is counted once");
}

// vLLM 25: blocks of a forgotten read are lost, and no request waits for them
#[test]
fn blocks_of_a_forgotten_read_are_lost_and_nobody_waits_for_them() {
    for already_failed in [true, false] {
        let mut decode = Rig::new(recomputing());
        let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
        if already_failed {
            fails(&mut decode, 1.0, &read, FailureKind::TransferFailed, false);
            assert_eq!(decode.outcomes(1.0), []);
        }
        decode.worker.move_forgotten(at(2.0), read.id);
        let outcomes = decode.outcomes(2.0);
        let [Outcome::Failed { then, held, .. }, Outcome::Lost { request, kept: Kept::Load }] =
            &outcomes[..]
        else {
            panic!("{outcomes:?}")
        };
        assert_eq!((*then, request.as_str()), (Then::Recompute { computed: 0 }, "r"));
        assert_eq!(held.iter().collect::<Vec<_>>(), [100, 101, 102]);
        assert!(!decode.scheduler.has_pending_block_frees());
        assert_eq!(decode.scheduler.blocks_lost(), 3);
        assert_eq!(decode.metric("vllm:nixl_num_failed_transfers"), 1.0);
        assert!(decode.log.iter().any(|line| line.contains("are lost")), "{:?}", decode.log);
    }
}

#[test]
fn blocks_held_after_a_deadline_are_lost_when_their_read_is_forgotten() {
    let mut decode =
        Rig::new(Settings { load_timeout: std::time::Duration::from_secs(60), ..recomputing() });
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(decode.outcomes(60.0).len(), 1);
    decode.worker.move_forgotten(at(70.0), read.id);
    let outcomes = decode.outcomes(70.0);
    assert!(matches!(&outcomes[..], [Outcome::Lost { kept: Kept::Load, .. }]), "{outcomes:?}");
    assert_eq!((decode.scheduler.blocks_held(), decode.scheduler.blocks_lost()), (0, 3));
}

// vLLM 12: a load that times out during the handshake releases the prefill's blocks
//     (`refused_parameters_release_the_blocks_that_they_name` holds rejected parameters)
#[test]
fn a_load_that_times_out_during_the_handshake_still_releases_the_prefill() {
    let mut decode =
        Rig::new(Settings { load_timeout: std::time::Duration::from_secs(3), ..recomputing() });
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    let outcomes = decode.outcomes(3.0);
    assert_eq!(failed(&outcomes[..1]).0, &LoadFailure::Deadline);
    assert!(decode.step(3.0).is_empty());
    let outcomes = decode.outcomes(3.1);
    assert_eq!(decode.scheduler.blocks_held(), 0, "{outcomes:?}");
    let actions = decode.connected(4.0, connection, plan());
    assert!(reads(&actions).is_empty());
    assert_eq!(notes(&actions), [(0, "p-r:1".to_owned())]);
    assert_eq!(decode.worker.next_deadline(), None);
}

#[test]
fn a_release_waits_for_a_handshake_no_longer_than_a_load() {
    let mut decode =
        Rig::new(Settings { load_timeout: std::time::Duration::from_secs(60), ..settings("d") });
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.ends(10.0, "r", Status::Aborted, 0);
    decode.step_to_handshake(10.0);
    assert_eq!(decode.worker.next_deadline(), Some(at(70.0)));
    decode.outcomes(70.0);
    assert_eq!(decode.worker.len(), 0);
}

#[test]
fn refused_parameters_release_the_blocks_that_they_name() {
    let mut decode = Rig::new(Settings { groups: vec![None, None], ..settings("d") });
    let (request, params) = ("r".into(), prefilled("p", "p-r", 40));
    let arrival =
        Arrival { request: &request, prompt_tokens: 40, params: Some(&params), deadline: None };
    let refused = decode.scheduler.on_new_request(at(0.0), arrival);
    assert_eq!(refused, Err(NotLoaded::TooFewBlocks), "one list of blocks for two groups");
    let connection = decode.step_to_handshake(0.0);
    assert_eq!(notes(&decode.connected(0.0, connection, plan())), [(0, "p-r:1".to_owned())]);
    assert!(decode.scheduler.is_empty());
}

#[test]
fn a_request_at_its_deadline_has_an_outcome_though_a_read_never_ends() {
    let mut decode =
        Rig::new(Settings { load_timeout: std::time::Duration::from_secs(60), ..recomputing() });
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(decode.outcomes(59.9), []);
    let outcomes = decode.outcomes(60.0);
    let [Outcome::Failed { failure, then, held, .. }] = &outcomes[..] else {
        panic!("{outcomes:?}")
    };
    assert_eq!((failure, *then), (&LoadFailure::Deadline, Then::Recompute { computed: 0 }));
    assert_eq!(
        held.iter().collect::<Vec<_>>(),
        [100, 101, 102],
        "the read may still write into them"
    );
    let cancelled = decode.step(60.0);
    assert!(
        cancelled.iter().any(|action| matches!(action, Action::Cancel { id } if *id == read.id)),
        "{cancelled:?}"
    );
    assert!(decode.scheduler.has_pending_block_frees());
    assert_eq!(decode.scheduler.blocks_held(), 3);
    fails(&mut decode, 500.0, &read, FailureKind::TransferFailed, true);
    let outcomes = decode.outcomes(500.0);
    assert!(
        matches!(&outcomes[..], [Outcome::Free { request, .. }] if request.as_str() == "r"),
        "{outcomes:?}"
    );
    assert_eq!(decode.scheduler.blocks_held(), 0);
}

#[test]
fn a_request_past_its_own_deadline_fails_under_either_policy() {
    let mut decode =
        Rig::new(Settings { load_timeout: std::time::Duration::from_secs(5000), ..recomputing() });
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.step(0.0);
    assert_eq!(failed(&decode.outcomes(1000.0)).1, Then::Fail);
}

#[test]
fn a_load_that_never_got_blocks_ends_at_the_deadline_of_its_request() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(decode.outcomes(999.0), [], "a queued request is not a load");
    let outcomes = decode.outcomes(1000.0);
    assert_eq!(failed(&outcomes), (&LoadFailure::Deadline, Then::Fail, &[][..]));
    assert_eq!(decode.matched(1000.0, "r", 0), 0);
    // The prefill side is notified.
    let connection = decode.step_to_handshake(1000.0);
    assert_eq!(notes(&decode.connected(1000.0, connection, plan())), [(0, "p-r:1".to_owned())]);
}

#[test]
fn the_time_of_a_load_counts_from_its_order() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(decode.outcomes(500.0), []);
    decode.allocate(500.0, "r", 100, 0);
    let connection = decode.step_to_handshake(500.0);
    let read = reads(&decode.connected(500.0, connection, plan())).remove(0);
    assert_eq!(read.deadline, at(620.0));
    assert_eq!(decode.outcomes(619.0), []);
    assert_eq!(failed(&decode.outcomes(620.0)[..1]).0, &LoadFailure::Deadline);
    // An earlier deadline of the request takes precedence.
    decode.arrive(620.0, "s", 40, &prefilled("p", "p-s", 40));
    decode.allocate(1600.0, "s", 200, 0);
    assert_eq!(reads(&decode.step(1600.0))[0].deadline, at(1620.0));
}

// vLLM 26: a failed request starts no further reads and sends no further notifications
#[test]
fn a_failed_request_reads_and_tells_nothing_more() {
    let mut decode = Rig::new(settings("d"));
    let moves = two_reads(&mut decode, "r");
    fails(&mut decode, 1.0, &moves[0], FailureKind::TransferException, true);
    decode.worker.move_resolved(at(1.0), moves[1].id, Ok(transferred()));
    assert!(decode.actions().is_empty());
    decode.outcomes(1.0);
    assert!(decode.step(2.0).is_empty(), "it is not loaded again");
}

// vLLM 27: five kinds of failures are logged with their context, with one KV cache group and with
//     several
#[test]
fn a_failure_is_logged_with_what_is_known() {
    for groups in [1, 2] {
        for kind in [
            FailureKind::TransferSetupFailed,
            FailureKind::TransferFailed,
            FailureKind::TransferException,
            FailureKind::HandshakeFailed,
            FailureKind::NotificationFailed,
        ] {
            let mut decode = Rig::new(Settings { groups: vec![None; groups], ..settings("d") });
            let mut from = remote("p", "p-r", blocks(500, 40), 40);
            from.block_ids = vec![blocks(500, 40); groups];
            decode.arrive(0.0, "r", 40, &TransferParams::prefilled(from, Version::default()));
            let fill = kvx_vllm::engine::BlockLists::new(vec![blocks(100, 40); groups]);
            let allocation = kvx_vllm::engine::Allocation { fill, computed: 0, external: 40 };
            decode.scheduler.update_state_after_alloc(at(0.0), &"r".into(), allocation);
            let connection = decode.step_to_handshake(0.0);
            if kind == FailureKind::HandshakeFailed {
                decode.worker.connected(at(1.0), connection, Err(no_answer()));
            } else {
                let read = reads(&decode.connected(0.0, connection, plan())).remove(0);
                if kind == FailureKind::NotificationFailed {
                    decode.worker.notification_failed(
                        at(1.0),
                        Some(&"r".into()),
                        read.part.rank,
                        "no route",
                    );
                } else {
                    fails(&mut decode, 1.0, &read, kind, true);
                }
            }
            decode.outcomes(1.0);
            let line = &decode.log[0];
            let context =
                line.strip_prefix(&format!("NIXL transfer failure: {} ", kind.as_str())).unwrap();
            let context: serde_json::Value = serde_json::from_str(context).unwrap();
            assert_eq!(context["request_id"], "r", "{line}");
            assert_eq!(context["remote_request_id"], "p-r", "{line}");
            assert_eq!(context["remote_engine_id"], "p", "{line}");
            assert_eq!(context["remote_host"], "p.host", "{line}");
            assert_eq!(context["num_local_blocks"], 3 * groups, "{line}");
            assert_eq!(context.get("num_local_blocks_per_group").is_some(), groups > 1, "{line}");
        }
    }
}

// vLLM 29: policy `fail` ends the request with an error
#[test]
fn the_policy_fail_ends_a_request_with_an_error_and_names_its_wrong_blocks() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    fails(&mut decode, 1.0, &read, FailureKind::TransferFailed, true);
    let outcomes = decode.outcomes(1.0);
    let (failure, then, invalid) = failed(&outcomes);
    assert_eq!((failure, then), (&LoadFailure::Transfer("no luck".into()), Then::Fail));
    assert_eq!(invalid, [100, 101, 102], "they must not enter the prefix cache");
    assert!(!decode.ends(1.0, "r", Status::Failed, 0).delay_free);
    assert!(decode.scheduler.is_empty());
}

// vLLM 30: policy `recompute` keeps the valid prefix and cuts the computed tokens
#[test]
fn the_policy_recompute_keeps_the_valid_prefix() {
    let mut decode = Rig::new(recomputing());
    decode.arrive(0.0, "r", 80, &prefilled("p", "p-r", 80));
    decode.allocate(0.0, "r", 100, 2 * BLOCK);
    let connection = decode.step_to_handshake(0.0);
    let read = reads(&decode.connected(0.0, connection, plan())).remove(0);
    fails(&mut decode, 1.0, &read, FailureKind::TransferFailed, true);
    let outcomes = decode.outcomes(1.0);
    assert_eq!(failed(&outcomes).1, Then::Recompute { computed: 2 * BLOCK });
}

// vLLM 31: with several KV cache groups, a failed load counts as failed as a whole, and nothing
//     raises
#[test]
fn with_several_groups_a_failed_load_counts_as_a_whole() {
    let mut decode = Rig::new(Settings { groups: vec![None, None], ..recomputing() });
    let mut from = remote("p", "p-r", blocks(500, 64), 64);
    from.block_ids = vec![blocks(500, 64), blocks(600, 64)];
    from.block_reference = Some(kvx_vllm::engine::BlockReference { pool: 7, stamp: 9 }.to_string());
    decode.arrive(0.0, "r", 64, &TransferParams::prefilled(from, Version::default()));
    let fill = kvx_vllm::engine::BlockLists::new([blocks(100, 64), blocks(200, 64)]);
    let allocation = kvx_vllm::engine::Allocation { fill, computed: 0, external: 64 };
    decode.scheduler.update_state_after_alloc(at(0.0), &"r".into(), allocation);
    let connection = decode.step_to_handshake(0.0);
    let mut checked = plan();
    checked.generations = true;
    let read = reads(&decode.connected(0.0, connection, checked)).remove(0);
    decode.read_done(1.0, &read);
    // The third block of the second group is invalid, which gives no valid prefix of tokens.
    decode.worker.generations_read(at(1.0), read.id, Ok((7, &[0, 0, 0, 0, 0, 0, 10, 0])));
    let outcomes = decode.outcomes(1.0);
    let (failure, then, invalid) = failed(&outcomes);
    assert_eq!(
        (failure, then, invalid),
        (&LoadFailure::Stale, Then::Recompute { computed: 0 }, &[202][..])
    );
}

#[test]
fn an_abort_during_a_load_frees_the_blocks_once_unused() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert!(decode.ends(1.0, "r", Status::Aborted, 0).delay_free);
    assert!(decode.step(1.0).iter().any(|action| matches!(action, Action::Cancel { .. })));
    assert_eq!(decode.outcomes(1.0), []);
    fails(&mut decode, 2.0, &read, FailureKind::TransferFailed, true);
    assert_eq!(
        notes(&decode.actions()),
        [(0, "p-r:1".to_owned())],
        "the prefill side frees its blocks before the lease ends"
    );
    let outcomes = decode.outcomes(2.0);
    assert!(matches!(&outcomes[..], [Outcome::Free { .. }]), "{outcomes:?}");
    assert!(decode.scheduler.is_empty());
}

#[test]
fn an_abort_while_the_handshake_runs_frees_the_blocks_at_once() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    assert!(decode.ends(1.0, "r", Status::Aborted, 0).delay_free);
    decode.step(1.0);
    let outcomes = decode.outcomes(1.0);
    assert!(matches!(&outcomes[..], [Outcome::Free { .. }]), "{outcomes:?}");
    let actions = decode.connected(4.0, connection, plan());
    assert!(reads(&actions).is_empty());
    assert_eq!(notes(&actions), [(0, "p-r:1".to_owned())]);
}

#[test]
fn a_report_about_an_ended_request_changes_nothing() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(1.0, &read);
    assert_eq!(decode.outcomes(1.0), [loaded("r", 40)]);
    for _ in 0..2 {
        decode.read_done(2.0, &read);
        decode.worker.move_settled(at(2.0), read.id);
        decode.worker.fenced(at(2.0), &"r".into());
        assert_eq!(decode.outcomes(2.0), []);
    }
    assert!(!decode.ends(3.0, "unheard", Status::Aborted, 0).delay_free);
}

/// Returns the actions for a load that was cancelled before a worker was told to start it.
fn cancelled_before_it_began(decode: &mut Rig, id: &str) -> Vec<Action> {
    decode.load(0.0, id, 40, &prefilled("p", "p-r", 40));
    let mut meta = decode.scheduler.build_connector_meta(at(0.0));
    assert!(decode.ends(0.0, id, Status::Aborted, 0).delay_free);
    meta.cancel = decode.scheduler.build_connector_meta(at(0.0)).cancel;
    decode.worker.start_load_kv(at(0.0), meta);
    decode.actions()
}

#[test]
fn a_load_cancelled_before_it_begins_fills_no_block_and_notifies_the_prefill() {
    let freed = |request: &str| Outcome::Free { request: request.into(), kept: Kept::Load };
    let mut decode = Rig::new(settings("d"));
    let connection = match &cancelled_before_it_began(&mut decode, "first")[..] {
        [Action::Handshake { connection, .. }] => *connection,
        actions => panic!("{actions:?}"),
    };
    assert_eq!(decode.outcomes(0.0), [freed("first")]);
    assert_eq!(notes(&decode.connected(1.0, connection, plan())), [(0, "p-r:1".to_owned())]);
    let actions = cancelled_before_it_began(&mut decode, "second");
    assert_eq!((reads(&actions).len(), notes(&actions).len()), (0, 1), "{actions:?}");
    assert_eq!(decode.outcomes(1.0), [freed("second")]);
    assert!(decode.scheduler.is_empty());
}

#[test]
fn a_shutdown_reports_everything() {
    for proven in [true, false] {
        let over = |request: &str, kept| match proven {
            true => Outcome::Free { request: request.into(), kept },
            false => Outcome::Lost { request: request.into(), kept },
        };
        let mut engine = Rig::new(settings("e"));
        engine.prefill(0.0, "published", 40);
        engine.load_to_read(0.0, "aborted", 40, &prefilled("p", "p-a", 40));
        engine.ends(0.0, "aborted", Status::Aborted, 0);
        engine.load(0.0, "loading", 40, &prefilled("p", "p-l", 40));
        engine.step(0.0);
        let mut outcomes = engine.scheduler.end(proven);
        let Outcome::Failed { request, then, invalid, held, .. } = outcomes.remove(0) else {
            panic!("{outcomes:?}")
        };
        assert_eq!(
            (request.as_str(), then, &invalid[..]),
            ("loading", Then::Fail, &blocks(100, 40)[..])
        );
        let mut told = vec![over("aborted", Kept::Load), over("published", Kept::Request)];
        if proven {
            assert!(held.is_empty());
        } else {
            assert_eq!(held.iter().collect::<Vec<_>>(), invalid);
            told.insert(0, over("loading", Kept::Load));
        }
        assert_eq!(outcomes, told);
        assert_eq!(
            (engine.scheduler.len(), engine.scheduler.blocks_lost()),
            (0, if proven { 0 } else { 6 })
        );
    }
}
