//! Tests of failing instances, one fault at a time: the client's answer, and the fate of the
//! blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_instance::{
    Connector, Delays, Fault, Instance, InstanceReport, Leg, Script, Settings, WrongAnswer,
    answer_to,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;

use crate::proxy::client::{CUT_OFF, Call, completion, prompt, streamed};
use crate::proxy::fleet::{Plan, Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

/// Timeouts short enough for a test, without ejections.
const PATIENT: &str = "[timeouts]\nconnect = \"500ms\"\nprefill = \"700ms\"\nfirst_byte = \"700ms\"\nidle = \"700ms\"\n\
                       [health]\nevery = \"60s\"\neject_after = 1000\n[retries]\nbudget = 1.0\n";

fn once(leg: Leg, fault: Fault) -> Script {
    Script { leg: Some(leg), times: 1, fault }
}

fn sum(instances: &mut [Instance], field: fn(&InstanceReport) -> u64) -> u64 {
    instances.iter_mut().map(|instance| field(&instance.report())).sum()
}

pub(crate) async fn a_failed_prefill_is_tried_on_another_instance() {
    for fault in [
        Fault::Status(500),
        Fault::Status(503),
        Fault::CloseFirst,
        Fault::HangFirst,
        Fault::Wrong(WrongAnswer::NoJson),
        Fault::Wrong(WrongAnswer::ErrorWith200),
        Fault::Wrong(WrongAnswer::Empty),
    ] {
        let mut fleet = Plan::of(2, 1, &Settings::default()).setup(PATIENT).start().await;
        // Only the first of the two instances fails; requests go to both in turn or by load.
        fleet.prefill[0].script(Script { leg: Some(Leg::Prefill), times: 1, fault: fault.clone() });
        for count in 0..3 {
            let prompt = prompt(&format!("{fault:?} {count}"), 30);
            let answer =
                Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 4)).send().await;
            assert_eq!(answer.texts(), [answer_to(&prompt, 4)], "{fault:?}");
        }
        let retries = fleet.proxy.metric("kvx_proxy_retries_total", "leg=\"prefill\"").await;
        assert_eq!(retries, 1.0, "{fault:?}");
        assert_eq!(sum(&mut fleet.decode, |report| report.decodes), 3, "{fault:?}");
    }
}

pub(crate) async fn requests_that_would_stop_a_decode_instance_never_reach_it() {
    for wrong in [
        WrongAnswer::NoRequestId,
        WrongAnswer::BothFlags,
        WrongAnswer::NoObject,
        WrongAnswer::OtherHost,
        WrongAnswer::Huge,
    ] {
        // No instance hangs here, and a busy machine needs more time for a huge answer.
        let patient = PATIENT.replace("700ms", "5s");
        let mut fleet = Plan::of(1, 1, &Settings::default()).setup(&patient).start().await;
        fleet.prefill[0].script(once(Leg::Prefill, Fault::Wrong(wrong)));
        let prompt = prompt(&format!("{wrong:?}"), 60);
        let answer = Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 4)).send().await;
        match answer.status {
            200 => assert_eq!(answer.texts(), [answer_to(&prompt, 4)], "{wrong:?}"),
            _ => assert!(
                answer.json()["error"]["message"].is_string(),
                "{wrong:?}: {}",
                answer.text()
            ),
        }
        assert_eq!(fleet.decode[0].violations(), Vec::<String>::new(), "{wrong:?}");
        let after = Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 4)).send().await;
        assert_eq!(after.texts(), [answer_to(&prompt, 4)], "{wrong:?}");
    }
}

pub(crate) async fn a_decode_that_accepted_nothing_is_replaced_with_the_same_blocks() {
    for refuses in [true, false] {
        let mut fleet = Plan::of(1, 2, &Settings::default()).setup(PATIENT).start().await;
        // The router chooses the first of the two: both answer 503 once, or one refuses
        // connections.
        if refuses {
            fleet.decode[0].listen(false);
        } else {
            fleet.decode[0].script(once(Leg::Decode, Fault::Status(503)));
        }
        for count in 0..3 {
            let prompt = prompt(&format!("{refuses} {count}"), 30);
            let stream =
                Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 4)).stream().await;
            assert!(stream.is_whole() && stream.text == answer_to(&prompt, 4), "{stream:?}");
        }
        let report = fleet.prefill[0].report();
        assert_eq!(
            (report.prefills, report.read, report.pinned),
            (3, 3, 0),
            "no prefill was made twice: {refuses}"
        );
        let retries = fleet.proxy.metric("kvx_proxy_retries_total", "leg=\"decode\"").await;
        assert!(retries >= 1.0, "{refuses}: {retries}");
    }
}

