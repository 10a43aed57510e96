//! Tests of answers that pass through the router, where vLLM's toy proxies are wrong: statuses,
//! streams, headers, clients that disconnect.

use std::time::{Duration, Instant};

use hyper::Method;
use kvx_instance::{Connector, Delays, Fault, Leg, Script, Settings, answer_to};
use serde_json::json;

use crate::proxy::client::{Call, Event, completion, prompt, streamed};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::{COMPLETIONS, seen};

fn decode_once(fault: Fault) -> Script {
    Script { leg: Some(Leg::Decode), times: 1, fault }
}

// vLLM 65: the proxy forwards the instance's status and content type to the client
pub(crate) async fn status_and_content_type_of_the_instance_reach_the_client() {
    let mut fleet = Fleet::new(1, 1).await;
    for status in [400, 404, 422] {
        fleet.decode[0].script(decode_once(Fault::Status(status)));
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &streamed("status, status", 3)).send().await;
        assert_eq!((answer.status, answer.header("content-type")), (status, "application/json"));
        let message = "scripted: engine <hidden>, <hidden>, <hidden>";
        assert_eq!(answer.json()["error"]["message"], message);
        fleet.prefill[0].script(Script {
            leg: Some(Leg::Prefill),
            times: 1,
            fault: Fault::Status(status),
        });
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &completion("status, status", 3)).send().await;
        assert_eq!((answer.status, answer.header("content-type")), (status, "application/json"));
    }
    let stream = Call::post(fleet.port(), COMPLETIONS, &streamed("kind", 3)).send().await;
    assert!(stream.header("content-type").starts_with("text/event-stream"), "{:?}", stream.headers);
    let whole = Call::post(fleet.port(), COMPLETIONS, &completion("kind", 3)).send().await;
    assert_eq!(whole.header("content-type"), "application/json");
}

pub(crate) async fn a_stream_passes_as_it_arrives() {
    let mut fleet = Fleet::new(1, 1).await;
    fleet.decode[0].script(decode_once(Fault::HangAfter(4)));
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed("as it comes", 9)).open().await;
    let mut text = String::new();
    for _ in 0..4 {
        // The fifth chunk never arrives: the router did not hold these back for it.
        let Ok(Some(Event::Chunk(chunk))) = open.event().await else { panic!("no chunk") };
        text += chunk["choices"][0]["text"].as_str().unwrap();
    }
    assert_eq!(text, answer_to("as it comes", 4));
    drop(open);
    fleet.decode[0].wait_until("the client has gone", |report| report.aborted_decodes == 1);
    fleet.decode[0].script(decode_once(Fault::SplitCharacter(2)));
    let split = Call::post(fleet.port(), COMPLETIONS, &streamed("split", 6)).stream().await;
    assert!(split.is_whole() && split.text == answer_to("split", 6), "{split:?}");
}

pub(crate) async fn an_error_after_the_first_byte_is_an_event_and_an_end() {
    let mut fleet = Plan::of(1, 2, &Settings::default())
        .setup("[timeouts]\nidle = \"400ms\"\n[health]\neject_after = 1000\n")
        .start()
        .await;
    for (fault, tokens) in [
        (Fault::CloseAfter(3), 3),
        (Fault::HangAfter(3), 3),
        (Fault::CloseInCharacter(3), 3),
        (Fault::HangInCharacter(3), 3),
        (Fault::ErrorAfter(3), 3),
    ] {
        let before = fleet.prefill[0].report().prefills;
        for decode in &mut fleet.decode {
            decode.clear_scripts();
            decode.script(decode_once(fault.clone()));
        }
        let start = Instant::now();
        let stream =
            Call::post(fleet.port(), COMPLETIONS, &streamed("breaks off", 9)).stream().await;
        assert_eq!(stream.text, answer_to("breaks off", tokens), "{fault:?}: {stream:?}");
        assert!(stream.error.is_some() && !stream.is_whole(), "{fault:?}: {stream:?}");
        assert!(
            stream.error.as_ref().unwrap()["error"]["message"].is_string(),
            "{fault:?}: {stream:?}"
        );
        assert!(start.elapsed() < Duration::from_secs(3), "{fault:?}");
        assert_eq!(
            fleet.prefill[0].report().prefills,
            before + 1,
            "{fault:?}: not retried after a byte was passed on"
        );
    }
    fleet.wait_until_idle();
}

