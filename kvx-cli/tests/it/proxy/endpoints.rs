//! Tests of the endpoints other than completions.

use std::time::Duration;

use hyper::Method;
use kvx_instance::{Delays, Fault, Instance, Leg, Script, Settings, answer_to};
use serde_json::json;

use crate::proxy::client::{Call, completion, prompt, streamed};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::{COMPLETIONS, seen};

pub(crate) async fn models_are_those_that_both_sides_serve() {
    let models = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let fleet = Plan::of(2, 2, &Settings::default())
        .prefill(|index, settings| {
            settings.models = models([&["m", "a", "p"][..], &["m", "b"]][index])
        })
        .decode(|index, settings| {
            settings.models = models([&["m", "a"][..], &["m", "b", "d"]][index])
        })
        .start()
        .await;
    let list = Call::get(fleet.port(), "/v1/models").send().await.json();
    let mut names: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!((names, &list["object"]), (vec!["a", "b", "m"], &json!("list")));
    // Only pairs with a common model.
    for model in ["a", "b"] {
        let body = json!({"model": model, "prompt": prompt(model, 30), "max_tokens": 3});
        for _ in 0..3 {
            let answer = Call::post(fleet.port(), COMPLETIONS, &body).send().await;
            assert_eq!(answer.header("x-kvx-route"), "disaggregated", "{model}: {}", answer.text());
        }
    }
}

pub(crate) async fn other_requests_go_to_a_decode_instance_unchanged() {
    let mut fleet = Fleet::new(1, 1).await;
    let bytes: Vec<u8> = (0..=255).collect();
    let head = b"--x\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n";
    let bytes = [&head[..], &bytes, b"\r\n--x--\r\n"].concat();
    for path in ["/v1/embeddings", "/v1/rerank", "/score", "/pooling", "/v1/audio/transcriptions"] {
        let answer = Call::new(fleet.port(), Method::POST, &format!("{path}?a=1&b=%20"))
            .header("content-type", "multipart/form-data; boundary=x")
            .body(bytes.clone())
            .send()
            .await;
        assert_eq!(
            (answer.status, &answer.body[..]),
            (200, &bytes[..]),
            "{path}: {}",
            answer.text()
        );
        assert_eq!(answer.header("content-type"), "multipart/form-data; boundary=x");
        assert_eq!(answer.header("x-instance"), fleet.decode[0].port().to_string());
        assert_eq!(
            seen(&mut fleet.decode[0], Leg::Alone).pop().unwrap().path,
            format!("{path}?a=1&b=%20")
        );
    }
    let asked = json!({"model": "m", "prompt": "four and four"});
    let tokens = Call::post(fleet.port(), "/tokenize", &asked).send().await.json();
    assert_eq!(tokens["count"], 4);
    let response = json!({"model": "m", "input": "hello"});
    let answer = Call::post(fleet.port(), "/v1/responses", &response).send().await;
    assert_eq!((answer.status, &answer.json()["object"]), (200, &json!("response")));
    assert!(
        fleet.prefill[0].report().seen.iter().all(|seen| seen.method == "GET"),
        "only the router's own checks"
    );
}