pub(crate) async fn a_decode_that_failed_before_its_first_byte_gets_a_fresh_prefill() {
    for (fault, streams) in [
        (Fault::CloseFirst, false),
        (Fault::CloseFirst, true),
        (Fault::HangFirst, true),
        (Fault::CloseAfter(0), true),
        (Fault::HangAfter(0), true),
    ] {
        let mut fleet = Plan::of(1, 2, &Settings::default()).setup(PATIENT).start().await;
        fleet.decode[0].script(once(Leg::Decode, fault.clone()));
        let mut seen_fault = false;
        for count in 0..3 {
            let prompt = prompt(&format!("{fault:?} {streams} {count}"), 30);
            let before = fleet.prefill[0].report().prefills;
            if streams {
                let stream =
                    Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 4)).stream().await;
                assert!(
                    stream.is_whole() && stream.text == answer_to(&prompt, 4),
                    "{fault:?}: {stream:?}"
                );
            } else {
                let answer =
                    Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 4)).send().await;
                assert_eq!(answer.texts(), [answer_to(&prompt, 4)], "{fault:?}");
            }
            seen_fault |= fleet.prefill[0].report().prefills == before + 2;
        }
        assert!(seen_fault, "{fault:?}: one request had two prefills");
        let report = fleet.prefill[0].report();
        assert_eq!((report.prefills, report.read, report.pinned), (4, 4, 0), "{fault:?}");
    }
}

pub(crate) async fn an_answer_that_is_not_streamed_has_the_timeout_of_its_request() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(PATIENT).start().await;
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 400 });
    let answer =
        Call::post(fleet.port(), COMPLETIONS, &completion("a long answer", 4)).send().await;
    assert_eq!(answer.texts(), [answer_to("a long answer", 4)]);
    let several = serde_json::json!({"model": "m", "prompt": ["one", "two"], "max_tokens": 4});
    let answer = Call::post(fleet.port(), COMPLETIONS, &several).send().await;
    assert_eq!((answer.status, answer.header("x-kvx-route")), (200, "decode-alone; prompt list"));
    let mut fleet = Plan::of(1, 2, &Settings::default())
        .setup(&PATIENT.replace("idle", "request = \"2s\"\nidle"))
        .start()
        .await;
    for decode in &mut fleet.decode {
        decode.script(Script { leg: Some(Leg::Decode), times: 9, fault: Fault::HangFirst });
    }
    let answer = Call::post(fleet.port(), COMPLETIONS, &completion("never", 4)).send().await;
    assert_eq!(answer.status, 504, "{}", answer.text());
    let failures = Call::get(fleet.port(), "/status").send().await.text();
    assert_eq!(fleet.proxy.metric("kvx_proxy_retries_total", "").await, 0.0, "{failures}");
    assert_eq!(sum(&mut fleet.prefill, |report| report.prefills), 1, "generated once");
}

pub(crate) async fn client_errors_do_not_count_against_the_instance() {
    let setup = PATIENT.replace("eject_after = 1000", "eject_after = 1");
    let mut fleet = Plan::of(1, 2, &Settings::default()).setup(&setup).start().await;
    for decode in &mut fleet.decode {
        decode.script(Script { leg: Some(Leg::Decode), times: 1, fault: Fault::Status(501) });
    }
    for _ in 0..2 {
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &completion("not implemented", 4)).send().await;
        assert_eq!(answer.status, 501, "{}", answer.text());
    }
    assert_eq!(fleet.proxy.metric("kvx_proxy_retries_total", "").await, 0.0);
    assert_eq!(fleet.proxy.metric("kvx_proxy_ejections_total", "").await, 0.0);
    // A stream that ends with a server error is a failure.
    for decode in &mut fleet.decode {
        decode.script(Script { leg: Some(Leg::Decode), times: 1, fault: Fault::ErrorAfter(2) });
    }
    let stream = Call::post(fleet.port(), COMPLETIONS, &streamed("an error", 4)).stream().await;
    assert!(stream.error.is_some(), "{stream:?}");
    assert_eq!(fleet.proxy.metric("kvx_proxy_ejections_total", "errors").await, 1.0);
}

