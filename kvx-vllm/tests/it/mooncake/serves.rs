//! The prefill side: waiting requests, the blocks that they get, the release of blocks, and
//! rejected requests.

use std::time::Duration;

use kvx_testkit::test;
use kvx_vllm::config::Role;
use kvx_vllm::engine::mooncake::{AskId, Mooncake, MooncakeAction};
use kvx_vllm::engine::{
    Action, FailureKind, HandshakeFailure, Kept, Move, MoveFailure, Outcome, PeerPlan, Settings,
    Status,
};
use kvx_vllm::wire::mooncake::PullStatus::{Continue, Error, Finish, LayoutMiss};
use kvx_vllm::wire::mooncake::{PullRequest, PullResponse};

use super::rig::{BLOCK, Rig, answer, answers, at, pairs, question, settings, told, writes};

const D1: (u32, u32) = (0, 1);

fn free(request: &str) -> Outcome {
    Outcome::Free { request: request.into(), kept: Kept::Request }
}

/// Returns the only answer, which is an error.
fn refusal(actions: &[MooncakeAction]) -> PullResponse {
    let [(_, answer)] = &answers(actions)[..] else { panic!("expected one answer: {actions:?}") };
    assert!(answer.ok_reqs.is_none() && answer.kvx_settled, "{answer:?}");
    answer.clone()
}

fn fails(prefill: &mut Rig, now: f64, write: &Move, settled: bool) -> Vec<MooncakeAction> {
    let (kind, error) = (FailureKind::TransferFailed, "no luck".to_owned());
    let failure = MoveFailure { kind, settled, peer_is_gone: false, error };
    prefill.worker.move_resolved(at(now), write.id, Err(failure));
    prefill.actions()
}

#[test]
fn blocks_that_are_computed_are_written_and_freed_when_they_are_there() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes =
        prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100, 101, 102])]));
    assert_eq!(writes.len(), 1);
    assert_eq!(pairs(&writes[0]), [(10, 100), (11, 101), (12, 102)]);
    assert!(writes[0].notification.is_none(), "the answer replaces it");
    assert!(prefill.outcomes(0.2).is_empty());
    let actions = prefill.written(0.3, writes[0].id);
    assert_eq!(answer(&actions), (1, Finish, vec!["d-1".into()], vec![]));
    assert_eq!(answers(&actions)[0].1.layout_id, 7, "from now on the layout may be omitted");
    assert_eq!(prefill.outcomes(0.3), [free("p-1")]);
    let summary = prefill.stats.reduce();
    assert_eq!((summary.transfers, summary.failed_transfers), (1, 0));
}

#[test]
fn an_early_request_waits_without_holding_resources() {
    let mut prefill = Rig::prefill();
    let actions = prefill.asked(0.0, 1, &question(D1, &[("d-1", "x-1", &[100, 101, 102])]));
    assert!(actions.is_empty(), "no connection, no write, no answer: {actions:?}");
    prefill.prefills("p-1", "x-1");
    assert!(prefill.step(0.1).is_empty());
    prefill.ends(0.2, "p-1", Status::LengthCapped, &[10, 11, 12]);
    let actions = prefill.step(0.2);
    let writes = prefill.connected(0.3, &actions);
    assert_eq!(pairs(&writes[0]), [(10, 100), (11, 101), (12, 102)]);
    prefill.written(0.4, writes[0].id);
    assert_eq!(prefill.outcomes(0.4), [free("p-1")]);
    // The next request uses the known connection.
    prefill.has_prefilled(1.0, "p-2", "x-2");
    assert_eq!(writes_of(&mut prefill, 1.0, 2, "x-2").len(), 1);
}

fn writes_of(prefill: &mut Rig, now: f64, ask: u64, transfer: &str) -> Vec<Move> {
    writes(&prefill.asked(now, ask, &question(D1, &[("d", transfer, &[100, 101, 102])])))
}

// vLLM 60: a thousand waiting pull requests do not delay the ones that can be served
#[test]
fn a_thousand_that_wait_keep_nobody_from_being_served() {
    let mut prefill = Rig::prefill();
    for ask in 0..1000 {
        let transfer = format!("never-{ask}");
        assert!(prefill.asked(0.0, ask, &question(D1, &[("d", &transfer, &[1, 2])])).is_empty());
    }
    prefill.has_prefilled(0.1, "p-1", "x-1");
    assert_eq!(
        prefill.asked_and_connected(0.1, 5000, &question(D1, &[("d-1", "x-1", &[5])])).len(),
        1
    );
}

