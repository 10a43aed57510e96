//! Tests of each connector's recipe: the parameters of both legs, and that the client gets the
//! answer of a single server.

use hyper::Method;
use kvx_instance::{Connector, Instance, Leg, Seen, Settings, answer_to};
use serde_json::{Value, json};

use crate::proxy::client::{Call, completion, prompt, streamed};
use crate::proxy::fleet::{Fleet, Plan};

pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const CHAT: &str = "/v1/chat/completions";

/// Returns the requests of one kind that an instance has received.
pub(crate) fn seen(instance: &mut Instance, leg: Leg) -> Vec<Seen> {
    instance.report().seen.into_iter().filter(|seen| seen.leg == Some(leg)).collect()
}

fn of(connector: Connector) -> Settings {
    Settings { connector, ..Settings::default() }
}

/// Sends a completion and a stream over both legs; checks that their blocks are read and none is
/// left.
async fn serves_both_ways(fleet: &mut Fleet, name: &str) {
    let prompt = prompt(name, 50);
    for _ in 0..2 {
        let answer = Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 9)).send().await;
        assert_eq!(answer.texts(), [answer_to(&prompt, 9)]);
        assert_eq!(answer.header("x-kvx-route"), "disaggregated");
        let stream = Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 9)).stream().await;
        assert!(stream.is_whole() && stream.text == answer_to(&prompt, 9), "{stream:?}");
    }
    let decodes: u64 = fleet.decode.iter_mut().map(|instance| instance.report().decodes).sum();
    let prefills: Vec<_> = fleet.prefill.iter_mut().map(Instance::report).collect();
    let sum =
        |field: fn(&kvx_instance::InstanceReport) -> u64| prefills.iter().map(field).sum::<u64>();
    assert_eq!((sum(|r| r.prefills), sum(|r| r.read), sum(|r| r.pinned), decodes), (4, 4, 0, 4));
}

pub(crate) async fn pull_is_prefill_then_decode() {
    let mut fleet = Fleet::new(1, 1).await;
    serves_both_ways(&mut fleet, "pull").await;
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "tell me"}], "max_completion_tokens": 7, "max_tokens": 9,
        "min_tokens": 3, "stream": true, "stream_options": {"include_usage": true}, "temperature": 0, "own_key": [1, null],
    });
    let stream =
        Call::post(fleet.port(), CHAT, &body).header("x-request-id", "join-me").stream().await;
    assert!(stream.is_whole(), "{stream:?}");
    assert_eq!(stream.chunks.last().unwrap()["usage"]["completion_tokens"], 7);
    let prefill = seen(&mut fleet.prefill[0], Leg::Prefill).pop().unwrap();
    let decode = seen(&mut fleet.decode[0], Leg::Decode).pop().unwrap();
    assert_eq!((&prefill.path[..], &decode.path[..]), (CHAT, CHAT));
    assert_eq!(prefill.headers["x-request-id"], decode.headers["x-request-id"]);
    let of = |key: &str| &prefill.body[key];
    assert_eq!(
        (of("max_tokens"), of("max_completion_tokens"), of("stream")),
        (&json!(1), &json!(1), &json!(false))
    );
    assert!(of("stream_options").is_null() && of("min_tokens").is_null());
    assert_eq!((of("temperature"), of("own_key")), (&json!(0), &json!([1, null])));
    let mut rest = decode.body.clone();
    let params = rest.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
    assert_eq!(rest, body, "the decode leg has the client's own body");
    assert_eq!(params["do_remote_prefill"], true);
    assert!(params["remote_request_id"].as_str().unwrap().starts_with("chatcmpl-"));
}

pub(crate) async fn push_is_both_legs_with_one_request_id() {
    for pool in ["connector = \"NixlPushConnector\"", ""] {
        let mut fleet = Plan::of(1, 1, &of(Connector::Push)).pool(pool).start().await;
        serves_both_ways(&mut fleet, "push").await;
    }
}

