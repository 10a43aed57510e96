//! The decode side: the workers that it asks, the answers that it accepts, and the release of its
//! blocks.

use kvx_testkit::test;
use kvx_vllm::config::Role;
use kvx_vllm::engine::mooncake::{MooncakeAction, MooncakeWorker, QueryId};
use kvx_vllm::engine::{
    Arrival, Kept, LoadFailure, NotLoaded, Outcome, Settings, Status, WorkerRank,
};
use kvx_vllm::params::{MooncakeLeg, MooncakeParams, MooncakeTransferId};
use kvx_vllm::wire::mooncake::PullResponse;
use kvx_vllm::wire::mooncake::PullStatus::{Continue, Error, Finish, LayoutMiss};

use super::rig::{
    Asked, Rig, asked, at, decode_leg, directory, fences, loaded, response, settings, told,
};

#[test]
fn one_question_to_the_bootstrap_server_and_one_for_all_requests_of_a_step() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    decode.loads(0.0, "d-2", "x-2", 200);
    let asked = decode.queries(0.0, &directory("p", 1, 1));
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].address, "tcp://p.host:4000");
    assert_eq!(
        asked[0].wants(),
        [("d-1", "x-1", vec![100, 101, 102]), ("d-2", "x-2", vec![200, 201, 202])]
    );
    assert_eq!(asked[0].request.kvx_engine_id.as_deref(), Some("p"));
    assert_eq!(
        asked[0].request.kv_caches_base_addr,
        [1 << 20],
        "the prefill does not know the layout yet"
    );

    decode.answered(0.1, asked[0].pull, &response(Continue, &["d-2"], &[]));
    assert_eq!(decode.outcomes(0.1), [loaded("d-2")]);
    decode.answered(0.2, asked[0].pull, &response(Finish, &["d-1"], &[]));
    assert_eq!(decode.outcomes(0.2), [loaded("d-1")]);
    assert!(decode.worker.is_empty(), "{:?}", decode.worker);
}

#[test]
fn answers_for_other_requests_are_counted_and_change_nothing() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let asked = decode.queries(0.0, &directory("p", 1, 1));
    decode.loads(0.1, "d-2", "x-2", 200);
    decode.step(0.1);
    decode.answered(0.2, asked[0].pull, &response(Continue, &["none"], &["d-2"]));
    assert_eq!(decode.worker.get_finished(at(0.2)).unknown_requests, 2);
    decode.answered(0.3, asked[0].pull, &response(Finish, &["d-1"], &[]));
    assert_eq!(decode.outcomes(0.3), [loaded("d-1")]);
    assert!(decode.scheduler.is_loading(&"d-2".into()));
}

// vLLM 58: a decode asks all ranks and stages that hold a part of its blocks
#[test]
fn every_worker_that_holds_a_part_is_asked_and_waited_for() {
    // (own rank, own size, prefill's tensor and pipeline size) and the expected workers.
    for (rank, tp, p_tp, p_pp, workers) in [
        (0, 1, 1, 1, vec![4000]),
        (0, 1, 2, 1, vec![4000, 4001]),
        (1, 2, 4, 2, vec![4002, 4003, 4012, 4013]),
        (3, 4, 2, 1, vec![4001]),
        (1, 2, 2, 2, vec![4001, 4011]),
    ] {
        let settings = Settings { tp_size: tp, ..settings("d", Role::Consumer) };
        let mut decode = Rig::new(settings, rank, 7);
        decode.loads(0.0, "d-1", "x-1", 100);
        let asked = decode.queries(0.0, &directory("p", p_tp, p_pp));
        let ports: Vec<u32> = asked
            .iter()
            .map(|asked| asked.address.rsplit_once(':').unwrap().1.parse().unwrap())
            .collect();
        assert_eq!(ports, workers, "rank {rank} of {tp}, prefill of {p_tp} x {p_pp}");
        for (at, asked) in asked.iter().enumerate() {
            assert!(decode.outcomes(0.1).is_empty(), "only {at} of {workers:?} have written");
            decode.answered(0.1, asked.pull, &response(Finish, &["d-1"], &[]));
        }
        assert_eq!(decode.outcomes(0.2), [loaded("d-1")]);
    }
    let settings = Settings { tp_size: 2, ..settings("d", Role::Consumer) };
    let mut decode = Rig::new(settings, 0, 7);
    decode.loads(0.0, "d-1", "x-1", 100);
    assert!(decode.queries(0.0, &directory("p", 3, 1)).is_empty(), "sizes that do not divide");
    assert!(matches!(decode.outcomes(0.0)[..], [Outcome::Failed { .. }]));
}

