//! Tests of requests while no prefill instance is up.

use std::time::{Duration, Instant};

use kvx_instance::{Fault, Leg, Script, Settings, answer_to};
use serde_json::json;

use crate::proxy::client::{CUT_OFF, Call, completion, streamed};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::COMPLETIONS;

/// Health checks that take an instance down at once.
const CHECKS: &str = "[health]\nevery = \"100ms\"\ndown_after = 1\n";

async fn take_prefill_down(fleet: &mut Fleet) {
    fleet.prefill[0].health(Some(503));
    let down = "\"missing\":[\"prefill\"]";
    fleet.proxy.wait_until("/ready", "no prefill is up", |_, text| text.contains(down)).await;
}

pub(crate) async fn is_off_by_default_and_503_names_the_missing_side() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(CHECKS).start().await;
    take_prefill_down(&mut fleet).await;
    let ready = Call::get(fleet.port(), "/ready").send().await;
    let why = "no prefill instance is up in pool default";
    assert_eq!((ready.status, &ready.json()["why"]), (503, &json!(why)));
    let answer = Call::post(fleet.port(), COMPLETIONS, &completion("no prefill", 2)).send().await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, "1"), "{}", answer.text());
    let message = "no prefill instance for this model is up in pool default: try again later";
    assert_eq!(answer.json()["error"]["message"], message);
    assert_eq!(fleet.decode[0].report().alone, 0);
}

pub(crate) async fn lets_decodes_compute_prompts_and_says_so() {
    let setup = "fallback = \"decode\"\n[health]\nevery = \"100ms\"\ndown_after = 2\neject_for = \"300ms\"\n";
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    let ask = async |port, text: &str| {
        let answer = Call::post(port, COMPLETIONS, &completion(text, 4)).send().await;
        assert_eq!(answer.texts(), [answer_to(text, 4)]);
        answer.header("x-kvx-route").to_owned()
    };
    assert_eq!(ask(fleet.port(), "with a prefill").await, "disaggregated");
    fleet.prefill[0].kill();
    // Before and after a check notices it.
    for count in 0..3 {
        let route = ask(fleet.port(), &format!("without a prefill {count}")).await;
        assert_eq!(route, "decode-alone; fallback", "{count}");
    }
    let down = "\"missing\":[\"prefill\"]";
    fleet.proxy.wait_until("/ready", "it is noticed", |_, text| text.contains(down)).await;
    assert_eq!(ask(fleet.port(), "a known outage").await, "decode-alone; fallback");
    let ready = Call::get(fleet.port(), "/ready").send().await;
    assert_eq!((ready.status, &ready.json()["ready"]), (200, &json!(true)), "it still serves");
    assert_eq!(fleet.proxy.metric("kvx_proxy_fallbacks_total", "result=\"served\"").await, 4.0);
    assert_eq!(fleet.decode[0].report().alone, 4);
    let warnings = |fleet: &Fleet| {
        let lines = fleet.proxy.errors();
        let of_fallbacks = lines.lines().filter(|line| line.contains("decode instances compute"));
        of_fallbacks.map(str::to_owned).collect::<Vec<_>>()
    };
    let lines = warnings(&fleet);
    assert_eq!(lines.len(), 1, "one in ten seconds: {lines:?}");
    assert!(lines[0].contains("WARN") && lines[0].contains("no "), "{lines:?}");
    fleet.prefill[0].restart();
    let end = Instant::now() + CUT_OFF;
    while ask(fleet.port(), "with a prefill again").await != "disaggregated" {
        assert!(Instant::now() < end, "the prefill is not used again");
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
    let ready = Call::get(fleet.port(), "/ready").send().await.json();
    assert_eq!(ready, json!({"ready": true}));
}

pub(crate) async fn has_a_cap() {
    let setup = format!("fallback = \"decode\"\n{CHECKS}");
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(&setup).start().await;
    let hang = |leg| Script { leg: Some(leg), times: 100, fault: Fault::HangAfter(1) };
    fleet.decode[0].script(hang(Leg::Decode));
    fleet.decode[0].script(hang(Leg::Alone));
    let port = fleet.port();
    // Returns once the request is in progress, or has failed.
    let open = async |tokens| {
        let mut open = Call::post(port, COMPLETIONS, &streamed("the cap", tokens)).open().await;
        if open.status == 200 {
            open.event().await.unwrap();
        }
        open
    };
    let busy = open(20_000).await;
    assert_eq!(busy.status, 200);
    take_prefill_down(&mut fleet).await;
    let mut held = Vec::new();
    let mut refused = loop {
        let next = open(500).await;
        if next.status != 200 {
            break next;
        }
        held.push(next);
        assert!(held.len() < 20, "there is no cap");
    };
    // Four times 502 tokens of 22,012 are below a tenth, five times are not.
    assert_eq!((held.len(), refused.status), (4, 503));
    assert_eq!(refused.headers["retry-after"], "1");
    let piece = refused.piece().await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&piece);
    assert!(
        text.contains("the limit for prompts that decode instances compute is reached"),
        "{text}"
    );
    assert_eq!(fleet.proxy.metric("kvx_proxy_fallbacks_total", "result=\"refused\"").await, 1.0);
    assert_eq!(fleet.proxy.metric("kvx_proxy_fallbacks_total", "result=\"served\"").await, 4.0);
    // One at a time is always served.
    held.clear();
    drop(busy);
    fleet.wait_until_idle();
    let ended = "kvx_proxy_in_flight 0";
    fleet.proxy.wait_until("/metrics", "all have ended", |_, text| text.contains(ended)).await;
    let alone = open(500).await;
    let second = open(500).await;
    assert_eq!((alone.status, second.status), (200, 503));
}