// vLLM guide R18: `kvx proxy` sends a prefill leg and a decode leg to Mooncake's instances, with
//     one transfer id
pub(crate) async fn mooncake_is_both_legs_with_one_transfer_id() {
    for pool in ["connector = \"MooncakeConnector\"", ""] {
        let mut fleet = Plan::of(1, 1, &of(Connector::Mooncake)).pool(pool).start().await;
        serves_both_ways(&mut fleet, "mooncake").await;
        let prefill = seen(&mut fleet.prefill[0], Leg::Prefill).pop().unwrap();
        let decode = seen(&mut fleet.decode[0], Leg::Decode).pop().unwrap();
        let (p, d) = (&prefill.body["kv_transfer_params"], &decode.body["kv_transfer_params"]);
        assert!(p["transfer_id"].as_str().unwrap().starts_with("xfer-"));
        assert_eq!(p["transfer_id"], d["transfer_id"]);
        assert_eq!(prefill.headers["x-data-parallel-rank"], "0");
        let address = format!("http://127.0.0.1:{}", fleet.prefill[0].bootstrap_port());
        assert_eq!(d["remote_bootstrap_addr"], address.as_str());
        assert!(fleet.prefill[0].report().queries >= 1);
    }
}

pub(crate) async fn mooncake_ranks_take_turns() {
    let settings = Settings { dp_size: 2, ..of(Connector::Mooncake) };
    let mut fleet =
        Plan::of(1, 1, &settings).pool("connector = \"MooncakeConnector\"").start().await;
    serves_both_ways(&mut fleet, "ranks").await;
    let ranks = seen(&mut fleet.prefill[0], Leg::Prefill);
    let of = |rank: &str| {
        ranks.iter().filter(|seen| seen.headers["x-data-parallel-rank"] == rank).count()
    };
    assert_eq!((of("0"), of("1")), (2, 2));
}

pub(crate) async fn a_later_turn_loads_what_the_decode_instance_holds() {
    let settings = Settings { bidirectional: true, ..Settings::default() };
    let mut fleet = Plan::of(1, 2, &settings).pool("bidirectional = true").start().await;
    let turn = |messages: &[Value], conversation: &str, stream: bool| json!({"model": "m", "messages": messages, "max_tokens": 6, "stream": stream, "conversation_id": conversation});
    let user = |content: &str| json!({"role": "user", "content": content});
    for (conversation, stream) in [("one", false), ("two", true)] {
        let mut messages = Vec::new();
        for content in ["first", "second", "third"] {
            messages.push(user(content));
            let call = Call::post(fleet.port(), CHAT, &turn(&messages, conversation, stream));
            let text = if stream {
                let stream = call.stream().await;
                assert!(stream.is_whole(), "{stream:?}");
                assert!(
                    stream.chunks.iter().all(|chunk| chunk.get("kv_transfer_params").is_none())
                );
                stream.text
            } else {
                let answer = call.send().await;
                assert!(answer.json()["kv_transfer_params"].is_null(), "{}", answer.text());
                answer.texts().remove(0)
            };
            messages.push(json!({"role": "assistant", "content": text}));
        }
    }
    let report = fleet.prefill[0].report();
    assert_eq!(
        (report.prefills, report.turns_loaded),
        (6, 4),
        "each turn but the first of a conversation"
    );
    let bodies = seen(&mut fleet.prefill[0], Leg::Prefill);
    assert!(bodies[1].body["kv_transfer_params"]["remote_request_id"].is_string());
    let other = Call::post(fleet.port(), CHAT, &turn(&[user("another beginning")], "one", false))
        .send()
        .await;
    assert_eq!(other.status, 200);
    assert_eq!(
        fleet.prefill[0].report().turns_loaded,
        4,
        "a request that does not continue the turn loads nothing"
    );
}

/// Removes the fields that differ between any two answers.
fn comparable(mut body: Value) -> Value {
    if let Some(object) = body.as_object_mut() {
        for key in ["id", "created", "kv_transfer_params"] {
            object.remove(key);
        }
    }
    body
}