// vLLM 61: later pull requests omit the layout, LAYOUT_MISS has it sent again, and peers that do
//     not echo its id always get it
#[test]
fn the_layout_is_left_out_once_the_prefill_has_named_it_and_sent_again_when_it_asks() {
    let mut decode = Rig::decode();
    let ask = |decode: &mut Rig, request: &str, transfer: &str| {
        decode.loads(0.0, request, transfer, 100);
        let actions = decode.step(0.0);
        if let Some(MooncakeAction::Query { query, .. }) = actions.first() {
            return decode.queried(0.0, *query, Ok(directory("p", 1, 1))).remove(0);
        }
        asked(&actions).remove(0)
    };
    // A prefill engine that does not name the layout gets it every time.
    for request in ["d-1", "d-2"] {
        let question = ask(&mut decode, request, request);
        assert_eq!(question.request.kv_caches_base_addr.len(), 1);
        decode.answered(0.1, question.pull, &response(Finish, &[request], &[]));
    }
    let question = ask(&mut decode, "d-3", "x-3");
    let mut names = response(Finish, &["d-3"], &[]);
    names.layout_id = 7;
    decode.answered(0.1, question.pull, &names);
    let question = ask(&mut decode, "d-4", "x-4");
    assert_eq!((question.request.layout_id, question.request.kv_caches_base_addr.len()), (7, 0));
    let again = asked(&decode.answered(0.1, question.pull, &response(LayoutMiss, &[], &[])));
    assert_eq!((again[0].pull, again[0].request.kv_caches_base_addr.len()), (question.pull, 1));
    assert_eq!(again[0].wants(), question.wants());
    decode.outcomes(0.1);
    // A prefill engine that asks for it repeatedly gets no third request.
    let actions = decode.answered(0.2, question.pull, &response(LayoutMiss, &[], &[]));
    assert_eq!(fences(&actions), 1);
    decode.worker.fenced(at(0.2), &"d-4".into());
    assert!(matches!(decode.outcomes(0.2)[..], [Outcome::Failed { .. }]));
}

// vLLM 59: a failed load ends after every worker has answered, or after its fence
#[test]
fn a_failed_load_waits_for_every_worker_or_for_the_fence() {
    for fenced in [true, false] {
        let mut decode = Rig::decode();
        decode.loads(0.0, "d-1", "x-1", 100);
        let asked_first = decode.queries(0.0, &directory("p", 3, 1));
        let actions = decode.answered(0.1, asked_first[0].pull, &response(Finish, &[], &["d-1"]));
        assert_eq!(fences(&actions), 1, "vLLM may continue to write after its error");
        let let_go = asked(&actions);
        assert_eq!(let_go.len(), 3, "the workers that have not written may free their blocks");
        assert!(let_go.iter().all(|asked| asked.wants() == [("d-1", "x-1", vec![])]));
        assert!(decode.outcomes(0.2).is_empty(), "the blocks are not free yet");
        decode.answered(0.3, asked_first[1].pull, &response(Finish, &["d-1"], &[]));
        assert!(decode.outcomes(0.3).is_empty());
        if fenced {
            decode.worker.fenced(at(0.4), &"d-1".into());
        } else {
            let mut settled = response(Finish, &[], &["d-1"]);
            settled.kvx_settled = true;
            decode.answered(0.4, asked_first[2].pull, &settled);
            assert!(decode.outcomes(0.4).is_empty(), "the first one has not settled");
            decode.worker.fenced(at(0.4), &"d-1".into());
        }
        let outcomes = decode.outcomes(0.5);
        let [Outcome::Failed { failure: LoadFailure::Transfer(_), invalid, .. }] = &outcomes[..]
        else {
            panic!("{outcomes:?}")
        };
        assert_eq!(*invalid, [100, 101, 102]);
        assert_eq!(decode.log.len(), 1, "{:?}", decode.log);
        assert!(
            decode.log[0].starts_with("Mooncake transfer failure: pull_failed"),
            "{:?}",
            decode.log
        );
    }
}

