//! SIGHUP and SIGTERM.

use std::time::{Duration, Instant};

use kvx_instance::{Instance, Pace, Settings, answer_to};
use rustix::process::Signal;

use crate::client::{CUT_OFF, Call, completion, prompt, streamed};
use crate::fleet::{Fleet, Plan};
use crate::recipes::COMPLETIONS;

pub(crate) async fn hangup_reads_the_file_again() {
    let mut fleet = Fleet::new(1, 1).await;
    fleet.decode[0].pace(Pace { prefill_ms: 0, token_ms: 100 });
    let prompt = prompt("across a hangup", 30);
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 12)).open().await;
    open.event().await.unwrap();
    let mut others = [Instance::start(Settings::default()), Instance::start(Settings::default())];
    let [prefill, decode] = &others;
    fleet.reread(std::slice::from_ref(prefill), std::slice::from_ref(decode));
    let end = Instant::now() + CUT_OFF;
    while others[1].report().decodes == 0 {
        assert!(Instant::now() < end, "the new instances get nothing");
        let answer = Call::post(fleet.port(), COMPLETIONS, &completion("to the new ones", 1)).send().await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let before = fleet.prefill[0].report().prefills;
    Call::post(fleet.port(), COMPLETIONS, &completion("to the new ones", 1)).send().await.texts();
    assert_eq!(fleet.prefill[0].report().prefills, before, "the old ones get nothing any more");
    let rest = open.read_out().await;
    assert!(rest.is_whole(), "a stream goes on: {rest:?}");
    assert!(answer_to(&prompt, 12).ends_with(&rest.text) && !rest.text.is_empty());
    // A file that makes no sense changes nothing.
    fleet.reread_text("prefil = 1\n");
    let end = Instant::now() + CUT_OFF;
    while !fleet.proxy.errors().contains("prefil") {
        assert!(Instant::now() < end, "nothing is said of it: {}", fleet.proxy.errors());
        tokio::time::sleep(Duration::from_millis(10)).await; // between looks, never in place of one
    }
    let answer = Call::post(fleet.port(), COMPLETIONS, &completion("still served", 1)).send().await;
    assert_eq!(answer.texts(), [answer_to("still served", 1)]);
}

pub(crate) async fn termination_lets_streams_finish_and_takes_nothing_new() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup("drain = \"20s\"").start().await;
    fleet.decode[0].pace(Pace { prefill_ms: 0, token_ms: 100 });
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed("to its end", 10)).open().await;
    open.event().await.unwrap();
    fleet.proxy.signal(Signal::TERM);
    let end = Instant::now() + CUT_OFF;
    loop {
        let refused = match Call::post(fleet.port(), COMPLETIONS, &completion("new", 1)).try_send().await {
            Ok(answer) => answer.status == 503,
            Err(_) => true, // it listens no more
        };
        if refused {
            break;
        }
        assert!(Instant::now() < end, "it still takes requests");
    }
    let ready = Call::get(fleet.port(), "/ready").try_send().await;
    assert!(ready.is_err() || ready.is_ok_and(|answer| answer.status == 503));
    let rest = open.read_out().await;
    assert!(rest.is_whole(), "{rest:?}");
    assert_eq!(fleet.proxy.ended(CUT_OFF).await, 0);
}

pub(crate) async fn termination_ends_at_its_deadline() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup("drain = \"500ms\"").start().await;
    fleet.decode[0].pace(Pace { prefill_ms: 0, token_ms: 300 });
    let mut open = Call::post(fleet.port(), COMPLETIONS, &streamed("cut short", 100)).open().await;
    open.event().await.unwrap();
    let start = Instant::now();
    fleet.proxy.signal(Signal::TERM);
    let rest = open.read_out().await;
    assert!(!rest.is_whole() && (rest.error.is_some() || rest.broken.is_some()), "{rest:?}");
    fleet.proxy.ended(Duration::from_secs(5)).await;
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    fleet.decode[0].wait_until("the decode is told", |report| report.running == 0);
}
