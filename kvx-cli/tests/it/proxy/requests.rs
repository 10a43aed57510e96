//! Tests of `/requests`, and of what `/status` says about requests and errors.

use std::collections::HashSet;

use kvx_instance::{Delays, Fault, Leg, Script, Settings};
use serde_json::{Value, json};

use crate::proxy::client::{Answer, Call, completion, streamed};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::COMPLETIONS;

const KEY: (&str, &str) = ("ADMIN_API_KEY", "let me in");

async fn requests(fleet: &Fleet, query: &str) -> Answer {
    Call::get(fleet.port(), &format!("/requests{query}")).header("x-api-key", KEY.1).send().await
}

/// Waits until this many requests have ended, and returns the last ones.
async fn ended(fleet: &Fleet, count: usize) -> Value {
    let is_all = |list: &Value| list["last"].as_array().is_some_and(|last| last.len() == count);
    let end = std::time::Instant::now() + crate::proxy::client::CUT_OFF;
    loop {
        let list = requests(fleet, "").await.json();
        if is_all(&list) {
            return list;
        }
        assert!(std::time::Instant::now() < end, "not {count} requests: {list}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await; // between polls
    }
}

async fn status(fleet: &Fleet) -> Value {
    Call::get(fleet.port(), "/status").send().await.json()
}

pub(crate) async fn show_where_the_time_went_with_the_key_alone() {
    let mut fleet = Plan::of(2, 1, &Settings::default())
        .setup("[health]\nevery = \"60s\"\n")
        .variable(KEY.0, KEY.1)
        .start()
        .await;
    let without = Call::get(fleet.port(), "/requests").send().await;
    assert_eq!(without.status, 403, "{}", without.text());
    assert!(without.text().contains("ADMIN_API_KEY"));
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 20 });
    let body = streamed("a secret prompt, a secret prompt", 5);
    let call = Call::post(fleet.port(), COMPLETIONS, &body).header("x-request-id", "timed");
    assert!(call.stream().await.is_whole());
    let list = ended(&fleet, 1).await;
    assert_eq!(list["kept"], json!({"last": 1000, "slowest": 100}));
    assert_eq!(list["last"], list["slowest"]);
    let one = &list["last"][0];
    for (key, value) in [
        ("id", json!("timed")),
        ("path", json!(COMPLETIONS)),
        ("model", json!("m")),
        ("route", json!("disaggregated")),
        ("outcome", json!("ok")),
        ("status", json!(200)),
        ("retries", json!(0)),
        ("events", json!(5)),
    ] {
        assert_eq!(one[key], value, "{key}: {one}");
    }
    let [prefill, decode] = &one["legs"].as_array().unwrap()[..] else { panic!("{one}") };
    let instances: Vec<_> = fleet.prefill.iter().map(|one| one.url()[7..].to_owned()).collect();
    assert!(instances.contains(&prefill["instance"].as_str().unwrap().to_owned()), "{one}");
    assert_eq!(decode["instance"], fleet.decode[0].url()[7..]);
    assert_eq!([&prefill["role"], &decode["role"]], ["prefill", "decode"]);
    assert_eq!([&prefill["outcome"], &decode["outcome"]], ["ok", "ok"]);
    assert!(prefill["prompt_tokens"].as_u64().is_some_and(|tokens| tokens > 0), "{one}");
    assert!(prefill["blocks"].as_u64().is_some_and(|blocks| blocks > 0), "{one}");
    // The events of a request are in the order of its life.
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{one}"));
    let times = [
        number(&one["queue_ms"]),
        number(&prefill["start_ms"]),
        number(&prefill["end_ms"]),
        number(&decode["start_ms"]),
        number(&decode["first_byte_ms"]),
        number(&one["first_byte_ms"]),
        number(&one["end_ms"]),
    ];
    assert!(times.is_sorted(), "{times:?}: {one}");
    assert_eq!(decode["end_ms"], one["end_ms"]);
    assert!(number(&one["time_per_token_ms"]) >= 15.0, "20 ms for each token: {one}");
    assert!(!list.to_string().contains("secret prompt"), "{list}");
    // A retried leg is shown with its end.
    for prefill in &mut fleet.prefill {
        prefill.script(Script { leg: Some(Leg::Prefill), times: 1, fault: Fault::CloseFirst });
    }
    let body = completion("a secret prompt, again", 5);
    let call = Call::post(fleet.port(), COMPLETIONS, &body).header("x-request-id", "again");
    assert_eq!(call.send().await.status, 200);
    let list = ended(&fleet, 2).await;
    let one = &list["last"][0];
    assert_eq!((&one["id"], &one["retries"]), (&json!("again"), &json!(2)), "{one}");
    let legs: Vec<_> = one["legs"].as_array().unwrap().iter().map(|leg| &leg["outcome"]).collect();
    assert_eq!(legs, ["failed", "failed", "ok", "ok"], "{one}");
    assert_eq!(
        [&one["legs"][0]["failed"], &one["legs"][2]["failed"]],
        [&json!(true), &json!(null)]
    );
    assert!(one["answer_tokens"].as_u64().is_some_and(|tokens| tokens > 0), "{one}");
    assert!(one["events"].is_null() && one["why"].is_null(), "absent: {one}");
    // The trace has both requests with their legs, at the router and at the instances.
    let trace = requests(&fleet, "?format=trace").await.json();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |cat: &str| events.iter().filter(|event| event["cat"] == cat).count();
    assert_eq!([of("request"), of("prefill"), of("decode")], [2, 4, 2], "{trace}");
    for event in events {
        let keys = match event["ph"].as_str() {
            Some("X") => &["ts", "dur", "pid", "tid"][..],
            Some("M") => &["pid"],
            _ => panic!("{event}"),
        };
        assert!(keys.iter().all(|key| event[key].is_u64()), "{event}");
    }
    let limited = requests(&fleet, "?limit=1").await.json();
    assert_eq!(limited["last"].as_array().unwrap().len(), 1);
    assert_eq!(requests(&fleet, "?format=svg").await.status, 400);
    let closed = Fleet::new(1, 1).await;
    let answer = Call::get(closed.port(), "/requests").header("x-api-key", "").send().await;
    assert_eq!(answer.status, 403, "refused when no key is set");
}