#[test]
fn settled_workers_need_no_fence() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let asked = decode.queries(0.0, &directory("p", 1, 1));
    let mut settled = response(Finish, &[], &["d-1"]);
    (settled.kvx_settled, settled.err_msg) = (true, Some("the prefill was aborted".into()));
    let actions = decode.answered(0.1, asked[0].pull, &settled);
    assert_eq!(fences(&actions), 0);
    let outcomes = decode.outcomes(0.1);
    let [Outcome::Failed { failure: LoadFailure::Transfer(why), .. }] = &outcomes[..] else {
        panic!("{outcomes:?}")
    };
    assert_eq!(why, "the prefill was aborted");
}

#[test]
fn a_settled_answer_ends_the_wait_for_the_fence() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let asked = decode.queries(0.0, &directory("p", 1, 1));
    assert_eq!(fences(&decode.answered(0.1, asked[0].pull, &response(Continue, &[], &["d-1"]))), 1);
    assert!(decode.outcomes(0.1).is_empty());
    let mut settled = response(Finish, &[], &["d-1"]);
    settled.kvx_settled = true;
    decode.answered(0.2, asked[0].pull, &settled);
    assert!(matches!(decode.outcomes(0.2)[..], [Outcome::Failed { .. }]));
    decode.worker.fenced(at(0.3), &"d-1".into());
    assert!(decode.outcomes(0.3).is_empty(), "it is reported only once");
}

// vLLM 59: FINISH settles exactly the requests that are pending
#[test]
fn an_end_without_a_word_fails_those_that_wait_and_no_others() {
    for status in [Finish, Error] {
        let mut decode = Rig::decode();
        decode.loads(0.0, "d-1", "x-1", 100);
        decode.loads(0.0, "d-2", "x-2", 200);
        let asked = decode.queries(0.0, &directory("p", 1, 1));
        decode.answered(0.1, asked[0].pull, &response(Continue, &["d-1"], &[]));
        assert_eq!(decode.outcomes(0.1), [loaded("d-1")]);
        let actions = decode.answered(0.2, asked[0].pull, &response(status, &[], &[]));
        assert_eq!(fences(&actions), 1);
        decode.worker.fenced(at(0.2), &"d-2".into());
        let outcomes = decode.outcomes(0.2);
        assert!(
            matches!(&outcomes[..], [Outcome::Failed { request, .. }] if *request == "d-2".into())
        );
    }
}

#[test]
fn an_unreachable_worker_has_written_nothing_and_its_engine_is_queried_again() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let asked_first = decode.queries(0.0, &directory("p", 1, 1));
    let actions = decode.unanswered(0.1, asked_first[0].pull, false);
    assert_eq!(fences(&actions), 0);
    assert!(matches!(decode.outcomes(0.1)[..], [Outcome::Failed { .. }]));
    decode.loads(0.2, "d-2", "x-2", 100);
    let asked_next = decode.queries(0.2, &directory("p", 1, 1));
    // A worker that was reached and is silent may have begun to write.
    let actions = decode.unanswered(0.3, asked_next[0].pull, true);
    assert_eq!(fences(&actions), 1);
}