#[test]
fn a_decode_with_a_cached_prefix_gets_the_end() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[101, 102])]));
    assert_eq!(pairs(&writes[0]), [(11, 101), (12, 102)]);
}

#[test]
fn a_request_for_several_transfers_is_answered_one_by_one() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-2", "x-2");
    let both = question(D1, &[("d-1", "x-1", &[100, 101, 102]), ("d-2", "x-2", &[200, 201, 202])]);
    let first = prefill.asked_and_connected(0.1, 1, &both);
    assert_eq!(
        answer(&prefill.written(0.2, first[0].id)),
        (1, Continue, vec!["d-2".into()], vec![])
    );
    let second = writes(&prefill.has_prefilled(0.3, "p-1", "x-1"));
    assert_eq!(
        answer(&prefill.written(0.4, second[0].id)),
        (1, Finish, vec!["d-1".into()], vec![])
    );
}

// vLLM 60: an abort of the prefill fails a waiting decode at once, and also a decode that asks
//     later
#[test]
fn an_abort_wakes_the_decode_that_waits_and_tells_the_one_that_asks_later() {
    for status in [Status::Aborted, Status::Failed, Status::Stopped] {
        let mut prefill = Rig::prefill();
        prefill.prefills("p-1", "x-1");
        prefill.step(0.0);
        let wanted = question(D1, &[("d-1", "x-1", &[100, 101, 102])]);
        assert!(prefill.asked(0.1, 1, &wanted).is_empty());
        assert!(!prefill.ends(0.2, "p-1", status, &[10, 11, 12]).delay_free, "{status:?}");
        let refused = refusal(&prefill.step(0.2));
        assert_eq!((refused.status, refused.err_reqs), (Finish, Some(vec!["d-1".into()])));
        let late = refusal(&prefill.asked(0.3, 2, &wanted));
        assert!(late.err_msg.unwrap().contains("without the blocks"));
        assert!(prefill.worker.is_empty(), "{:?}", prefill.worker);
    }
}

// vLLM 57: only a prefill that ends as LENGTH_CAPPED delays freeing its blocks
#[test]
fn only_a_prefill_that_was_cut_at_its_length_keeps_its_blocks() {
    for (status, keeps) in [
        (Status::LengthCapped, true),
        (Status::Stopped, false),
        (Status::Aborted, false),
        (Status::Failed, false),
    ] {
        let mut prefill = Rig::prefill();
        prefill.prefills("p-1", "x-1");
        let finished = prefill.ends(0.0, "p-1", status, &[10]);
        assert_eq!((finished.delay_free, finished.params), (keeps, None), "{status:?}");
    }
}

// vLLM 60: the time limit frees a prefill's blocks
#[test]
fn blocks_that_nobody_asks_for_are_free_at_the_time_limit() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    assert!(prefill.outcomes(479.9).is_empty());
    assert_eq!(prefill.outcomes(480.0), [free("p-1")]);
    assert_eq!(prefill.stats.reduce().expired, 1);
    let [line] = &prefill.log[..] else { panic!("{:?}", prefill.log) };
    let setting = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT";
    assert!(line.contains("request p-1") && line.contains(setting), "{line}");
    let late = refusal(&prefill.asked(481.0, 1, &question(D1, &[("d-1", "x-1", &[100])])));
    assert!(late.err_msg.unwrap().contains(setting));
    prefill.outcomes(2000.0);
    assert!(prefill.worker.next_deadline().is_none(), "the name is forgotten too");
}

#[test]
fn a_time_limit_during_a_write_waits_for_it() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(479.0, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    assert!(prefill.outcomes(480.0).is_empty(), "a write reads the blocks");
    assert_eq!(writes[0].deadline, at(481.0), "the decode side may hang, so no longer than that");
    assert_eq!(answer(&prefill.written(480.5, writes[0].id)).2, ["d-1"]);
    assert_eq!(prefill.outcomes(480.5), [free("p-1")]);
}