pub(crate) async fn repeated_errors_are_counted_and_quote_their_cause() {
    let setup = "[health]\nevery = \"100ms\"\ndown_after = 1000\neject_after = 1000\n\
                 [retries]\nattempts = 1\n";
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    let (prefill, decode) =
        (fleet.prefill[0].url()[7..].to_owned(), fleet.decode[0].url()[7..].to_owned());
    fleet.decode[0].script(Script {
        leg: Some(Leg::Decode),
        times: u32::MAX,
        fault: Fault::Status(500),
    });
    for _ in 0..6 {
        let body = completion("it fails, it fails", 2);
        assert_eq!(Call::post(fleet.port(), COMPLETIONS, &body).send().await.status, 500);
    }
    let told = status(&fleet).await;
    let errors = told["errors"].as_array().unwrap();
    let [error] = &errors[..] else { panic!("one error, six times: {errors:?}") };
    assert_eq!((&error["instance"], &error["count"]), (&json!(decode), &json!(6)), "{error}");
    let what = error["what"].as_str().unwrap();
    let quoted = what.strip_prefix("decode leg: answered with status 500: ");
    assert!(quoted.is_some_and(|quoted| quoted.contains("engine-")), "its message: {what}");
    assert!(error["first"].as_f64().unwrap() <= error["last"].as_f64().unwrap());
    // All health checks pass, and all requests fail.
    assert_eq!((&told["ready"], &told["state"]), (&json!(true), &json!("failing")), "{told}");
    assert_eq!(told["why"], "6 of the last minute's 6 requests failed");
    assert_eq!(Call::get(fleet.port(), "/ready").send().await.status, 200, "as health checks say");
    let of = |told: &Value, name: &str| {
        let list = told["instances"].as_array().unwrap();
        list.iter().find(|one| one["url"] == format!("http://{name}")).cloned().unwrap()
    };
    let failing = of(&told, &decode);
    assert_eq!((&failing["state"], &failing["failed_in_a_row"]), (&json!("failing"), &json!(6)));
    assert_eq!(failing["recent"], json!({"legs": 6, "failed": 6}));
    let sound = of(&told, &prefill);
    assert_eq!((&sound["state"], &sound["recent"]["legs"]), (&json!("up"), &json!(6)));
    let flow = &told["flows"][0];
    assert_eq!((&flow["prefill"], &flow["decode"]), (&json!(prefill), &json!(decode)));
    assert_eq!((&flow["requests"], &flow["failed"]), (&json!(6), &json!(6)));
    // It answers again.
    fleet.decode[0].clear_scripts();
    let body = completion("it answers, it answers", 2);
    assert_eq!(Call::post(fleet.port(), COMPLETIONS, &body).send().await.status, 200);
    assert_eq!(of(&status(&fleet).await, &decode)["state"], "up");
    // A failed health check is one error, however often it fails.
    fleet.prefill[0].health(Some(503));
    fleet
        .proxy
        .wait_until("/status", "three checks have failed", |_, text| {
            let told: Value = serde_json::from_str(text).unwrap();
            let errors = told["errors"].as_array().unwrap();
            assert!(errors.len() <= 2, "{errors:?}");
            let what = "GET /health answered 503";
            errors.iter().any(|error| error["what"] == what && error["count"].as_u64() >= Some(3))
        })
        .await;
}

pub(crate) async fn a_thousand_and_the_slowest_hundred_are_kept() {
    let fleet = Plan::of(1, 1, &Settings::default()).variable(KEY.0, KEY.1).start().await;
    let port = fleet.port();
    let wrong = json!({"model": "m"});
    let clients = (0..8).map(|client| {
        let wrong = wrong.clone();
        tokio::spawn(async move {
            for count in 0..140 {
                let call = Call::post(port, COMPLETIONS, &wrong);
                let call = call.header("x-request-id", format!("r-{client}-{count}"));
                assert_eq!(call.send().await.status, 400);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let list = requests(&fleet, "").await.json();
    let ids = |key: &str| -> HashSet<String> {
        list[key].as_array().unwrap().iter().map(|one| one["id"].to_string()).collect()
    };
    assert_eq!((ids("last").len(), ids("slowest").len()), (1000, 100));
    assert_eq!(list["last"][0]["outcome"], "client_error");
    let told = status(&fleet).await;
    assert_eq!(
        (&told["state"], &told["requests"]["client_error"]),
        (&json!("ready"), &json!(1120))
    );
    assert_eq!(told["window"]["last_minute"]["failed"], 0, "they are the clients' errors");
    let ended: u64 =
        told["window"]["ended"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert_eq!(ended, 1120);
}
