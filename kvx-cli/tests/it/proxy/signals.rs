//! Tests of SIGHUP and SIGTERM.

use std::time::{Duration, Instant};

use kvx_instance::{Delays, Instance, Settings, answer_to};
use rustix::process::Signal;

use crate::proxy::client::{CUT_OFF, Call, completion, prompt, streamed};
use crate::proxy::fleet::{Fleet, Plan, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

pub(crate) async fn hangup_reloads_the_file() {
    let mut fleet = Fleet::new(1, 1).await;
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 100 });
    let prompt = prompt("across a hangup", 30);
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 12)).open().await;
    open.event().await.unwrap();
    let mut others = [Instance::start(Settings::default()), Instance::start(Settings::default())];
    let [prefill, decode] = &others;
    fleet.reread(std::slice::from_ref(prefill), std::slice::from_ref(decode));
    let end = Instant::now() + CUT_OFF;
    while others[1].report().decodes == 0 {
        assert!(Instant::now() < end, "the new instances get nothing");
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &completion("to the new ones", 1)).send().await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let before = fleet.prefill[0].report().prefills;
    Call::post(fleet.port(), COMPLETIONS, &completion("to the new ones", 1)).send().await.texts();
    assert_eq!(fleet.prefill[0].report().prefills, before, "the old ones get no more requests");
    let rest = open.read_out().await;
    assert!(rest.is_whole(), "a stream continues: {rest:?}");
    assert!(answer_to(&prompt, 12).ends_with(&rest.text) && !rest.text.is_empty());
    // An invalid file changes nothing.
    fleet.reread_text("prefil = 1\n");
    let end = Instant::now() + CUT_OFF;
    while !fleet.proxy.errors().contains("prefil") {
        assert!(Instant::now() < end, "no error is logged: {}", fleet.proxy.errors());
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
    let answer = Call::post(fleet.port(), COMPLETIONS, &completion("still served", 1)).send().await;
    assert_eq!(answer.texts(), [answer_to("still served", 1)]);
}

pub(crate) async fn hangup_reloads_the_keys() {
    let keys = SetupFile::new("old-key\n");
    let setup = format!("api_key_file = \"{}\"", keys.path());
    let fleet = Plan::of(1, 1, &Settings::default()).setup(&setup).start().await;
    let status = async |key: &str| {
        let call = Call::post(fleet.port(), COMPLETIONS, &completion("with a key", 1));
        call.header("authorization", format!("Bearer {key}")).send().await.status
    };
    assert_eq!((status("old-key").await, status("new-key").await), (200, 401));
    keys.write("new-key\n");
    assert_eq!(status("new-key").await, 401, "the file was not reloaded yet");
    fleet.proxy.signal(Signal::HUP);
    let end = Instant::now() + CUT_OFF;
    while status("new-key").await != 200 {
        assert!(Instant::now() < end, "the new key is rejected");
    }
    assert_eq!(status("old-key").await, 401, "a removed key is rejected");
    // A file without a key changes nothing: it does not open the router to all.
    keys.write("# none\n");
    fleet.proxy.signal(Signal::HUP);
    let end = Instant::now() + CUT_OFF;
    while !fleet.proxy.errors().contains("has no key") {
        assert!(Instant::now() < end, "no error is logged: {}", fleet.proxy.errors());
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
    assert_eq!((status("new-key").await, status("none").await), (200, 401));
}

pub(crate) async fn termination_lets_streams_finish_and_takes_nothing_new() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup("drain = \"20s\"").start().await;
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 100 });
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed("to its end", 30)).open().await;
    open.event().await.unwrap();
    assert_eq!(Call::get(fleet.port(), "/ready").send().await.status, 200);
    fleet.proxy.signal(Signal::TERM);
    // It keeps listening, so that load balancers receive its state.
    fleet
        .proxy
        .wait_until("/ready", "it reports that it is not ready", |status, _| status == 503)
        .await;
    let ready = Call::get(fleet.port(), "/ready").send().await.json();
    assert_eq!(ready["ready"], false);
    assert!(ready["why"].as_str().is_some_and(|why| why.contains("shutting down")), "{ready}");
    let refused = Call::post(fleet.port(), COMPLETIONS, &completion("new", 1)).send().await;
    assert_eq!(
        (refused.status, refused.header("connection")),
        (503, "close"),
        "{}",
        refused.text()
    );
    assert!(!refused.header("retry-after").is_empty());
    assert_eq!(Call::get(fleet.port(), "/health").send().await.status, 200, "it lives");
    fleet.decode[0].wait_until("the stream still runs", |report| report.running == 1);
    let rest = open.read_out().await;
    assert!(rest.is_whole(), "{rest:?}");
    assert_eq!(fleet.proxy.ended(CUT_OFF).await, 0);
}

pub(crate) async fn termination_ends_at_its_deadline() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup("drain = \"500ms\"").start().await;
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 300 });
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed("cut short", 100)).open().await;
    open.event().await.unwrap();
    let start = Instant::now();
    fleet.proxy.signal(Signal::TERM);
    let rest = open.read_out().await;
    assert!(!rest.is_whole() && (rest.error.is_some() || rest.broken.is_some()), "{rest:?}");
    fleet.proxy.ended(Duration::from_secs(5)).await;
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    fleet.decode[0].wait_until("the decode is cancelled", |report| report.running == 0);
}