fn queries(actions: &[MooncakeAction]) -> Vec<QueryId> {
    let query = |action: &MooncakeAction| match action {
        MooncakeAction::Query { query, .. } => Some(*query),
        _ => None,
    };
    actions.iter().filter_map(query).collect()
}

/// Returns a decode engine that has loaded from both workers of a prefill engine, and its requests
/// for another prompt.
fn asks_from_memory() -> (Rig, Vec<Asked>) {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    for asked in decode.queries(0.0, &directory("p", 2, 1)) {
        decode.answered(0.1, asked.pull, &response(Finish, &["d-1"], &[]));
    }
    assert_eq!(decode.outcomes(0.1), [loaded("d-1")]);
    decode.loads(0.2, "d-2", "x-2", 200);
    let asked = asked(&decode.step(0.2));
    assert_eq!(asked.len(), 2, "the bootstrap server is not asked again");
    (decode, asked)
}

#[test]
fn a_prefill_that_listens_elsewhere_under_its_name_is_found_again() {
    let (mut decode, asked) = asks_from_memory();
    let actions = decode.unanswered(0.3, asked[0].pull, false);
    assert!(queries(&actions).is_empty(), "the other worker may have received it");
    let actions = decode.unanswered(0.3, asked[1].pull, false);
    let mut elsewhere = directory("p", 1, 1);
    elsewhere
        .engines
        .get_mut(&0)
        .unwrap()
        .workers
        .insert(WorkerRank::default(), "tcp://p.host:5000".into());
    let asked = decode.queried(0.4, queries(&actions)[0], Ok(elsewhere));
    assert_eq!((asked.len(), &*asked[0].address), (1, "tcp://p.host:5000"));
    assert_eq!(asked[0].wants(), [("d-2", "x-2", vec![200, 201, 202])]);
    decode.answered(0.5, asked[0].pull, &response(Finish, &["d-2"], &[]));
    assert_eq!(decode.outcomes(0.5), [loaded("d-2")]);
    assert!(decode.worker.is_empty() && decode.log.is_empty(), "{:?}", decode.worker);
}

#[test]
fn a_prefill_is_queried_once() {
    let (mut decode, asked) = asks_from_memory();
    decode.unanswered(0.3, asked[0].pull, false);
    let actions = decode.unanswered(0.3, asked[1].pull, false);
    let asked = decode.queried(0.4, queries(&actions)[0], Ok(directory("p", 1, 1)));
    assert_eq!(fences(&decode.unanswered(0.5, asked[0].pull, false)), 0);
    assert!(matches!(decode.outcomes(0.5)[..], [Outcome::Failed { .. }]));
}

#[test]
fn a_prefill_that_partly_received_a_request_is_not_asked_again() {
    for heard_first in [true, false] {
        let (mut decode, asked) = asks_from_memory();
        if !heard_first {
            decode.unanswered(0.3, asked[0].pull, false);
        }
        let actions = decode.answered(0.4, asked[1].pull, &response(Finish, &["d-2"], &[]));
        assert_eq!(fences(&actions), 0, "no writes remain");
        if heard_first {
            assert!(queries(&decode.unanswered(0.5, asked[0].pull, false)).is_empty());
        }
        let outcomes = decode.outcomes(0.5);
        assert!(
            matches!(outcomes[..], [Outcome::Failed { failure: LoadFailure::Transfer(_), .. }]),
            "{outcomes:?}"
        );
    }
    // It may be writing, so its blocks are fenced at the deadline.
    let (mut decode, asked) = asks_from_memory();
    decode.unanswered(0.3, asked[0].pull, false);
    assert_eq!(fences(&decode.unanswered(0.4, asked[1].pull, true)), 1);
}

