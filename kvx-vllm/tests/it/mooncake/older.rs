//! The protocol before vLLM 0.16: the worker that is asked, one answer per request, and names that
//! both sides share.

use kvx_core::{ErrorKind, Result};
use kvx_testkit::test;
use kvx_vllm::config::Role;
use kvx_vllm::engine::mooncake::{
    AskId, Bootstrap, Mooncake, MooncakeAction, MooncakeWorker, PullId,
};
use kvx_vllm::engine::{
    Address, Arrival, Kept, LoadFailure, Move, Outcome, RequestId, Settings, Status, WorkerRank,
};
use kvx_vllm::params::{OlderMooncakeParams, TransferParams};
use kvx_vllm::wire::mooncake::PullStatus::Finish;
use kvx_vllm::wire::mooncake::{OlderAnswer, OlderPullRequest, PullRequest, PullResponse};
use serde_json::{Value, json};

use super::rig::{Asked, Rig, answer, asked, at, fences, loaded, pairs, question, told, writes};

/// The request of a decode worker before vLLM 0.16, by the rules of msgspec.
const GOLDEN: &[u8] = b"\x85\xafremote_hostname\xa810.0.0.1\xabremote_port\xcd\x04\xd2\
    \xabrequest_ids\x91\xa2r1\xb3kv_caches_base_addr\x91\x01\xa9block_ids\x91\x92\x03\x04";

fn settings(engine: &str, role: Role) -> Settings {
    let mooncake = Mooncake { bootstrap: Bootstrap::Without, ..Mooncake::new(role) };
    let address = Address { host: format!("{engine}.host").into(), port: 9000 };
    Settings::new(engine, address).with_mooncake(mooncake)
}

fn rig(role: Role) -> Rig {
    Rig::new(settings(if role == Role::Producer { "p" } else { "d" }, role), 0, 7)
}

fn arrives(rig: &mut Rig, request: &str, params: &TransferParams) {
    let params = OlderMooncakeParams::from_params(params).unwrap();
    let request = RequestId::from(request);
    let arrival =
        Arrival { request: &request, prompt_tokens: 40, params: None, deadline: Some(at(1000.0)) };
    rig.scheduler.on_new_older_transfer(arrival, &params).unwrap();
}

/// Computes a prefill leg with three blocks from `first` on, and returns its answer.
fn prefilled(prefill: &mut Rig, request: &str, first: u32) -> TransferParams {
    arrives(prefill, request, &TransferParams::ask_prefill());
    prefill.step(0.0);
    let finished = prefill.ends(0.0, request, Status::LengthCapped, &[first, first + 1, first + 2]);
    assert!(finished.delay_free);
    prefill.step(0.0);
    finished.params.unwrap()
}

/// Returns the answer of a vLLM prefill instance.
fn vllms_answer() -> TransferParams {
    let answer = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_host": "p.host",
        "remote_port": 9000});
    TransferParams::from_value(&answer).unwrap()
}

/// Gives a decode leg the blocks from 100 on. Returns its request with the destination, and whether
/// that is a kvx engine.
fn asks(decode: &mut Rig, request: &str, params: &TransferParams) -> (Asked, bool) {
    arrives(decode, request, params);
    decode.allocate(0.0, request, 100, 0);
    let actions = decode.step(0.0);
    let [MooncakeAction::Ask { is_kvx, .. }] = &actions[..] else {
        panic!("expected one request: {actions:?}")
    };
    (asked(&actions).remove(0), *is_kvx)
}

fn answered(decode: &mut Rig, now: f64, pull: PullId, bytes: &[u8]) -> Vec<MooncakeAction> {
    decode.worker.older_answered(at(now), pull, OlderAnswer::decode(bytes));
    decode.actions()
}

/// Returns a plain agent's request.
fn plain(asked: &[(&str, &[u32])]) -> OlderPullRequest {
    let asked: Vec<_> =
        asked.iter().map(|(request, blocks)| (*request, *request, *blocks)).collect();
    OlderPullRequest::plain(&question((0, 1), &asked)).unwrap()
}

fn is_asked(
    prefill: &mut Rig,
    ask: u64,
    question: OlderPullRequest,
) -> (Result<()>, Vec<MooncakeAction>) {
    let question = OlderPullRequest::decode(&question.encode());
    let taken = prefill.worker.older_asked(at(0.1), AskId(ask), question);
    (taken, prefill.actions())
}

fn begins(prefill: &mut Rig, ask: u64, question: OlderPullRequest) -> Vec<Move> {
    let (taken, actions) = is_asked(prefill, ask, question);
    taken.unwrap();
    prefill.connected(0.1, &actions)
}