pub(crate) async fn a_decode_that_refuses_ends_its_concurrent_prefill() {
    let settings = Settings { connector: Connector::Mooncake, ..Settings::default() };
    let mut fleet = Plan::of(1, 1, &settings).setup(PATIENT).start().await;
    fleet.prefill[0].delays(Delays { prefill_ms: 30_000, token_ms: 0 });
    fleet.decode[0].script(once(Leg::Decode, Fault::Status(404)));
    let setup =
        Call::post(fleet.port(), COMPLETIONS, &completion("refused, refused", 4)).send().await;
    assert_eq!(setup.status, 404, "{}", setup.text());
    let report = fleet.prefill[0].wait_until("the prefill ends", |report| report.running == 0);
    assert_eq!((report.prefills, report.pinned), (0, 0), "{report:?}");
}

pub(crate) async fn both_legs_at_once_fail_together_and_are_answered_by_others() {
    for connector in [Connector::Push, Connector::Mooncake] {
        let settings = Settings { connector, ..Settings::default() };
        let name = match connector {
            Connector::Push => "connector = \"NixlPushConnector\"",
            _ => "connector = \"MooncakeConnector\"",
        };
        let mut fleet = Plan::of(2, 2, &settings).setup(PATIENT).pool(name).start().await;
        // The router notices a prefill that breaks off after its work before the decode, which has
        // the blocks, can answer.
        for decode in &mut fleet.decode {
            decode.delays(Delays { prefill_ms: 0, token_ms: 50 });
        }
        let mut failed = 0.0;
        for (leg, fault) in [
            (Leg::Prefill, Fault::Status(500)),
            (Leg::Prefill, Fault::CloseFirst),
            (Leg::Decode, Fault::Status(503)),
            (Leg::Decode, Fault::CloseFirst),
        ] {
            let instances =
                if leg == Leg::Prefill { &mut fleet.prefill } else { &mut fleet.decode };
            instances[0].script(once(leg, fault.clone()));
            let told = format!("{connector:?} {leg:?} {fault:?}");
            let before = sum(&mut fleet.prefill, |report| report.prefills);
            // The router chooses the instances: some request meets the fault.
            failed += 1.0;
            let (mut asked, mut retries) = (0, 0.0);
            while retries < failed {
                assert!(asked < 20, "{told}: no request met the fault");
                let prompt = prompt(&format!("{told} {asked}"), 30);
                let answer =
                    Call::post(fleet.port(), COMPLETIONS, &completion(&prompt, 4)).send().await;
                assert_eq!(answer.texts(), [answer_to(&prompt, 4)], "{told}");
                asked += 1;
                retries = fleet.proxy.metric("kvx_proxy_retries_total", "").await;
            }
            fleet.wait_until_idle(); // no leg waits for ever
            assert_eq!(retries, failed, "{told}: one request was retried once");
            let prefills = sum(&mut fleet.prefill, |report| report.prefills) - before;
            // Only a fault after which the blocks may have been read, or left behind, costs a
            // second prefill.
            let fresh = u64::from(fault == Fault::CloseFirst);
            assert_eq!(prefills, asked + fresh, "{told}");
        }
    }
}

pub(crate) async fn retries_have_a_budget() {
    let setup =
        "[health]\nevery = \"60s\"\neject_after = 1000000\n[retries]\nattempts = 3\nbudget = 0.1\n";
    let mut fleet = Plan::of(2, 1, &Settings::default()).setup(setup).start().await;
    for prefill in &mut fleet.prefill {
        prefill.script(Script {
            leg: Some(Leg::Prefill),
            times: u32::MAX,
            fault: Fault::Status(500),
        });
    }
    let requests = 100;
    for _ in 0..requests {
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &completion("a sick fleet, a sick fleet", 2))
                .send()
                .await;
        assert!(answer.status >= 500, "{}", answer.text());
    }
    let tries: usize =
        fleet.prefill.iter_mut().map(|p| crate::proxy::recipes::seen(p, Leg::Prefill).len()).sum();
    assert!(tries <= requests + requests / 10 + 12, "{tries} tries of {requests} requests");
    assert!(tries > requests, "there were some");
    assert!(fleet.proxy.metric("kvx_proxy_retries_denied_total", "").await > 0.0);
}