#[test]
fn a_forgotten_kvx_prefill_gets_a_kvx_release() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let mut listed = directory("p", 1, 1);
    listed.engines.get_mut(&0).unwrap().is_kvx = true;
    let asked_first = decode.queries(0.0, &listed);
    // The same happens if the load ends before its request was sent.
    let actions = decode.unanswered(0.1, asked_first[0].pull, false);
    let told = |action: &MooncakeAction| matches!(action, MooncakeAction::Ask { is_kvx: true, .. });
    assert!(actions.iter().any(told), "{actions:?}");
}

#[test]
fn an_engine_that_its_bootstrap_server_does_not_list_fails_all_that_wait_with_one_line() {
    for directory in
        [Ok(directory("other", 1, 1)), Ok(Default::default()), Err("no answer".to_owned())]
    {
        let mut decode = Rig::decode();
        decode.loads(0.0, "d-1", "x-1", 100);
        decode.loads(0.0, "d-2", "x-2", 200);
        let actions = decode.step(0.0);
        let [MooncakeAction::Query { query, address, .. }] = &actions[..] else {
            panic!("{actions:?}")
        };
        assert_eq!((&*address.host, address.port), ("p.host", 8998));
        assert!(decode.queried(0.1, *query, directory.clone()).is_empty());
        let outcomes = decode.outcomes(0.1);
        let handshake = |outcome: &Outcome| {
            matches!(outcome, Outcome::Failed { failure: LoadFailure::Handshake(_), .. })
        };
        assert!(outcomes.len() == 2 && outcomes.iter().all(handshake), "{outcomes:?}");
        assert_eq!(decode.log.len(), 1, "{:?}", decode.log);
        assert!(decode.worker.is_empty());
    }
    // Not all of its workers have registered yet, so the next request asks again.
    let mut partly = directory("p", 2, 1);
    partly.engines.get_mut(&0).unwrap().workers.remove(&WorkerRank { pp: 0, tp: 0 });
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    assert!(decode.queries(0.0, &partly).is_empty());
    assert!(matches!(decode.outcomes(0.0)[..], [Outcome::Failed { .. }]));
    assert!(decode.log[0].contains("tensor rank 0, pipeline rank 0"), "{:?}", decode.log);
    decode.loads(1.0, "d-2", "x-2", 100);
    assert_eq!(decode.queries(1.0, &directory("p", 2, 1)).len(), 2);
}

#[test]
fn a_request_that_needs_no_blocks_releases_the_prefill() {
    let mut decode = Rig::decode();
    decode.arrive("d-1", 40, "x-1", decode_leg("p"));
    decode.ends(0.0, "d-1", Status::Aborted, &[]);
    let asked_first = decode.queries(0.0, &directory("p", 2, 1));
    assert_eq!(asked_first.len(), 2);
    assert!(asked_first.iter().all(|asked| asked.wants() == [("d-1", "x-1", vec![])]));
    for asked in &asked_first {
        decode.answered(0.1, asked.pull, &response(Finish, &["d-1"], &[]));
    }
    // A request with the whole prompt cached also releases the prefill's blocks.
    decode.arrive("d-2", 40, "x-2", decode_leg("p"));
    decode.allocate(0.2, "d-2", 100, 40);
    assert_eq!(asked(&decode.step(0.2)).len(), 2);
    assert!(decode.outcomes(0.2).is_empty());
}

#[test]
fn a_cached_prefix_is_not_asked_for() {
    let mut decode = Rig::decode();
    decode.arrive("d-1", 40, "x-1", decode_leg("p"));
    decode.allocate(0.0, "d-1", 101, 16);
    let asked = decode.queries(0.0, &directory("p", 1, 1));
    assert_eq!(asked[0].wants(), [("d-1", "x-1", vec![101, 102])]);
}