/// Returns the answer, of which there is at most one.
fn said(actions: &[MooncakeAction]) -> Option<(u64, &[u8])> {
    let answers: Vec<_> = actions
        .iter()
        .filter_map(|action| match action {
            MooncakeAction::Answer { ask, bytes } => Some((ask.0, &bytes[..])),
            _ => None,
        })
        .collect();
    assert!(answers.len() <= 1, "a REQ socket gets one answer: {answers:?}");
    answers.first().copied()
}

// vLLM 56, 58: before 0.16: pull requests and answers equal vLLM's byte for byte
#[test]
fn messages_are_those_of_vllm() {
    let mut asked = told((0, 1), 7);
    (asked.remote_hostname, asked.remote_port) = ("10.0.0.1".into(), 1234);
    asked.kv_caches_base_addr = vec![1];
    asked.req_blocks = question((0, 1), &[("d-1", "r1", &[3, 4])]).req_blocks;
    let older = OlderPullRequest::plain(&asked).unwrap();
    assert_eq!(older.encode(), GOLDEN);
    assert_eq!(OlderPullRequest::decode(GOLDEN).unwrap(), older);
    assert_eq!(OlderAnswer::decode(b"trans_done").unwrap(), OlderAnswer::Done);
    assert_eq!(OlderAnswer::decode(b"trans_error").unwrap(), OlderAnswer::Failed);
    assert_eq!(OlderAnswer::decode(b"trans_done ").unwrap_err().kind(), ErrorKind::Malformed);
    for cut in 0..GOLDEN.len() {
        assert_eq!(
            OlderPullRequest::decode(&GOLDEN[..cut]).unwrap_err().kind(),
            ErrorKind::Malformed,
            "{cut}"
        );
    }
    // The request to a kvx engine names no block, so a vLLM at the same address rejects it.
    let kvx = OlderPullRequest::decode(&OlderPullRequest::to_kvx(&asked).encode()).unwrap();
    assert_eq!((kvx.request_ids.len(), kvx.block_ids.len()), (1, 0));
    assert_eq!(PullRequest::decode(&kvx.kvx_question.unwrap()).unwrap(), asked);
}

// vLLM 56, 58: before 0.16: a prefill's answer to its client names the address that a decode asks
#[test]
fn a_prefill_answers_where_it_listens_and_vllm_finds_its_keys() {
    let params = prefilled(&mut rig(Role::Producer), "cmpl-x-0-0123abcd", 10);
    let mut told = params.to_value(Default::default()).unwrap();
    let vllms = vllms_answer().to_value(Default::default()).unwrap();
    for (key, value) in vllms.as_object().unwrap() {
        assert_eq!(told.as_object_mut().unwrap().remove(key).as_ref(), Some(value), "{key}");
    }
    let own: Value = json!({"kvx_engine_id": "p", "kvx_request_id": "cmpl-x-0-0123abcd", "remote_num_tokens": 48});
    assert_eq!(told, own);
}

#[test]
fn a_plain_prefill_is_asked_by_the_shared_name_at_the_port_of_the_own_rank() {
    for tp in [0, 3] {
        let settings = Settings { tp_size: 4, ..settings("d", Role::Consumer) };
        let mut decode = Rig::new(settings, tp, 7);
        let (asked, is_kvx) = asks(&mut decode, "cmpl-x-0-0123abcd", &vllms_answer());
        assert_eq!((asked.address, is_kvx), (format!("tcp://p.host:{}", 9000 + tp), false));
        let older = OlderPullRequest::plain(&asked.request).unwrap();
        assert_eq!(
            (older.request_ids, older.block_ids),
            (vec!["cmpl-x-0".into()], vec![vec![100, 101, 102]])
        );
        assert_eq!(older.kv_caches_base_addr, [1 << 20]);
        answered(&mut decode, 0.1, asked.pull, b"trans_done");
        assert_eq!(decode.outcomes(0.1), [loaded("cmpl-x-0-0123abcd")]);
        assert!(decode.worker.is_empty(), "{:?}", decode.worker);
    }
}