pub(crate) async fn health_and_readiness_are_reported() {
    let mut fleet = Plan::of(2, 1, &Settings::default())
        .setup("[health]\nevery = \"100ms\"\ntimeout = \"100ms\"\n")
        .start()
        .await;
    assert_eq!(Call::get(fleet.port(), "/health").send().await.status, 200);
    let toy = Call::get(fleet.port(), "/healthcheck").send().await.json();
    assert_eq!(toy, json!({"status": "ok", "prefill_instances": 2, "decode_instances": 1}));
    fleet.decode[0].health(Some(503));
    let ready =
        fleet.proxy.wait_until("/ready", "no decode instance is up", |status, _| status == 503);
    ready.await;
    let ready = Call::get(fleet.port(), "/ready").send().await.json();
    let decode = "no decode instance is up in pool default";
    let missing = json!([{"pool": "default", "missing": ["decode"]}]);
    assert_eq!(ready, json!({"ready": false, "why": decode, "missing": missing}));
    for path in [COMPLETIONS, "/v1/embeddings"] {
        let body = completion("no decode instance", 2);
        let answer = Call::post(fleet.port(), path, &body).send().await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, "1"), "{path}");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("no decode instance for this model is up in pool default"));
    }
    fleet.decode[0].health(Some(200));
    fleet.proxy.wait_until("/ready", "it is up again", |status, _| status == 200).await;
    fleet.prefill[0].health(Some(503));
    let down = format!("127.0.0.1:{}", fleet.prefill[0].port());
    fleet
        .proxy
        .wait_until("/metrics", "one prefill instance is down", |_, text| {
            text.lines().any(|line| {
                line.starts_with("kvx_proxy_instance_up")
                    && line.contains(&down)
                    && line.ends_with(" 0")
            })
        })
        .await;
    assert_eq!(Call::get(fleet.port(), "/ready").send().await.status, 200, "one of two is enough");
}

pub(crate) async fn metrics_count_requests_and_legs() {
    let mut fleet = Fleet::new(1, 1).await;
    for _ in 0..3 {
        Call::post(fleet.port(), COMPLETIONS, &completion("count me, count me", 2))
            .send()
            .await
            .texts();
    }
    let wrong = Call::post(fleet.port(), COMPLETIONS, &json!({"model": "m"})).send().await;
    assert_eq!(wrong.status, 400);
    let metric = |name: &'static str, part: &'static str| fleet.proxy.metric(name, part);
    assert_eq!(metric("kvx_proxy_requests_total", "outcome=\"ok\"").await, 3.0);
    assert_eq!(metric("kvx_proxy_legs_total", "leg=\"prefill\",outcome=\"ok\"").await, 3.0);
    assert_eq!(metric("kvx_proxy_legs_total", "leg=\"decode\",outcome=\"ok\"").await, 3.0);
    assert_eq!(metric("kvx_proxy_ttft_seconds_count", "").await, 3.0);
    assert_eq!(metric("kvx_proxy_in_flight", "").await, 0.0);
    assert_eq!(metric("kvx_proxy_retries_total", "").await, 0.0);
    assert_eq!(
        metric("kvx_proxy_queue_seconds_count", "").await,
        4.0,
        "every admitted request, right or wrong"
    );
    assert!(metric("kvx_proxy_queue_seconds_sum", "").await < 1.0, "no request was queued");
    assert_eq!(
        metric("kvx_proxy_time_per_token_seconds_count", "").await,
        0.0,
        "nothing was streamed"
    );
    let log = fleet.proxy.output();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .filter(|line| line.contains(COMPLETIONS))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4, "a JSON line of the access log for each: {log}");
    let page = Call::get(fleet.port(), "/").send().await;
    assert!(page.header("content-type").starts_with("text/html"));
    for outside in ["src=\"http", "href=\"http", "url(http", "@import", "src=\"//", "href=\"//"] {
        assert!(!page.text().contains(outside), "it works without network, and has {outside}");
    }
    assert!(Call::get(fleet.port(), "/status").send().await.json().is_object());
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 40 });
    for tokens in [1, 6, 6] {
        let body = streamed("count my tokens", tokens);
        assert!(Call::post(fleet.port(), COMPLETIONS, &body).stream().await.is_whole());
    }
    let metric = |name: &'static str, part: &'static str| fleet.proxy.metric(name, part);
    assert_eq!(metric("kvx_proxy_queue_seconds_count", "").await, 7.0);
    assert_eq!(metric("kvx_proxy_ttft_seconds_count", "").await, 6.0);
    let count = metric("kvx_proxy_time_per_token_seconds_count", "").await;
    assert_eq!(
        count, 2.0,
        "one mean of each stream; between the one token of the first there is no time"
    );
    let sum = metric("kvx_proxy_time_per_token_seconds_sum", "").await;
    assert!((0.02..0.3).contains(&sum), "about 40 ms in each of two streams: {sum}");
}