#[test]
fn at_its_deadline_a_load_ends_and_its_blocks_are_held_until_writes_end() {
    for lost in [false, true] {
        let settings = Settings {
            push_timeout: std::time::Duration::from_secs(9),
            ..settings("d", Role::Consumer)
        };
        let mut decode = Rig::new(settings, 0, 7);
        decode.loads(0.0, "d-1", "x-1", 100);
        decode.queries(0.0, &directory("p", 1, 1));
        assert!(decode.outcomes(8.9).is_empty());
        let outcomes = decode.outcomes(9.0);
        let [Outcome::Failed { failure: LoadFailure::Deadline, held, .. }] = &outcomes[..] else {
            panic!("{outcomes:?}")
        };
        assert_eq!(held.iter().collect::<Vec<_>>(), [100, 101, 102]);
        let actions = decode.step(9.0);
        assert_eq!(fences(&actions), 1);
        assert!(decode.outcomes(9.1).is_empty());
        let (request, kept) = ("d-1".into(), Kept::Load);
        if lost {
            decode.worker.fence_forgotten(at(9.2), &request);
            assert_eq!(decode.outcomes(9.2), [Outcome::Lost { request, kept }]);
        } else {
            decode.worker.fenced(at(9.2), &request);
            assert_eq!(decode.outcomes(9.2), [Outcome::Free { request, kept }]);
        }
    }
}

/// A plain Mooncake agent may continue to write after its error, and does not report when it stops.
/// The load fails at once.
#[test]
fn a_load_whose_blocks_are_not_free_for_long_has_failed_all_the_same() {
    for lost in [false, true] {
        let mut decode = Rig::decode();
        decode.loads(0.0, "d-1", "x-1", 100);
        let asked = decode.queries(0.0, &directory("p", 1, 1));
        let request = "d-1".into();
        decode.worker.fence_is_slow(&request);
        assert!(decode.outcomes(0.1).is_empty(), "no load has failed yet");
        let actions = decode.answered(0.2, asked[0].pull, &response(Finish, &[], &["d-1"]));
        assert_eq!(fences(&actions), 1);
        assert!(decode.outcomes(0.2).is_empty());
        decode.worker.fence_is_slow(&request);
        let outcomes = decode.outcomes(0.3);
        let [Outcome::Failed { failure: LoadFailure::Transfer(_), held, invalid, .. }] =
            &outcomes[..]
        else {
            panic!("{outcomes:?}")
        };
        assert_eq!(held.iter().collect::<Vec<_>>(), *invalid);
        assert_eq!(invalid, &[100, 101, 102]);
        decode.step(0.4);
        decode.worker.fence_is_slow(&request);
        assert!(decode.outcomes(0.5).is_empty(), "it fails only once");
        let kept = Kept::Load;
        let end = if lost {
            decode.worker.fence_forgotten(at(0.6), &request);
            Outcome::Lost { request, kept }
        } else {
            decode.worker.fenced(at(0.6), &request);
            Outcome::Free { request, kept }
        };
        assert_eq!(decode.outcomes(0.6), [end]);
    }
}

#[test]
fn an_abort_during_the_bootstrap_query_releases_the_blocks_at_once() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let actions = decode.step(0.0);
    let [MooncakeAction::Query { query, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert!(decode.ends(0.1, "d-1", Status::Aborted, &[100, 101, 102]).delay_free);
    decode.step(0.1);
    assert_eq!(decode.outcomes(0.1), [Outcome::Free { request: "d-1".into(), kept: Kept::Load }]);
    let asked = decode.queried(0.2, *query, Ok(directory("p", 1, 1)));
    assert_eq!(asked[0].wants(), [("d-1", "x-1", vec![])], "the prefill is still told");
}

#[test]
fn a_request_that_releases_blocks_survives_the_end_of_its_other_load() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    decode.loads(0.0, "d-2", "x-2", 200);
    let actions = decode.step(0.0);
    let [MooncakeAction::Query { query, .. }] = &actions[..] else { panic!("{actions:?}") };
    decode.ends(0.1, "d-1", Status::Aborted, &[100, 101, 102]);
    decode.step(0.1);
    let asked = decode.queried(0.2, *query, Ok(directory("p", 1, 1)));
    assert_eq!(asked[0].wants(), [("d-1", "x-1", vec![]), ("d-2", "x-2", vec![200, 201, 202])]);
    decode.ends(0.3, "d-2", Status::Aborted, &[200, 201, 202]);
    let mut actions = decode.step(0.3);
    decode.worker.fenced(at(0.4), &"d-2".into());
    actions.extend(decode.actions());
    let ends = |action: &MooncakeAction| matches!(action, MooncakeAction::Hangup { .. });
    assert!(!actions.iter().any(ends), "it may not be sent yet: {actions:?}");
    decode.answered(0.5, asked[0].pull, &response(Finish, &["d-1"], &["d-2"]));
    assert_eq!(self::asked(&decode.step(0.6)).len(), 0);
}