#[test]
fn a_failing_plain_prefill_is_fenced_and_fails_the_load_with_a_reason() {
    for bytes in [&b"trans_error"[..], b"nonsense"] {
        let mut decode = rig(Role::Consumer);
        let (asked, _) = asks(&mut decode, "d-1", &vllms_answer());
        let actions = answered(&mut decode, 0.1, asked.pull, bytes);
        assert_eq!(fences(&actions), 1, "it may continue to write");
        assert!(decode.outcomes(0.2).is_empty(), "the blocks are not free yet");
        decode.worker.fenced(at(0.3), &"d-1".into());
        let outcomes = decode.outcomes(0.3);
        let [Outcome::Failed { failure: LoadFailure::Transfer(why), .. }] = &outcomes[..] else {
            panic!("{outcomes:?}")
        };
        assert!(why.contains("trans_error"), "{why}");
    }
    // A silent prefill engine costs the load its time limit, and then a fence.
    let mut decode = rig(Role::Consumer);
    asks(&mut decode, "d-1", &vllms_answer());
    let late = decode.worker.next_deadline().unwrap();
    let output = decode.worker.get_finished(late);
    assert!(output.finished_recving.is_empty());
    assert_eq!(fences(&decode.actions()), 1);
}

#[test]
fn requests_are_sent_separately_and_fail_separately() {
    let mut decode = rig(Role::Consumer);
    for (request, first) in [("d-1", 100), ("d-2", 200)] {
        arrives(&mut decode, request, &vllms_answer());
        decode.allocate(0.0, request, first, 0);
    }
    let asked = asked(&decode.step(0.0));
    assert_eq!(asked.len(), 2);
    answered(&mut decode, 0.1, asked[0].pull, b"trans_error");
    answered(&mut decode, 0.1, asked[1].pull, b"trans_done");
    assert_eq!(decode.outcomes(0.1), [loaded("d-2")]);
}

// vLLM 58, 59: before 0.16: a decode gets one answer for all its requests, after the last write
#[test]
fn a_plain_decode_is_written_and_hears_one_answer_for_all() {
    let mut prefill = rig(Role::Producer);
    prefilled(&mut prefill, "r1-0123abcd", 10);
    prefilled(&mut prefill, "r2-0123abcd", 20);
    let moves = begins(&mut prefill, 1, plain(&[("r1", &[100, 101]), ("r2", &[200])]));
    let written: Vec<_> = moves.iter().map(pairs).collect();
    assert_eq!(
        written,
        [vec![(11, 100), (12, 101)], vec![(22, 200)]],
        "a cached prefix is not written"
    );
    assert_eq!(said(&prefill.written(0.2, moves[0].id)), None);
    assert_eq!(said(&prefill.written(0.2, moves[1].id)), Some((1, &b"trans_done"[..])));
    let free = |request: &str| Outcome::Free { request: request.into(), kept: Kept::Request };
    assert_eq!(prefill.outcomes(0.3), [free("r1-0123abcd"), free("r2-0123abcd")]);
    // A request without blocks releases the prefill's blocks.
    prefilled(&mut prefill, "r3-0123abcd", 30);
    let (taken, actions) = is_asked(&mut prefill, 2, plain(&[("r3", &[])]));
    taken.unwrap();
    assert_eq!(said(&actions), Some((2, &b"trans_done"[..])));
    assert_eq!(prefill.outcomes(0.3), [free("r3-0123abcd")]);
    // It also gets an answer if the request is over.
    let (_, actions) = is_asked(&mut prefill, 3, plain(&[("r3", &[100])]));
    assert_eq!(said(&actions), Some((3, &b"trans_error"[..])));
    assert_eq!(prefill.worker.len(), 1, "the connection to the decode: {:?}", prefill.worker);
}

#[test]
fn an_early_request_waits_for_the_prefill_and_an_abort_wakes_it() {
    let mut prefill = rig(Role::Producer);
    for (ask, blocks) in [(1, &[100, 101, 102][..]), (2, &[200, 201, 202])] {
        let request = format!("r{ask}");
        let (taken, actions) = is_asked(&mut prefill, ask, plain(&[(&request, blocks)]));
        assert!(taken.is_ok() && actions.is_empty(), "it waits");
    }
    arrives(&mut prefill, "r1-0123abcd", &TransferParams::ask_prefill());
    arrives(&mut prefill, "r2-0123abcd", &TransferParams::ask_prefill());
    prefill.step(0.2);
    prefill.ends(0.2, "r1-0123abcd", Status::LengthCapped, &[10, 11, 12]);
    prefill.ends(0.2, "r2-0123abcd", Status::Aborted, &[]);
    let actions = prefill.step(0.2);
    assert_eq!(said(&actions), Some((2, &b"trans_error"[..])));
    let moves = prefill.connected(0.2, &actions);
    assert_eq!(pairs(&moves[0]), [(10, 100), (11, 101), (12, 102)]);
    assert_eq!(said(&prefill.written(0.3, moves[0].id)), Some((1, &b"trans_done"[..])));
    // No prefill starts for this request, so it gets an error at the time limit.
    is_asked(&mut prefill, 3, plain(&[("r3", &[100])])).0.unwrap();
    prefill.worker.get_finished(at(0.1 + 480.0));
    assert_eq!(said(&prefill.actions()), Some((3, &b"trans_error"[..])));
}