pub(crate) async fn an_instance_that_fails_is_ejected_and_tried_again() {
    let setup = "[health]\nevery = \"60s\"\neject_after = 3\neject_for = \"500ms\"\n[retries]\nbudget = 1.0\n";
    let mut fleet = Plan::of(2, 1, &Settings::default()).setup(setup).start().await;
    fleet.prefill[0].script(Script {
        leg: Some(Leg::Prefill),
        times: 3,
        fault: Fault::Status(500),
    });
    let ask = async |port| {
        Call::post(port, COMPLETIONS, &completion("eject me, eject me", 2)).send().await
    };
    let end = Instant::now() + Duration::from_secs(5);
    while fleet.proxy.metric("kvx_proxy_ejections_total", "errors").await == 0.0 {
        assert!(Instant::now() < end, "never ejected");
        assert_eq!(ask(fleet.port()).await.status, 200);
    }
    let failed = crate::proxy::recipes::seen(&mut fleet.prefill[0], Leg::Prefill).len();
    assert_eq!(failed, 3);
    assert_eq!(ask(fleet.port()).await.status, 200);
    assert_eq!(
        crate::proxy::recipes::seen(&mut fleet.prefill[0], Leg::Prefill).len(),
        failed,
        "it gets nothing meanwhile"
    );
    let end = Instant::now() + Duration::from_secs(5);
    while fleet.prefill[0].report().prefills == 0 {
        assert!(Instant::now() < end, "never tried again");
        assert_eq!(ask(fleet.port()).await.status, 200);
        tokio::time::sleep(Duration::from_millis(20)).await; // between polls
    }
}

pub(crate) async fn the_last_instance_of_a_pool_is_not_ejected_for_its_latency() {
    let setup = "[timeouts]\nprefill = \"100ms\"\nfirst_byte = \"100ms\"\n[retries]\nattempts = 1\n\
                 [health]\nevery = \"100ms\"\ntimeout = \"300ms\"\ndown_after = 1\neject_after = 1\n\
                 eject_for = \"60s\"\n";
    let slow = |prefill_ms, token_ms| Delays { prefill_ms, token_ms };
    let ask = async |port| {
        let call = Call::post(port, COMPLETIONS, &streamed("slow, but alone", 2));
        call.stream().await
    };
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    for (role, prefill, decode) in
        [("prefill", slow(1000, 0), slow(0, 0)), ("decode", slow(0, 0), slow(0, 1000))]
    {
        fleet.prefill[0].delays(prefill);
        fleet.decode[0].delays(decode);
        let end = Instant::now() + CUT_OFF;
        while fleet.proxy.metric("kvx_proxy_instance_failures_total", role).await < 4.0 {
            assert!(Instant::now() < end, "{role}: it is not blamed");
            let late = ask(fleet.port()).await;
            assert_eq!(late.status, 504, "{role}: {late:?}");
        }
    }
    fleet.prefill[0].delays(slow(0, 0));
    fleet.decode[0].delays(slow(0, 0));
    for instance in fleet.prefill.iter_mut().chain(&mut fleet.decode) {
        instance.health(None);
        let looks = instance.report().health_looks;
        instance.wait_until("its health check timed out", |report| report.health_looks > looks + 3);
    }
    assert_eq!(fleet.proxy.metric("kvx_proxy_ejections_total", "").await, 0.0);
    assert_eq!(fleet.proxy.metric("kvx_proxy_instance_up", "").await, 2.0);
    let end = Instant::now() + CUT_OFF;
    while !ask(fleet.port()).await.is_whole() {
        assert!(Instant::now() < end, "they are as fast as before, and get requests");
    }

    // An instance that is not the last one is ejected for the same latency.
    let mut fleet = Plan::of(2, 1, &Settings::default()).setup(setup).start().await;
    fleet.prefill[0].delays(slow(1000, 0));
    let end = Instant::now() + CUT_OFF;
    while fleet.proxy.metric("kvx_proxy_ejections_total", "reason=\"slow\"").await == 0.0 {
        assert!(Instant::now() < end, "one of two is ejected");
        ask(fleet.port()).await;
    }
    // Until it is the last one, long before its ejection ends.
    fleet.prefill[0].delays(slow(0, 0));
    fleet.prefill[1].kill();
    let end = Instant::now() + CUT_OFF;
    while !ask(fleet.port()).await.is_whole() {
        assert!(Instant::now() < end, "the only one that is left gets requests");
    }
}