// vLLM 60: the time limit ends a decode's wait for a prefill that never arrives
#[test]
fn who_waits_for_a_prefill_that_never_comes_hears_so_in_vllms_words() {
    let mut prefill = Rig::prefill();
    prefill.asked(0.0, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    prefill.outcomes(479.9);
    assert!(prefill.actions().is_empty());
    prefill.outcomes(480.0);
    let refused = refusal(&prefill.actions());
    assert_eq!(refused.err_msg.as_deref(), Some("Timeout waiting for P side ready."));
    assert!(prefill.worker.is_empty());
}

// vLLM 58: `need_send`: a prefill waits for all its readers, also those of several pipeline stages
#[test]
fn blocks_are_kept_until_all_readers_have_had_them() {
    // Own rank and size, the decode's size and stages, and the ranks that must all have asked.
    for (rank, tp, d_tp, d_pp, readers) in [
        (0, 1, 1, 1, vec![0]),
        (0, 1, 2, 1, vec![0, 1]),
        (1, 2, 4, 1, vec![2, 3]),
        (2, 4, 2, 1, vec![1]),
        (1, 2, 4, 2, vec![2, 3, 2, 3]),
    ] {
        let settings = Settings { tp_size: tp, ..settings("p", Role::Producer) };
        let mut prefill = Rig::new(settings, rank, 7);
        prefill.has_prefilled(0.0, "p-1", "x-1");
        for (number, reader) in readers.iter().enumerate() {
            assert!(prefill.outcomes(0.1).is_empty(), "{number} of {readers:?}");
            let mut wanted = question((*reader, d_tp), &[("d-1", "x-1", &[100, 101, 102])]);
            wanted.remote_pp_size = d_pp;
            wanted.remote_port += 100 * number as u16;
            let writes = prefill.asked_and_connected(0.1, number as u64, &wanted);
            // The same worker asks again, but is written to only once.
            let again = refusal(&prefill.asked(0.1, 1000 + number as u64, &wanted));
            assert!(again.err_msg.unwrap().contains("already"));
            prefill.written(0.2, writes[0].id);
        }
        assert_eq!(prefill.outcomes(0.3), [free("p-1")], "{readers:?}");
    }
}

#[test]
fn a_worker_that_releases_blocks_counts_as_a_reader_at_any_time() {
    for before in [false, true] {
        let mut prefill = Rig::prefill();
        let lets_go = |rank: u32| question((rank, 2), &[("d-1", "x-1", &[])]);
        if before {
            assert!(prefill.asked(0.0, 1, &lets_go(0)).is_empty());
        }
        prefill.has_prefilled(0.1, "p-1", "x-1");
        if !before {
            assert_eq!(
                answer(&prefill.asked(0.2, 1, &lets_go(0))),
                (1, Finish, vec!["d-1".into()], vec![])
            );
        }
        assert!(prefill.outcomes(0.2).is_empty());
        prefill.asked(0.3, 2, &lets_go(0));
        assert!(prefill.outcomes(0.3).is_empty(), "it counts once");
        prefill.asked(0.4, 3, &lets_go(1));
        assert_eq!(prefill.outcomes(0.4), [free("p-1")]);
    }
}

#[test]
fn a_worker_that_releases_blocks_withdraws_its_request() {
    let mut prefill = Rig::prefill();
    let wanted = question(D1, &[("d-1", "x-1", &[100, 101, 102])]);
    let lets_go = question(D1, &[("d-1", "x-1", &[])]);
    // A waiting request is withdrawn: nothing is written for it.
    prefill.asked(0.0, 1, &wanted);
    let actions = prefill.asked(0.1, 2, &lets_go);
    assert_eq!(answer(&actions), (1, Finish, vec![], vec!["d-1".into()]));
    assert!(
        prefill
            .has_prefilled(0.2, "p-1", "x-1")
            .iter()
            .all(|action| { matches!(action, MooncakeAction::Answer { ask: AskId(2), .. }) })
    );
    assert_eq!(prefill.outcomes(0.2), [free("p-1")]);
    // During a write, the write ends, and the worker gets an answer when it has settled.
    let wanted = question(D1, &[("d-2", "x-2", &[100, 101, 102])]);
    let lets_go = question(D1, &[("d-2", "x-2", &[])]);
    prefill.has_prefilled(1.0, "p-2", "x-2");
    let writes = prefill.asked_and_connected(1.0, 3, &wanted);
    let actions = prefill.asked(1.1, 4, &lets_go);
    let cancel = |action: &MooncakeAction| match action {
        MooncakeAction::Engine(Action::Cancel { id }) => *id == writes[0].id,
        _ => false,
    };
    assert!(actions.iter().any(cancel), "{actions:?}");
    let said = answers(&actions);
    assert!(
        said.iter()
            .any(|(ask, answer)| *ask == 3 && answer.status == Continue && !answer.kvx_settled)
    );
    assert!(prefill.outcomes(1.2).is_empty(), "the write still reads the blocks");
    let actions = prefill.written(1.3, writes[0].id);
    let settled = refusal(&actions);
    assert_eq!((settled.status, settled.err_reqs), (Finish, Some(vec!["d-2".into()])));
    assert_eq!(prefill.outcomes(1.3), [free("p-2")]);
}

#[test]
fn a_failed_write_keeps_the_blocks_until_the_decode_releases_them() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    let refused = refusal(&fails(&mut prefill, 0.2, &writes[0], true));
    assert_eq!((refused.status, refused.err_msg.as_deref()), (Finish, Some("no luck")));
    assert!(prefill.outcomes(0.2).is_empty());
    assert!(
        prefill.log[0].starts_with("Mooncake transfer failure: send_failed"),
        "{:?}",
        prefill.log
    );
    prefill.asked(0.3, 2, &question(D1, &[("d-1", "x-1", &[])]));
    assert_eq!(prefill.outcomes(0.3), [free("p-1")]);
}