pub(crate) async fn headers_of_the_client_are_forwarded_except_hop_by_hop_ones() {
    let mut fleet =
        Plan::of(1, 1, &Settings::default()).variable("OPENAI_API_KEY", "ours").start().await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let call = |path: &str| {
        Call::post(fleet.port(), path, &completion("headers", 2))
            .header("x-request-id", "the-client's")
            .header("traceparent", parent)
            .header("x-own", "kept")
            .header("connection", "x-hop, keep-alive")
            .header("x-hop", "dropped")
            .header("te", "trailers")
            .header("proxy-authorization", "dropped")
            .header("upgrade-insecure-requests", "1")
    };
    let answer = call(COMPLETIONS).header("authorization", "Bearer theirs").send().await;
    assert_eq!(answer.status, 200);
    call(COMPLETIONS).send().await;
    call("/v1/embeddings").send().await;
    let mut requests = seen(&mut fleet.prefill[0], Leg::Prefill);
    requests.extend(seen(&mut fleet.decode[0], Leg::Decode));
    assert_eq!(requests.len(), 4);
    let keys: Vec<_> = requests.iter().map(|seen| seen.headers["authorization"].as_str()).collect();
    assert_eq!(keys, ["Bearer theirs", "Bearer ours", "Bearer theirs", "Bearer ours"]);
    requests.extend(seen(&mut fleet.decode[0], Leg::Alone));
    assert_eq!(requests.len(), 5);
    for seen in requests {
        assert_eq!(seen.headers["x-own"], "kept");
        for dropped in ["x-hop", "proxy-authorization", "te", "transfer-encoding", "upgrade"] {
            assert!(!seen.headers.contains_key(dropped), "{dropped}: {:?}", seen.headers);
        }
        let trace = &seen.headers["traceparent"];
        assert_eq!(trace.split('-').nth(1), parent.split('-').nth(1), "one trace");
        assert!(seen.headers["x-request-id"].contains("the-client's"), "{:?}", seen.headers);
        assert!(
            seen.headers["host"].starts_with("127.0.0.1:")
                && !seen.headers["host"].contains(&fleet.port().to_string())
        );
    }
}

pub(crate) async fn a_client_that_goes_away_ends_both_legs() {
    let mut fleet = Fleet::new(1, 1).await;
    let slow = Delays { prefill_ms: 20_000, token_ms: 20_000 };
    // The client disconnects while its prefill runs.
    fleet.prefill[0].delays(slow);
    let call = Call::post(fleet.port(), COMPLETIONS, &completion(&prompt("goes away", 40), 5));
    let waits = tokio::spawn(call.limit(Duration::from_secs(30)).try_send());
    fleet.prefill[0].wait_until("the prefill runs", |report| report.running == 1);
    waits.abort();
    let report = fleet.prefill[0].wait_until("the prefill ends", |report| report.running == 0);
    assert_eq!((report.aborted_prefills, report.pinned), (1, 0), "its blocks are free");
    // The client disconnects before its decode answers, and while it streams.
    fleet.prefill[0].delays(Delays::default());
    fleet.decode[0].delays(slow);
    for (count, body) in [(1, completion("gone", 5)), (2, streamed("gone", 5))] {
        let call = Call::post(fleet.port(), COMPLETIONS, &body);
        let waits = tokio::spawn(call.limit(Duration::from_secs(30)).try_send());
        fleet.decode[0].wait_until("the decode runs", |report| report.running == 1);
        waits.abort();
        fleet.decode[0].wait_until("the decode ends", |report| {
            report.running == 0 && report.aborted_decodes == count
        });
    }
    assert_eq!(fleet.prefill[0].report().pinned, 0);
    fleet
        .proxy
        .wait_until("/metrics", "nothing is in flight", |_, text| {
            text.contains("kvx_proxy_in_flight 0")
        })
        .await;
    assert_eq!(
        fleet.proxy.metric("kvx_proxy_requests_total", "outcome=\"client_gone\"").await,
        3.0
    );
}