/// A server that answers every `GET` with `{}`, until it stops accepting connections: then its
/// backlog is full.
pub(crate) struct Deaf {
    listener: Arc<TcpListener>,
    answers: tokio::task::JoinHandle<()>,
    /// Stops the accept loop.
    no_more: Arc<Notify>,
    waiting: Vec<TcpStream>,
}

impl Deaf {
    pub(crate) fn start() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = Arc::new(socket.listen(1).unwrap());
        let listens = Arc::clone(&listener);
        let no_more = Arc::new(Notify::new());
        let ends = Arc::clone(&no_more);
        let answers = tokio::spawn(async move {
            loop {
                let (mut stream, _) = tokio::select! {
                    accepted = listens.accept() => accepted.unwrap(),
                    () = ends.notified() => break,
                };
                // Requests of a router are short, and arrive in one piece.
                if stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {
                    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\
                                  connection: close\r\n\r\n{}";
                    stream.write_all(answer.as_bytes()).await.ok(); // an error: the router has disconnected
                }
            }
        });
        Deaf { listener, answers, no_more, waiting: Vec::new() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.listener.local_addr().unwrap())
    }

    /// Fills the backlog, so that connection attempts time out from now on.
    pub(crate) async fn take_none(&mut self) {
        // Requests in progress are still answered: breaking them off would be another fault.
        self.no_more.notify_one();
        let answered = tokio::time::timeout(CUT_OFF, &mut self.answers).await;
        answered.expect("every open connection has a request").unwrap();
        let address = self.listener.local_addr().unwrap();
        let connect =
            || tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address));
        while let Ok(connected) = connect().await {
            self.waiting.push(connected.unwrap());
            assert!(self.waiting.len() < 100, "its backlog is never full");
        }
    }
}

async fn beside_a_deaf_one(setup: &str, prefill: &[String], decode: &[String]) -> Proxy {
    let pool = format!(
        "[[pool]]\nconnector = \"NixlConnector\"\nprefill = {prefill:?}\ndecode = {decode:?}\n"
    );
    let file = SetupFile::new(&format!("port = 0\n{setup}{pool}"));
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    let up = (prefill.len() + decode.len()) as f64;
    let end = Instant::now() + CUT_OFF;
    while proxy.metric("kvx_proxy_instance_up", "").await < up {
        assert!(Instant::now() < end, "they are up");
    }
    proxy
}

pub(crate) async fn an_instance_that_takes_no_connection_in_time_is_replaced_with_the_same_blocks()
{
    for leg in ["prefill", "decode"] {
        let mut deaf = Deaf::start();
        let (mut prefill, mut decode) =
            (Instance::start(Settings::default()), Instance::start(Settings::default()));
        let (mut prefills, mut decodes) = (vec![prefill.url()], vec![decode.url()]);
        let with_deaf = if leg == "prefill" { &mut prefills } else { &mut decodes };
        with_deaf.push(deaf.url());
        let proxy = beside_a_deaf_one(PATIENT, &prefills, &decodes).await;
        deaf.take_none().await;
        for count in 0..4 {
            let prompt = prompt(&format!("deaf {leg} {count}"), 30);
            let start = Instant::now();
            let stream = Call::post(proxy.port, COMPLETIONS, &streamed(&prompt, 4)).stream().await;
            assert!(stream.is_whole() && stream.text == answer_to(&prompt, 4), "{leg}: {stream:?}");
            assert!(start.elapsed() < Duration::from_secs(3), "{leg}: {:?}", start.elapsed());
        }
        let report = prefill.report();
        assert_eq!(
            (report.prefills, report.read, report.pinned),
            (4, 4, 0),
            "{leg}: no leg was repeated"
        );
        assert_eq!(decode.report().decodes, 4, "{leg}");
        let legs = async |outcome| {
            proxy
                .metric("kvx_proxy_legs_total", &format!("leg=\"{leg}\",outcome=\"{outcome}\""))
                .await
        };
        let late = legs("timeout").await;
        assert!(late >= 1.0, "{leg}: it was tried");
        assert_eq!(legs("refused").await, 0.0, "{leg}: no instance refused anything");
        assert_eq!(
            proxy.metric("kvx_proxy_retries_total", leg).await,
            late,
            "{leg}: each was retried elsewhere"
        );
        let status = Call::get(proxy.port, "/status").send().await.text();
        assert!(status.contains(&format!("{leg} leg: accepted no connection in time")), "{status}");
        assert_eq!([prefill.violations(), decode.violations()], [Vec::<String>::new(), Vec::new()]);
    }
}

