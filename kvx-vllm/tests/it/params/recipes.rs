//! Recipes of proxies: the body of each leg, and parameters that are never passed on.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::params::recipe::concurrent::{self, MooncakeTarget, PushTarget};
use kvx_vllm::params::recipe::{Answer, AnswerStream, sequential};
use kvx_vllm::params::{MooncakeTransferId, RemoteBlocks, TransferParams, XRequestId};
use serde_json::{Value, json};

fn request() -> Value {
    json!({
        "model": "m", "prompt": "Once", "max_tokens": 24, "min_tokens": 3, "stream": true, "seed": 7,
        "stream_options": {"include_usage": true},
    })
}

fn handed_over() -> Value {
    let remote =
        RemoteBlocks::new("prefill-0", "cmpl-u-0-bbb18847", "10.0.0.1", 5600, vec![vec![28]]);
    TransferParams::prefilled(remote, Version::V0_33).to_value(Version::V0_33).unwrap()
}

fn response(params: Value) -> Value {
    json!({"id": "cmpl-u", "choices": [{"index": 0, "finish_reason": "length"}], "kv_transfer_params": params})
}

fn answer(params: Value) -> Answer {
    Answer::from_body(&response(params)).unwrap()
}

#[test]
fn a_prefill_leg_makes_one_token_and_does_not_stream() {
    let mut chat = request();
    chat["max_completion_tokens"] = json!(24);
    chat["min_completion_tokens"] = json!(2);
    let leg = sequential::prefill_leg(&chat).unwrap();
    assert_eq!(
        leg,
        json!({
            "model": "m", "prompt": "Once", "max_tokens": 1, "max_completion_tokens": 1, "stream": false, "seed": 7,
            "kv_transfer_params": TransferParams::ask_prefill().to_value(Version::V0_33).unwrap(),
        })
    );
    assert!(sequential::prefill_leg(&request()).unwrap().get("max_completion_tokens").is_none());
}

#[test]
fn a_decode_leg_is_the_clients_request_with_the_answers_parameters() {
    let leg = sequential::decode_leg(&request(), &answer(handed_over()), Version::V0_33).unwrap();
    let mut expected = request();
    expected["kv_transfer_params"] = handed_over();
    assert_eq!((leg.body, leg.transfers), (expected, true));
}

#[test]
fn without_blocks_the_decode_instance_computes_the_prompt_itself() {
    let mut empty = handed_over();
    empty["remote_block_ids"] = json!([[]]);
    for nothing in [Value::Null, json!({"do_remote_prefill": false}), empty] {
        let leg = sequential::decode_leg(&request(), &answer(nothing), Version::V0_33).unwrap();
        assert_eq!((leg.body, leg.transfers), (request(), false));
    }
    assert_eq!(Answer::from_body(&json!({})).unwrap(), Answer::default());
}

/// Parameters of a client would name hosts that instances connect to.
#[test]
fn an_address_alone_is_of_a_mooncake_connector_before_0_16_and_is_passed_on() {
    let told = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_host": "10.0.0.1",
        "remote_port": 8998, "kvx_engine_id": "p"});
    let leg = sequential::decode_leg(&request(), &answer(told.clone()), Version::V0_33).unwrap();
    assert!(leg.transfers);
    assert_eq!(leg.body["kv_transfer_params"], told);
    for (key, value) in [("remote_engine_id", json!("e")), ("remote_request_id", json!("r"))] {
        let mut other = told.clone();
        other[key] = value;
        assert!(
            sequential::decode_leg(&request(), &answer(other), Version::V0_33).is_err(),
            "{key}: its blocks are missing"
        );
    }
}

#[test]
fn parameters_of_a_client_are_never_passed_on() {
    let mut hostile = request();
    hostile["kv_transfer_params"] =
        json!({"do_remote_prefill": true, "remote_host": "169.254.169.254"});
    let prefill = sequential::prefill_leg(&hostile).unwrap();
    let decode = sequential::decode_leg(&hostile, &Answer::default(), Version::V0_33).unwrap().body;
    let target = MooncakeTarget {
        dp_rank: 0,
        engine_id: "e".to_owned(),
        bootstrap_addr: "http://h:1".to_owned(),
    };
    let legs = concurrent::mooncake_legs(&hostile, &MooncakeTransferId::new("x").unwrap(), &target)
        .unwrap();
    for body in [prefill, decode, legs.prefill, legs.decode] {
        assert!(!body.to_string().contains("169.254"), "{body}");
    }
}

#[test]
fn a_request_for_several_answers_has_no_transfer() {
    for (key, value) in [
        ("n", json!(2)),
        ("n", json!("2")),
        ("best_of", json!(4)),
        ("use_beam_search", json!(true)),
    ] {
        let mut several = request();
        several[key] = value;
        assert_eq!(sequential::prefill_leg(&several).unwrap_err().key(), key);
        let error =
            sequential::decode_leg(&several, &answer(handed_over()), Version::V0_33).unwrap_err();
        assert_eq!(error.key(), key);
    }
    let mut one = request();
    (one["n"], one["best_of"], one["use_beam_search"]) = (json!(1), Value::Null, json!(false));
    sequential::prefill_leg(&one).unwrap();
    assert_eq!(sequential::prefill_leg(&json!("text")).unwrap_err().key(), "request");
}