pub(crate) async fn a_client_that_goes_away_ends_both_legs_that_run_at_once() {
    for (connector, name) in
        [(Connector::Push, "NixlPushConnector"), (Connector::Mooncake, "MooncakeConnector")]
    {
        let settings = Settings { connector, ..Settings::default() };
        let pool = format!("connector = \"{name}\"");
        let mut fleet = Plan::of(1, 1, &settings).pool(&pool).start().await;
        // From here on the router knows which instances push.
        let first =
            Call::post(fleet.port(), COMPLETIONS, &completion("who are you", 2)).send().await;
        assert_eq!(first.status, 200, "{name}: {}", first.text());

        // The client disconnects while the prefill computes and the decode waits for it.
        fleet.prefill[0].delays(Delays { prefill_ms: 20_000, token_ms: 0 });
        for (count, body) in [(1, completion("gone", 5)), (2, streamed("gone", 5))] {
            let call = Call::post(fleet.port(), COMPLETIONS, &body);
            let waits = tokio::spawn(call.limit(Duration::from_secs(30)).try_send());
            fleet.prefill[0].wait_until("the prefill runs", |report| report.running == 1);
            fleet.decode[0].wait_until("the decode runs", |report| report.running == 1);
            waits.abort();
            let report =
                fleet.prefill[0].wait_until("the prefill ends", |report| report.running == 0);
            let freed = (report.prefills, report.aborted_prefills, report.pinned);
            assert_eq!(freed, (1, count, 0), "{name}: its blocks are free");
            let report =
                fleet.decode[0].wait_until("the decode ends", |report| report.running == 0);
            assert_eq!((report.decodes, report.aborted_decodes), (1, count), "{name}");
        }

        // The client disconnects while the decode streams, before the prefill answers.
        let cancelled = fleet
            .proxy
            .metric("kvx_proxy_legs_total", "leg=\"prefill\",outcome=\"cancelled\"")
            .await;
        fleet.prefill[0].delays(Delays::default());
        fleet.prefill[0].script(Script {
            leg: Some(Leg::Prefill),
            times: 1,
            fault: Fault::HangFirst,
        });
        fleet.decode[0].script(decode_once(Fault::HangAfter(1)));
        let mut open =
            Call::post(fleet.port(), COMPLETIONS, &streamed("gone on the way", 5)).open().await;
        assert!(matches!(open.event().await, Ok(Some(Event::Chunk(_)))), "{name}");
        drop(open);
        fleet.decode[0].wait_until("the decode ends", |report| {
            report.running == 0 && report.aborted_decodes == 3
        });
        fleet
            .proxy
            .wait_until("/metrics", "the prefill leg ends", |_, text| {
                let line = format!("leg=\"prefill\",outcome=\"cancelled\"}} {}", cancelled + 1.0);
                text.lines().any(|one| one.ends_with(&line))
            })
            .await;
        let report = fleet.prefill[0].report();
        assert_eq!((report.read, report.pinned), (2, 0), "{name}: its blocks were read");
        assert_eq!(
            fleet.proxy.metric("kvx_proxy_requests_total", "outcome=\"client_gone\"").await,
            3.0
        );
    }
}

pub(crate) async fn connections_to_instances_are_pooled_over_both_protocols() {
    for (http, version) in [("1.1", "HTTP/1.1"), ("h2c", "HTTP/2.0")] {
        let mut fleet = Fleet::new(1, 1).await;
        let entry = |instance: &kvx_instance::Instance| {
            format!("{{ url = \"{}\", http = \"{http}\" }}", instance.url())
        };
        let text = format!(
            "port = 0\n[[pool]]\nprefill = [{}]\ndecode = [{}]\n",
            entry(&fleet.prefill[0]),
            entry(&fleet.decode[0])
        );
        let file = crate::proxy::fleet::SetupFile::new(&text);
        let proxy = crate::proxy::fleet::Proxy::start(&["--config", file.path()], &[]);
        proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
        for count in 0..20 {
            let prompt = prompt(&format!("{http} {count}"), 20);
            let stream = Call::post(proxy.port, COMPLETIONS, &streamed(&prompt, 4)).stream().await;
            assert!(stream.is_whole() && stream.text == answer_to(&prompt, 4), "{stream:?}");
        }
        for (instance, leg) in
            [(&mut fleet.prefill[0], Leg::Prefill), (&mut fleet.decode[0], Leg::Decode)]
        {
            let versions: Vec<_> =
                seen(instance, leg).into_iter().map(|seen| seen.version).collect();
            assert_eq!(versions, vec![version; 20]);
            let connections = instance.report().connections;
            assert!(
                connections <= 6,
                "{connections} connections for one request at a time, from two routers"
            );
        }
        let text = Call::new(proxy.port, Method::POST, COMPLETIONS)
            .header("content-type", "application/json")
            .body(json!({"model": "m", "prompt": "x", "max_tokens": 1}).to_string());
        assert_eq!(text.send().await.status, 200);
    }
}
