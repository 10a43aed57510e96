//! Tests of the test instances, without a router: their checks must be seen to fail.

use std::time::Duration;

use kvx_instance::{Fault, Instance, Leg, Script, Settings, WrongAnswer, answer_to};
use serde_json::{Value, json};

use crate::proxy::client::{Call, completion, prompt, streamed};

const PATH: &str = "/v1/completions";

/// Sends the request that a router sends to a prefill instance.
async fn prefill(instance: &Instance, prompt: &str) -> Value {
    let mut body = completion(prompt, 1);
    body["kv_transfer_params"] =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null});
    let answer =
        Call::post(instance.port(), PATH, &body).header("x-request-id", "7").send().await.json();
    answer["kv_transfer_params"].clone()
}

fn decode(prompt: &str, params: &Value) -> Value {
    let mut body = completion(prompt, 8);
    body["kv_transfer_params"] = params.clone();
    body
}

pub(crate) async fn give_the_answers_of_a_single_server() {
    let mut instance = Instance::start(Settings::default());
    let prompt = prompt("alone", 40);
    let answer = Call::post(instance.port(), PATH, &completion(&prompt, 12)).send().await;
    assert_eq!(answer.texts(), [answer_to(&prompt, 12)]);
    let stream = Call::post(instance.port(), PATH, &streamed(&prompt, 12)).stream().await;
    assert!(stream.is_whole(), "{stream:?}");
    assert_eq!(stream.text, answer_to(&prompt, 12));
    assert_ne!(answer_to(&prompt, 12), answer_to("another prompt", 12));
    assert_eq!((instance.report().alone, instance.violations()), (2, Vec::new()));
}

pub(crate) async fn hand_over_their_blocks_once() {
    let (mut there, mut here) =
        (Instance::start(Settings::default()), Instance::start(Settings::default()));
    let prompt = prompt("once", 40);
    let params = prefill(&there, &prompt).await;
    assert_eq!(there.report().pinned, 1);
    let body = decode(&prompt, &params);
    assert_eq!(Call::post(here.port(), PATH, &body).send().await.texts(), [answer_to(&prompt, 8)]);
    let report = there.report();
    assert_eq!((report.pinned, report.read, here.report().decodes), (0, 1, 1));
    assert_eq!(here.violations(), Vec::<String>::new());
    let again = Call::post(here.port(), PATH, &body).send().await.texts();
    assert_ne!(again, [answer_to(&prompt, 8)], "the blocks may hold other content by then");
    assert_eq!(here.violations().len(), 1);
}

pub(crate) async fn stop_where_a_vllm_stops() {
    let there = Instance::start(Settings::default());
    let prompt = prompt("stops", 40);
    for (key, wrong) in [
        ("remote_block_ids", json!([[1]])),
        ("remote_block_ids", json!([1, 2, 3])),
        ("remote_block_ids", json!([])),
        ("remote_request_id", Value::Null),
        ("do_remote_decode", json!(true)),
    ] {
        let mut here = Instance::start(Settings::default());
        let mut params = prefill(&there, &prompt).await;
        params[key] = wrong;
        let answer = Call::post(here.port(), PATH, &decode(&prompt, &params)).send().await;
        assert_eq!((answer.status, here.violations().len()), (500, 1), "{params}");
        let healthy = Call::post(here.port(), PATH, &completion(&prompt, 1)).send().await;
        assert_eq!(healthy.status, 500, "its engine has stopped: {params}");
        assert_eq!(Call::get(here.port(), "/health").send().await.status, 503);
        here.restart();
        assert_eq!(Call::get(here.port(), "/health").send().await.status, 200);
        assert_eq!(here.violations().len(), 1, "the violation is still reported");
    }
    let mut here = Instance::start(Settings::default());
    let good = prefill(&there, &prompt).await;
    let with = |key: &str, value| {
        let mut params = good.clone();
        params[key] = value;
        params
    };
    let survived =
        [with("remote_engine_id", Value::Null), with("transfer_mode", json!("push")), json!({})];
    for (number, params) in survived.into_iter().enumerate() {
        let answer = Call::post(here.port(), PATH, &decode(&prompt, &params)).send().await;
        assert_eq!((answer.status, here.violations().len()), (500, number + 1), "{params}");
        assert_eq!(Call::get(here.port(), "/health").send().await.status, 200, "{params}");
    }
}