#[test]
fn only_a_kvx_decode_is_notified_when_a_failed_write_has_settled() {
    for kvx in [true, false] {
        let mut prefill = Rig::prefill();
        prefill.has_prefilled(0.0, "p-1", "x-1");
        let mut wanted = question(D1, &[("d-1", "x-1", &[100])]);
        wanted.kvx_engine_id = wanted.kvx_engine_id.filter(|_| kvx);
        let writes = prefill.asked_and_connected(0.1, 1, &wanted);
        let said = answers(&fails(&mut prefill, 0.2, &writes[0], false));
        let expected = if kvx { Continue } else { Finish };
        assert_eq!((said.len(), said[0].1.status, said[0].1.kvx_settled), (1, expected, false));
        prefill.worker.move_settled(at(0.3), writes[0].id);
        let said = answers(&prefill.actions());
        assert_eq!(said.len(), usize::from(kvx));
        assert!(said.iter().all(|(_, answer)| answer.status == Finish && answer.kvx_settled));
        assert!(prefill.outcomes(480.0).contains(&free("p-1")));
    }
}

#[test]
fn blocks_that_a_forgotten_write_reads_are_lost() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    fails(&mut prefill, 0.2, &writes[0], false);
    // The loss becomes known after the step that reports the failure.
    prefill.outcomes(0.2);
    prefill.worker.move_forgotten(at(0.3), writes[0].id);
    assert!(
        prefill.actions().iter().all(|action| !matches!(action, MooncakeAction::Answer { .. }))
    );
    prefill.outcomes(0.3);
    let outcome = Outcome::Lost { request: "p-1".into(), kept: Kept::Request };
    assert_eq!(prefill.outcomes(480.0), [outcome]);
}