pub(crate) async fn the_client_gets_what_one_server_would_answer() {
    let fleet = Fleet::new(1, 1).await;
    let alone = Instance::start(Settings::default());
    let text = prompt("one server", 40);
    let chat = |more: Value| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        (CHAT, body)
    };
    let plain = |more: Value| {
        let mut body = json!({"model": "m", "prompt": text});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        (COMPLETIONS, body)
    };
    for (path, body) in [
        plain(json!({})),
        plain(json!({"max_tokens": 5, "min_tokens": 5})),
        plain(json!({"max_tokens": 5, "n": 3})),
        plain(json!({"max_tokens": 5, "n": 1})),
        plain(json!({"max_tokens": 5, "best_of": 1})),
        plain(json!({"max_tokens": 5, "prompt": ["one", "two", "three"]})),
        plain(json!({"max_tokens": 5, "prompt": ["one"]})),
        plain(json!({"max_tokens": 5, "prompt": [3, 4, 5, 6, 7, 8, 9, 10]})),
        plain(json!({"max_tokens": 5, "prompt": [[3, 4, 5], [6, 7]]})),
        plain(json!({"max_tokens": 5, "echo": true})),
        plain(json!({"max_tokens": 5, "logprobs": 1})),
        plain(json!({"max_tokens": 5, "echo": true, "logprobs": 1})),
        plain(json!({"max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}})),
        plain(json!({"max_tokens": 5, "stream": true, "echo": true, "logprobs": 1})),
        plain(json!({"max_tokens": 4, "stream": true, "n": 2})),
        plain(json!({"max_tokens": 4, "stream_options": {"include_usage": true}})),
        plain(json!({"max_tokens": 4, "min_tokens": 9})),
        plain(json!({"max_tokens": "many"})),
        plain(json!({"model": "nobody's"})),
        plain(json!({"prompt": null})),
        chat(json!({"max_tokens": 5})),
        chat(json!({"max_completion_tokens": 5, "logprobs": true})),
        chat(json!({"max_tokens": 5, "stream": true})),
        chat(json!({"max_tokens": 5, "n": 2})),
        chat(json!({"messages": []})),
    ] {
        if body["stream"] == true {
            let ours = Call::post(fleet.port(), path, &body).stream().await;
            let theirs = Call::post(alone.port(), path, &body).stream().await;
            let chunks =
                |chunks: Vec<Value>| chunks.into_iter().map(comparable).collect::<Vec<_>>();
            assert!(ours.is_whole(), "{body}: {ours:?}");
            assert_eq!(chunks(ours.chunks), chunks(theirs.chunks), "{body}");
            continue;
        }
        let ours = Call::post(fleet.port(), path, &body).send().await;
        let theirs = Call::post(alone.port(), path, &body).send().await;
        assert_eq!(ours.status, theirs.status, "{body}: {}", ours.text());
        assert_eq!(ours.header("content-type"), theirs.header("content-type"), "{body}");
        if ours.status == 200 {
            assert_eq!(comparable(ours.json()), comparable(theirs.json()), "{body}");
        } else {
            let said = ours.json()["error"]["message"].as_str().map(str::to_owned);
            assert!(said.is_some_and(|said| said.len() > 10), "{body}: {}", ours.text());
        }
    }
}

pub(crate) async fn hosts_that_a_client_names_are_dropped() {
    let mut fleet = Fleet::new(1, 1).await;
    let evil = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "evil", "remote_request_id": "evil",
        "remote_block_ids": [[1, 2, 3]], "remote_host": "evil.example", "remote_port": 5600, "transfer_id": "evil",
        "remote_bootstrap_addr": "http://evil.example:8998",
    });
    let several = json!(["one", "two"]);
    for (path, prompts) in
        [(COMPLETIONS, json!("dropped")), (COMPLETIONS, several), ("/v1/embeddings", json!("x"))]
    {
        let body =
            json!({"model": "m", "prompt": prompts, "max_tokens": 2, "kv_transfer_params": evil});
        let call = Call::new(fleet.port(), Method::POST, path)
            .header("content-type", "application/json")
            .header("x-prefiller-host-port", "evil.example:1")
            .header("x-prefiller-url", "http://evil.example:1")
            .body(body.to_string());
        let answer = call.send().await;
        assert!(answer.status == 200 || answer.status == 400, "{}", answer.text());
    }
    // Bodies that only an engine would parse, and paths that it would read as another one.
    let text = "{\"x\": NaN, \"kv_transfer_params\": {\"remote_host\": \"evil\"}}";
    for (path, coding, status) in [
        ("/v1/embeddings", "identity", 400),
        ("/v1/embeddings", "gzip", 415),
        (COMPLETIONS, "gzip", 415),
        ("/v1/%63hat/completions", "identity", 400),
        ("/v1/%6coad_lora_adapter", "identity", 400),
        ("/v1//completions", "identity", 400),
    ] {
        let call =
            Call::new(fleet.port(), Method::POST, path).header("content-type", "application/json");
        let answer = call.header("content-encoding", coding).body(text).send().await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
    }
    for instance in fleet.prefill.iter_mut().chain(&mut fleet.decode) {
        for seen in instance.report().seen {
            assert!(!seen.path.contains('%') && !seen.path.contains("//"), "{}", seen.path);
            let all = format!("{:?} {}", seen.headers, seen.body);
            assert!(!all.contains("evil"), "{}: {all}", seen.path);
        }
    }
}
