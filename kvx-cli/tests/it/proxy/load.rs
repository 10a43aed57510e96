//! Faults under load: 200 streams, while instances are killed, stopped and restarted in turn.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvx_instance::{Begun, Delays, Instance, Leg, Settings, answer_to};

use crate::proxy::client::{Call, prompt, streamed};
use crate::proxy::fleet::Plan;
use crate::proxy::recipes::COMPLETIONS;

const STREAMS: usize = 200;
const TOKENS: u64 = 16;
/// The time within which each request has an answer; the router's timeout is two seconds less.
const DEADLINE: Duration = Duration::from_secs(10);
const LEASE: Duration = Duration::from_secs(5);
const SETUP: &str = "[timeouts]\nconnect = \"500ms\"\nprefill = \"1500ms\"\nfirst_byte = \"1500ms\"\nidle = \"1500ms\"\n\
                     request = \"8s\"\n[health]\nevery = \"500ms\"\ntimeout = \"500ms\"\neject_for = \"500ms\"\n\
                     [retries]\nbudget = 1.0\n";

/// Counts of requests by their result.
#[derive(Default)]
struct Ends {
    right: AtomicU64,
    /// An error before the first byte, with a status.
    refused: AtomicU64,
    /// A correct beginning, an error event, the end.
    cut_short: AtomicU64,
}

/// Sends requests one after the other until the deadline. Panics unless each ends in a way that a
/// client can recognize. Returns their ids, and the times at which parts of their answers had
/// arrived.
async fn stream(
    port: u16,
    number: usize,
    over: Arc<AtomicBool>,
    ends: Arc<Ends>,
) -> Vec<(String, Duration)> {
    let mut begun = Vec::new();
    for count in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let prompt = prompt(&format!("stream {number}, request {count}"), 40);
        let id = format!("load-{number}-{count}");
        let call =
            Call::post(port, COMPLETIONS, &streamed(&prompt, TOKENS)).header("x-request-id", &id);
        let open = call.limit(DEADLINE).try_open().await;
        let open = open.unwrap_or_else(|error| panic!("{prompt}: no answer: {error}"));
        let answer = open.read_out().await;
        begun.extend(answer.begun.map(|at| (id, at)));
        let whole = answer_to(&prompt, TOKENS);
        if answer.is_whole() {
            assert_eq!(answer.text, whole, "{prompt}");
            ends.right.fetch_add(1, Ordering::Relaxed);
        } else if answer.status != 200 {
            assert!(answer.status >= 500 && answer.text.is_empty(), "{prompt}: {answer:?}");
            ends.refused.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await; // as a client would
        } else {
            assert!(
                answer.error.is_some(),
                "{prompt}: a short answer without an error: {answer:?}"
            );
            assert!(whole.starts_with(&answer.text), "{prompt}: {answer:?}");
            ends.cut_short.fetch_add(1, Ordering::Relaxed);
        }
    }
    begun
}

/// Checks that no request of which a part had reached the client has a leg that began later.
fn none_was_tried_again(passed_on: &HashMap<String, Duration>, legs: &[Begun]) {
    let mut answered: HashSet<&str> = HashSet::new();
    for leg in legs {
        let Some(at) = passed_on.get(&leg.id) else { continue };
        assert!(leg.at < *at, "something of it was passed on {:?} before: {leg:?}", leg.at - *at);
        if leg.leg == Leg::Decode {
            answered.insert(&leg.id);
        }
    }
    assert_eq!(answered.len(), passed_on.len(), "each has the leg that answered it");
}

/// Applies faults to an instance one after the other, and ends each of them.
fn plague(instance: &mut Instance) {
    let while_it_lasts = || std::thread::sleep(Duration::from_millis(300));
    instance.kill();
    while_it_lasts();
    instance.restart();
    while_it_lasts();
    instance.stop();
    while_it_lasts();
    while_it_lasts();
    instance.go_on();
    while_it_lasts();
    instance.listen(false);
    while_it_lasts();
    instance.listen(true);
}

pub(crate) async fn every_request_is_answered_while_instances_come_and_go() {
    let settings = Settings {
        lease_ms: LEASE.as_millis() as u64,
        delays: Delays { prefill_ms: 20, token_ms: 50 },
        keeps: 0,
        tells: true,
        ..Settings::default()
    };
    let mut fleet = Plan::of(3, 3, &settings).setup(SETUP).start().await;
    let (over, ends) = (Arc::new(AtomicBool::new(false)), Arc::new(Ends::default()));
    let streams: Vec<_> = (0..STREAMS)
        .map(|number| tokio::spawn(stream(fleet.port(), number, over.clone(), ends.clone())))
        .collect();
    for index in 0..3 {
        plague(&mut fleet.prefill[index]);
        plague(&mut fleet.decode[index]);
    }
    over.store(true, Ordering::Relaxed);
    let end = Instant::now() + DEADLINE + Duration::from_secs(2);
    let mut passed_on = HashMap::new();
    for stream in streams {
        let left = end.saturating_duration_since(Instant::now());
        let ended = tokio::time::timeout(left, stream)
            .await
            .expect("every request has ended by its deadline");
        passed_on.extend(ended.unwrap_or_else(|panic| panic!("a request: {panic}")));
    }
    let instances = fleet.prefill.iter_mut().chain(&mut fleet.decode);
    none_was_tried_again(&passed_on, &instances.flat_map(Instance::begun).collect::<Vec<_>>());
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let (right, refused, cut_short) = (of(&ends.right), of(&ends.refused), of(&ends.cut_short));
    let retries = fleet.proxy.metric("kvx_proxy_retries_total", "").await;
    println!("{right} right, {refused} refused, {cut_short} cut short; {retries} retries");
    assert!(
        right * 10 >= (right + refused + cut_short) * 7,
        "{right} right, {refused} refused, {cut_short} cut short"
    );
    // Remaining blocks are freed by their lease and two seconds.
    let end = Instant::now() + LEASE + Duration::from_secs(2);
    let mut expired = 0;
    for instance in fleet.prefill.iter_mut().chain(&mut fleet.decode) {
        loop {
            let report = instance.report();
            if report.pinned == 0 && report.running == 0 {
                expired += report.expired;
                break;
            }
            assert!(Instant::now() < end, "blocks are left: {report:#?}");
            std::thread::sleep(Duration::from_millis(20)); // between polls
        }
    }
    let known = retries as u64 + refused + cut_short;
    assert!(expired <= known, "{expired} prefills were unused, and {known} requests had a fault");
    for count in 0..20 {
        let prompt = prompt(&format!("after all {count}"), 40);
        let answer = Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 2)).stream().await;
        assert!(answer.is_whole() && answer.text == answer_to(&prompt, 2), "{answer:?}");
    }
}