#[test]
fn invalid_older_requests_get_an_error_and_no_writes() {
    let wrong: [(ErrorKind, &dyn Fn(&mut OlderPullRequest)); 5] = [
        (ErrorKind::Malformed, &|asked| asked.block_ids.clear()),
        (ErrorKind::Malformed, &|asked| asked.request_ids.push("r2".into())),
        (ErrorKind::Malformed, &|asked| {
            asked.request_ids.push("r1".into());
            asked.block_ids.push(vec![101]);
        }),
        (ErrorKind::Incompatible, &|asked| asked.kv_caches_base_addr.push(1 << 30)),
        (ErrorKind::Incompatible, &|asked| asked.kv_caches_base_addr.clear()),
    ];
    let mut prefill = rig(Role::Producer);
    prefilled(&mut prefill, "r1-0123abcd", 10);
    for (ask, (kind, change)) in wrong.into_iter().enumerate() {
        let mut question = plain(&[("r1", &[100])]);
        change(&mut question);
        let (taken, actions) = is_asked(&mut prefill, ask as u64, question);
        assert_eq!(taken.unwrap_err().kind(), kind, "{ask}");
        assert_eq!(said(&actions), Some((ask as u64, &b"trans_error"[..])));
        assert!(writes(&actions).is_empty());
    }
    let nonsense = OlderPullRequest::decode(b"\xc0");
    assert!(prefill.worker.older_asked(at(0.1), AskId(9), nonsense).is_err());
    assert_eq!(said(&prefill.actions()), Some((9, &b"trans_error"[..])));
    // More blocks than the request has; the last request of all is valid.
    let moves = begins(&mut prefill, 10, plain(&[("r1", &[100, 101, 102, 103])]));
    assert!(moves.is_empty());
    assert_eq!(begins(&mut prefill, 11, plain(&[("r1", &[100])])).len(), 1);
}

#[test]
fn a_name_that_is_used_again_means_the_latest_and_kvx_its_own() {
    let mut prefill = rig(Role::Producer);
    let first = prefilled(&mut prefill, "r-00000001", 10);
    prefilled(&mut prefill, "r-00000002", 20);
    let moves = begins(&mut prefill, 1, plain(&[("r", &[100])]));
    assert_eq!(pairs(&moves[0]), [(22, 100)]);
    let mut decode = rig(Role::Consumer);
    let (asked, is_kvx) = asks(&mut decode, "r-00000009", &first);
    assert!(is_kvx);
    assert_eq!(asked.wants(), [("r-00000009", "r-00000001", vec![100, 101, 102])]);
    let moves = begins(&mut prefill, 2, OlderPullRequest::to_kvx(&asked.request));
    assert_eq!(pairs(&moves[0]), [(10, 100), (11, 101), (12, 102)]);
    // Between kvx engines, the answer has the current form.
    let actions = prefill.written(0.2, moves[0].id);
    assert_eq!(answer(&actions), (2, Finish, vec!["r-00000009".into()], vec![]));
    let [MooncakeAction::Answer { bytes, .. }] = &actions[..] else { panic!("{actions:?}") };
    decode.worker.answered(at(0.2), asked.pull, PullResponse::decode(bytes));
    assert_eq!(decode.outcomes(0.2), [loaded("r-00000009")]);
}

#[test]
fn settings_that_the_older_protocol_cannot_express_are_rejected() {
    let several = Settings { groups: vec![None, None], ..settings("p", Role::Both) };
    let stages = Settings { pp_size: 2, ..settings("p", Role::Both) };
    for settings in [several, stages] {
        let error =
            MooncakeWorker::new(settings, WorkerRank::default(), told((0, 1), 7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("0.16 or later"), "{error}");
    }
    // A port above 65535 fails the load without a request.
    let mut decode = Rig::new(Settings { tp_size: 2, ..settings("d", Role::Consumer) }, 1, 7);
    let mut params = vllms_answer();
    params.remote_port = Some(65535);
    arrives(&mut decode, "d-1", &params);
    decode.allocate(0.0, "d-1", 100, 0);
    let actions = decode.step(0.0);
    assert!(asked(&actions).is_empty());
    let outcomes = decode.outcomes(0.0);
    let [Outcome::Failed { failure: LoadFailure::Handshake(why), .. }] = &outcomes[..] else {
        panic!("{outcomes:?}")
    };
    assert!(why.contains("VLLM_MOONCAKE_BOOTSTRAP_PORT"), "{why}");
}
