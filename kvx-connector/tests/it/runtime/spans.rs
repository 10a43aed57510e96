//! The spans and log lines of a load.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvx_connector::{Decode, Prefill};
use kvx_testkit::test;
use tracing_subscriber::fmt::format::FmtSpan;

use super::rig::{BLOCK, Engine, LIMIT, lists};

/// Everything that any thread writes.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs in a process of its own, because it sets the process's subscriber.
#[test(own_process)]
fn a_load_has_one_span_with_its_phases_and_a_failure_a_line() {
    let written = Written::default();
    let writer = written.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_span_events(FmtSpan::CLOSE);
    subscriber.with_writer(move || writer.clone()).init();
    let (prefill, decode) = (Engine::new("prefill", "{}", 1), Engine::new("decode", "{}", 1));
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    Decode::new(&decode.connector)
        .fetch("traced", &params, 0, lists(&[2]), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap()
        .unwrap();
    // The first request keeps the block unchanged as long as it holds it.
    lease.wait_blocking(LIMIT).unwrap();
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("late", lists(&[1]), BLOCK).unwrap();
    drop(lease);
    let late = Decode::new(&decode.connector)
        .fetch("late", &params, 0, lists(&[2]), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap();
    late.expect_err("its lease was dropped");
    let until = Instant::now() + LIMIT;
    let lines = |of: &str| -> Vec<String> {
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(of)).map(str::to_owned).collect()
    };
    // The span ends with the notification to the prefill, which nothing waits for.
    let closed = loop {
        let closed: Vec<_> = lines("kvx_load{request=traced")
            .into_iter()
            .filter(|line| line.contains("close"))
            .collect();
        if !closed.is_empty() || Instant::now() > until {
            break closed;
        }
        std::thread::yield_now();
    };
    assert_eq!(closed.len(), 1, "{closed:?}");
    for field in [
        "engine=\"prefill_dp0\"",
        "queue_us=",
        "handshake_us=",
        "post_us=",
        "transfer_us=",
        "check_us=",
        "notify_us=",
        "backend=\"SHM\"",
        "outcome=\"loaded\"",
    ] {
        assert!(closed[0].contains(field), "{field}: {}", closed[0]);
    }
    // The line of a failure may be written after its outcome has been delivered.
    let failures = loop {
        let failures = lines("NIXL transfer failure: transfer_failed");
        if !failures.is_empty() || Instant::now() > until {
            break failures;
        }
        std::thread::yield_now();
    };
    assert!(
        failures.iter().any(|line| line.contains("\"remote_request_id\":\"late\"")),
        "{failures:?}"
    );
}