pub(crate) async fn the_wait_for_admission_is_measured() {
    let mut fleet =
        Plan::of(1, 1, &Settings::default()).setup("[limits]\nin_flight = 1\n").start().await;
    fleet.decode[0].script(Script { leg: Some(Leg::Decode), times: 1, fault: Fault::HangAfter(1) });
    let mut first =
        Call::post(fleet.port(), COMPLETIONS, &streamed("has the place", 9)).open().await;
    first.event().await.unwrap();
    let second = Call::post(fleet.port(), COMPLETIONS, &completion("waits for it", 2));
    let second = tokio::spawn(second.send());
    let one_waits = |_, text: &str| text.lines().any(|line| line == "kvx_proxy_queued 1");
    fleet.proxy.wait_until("/metrics", "the second waits", one_waits).await;
    assert_eq!(
        fleet.proxy.metric("kvx_proxy_queue_seconds_count", "").await,
        1.0,
        "it has none yet"
    );
    tokio::time::sleep(Duration::from_millis(120)).await; // the measured wait
    drop(first);
    assert_eq!(second.await.unwrap().texts(), [answer_to("waits for it", 2)]);
    assert_eq!(fleet.proxy.metric("kvx_proxy_queue_seconds_count", "").await, 2.0);
    let waited = fleet.proxy.metric("kvx_proxy_queue_seconds_sum", "").await;
    assert!((0.12..10.0).contains(&waited), "{waited}");
    assert_eq!(fleet.proxy.metric("kvx_proxy_queued", "").await, 0.0);
}

pub(crate) async fn instances_are_added_and_removed_only_with_the_key() {
    let fleet =
        Plan::of(1, 1, &Settings::default()).variable("ADMIN_API_KEY", "let me in").start().await;
    let mut added = Instance::start(Settings::default());
    let entry = json!({"role": "decode", "url": added.url()});
    let call = |method: Method, key: &str| {
        Call::new(fleet.port(), method, "/instances")
            .header("content-type", "application/json")
            .header("x-api-key", key)
            .body(entry.to_string())
    };
    for method in [Method::GET, Method::POST, Method::DELETE] {
        assert_eq!(call(method, "let me i").send().await.status, 403);
    }
    let answer = call(Method::POST, "let me in").send().await;
    assert!((200..300).contains(&answer.status), "{}", answer.text());
    let list = call(Method::GET, "let me in").send().await;
    assert!(list.text().contains(&added.url()[7..]), "{}", list.text());
    let drained = json!({"role": "decode", "url": fleet.decode[0].url(), "draining": true});
    let answer = call(Method::POST, "let me in").body(drained.to_string()).send().await;
    assert!((200..300).contains(&answer.status), "{}", answer.text());
    let up = format!(
        "kvx_proxy_instance_up{{pool=\"default\",role=\"decode\",instance=\"{}\"}} 1",
        &added.url()[7..]
    );
    fleet.proxy.wait_until("/metrics", "it has been checked", |_, text| text.contains(&up)).await;
    let before = added.report().decodes;
    for _ in 0..3 {
        Call::post(fleet.port(), COMPLETIONS, &completion("to the new one alone", 2))
            .send()
            .await
            .texts();
    }
    assert_eq!(added.report().decodes, before + 3, "the other one drains");
    let answer = call(Method::DELETE, "let me in").send().await;
    assert!((200..300).contains(&answer.status), "{}", answer.text());
    let list = call(Method::GET, "let me in").send().await;
    assert!(!list.text().contains(&added.url()[7..]), "{}", list.text());
    let closed = Fleet::new(1, 1).await;
    let answer = Call::get(closed.port(), "/instances").header("x-api-key", "").send().await;
    assert_eq!(answer.status, 403, "refused when no key is set");
    assert!(added.violations().is_empty());
}
