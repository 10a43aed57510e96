//! Tests of `kvx proxy --explain`.

use hyper::Method;
use kvx_instance::{Leg, Settings};
use kvx_testkit::Random;
use serde_json::{Value, json};

use crate::proxy::client::{Call, completion};
use crate::proxy::commands::{kvx_proxy_with, said};
use crate::proxy::fleet::{Fleet, Plan, SetupFile};
use crate::proxy::recipes::{COMPLETIONS, seen};

const KEY: (&str, &str) = ("ADMIN_API_KEY", "let me in");

/// Returns what the command prints about a request.
fn explain(fleet: &Fleet, request: &str) -> String {
    let router = format!("http://127.0.0.1:{}", fleet.port());
    let output = kvx_proxy_with(&[KEY], &["--explain", request, "--router", &router]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the row of an instance without repeated spaces.
fn row(explained: &str, instance: &str) -> String {
    let line = explained.lines().find(|line| line.contains(instance) && line.contains("default"));
    let line = line.unwrap_or_else(|| panic!("no {instance}: {explained}"));
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns a prompt of 2,000 tokens that no other test sends.
fn long_prompt(seed: u64) -> String {
    let mut random = Random::seeded(seed);
    (0..2000).map(|_| format!("{:03} ", random.below(1000))).collect()
}

pub(crate) async fn says_where_a_request_goes_and_why() {
    let mut fleet = Plan::of(3, 2, &Settings::default())
        .setup("[health]\nevery = \"100ms\"\n")
        .variable(KEY.0, KEY.1)
        .start()
        .await;
    fleet.prefill[2].health(Some(503));
    let labels =
        format!("pool=\"default\",role=\"prefill\",instance=\"{}\"", &fleet.prefill[2].url()[7..]);
    let down = format!("kvx_proxy_instance_up{{{labels}}} 0");
    fleet.proxy.wait_until("/metrics", "one is down", |_, text| text.contains(&down)).await;
    let body = completion(&long_prompt(54), 4);
    let ask = async |port, body: &Value| {
        let answer = Call::post(port, COMPLETIONS, body).send().await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    let file = SetupFile::new(&body.to_string());
    // The instances have no prompts cached, so both are equal.
    let before = explain(&fleet, file.path());
    assert!(
        before.starts_with("route: disaggregated\nmodel m, about 2000 prompt tokens"),
        "{before}"
    );
    assert!(before.contains("take turns"), "{before}");
    ask(fleet.port(), &body).await;
    let got = |fleet: &mut Fleet, at: usize| seen(&mut fleet.prefill[at], Leg::Prefill).len();
    let winner = (0..2).find(|at| got(&mut fleet, *at) == 1).expect("one of them got it");
    let name = |fleet: &Fleet, at: usize| fleet.prefill[at].url()[7..].to_owned();
    let (has, other, down) = (name(&fleet, winner), name(&fleet, 1 - winner), name(&fleet, 2));
    assert!(before.contains(&format!("prefill, by cached: {has}, because")), "{before}");
    // Seven chunks of 256 tokens are cached; asking changes nothing.
    for _ in 0..3 {
        let explained = explain(&fleet, file.path());
        assert_eq!(row(&explained, &has), format!("-> {has} default up 0 1792 history 208 1 208"));
        assert_eq!(row(&explained, &other), format!("{other} default up 0 0 history 2000 1 2000"));
        let excluded = format!(
            "{down} default down 0 0 history 2000 1 - it is down: GET /health answered 503"
        );
        assert_eq!(row(&explained, &down), excluded);
        let why = format!(
            "{has}, because it would finish first: its cost is 208, the next best has 2000"
        );
        assert!(explained.contains(&why), "{explained}");
        assert!(explained.contains("\ndecode, by least-tokens: "), "{explained}");
    }
    ask(fleet.port(), &body).await;
    assert_eq!((got(&mut fleet, winner), got(&mut fleet, 1 - winner)), (2, 0));
    // As text, for a request that one transfer cannot serve.
    let explained = explain(&fleet, &json!({"model": "m", "prompt": "x", "n": 2}).to_string());
    assert!(explained.starts_with("route: decode-alone; n\n"), "{explained}");
    assert!(!explained.contains("\nprefill") && explained.contains("\ndecode"), "{explained}");
    for prefill in &mut fleet.prefill {
        prefill.health(Some(503));
    }
    fleet.proxy.wait_until("/ready", "no prefill is up", |status, _| status == 503).await;
    let explained = explain(&fleet, file.path());
    assert!(explained.starts_with("route: none\n"), "{explained}");
    let note = "note: no prefill instance for this model is up in pool default";
    assert!(explained.contains(note), "{explained}");
}

pub(crate) async fn needs_the_key() {
    let fleet = Plan::of(1, 1, &Settings::default()).variable(KEY.0, KEY.1).start().await;
    let router = format!("http://127.0.0.1:{}", fleet.port());
    let body = completion("whose prompt is cached?", 4).to_string();
    for variables in [&[("ADMIN_API_KEY", "")][..], &[("ADMIN_API_KEY", "let me")]] {
        let output = kvx_proxy_with(variables, &["--explain", &body, "--router", &router]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(
            said(&output).contains("status 403: this path needs ADMIN_API_KEY"),
            "{}",
            said(&output)
        );
    }
    let call = |body: &str| {
        Call::new(fleet.port(), Method::POST, "/explain")
            .header("content-type", "application/json")
            .header("x-api-key", KEY.1)
            .body(body.to_owned())
    };
    let explained = call(&body).send().await;
    assert_eq!((explained.status, &explained.json()["route"]), (200, &json!("disaggregated")));
    assert_eq!(call("[]").send().await.status, 400);
    let closed = Fleet::new(1, 1).await;
    let answer = Call::post(closed.port(), "/explain", &completion("x", 1)).send().await;
    assert_eq!(answer.status, 403, "refused when no key is set: {}", answer.text());
}
