//! Tests of requests while no prefill instance is up.

use kvx_instance::Settings;
use serde_json::json;

use crate::proxy::client::{Call, completion};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::COMPLETIONS;

/// Health checks that take an instance down at once.
const CHECKS: &str = "[health]\nevery = \"100ms\"\ndown_after = 1\n";

async fn take_prefill_down(fleet: &mut Fleet) {
    fleet.prefill[0].health(Some(503));
    let down = "\"missing\":[\"prefill\"]";
    fleet.proxy.wait_until("/ready", "no prefill is up", |_, text| text.contains(down)).await;
}

pub(crate) async fn get_503_that_names_the_missing_side() {
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