#[test]
fn an_error_answer_gives_an_error_with_its_message() {
    let body = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}});
    let error = Answer::from_body(&body).unwrap_err();
    assert!(
        error.key() == "error" && error.to_string().contains("Internal server error"),
        "{error}"
    );
    let mut stream = AnswerStream::default();
    assert_eq!(stream.push(format!("data: {body}\n").as_bytes()).unwrap_err().key(), "error");
}

// vLLM 46: the prefill leg of a later turn carries the parameters of the decode's answer
#[test]
fn answers_of_the_wrong_leg_are_told_apart() {
    let mut from_decode = handed_over();
    (from_decode["do_remote_decode"], from_decode["do_remote_prefill"]) =
        (json!(true), json!(false));
    let error = sequential::decode_leg(&request(), &answer(from_decode.clone()), Version::V0_33)
        .unwrap_err();
    assert_eq!(error.key(), "do_remote_prefill");
    let error =
        sequential::prefill_leg_of_later_turn(&request(), &answer(handed_over()), Version::V0_33)
            .unwrap_err();
    assert_eq!(error.key(), "do_remote_decode");

    let leg = sequential::prefill_leg_of_later_turn(
        &request(),
        &answer(from_decode.clone()),
        Version::V0_33,
    )
    .unwrap();
    assert_eq!((&leg["kv_transfer_params"], &leg["max_tokens"]), (&from_decode, &json!(1)));
    let first =
        sequential::prefill_leg_of_later_turn(&request(), &Answer::default(), Version::V0_33)
            .unwrap();
    assert_eq!(
        first,
        sequential::prefill_leg(&request()).unwrap(),
        "a decode instance that kept nothing"
    );
}

#[test]
fn a_stream_is_read_in_pieces_of_any_size() {
    let stream = format!(
        ": comment\r\nevent: x\r\ndata: {}\r\n\r\ndata:{}\n\ndata: \n\ndata: [DONE]\n",
        json!({"choices": [{"text": "a", "finish_reason": null}]}),
        response(handed_over()),
    );
    for size in 1..stream.len() {
        let mut reader = AnswerStream::default();
        for piece in stream.as_bytes().chunks(size) {
            assert!(!reader.done());
            reader.push(piece).unwrap();
        }
        assert!(reader.done());
        assert_eq!(reader.answer(), &answer(handed_over()), "pieces of {size}");
    }
}

#[test]
fn a_stream_keeps_one_line_of_bounded_length() {
    let mut reader = AnswerStream::with_max_line(64);
    let short = format!("data: {}\n", json!({"a": "x".repeat(40)}));
    for _ in 0..1000 {
        short.as_bytes().chunks(5).for_each(|piece| reader.push(piece).unwrap());
    }
    reader.push(&[b'x'; 60]).unwrap();
    assert_eq!(reader.push(&[b'x'; 5]).unwrap_err().key(), "data");
    assert_eq!(AnswerStream::default().push(b"data: {\n").unwrap_err().key(), "data");
}

#[test]
fn both_mooncake_legs_name_one_transfer() {
    let query = json!({
        "10": {"engine_id": "e10", "worker_addr": {}},
        "2": {"engine_id": "e2", "worker_addr": {"0": {"0": "tcp://10.0.0.1:4711"}}},
    });
    let targets = MooncakeTarget::from_query("http://10.0.0.1:8998", &query).unwrap();
    assert_eq!(targets.iter().map(|target| target.dp_rank).collect::<Vec<_>>(), [2, 10]);
    let id = MooncakeTransferId::from_random([7; 16]);
    let legs = concurrent::mooncake_legs(&request(), &id, &targets[0]).unwrap();
    assert_eq!(legs.prefill_headers, [("X-data-parallel-rank", "2".to_owned())]);
    assert_eq!((&legs.prefill["max_tokens"], &legs.prefill["stream"]), (&json!(1), &json!(false)));
    assert_eq!(
        legs.prefill["kv_transfer_params"],
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id.as_str()})
    );
    let mut decode = request();
    decode["kv_transfer_params"] = json!({
        "do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e2", "transfer_id": id.as_str(),
    });
    assert_eq!(legs.decode, decode);

    for (bad, key) in
        [(json!([]), "query"), (json!({"x": {}}), "query"), (json!({"0": {}}), "engine_id")]
    {
        assert_eq!(MooncakeTarget::from_query("http://h:1", &bad).unwrap_err().key(), key);
    }
}

#[test]
fn both_push_legs_are_known_before_the_prefill_is_done() {
    let target = PushTarget {
        engine_id: "p".to_owned(),
        host: "10.0.0.1".to_owned(),
        port: 5600,
        tp_size: 2,
        pp_size: 1,
    };
    let id = XRequestId::new("shared").unwrap();
    let legs = concurrent::push_legs(&request(), &id, &target).unwrap();
    assert_eq!(legs.prefill, sequential::prefill_leg(&request()).unwrap());
    assert!(legs.prefill_headers.is_empty());
    assert_eq!(
        legs.decode["kv_transfer_params"],
        json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "p", "remote_host": "10.0.0.1",
               "remote_port": 5600, "remote_request_id": "shared", "tp_size": 2, "pp_size": 1, "dcp_size": 1,
               "transfer_mode": "push"})
    );
    let nameless = PushTarget { engine_id: String::new(), ..target };
    assert_eq!(
        concurrent::push_legs(&request(), &id, &nameless).unwrap_err().key(),
        "remote_engine_id"
    );
}