#[test]
fn invalid_answers_do_not_affect_other_loads() {
    let mut decode = Rig::decode();
    decode.loads(0.0, "d-1", "x-1", 100);
    let first = decode.queries(0.0, &directory("p", 1, 1));
    decode.loads(0.1, "d-2", "x-2", 200);
    let second = asked(&decode.step(0.1));
    // A worker's answer counts only for the requests that it was asked for.
    decode.answered(0.2, second[0].pull, &response(Continue, &["d-1", "nobody"], &["x-1", ""]));
    assert!(decode.outcomes(0.2).is_empty());
    decode.answered(0.3, first[0].pull, &response(Finish, &["d-1"], &[]));
    assert_eq!(decode.outcomes(0.3), [loaded("d-1")]);
    decode.answered(0.4, first[0].pull, &response(Finish, &[], &["d-1"]));
    assert!(decode.outcomes(0.4).is_empty(), "a load has only one outcome");
    let malformed = PullResponse::decode(b"\xff\x00 no msgpack");
    decode.worker.answered(at(0.5), second[0].pull, malformed);
    assert_eq!(fences(&decode.actions()), 1);
}

// vLLM 58: legs that contradict the engine's role are rejected
#[test]
fn legs_of_the_other_role_and_addresses_that_are_none_are_refused_in_words() {
    let refused = |settings: Settings, leg: MooncakeLeg| {
        let request = "r".into();
        let arrival =
            Arrival { request: &request, prompt_tokens: 40, params: None, deadline: None };
        let params = MooncakeParams::new(MooncakeTransferId::new("x").unwrap(), leg);
        let mut scheduler = kvx_vllm::engine::Scheduler::new(settings);
        scheduler.on_new_transfer(arrival, &params).unwrap_err()
    };
    for (role, leg, says) in [
        (Role::Consumer, MooncakeLeg::Prefill, "kv_producer"),
        (Role::Producer, decode_leg("p"), "kv_consumer"),
    ] {
        assert!(refused(settings("e", role), leg).to_string().contains(says));
    }
    for address in
        ["https://h:8998", "h", "http://h:0", "http://:1", "http://a/b:1", "http://::1:8998"]
    {
        let leg = MooncakeLeg::Decode {
            remote_engine_id: "p".into(),
            remote_bootstrap_addr: address.into(),
        };
        let why = refused(settings("e", Role::Both), leg).to_string();
        assert!(why.contains("http://host:port"), "{address}: {why}");
    }
    let mut strict = settings("e", Role::Both);
    strict.allowed_hosts = Some(vec!["10.0.0.1".into()]);
    assert!(matches!(refused(strict, decode_leg("p")), NotLoaded::HostNotAllowed(_)));
    let nixl = Settings::new("e", kvx_vllm::engine::Address { host: "h".into(), port: 1 });
    assert!(refused(nixl.clone(), decode_leg("p")).to_string().contains("MooncakeConnector"));
    assert!(MooncakeWorker::new(nixl, WorkerRank::default(), told((0, 1), 0)).is_err());
}