#[test]
fn an_unknown_layout_is_requested_and_a_new_one_ends_waits_for_the_old() {
    let mut prefill = Rig::prefill();
    let mut short = question(D1, &[("d-1", "x-1", &[100])]);
    short.kv_caches_base_addr.clear();
    let actions = prefill.asked(0.0, 1, &short);
    assert_eq!(answer(&actions), (1, LayoutMiss, vec![], vec![]));
    assert!(prefill.worker.is_empty(), "it asks again");
    prefill.asked(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    // The decode engine restarts at the same address with different memory.
    let mut restarted = question(D1, &[("d-2", "x-2", &[200])]);
    (restarted.layout_id, restarted.kv_caches_base_addr) = (9, vec![2 << 20]);
    let refused = refusal(&prefill.asked(0.2, 2, &restarted));
    assert_eq!(refused.err_reqs, Some(vec!["d-1".into()]));
    let actions = prefill.has_prefilled(0.3, "p-2", "x-2");
    let [MooncakeAction::Connect { target, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(target.told.kv_caches_base_addr, [2 << 20]);
    let writes = prefill.connected(0.3, &actions);
    assert_eq!(pairs(&writes[0]), [(12, 200)], "one of three: the end");
}

#[test]
fn a_replica_that_does_not_send_says_so_at_once() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let actions = prefill.asked(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    let [MooncakeAction::Connect { connection, .. }] = &actions[..] else { panic!("{actions:?}") };
    let plan = PeerPlan { lanes: Vec::new(), ..PeerPlan::one_to_one(BLOCK, 1000).unwrap() };
    prefill.worker.connected(at(0.2), *connection, Ok(plan));
    assert_eq!(answer(&prefill.actions()), (1, Finish, vec!["d-1".into()], vec![]));
    assert_eq!(prefill.outcomes(0.2), [free("p-1")]);
}

// vLLM 63: a pull request with a wrong number of KV cache groups is an error
#[test]
fn a_decode_whose_memory_does_not_fit_is_told_why() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let actions = prefill.asked(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    let [MooncakeAction::Connect { connection, .. }] = &actions[..] else { panic!("{actions:?}") };
    let failure = HandshakeFailure { setup: true, error: "layer l.9 is missing there".into() };
    prefill.worker.connected(at(0.2), *connection, Err(failure));
    assert!(refusal(&prefill.actions()).err_msg.unwrap().contains("l.9"));
    assert!(prefill.outcomes(0.2).is_empty());
    assert_eq!(prefill.log.len(), 1);
    // Lists that do not match, and blocks beyond any pool.
    for blocks in [&[1, 2, 3, 4][..], &[1_000_000]] {
        prefill.has_prefilled(1.0, "p-2", "x-2");
        let mut actions = prefill.asked(1.0, 2, &question(D1, &[("d-2", "x-2", blocks)]));
        if let [MooncakeAction::Connect { connection, .. }] = &actions[..] {
            prefill.worker.connected(
                at(1.0),
                *connection,
                Ok(PeerPlan::one_to_one(BLOCK, 1000).unwrap()),
            );
            actions = prefill.actions();
        }
        assert_eq!(refusal(&actions).err_reqs, Some(vec!["d-2".into()]), "{blocks:?}");
        prefill.scheduler.withdraw(&"p-2".into());
        prefill.step(1.1);
    }
    // A different number of KV cache groups.
    prefill.has_prefilled(2.0, "p-3", "x-3");
    let mut two = question(D1, &[("d-3", "x-3", &[1])]);
    two.req_blocks[0].block_ids = vec![vec![1], vec![2]];
    assert!(refusal(&prefill.asked(2.0, 3, &two)).err_msg.unwrap().contains("KV cache groups"));
}

#[test]
fn invalid_requests_are_rejected_as_a_whole() {
    let mut prefill = Rig::new(Settings { tp_size: 2, ..settings("p", Role::Producer) }, 1, 7);
    let good = question((1, 2), &[("d-1", "x-1", &[100])]);
    let mut other = good.clone();
    other.kvx_engine_id = Some("the previous one".into());
    let mut stages = good.clone();
    stages.remote_pp_size = u32::MAX;
    for (bad, says) in [
        (question((0, 2), &[("d-1", "x-1", &[100])]), "must not pull"),
        (question((0, 3), &[("d-1", "x-1", &[100])]), "multiple"),
        (question((0, u32::MAX), &[("d-1", "x-1", &[100])]), "1024"),
        (other, "query the bootstrap server again"),
        (stages, "pipeline stages"),
    ] {
        let bad = PullRequest::decode(&bad.encode());
        let error = prefill.worker.asked(at(0.0), AskId(1), bad).unwrap_err();
        let refused = refusal(&prefill.actions());
        assert_eq!(refused.status, Error);
        assert!(error.to_string().contains(says), "{says}: {error}");
        assert_eq!(refused.err_msg, Some(error.to_string()));
    }
    let malformed = PullRequest::decode(b"\x93\x01");
    assert!(prefill.worker.asked(at(0.0), AskId(1), malformed).is_err());
    assert_eq!(refusal(&prefill.actions()).status, Error);
    assert!(prefill.worker.is_empty(), "no part of it is kept");
    let nothing = told((1, 2), 7);
    assert_eq!(answer(&prefill.asked(0.1, 2, &nothing)), (2, Finish, vec![], vec![]));
}

#[test]
fn memory_for_a_peer_is_bounded() {
    let mut prefill = Rig::prefill();
    let blocks: Vec<u32> = (0..1 << 20).collect();
    let mut refused = 0;
    for ask in 0..24 {
        let transfer = format!("x-{ask}");
        let actions = prefill.asked(0.0, ask, &question(D1, &[("d", &transfer, &blocks)]));
        refused += usize::from(!actions.is_empty());
    }
    assert!((4..14).contains(&refused), "16 requests of 4 MiB wait: {refused} of 24 were rejected");
    let mut many: Vec<String> = (0..65_000).map(|name| format!("y-{name}")).collect();
    many.push("z".into());
    let mut flood = question(D1, &[]);
    flood.req_blocks = many
        .iter()
        .map(|name| kvx_vllm::wire::mooncake::PulledRequest {
            request_id: name.clone(),
            transfer_id: name.clone(),
            block_ids: vec![vec![1]],
        })
        .collect();
    let mut prefill = Rig::prefill();
    assert!(prefill.asked(0.0, 1, &flood).is_empty());
    flood.req_blocks.iter_mut().for_each(|each| each.transfer_id.push('2'));
    let said = answers(&prefill.asked(0.0, 2, &flood));
    assert_eq!(said.len(), 2 * 65_001 - 65_536, "the rest is rejected");
}

#[test]
fn two_requests_of_one_transfer_are_ambiguous() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    prefill.has_prefilled(0.1, "p-2", "x-1");
    assert_eq!(prefill.outcomes(0.1), [free("p-2")], "the second one is not sent");
    assert!(prefill.log[0].contains("transfer_id x-1"), "{:?}", prefill.log);
    let writes = prefill.asked_and_connected(0.2, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    assert_eq!(writes[0].request, "p-1".into());
}

#[test]
fn withdrawn_blocks_are_no_longer_served() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    assert!(prefill.scheduler.withdraw(&"p-1".into()));
    let said = answers(&prefill.step(0.2));
    assert_eq!(said[0].1.err_reqs, Some(vec!["d-1".into()]));
    let said = answers(&prefill.written(0.3, writes[0].id));
    assert!(said[0].1.ok_reqs.is_none(), "the written blocks may belong to another request");
    assert!(prefill.outcomes(0.3).is_empty());
}

#[test]
fn a_retried_transfer_is_independent_of_the_previous_write() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let before = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    assert!(prefill.scheduler.withdraw(&"p-1".into()));
    prefill.step(0.2);
    prefill.has_prefilled(0.3, "p-2", "x-1");
    prefill.written(0.4, before[0].id);
    assert!(prefill.outcomes(0.4).is_empty(), "the new one has not been requested");
    let writes = prefill.asked_and_connected(0.5, 2, &question(D1, &[("d-1", "x-1", &[100])]));
    prefill.written(0.6, writes[0].id);
    assert_eq!(prefill.outcomes(0.6), [free("p-2")]);
}

#[test]
fn a_shutdown_answers_all_requests() {
    let mut prefill = Rig::prefill();
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let writes = prefill.asked_and_connected(0.1, 1, &question(D1, &[("d-1", "x-1", &[100])]));
    prefill.asked(0.1, 2, &question(D1, &[("d-2", "x-2", &[200])]));
    prefill.worker.shutdown(at(0.2));
    let said = answers(&prefill.actions());
    assert_eq!(said.iter().map(|(ask, _)| *ask).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(answers(&prefill.written(0.3, writes[0].id)).len(), 1);
}

#[test]
fn waits_follow_the_settings() {
    let mut mooncake = Mooncake::new(Role::Producer);
    mooncake.wait = Duration::from_secs(6);
    let mut prefill = Rig::new(settings("p", Role::Producer).with_mooncake(mooncake), 0, 7);
    prefill.has_prefilled(0.0, "p-1", "x-1");
    let mut vllm = question(D1, &[("d-2", "x-2", &[1])]);
    vllm.kvx_engine_id = None;
    prefill.asked(1.0, 1, &vllm);
    assert_eq!(prefill.outcomes(6.0), [free("p-1")]);
    prefill.outcomes(7.0);
    assert_eq!(answers(&prefill.actions()).len(), 1);
}