pub(crate) async fn notice_blocks_of_another_prompt() {
    let (there, mut here) =
        (Instance::start(Settings::default()), Instance::start(Settings::default()));
    let (ours, others) = (prompt("ours", 40), prompt("others", 40));
    let params = prefill(&there, &others).await;
    let answer = Call::post(here.port(), PATH, &decode(&ours, &params)).send().await;
    assert_eq!(answer.texts(), [answer_to(&others, 8)], "it answers from what it has fetched");
    assert_eq!(here.violations().len(), 1);
}

pub(crate) async fn count_blocks_that_no_instance_reads() {
    let settings = Settings { lease_ms: 50, ..Settings::default() };
    let mut there = Instance::start(settings);
    let params = prefill(&there, &prompt("nobody", 40)).await;
    there.wait_until("its lease ends", |report| report.expired == 1 && report.pinned == 0);
    let mut here = Instance::start(Settings::default());
    there.restart(); // another engine in its place
    let answer =
        Call::post(here.port(), PATH, &decode(&prompt("nobody", 40), &params)).send().await;
    assert_eq!(answer.status, 500);
    assert_eq!(here.violations(), Vec::<String>::new(), "a fleet's fault, not the router's");
    // A router that disconnects during a prefill: the instance keeps no blocks.
    there.delays(kvx_instance::Delays { prefill_ms: 5_000, token_ms: 0 });
    let mut body = completion("gone", 1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let gone =
        Call::post(there.port(), PATH, &body).limit(Duration::from_millis(50)).try_send().await;
    assert!(gone.is_err());
    there.wait_until("it is aborted", |report| report.aborted_prefills == 1 && report.pinned == 0);
}

pub(crate) async fn produce_the_requested_faults() {
    let mut instance = Instance::start(Settings::default());
    let asked = streamed("wrong", 8);
    let once = |fault| Script { leg: Some(Leg::Alone), times: 1, fault };
    for (fault, broken, error) in [
        (Fault::CloseAfter(3), true, false),
        (Fault::CloseInCharacter(3), true, false),
        (Fault::ErrorAfter(3), false, true),
        (Fault::SplitCharacter(3), false, false),
    ] {
        instance.script(once(fault.clone()));
        let stream = Call::post(instance.port(), PATH, &asked).stream().await;
        assert_eq!(
            (stream.broken.is_some(), stream.error.is_some()),
            (broken, error),
            "{fault:?}: {stream:?}"
        );
        let whole = answer_to("wrong", if broken || error { 3 } else { 8 });
        assert_eq!(stream.text, whole, "{fault:?}");
    }
    instance.script(once(Fault::HangAfter(3)));
    let limit = Duration::from_millis(200);
    let stream = Call::post(instance.port(), PATH, &asked).limit(limit).stream().await;
    assert_eq!((stream.text, stream.broken.is_some()), (answer_to("wrong", 3), true));
    instance.script(once(Fault::CloseFirst));
    assert!(Call::post(instance.port(), PATH, &asked).try_send().await.is_err());
    instance.script(once(Fault::Status(503)));
    assert_eq!(Call::post(instance.port(), PATH, &asked).send().await.status, 503);
    instance.script(Script {
        leg: Some(Leg::Prefill),
        times: 1,
        fault: Fault::Wrong(WrongAnswer::FlatBlocks),
    });
    assert!(prefill(&instance, "wrong").await["remote_block_ids"][0].is_u64());
    instance.listen(false);
    assert!(Call::post(instance.port(), PATH, &asked).try_send().await.is_err());
    instance.listen(true);
    assert_eq!(
        Call::post(instance.port(), PATH, &asked).stream().await.text,
        answer_to("wrong", 8)
    );
}