pub(crate) async fn the_last_instance_that_takes_no_connection_in_time_is_late_and_stays() {
    let mut deaf = Deaf::start();
    let prefill = Instance::start(Settings::default());
    let setup = PATIENT.replace("eject_after = 1000", "eject_after = 1\ndown_after = 1");
    let proxy = beside_a_deaf_one(&setup, &[prefill.url()], &[deaf.url()]).await;
    deaf.take_none().await;
    for _ in 0..2 {
        let answer =
            Call::post(proxy.port, COMPLETIONS, &completion("nobody listens", 4)).send().await;
        assert_eq!(answer.status, 504, "{}", answer.text());
        assert!(answer.text().contains("accepted no connection in time"), "{}", answer.text());
    }
    assert_eq!(proxy.metric("kvx_proxy_ejections_total", "").await, 0.0);
    assert_eq!(proxy.metric("kvx_proxy_instance_up", "").await, 2.0);
}

pub(crate) async fn requests_beyond_the_queue_get_503_with_retry_after() {
    let setup = "[limits]\nin_flight = 2\nqueue = 2\nqueue_wait = \"20s\"\n";
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    fleet.prefill[0].delays(Delays { prefill_ms: 20_000, token_ms: 0 });
    let call = || {
        Call::post(fleet.proxy.port, COMPLETIONS, &completion("queue, queue", 2))
            .limit(Duration::from_secs(30))
    };
    let waiting: Vec<_> = (0..4).map(|_| tokio::spawn(call().try_send())).collect();
    fleet
        .proxy
        .wait_until("/metrics", "two wait", |_, text| {
            text.lines().any(|line| line == "kvx_proxy_queued 2")
        })
        .await;
    let refused = call().send().await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(
        refused.header("retry-after").parse::<u64>().is_ok_and(|seconds| seconds > 0),
        "{:?}",
        refused.headers
    );
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    fleet.prefill[0].delays(Delays::default());
    fleet
        .proxy
        .wait_until("/metrics", "none is left", |_, text| text.contains("kvx_proxy_in_flight 0"))
        .await;
    assert_eq!(call().send().await.status, 200, "a client that disconnected holds no slot");
}

pub(crate) async fn unreachable_blocks_are_freed_when_their_lease_ends() {
    let settings = Settings { lease_ms: 700, ..Settings::default() };
    let mut fleet = Plan::of(1, 1, &settings).setup(PATIENT).start().await;
    fleet.decode[0].script(Script { leg: Some(Leg::Decode), times: 10, fault: Fault::Status(503) });
    let answer =
        Call::post(fleet.port(), COMPLETIONS, &completion("left over, left over", 2)).send().await;
    assert!(answer.status >= 500, "{}", answer.text());
    let report = fleet.prefill[0].wait_until("the lease ends", |report| report.pinned == 0);
    assert!(report.expired >= 1 && report.expired == report.prefills, "{report:?}");
}

pub(crate) async fn requests_to_a_stopped_instance_only_time_out() {
    let mut fleet = Plan::of(2, 2, &Settings::default()).setup(PATIENT).start().await;
    fleet.prefill[0].stop();
    fleet.decode[0].stop();
    for count in 0..4 {
        let prompt = prompt(&format!("stopped {count}"), 30);
        let start = Instant::now();
        let stream = Call::post(fleet.port(), COMPLETIONS, &streamed(&prompt, 4)).stream().await;
        assert!(stream.is_whole() && stream.text == answer_to(&prompt, 4), "{stream:?}");
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
    fleet.prefill[0].go_on();
    fleet.decode[0].go_on();
    fleet.wait_until_idle();
}
